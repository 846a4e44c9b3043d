"""Names of kernels: what they are called in a row, whose they are, and what is said of them."""

import pytest
import torch
import torch.nn.functional as F

from scripts.measure.instruments.kernels import as_field, counted, family, profile, short, verdict

FLASH2 = (
    "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4, false, false, "
    "cutlass::bfloat16_t, Flash_kernel_traits<64, 128, 128, 4, cutlass::bfloat16_t> >, false, true, "
    "false, false, true, true, false, false>(pytorch_flash::Flash_fwd_params)"
)
CUDNN = (
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_cga1x1x1_kernel0_0"
)
SOFTMAX = "void at::native::(anonymous namespace)::cunn_SoftMaxForward<4, float>(float*, float const*, int)"
GEMM = "nvjet_sm90_tst_128x256_64x4_2x1_v_bz_coopA_TNT"
NAMES = {
    FLASH2: "FlashAttention-2 in PyTorch",
    "void flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<64>>(flash::Params)": (
        "FlashAttention-2"
    ),
    CUDNN: "cuDNN",
    "void cudnn::fusion::compute_dot_do_o_specialized<true, 64>(float*)": "cuDNN",
    "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::Params)": "memory-efficient attention",
    "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<flash::Collective"
    "MainloopFwdSm90<2>>>>(Params)": "FlashAttention-3",
    "kernel_cutlass_kernel_flash_attncuteflash_fwdFlashAttentionForwardSm90_object_at__tensor0000": (
        "FlashAttention-4"
    ),
    "triton_tem_fused_flex_attention_0": "FlexAttention",
    "_tilegpt_attention_forward": "our Triton kernels",
    "_tilegpt_cross_entropy": None,  # a loss, beside whatever attention
    "_tilegpt_fp8_round": None,  # for linear layers
    "tilegpt_fa2_forward": "our CUDA kernels",
    GEMM: "matrix products",
    "void gemv2T_kernel_val<int, float>(cublasGemvParams)": "matrix products",
    "aten::bmm": "matrix products on the CPU",
    SOFTMAX: None,
    "triton_poi_fused_add_0": None,
    "Memset (Device)": None,
    "aten::bmm_like_helper": None,
}


@pytest.mark.parametrize("name", NAMES)
def test_whose_a_kernel_is(name):
    assert family(name.removeprefix("void ")) == family(short(name)) == NAMES[name]


def test_a_name_is_shortened_to_what_tells_kernels_apart():
    assert short(SOFTMAX) == "at::native::(anonymous namespace)::cunn_SoftMaxForward<4, float>"
    assert short("Memset (Device)") == "Memset (Device)"
    assert short("Memcpy DtoD (Device -> Device)") == "Memcpy DtoD (Device -> Device)"
    assert short(GEMM) == GEMM
    assert short(FLASH2).startswith("pytorch_flash::flash_fwd_kernel<") and len(short(FLASH2)) == 100


def test_launches_are_counted_by_first_appearance():
    found = counted([("b", 1.0), ("a", 2.0), ("b", 3.0)])
    assert as_field(found) == {"b": 2, "a": 1} and list(as_field(found)) == ["b", "a"]
    assert [kernel.us for kernel in found] == [4.0, 2.0]


@pytest.mark.parametrize(
    ("asked", "names", "ran", "ok", "words"),
    [
        ("sdpa_cudnn", [CUDNN], None, True, f"asked for sdpa_cudnn, ran cuDNN ({CUDNN})"),
        ("sdpa_cudnn", [FLASH2], None, False, "where cuDNN was to run"),
        ("sdpa_flash", [SOFTMAX, FLASH2], None, True, "ran FlashAttention-2 in PyTorch"),
        ("sdpa", [CUDNN], None, True, "ran cuDNN"),
        ("auto", [CUDNN], "sdpa", True, "asked for auto, which chose sdpa, ran cuDNN"),
        ("flash2", [FLASH2], None, False, "where FlashAttention-2 was to run"),
        ("triton", ["_tilegpt_attention_forward"], None, True, "our Triton kernels"),
        # the forward is fused, the backward is the formula
        ("triton", ["_tilegpt_attention_forward", GEMM], None, False, "our Triton kernels"),
        ("cuda_fa2", ["tilegpt_fa2_forward"], None, True, "our CUDA kernels"),
        ("naive", [GEMM, SOFTMAX], None, True, "ran matrix products"),
        ("naive", ["_tilegpt_attention_forward"], None, False, "where matrix products was to run"),
        ("naive", [SOFTMAX], None, False, "ran no attention kernel that is known here"),
        ("triton", [], None, False, "ran no attention kernel"),
        ("another", [CUDNN], None, False, "is not in its declaration"),
    ],
)
def test_verdict(asked, names, ran, ok, words):
    said = verdict(asked, names, ran)
    assert said.ok is ok and words in said.text, said.text


def test_profile_on_a_cpu_names_the_operators_of_the_call_alone():
    q = torch.randn(2, 2, 64, 32)
    calls = []

    def call():
        calls.append(None)
        F.scaled_dot_product_attention(q, q, q)

    found = profile(call, "cpu", warm_up=2)
    assert len(calls) == 3
    assert as_field(found)["aten::_scaled_dot_product_flash_attention_for_cpu"] == 1
    assert all(kernel.us > 0 for kernel in found) and "aten::transpose" not in as_field(found)


@pytest.mark.gpu
def test_profile_on_a_gpu_names_kernels():
    q = torch.randn(2, 2, 256, 64, device="cuda", dtype=torch.bfloat16)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        found = profile(lambda: F.scaled_dot_product_attention(q, q, q), "cuda")
    assert verdict("sdpa_flash", as_field(found)).ok, found
    assert as_field(profile(lambda: q @ q.mT, "cuda")) and verdict("naive", as_field(found)).ok is False
