"""callbacks.profile=true: a step by class of kernel, and what it leaves behind."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from model.training.profiling import OTHER, Launch, Share, class_of, idle_ms, shares, table
from tests.running import rows, train_here


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT", "matrix products"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_nn_n_tilesize128x128x64_aux_bf16_dgelu", "matrix products"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>", "matrix products"),
        ("tilegpt_fa3_backward", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16", "attention"),
        ("_tilegpt_attention_forward", "attention"),
        ("_tilegpt_cross_entropy", "loss"),
        ("triton_red_fused__log_softmax__to_copy_prepare_softmax_online_14", "loss"),
        ("triton_per_fused__to_copy_add_native_layer_norm_backward_view_5", "norms and residuals"),
        ("triton_poi_fused__unsafe_view_gelu_gelu_backward_view_4", "GELU, SwiGLU"),
        ("void at::native::multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata<4>>", "optimiser"),
        ("triton_poi_fused_cat_transpose_view_7", "copies, casts, fills"),
        ("Memset (Device)", "copies, casts, fills"),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "between devices"),
        ("triton_poi_fused_mul_3", OTHER),
        ("aten::addmm", "matrix products"),
        ("aten::_scaled_mm", "matrix products"),
        ("_tilegpt_fp8_round", "rounding to fp8"),
        ("tilegpt_fp8_values", "attention"),
        ("tilegpt::cuda_fa3", "attention"),
        ("tilegpt::product", "matrix products"),
        ("tilegpt::linear_gelu_backward", "matrix products"),
        ("aten::mul", OTHER),
    ],
)
def test_kernels_have_a_class(name: str, expected: str) -> None:
    assert class_of(name) == expected


def test_shares_are_of_a_step_and_gaps_are_idle() -> None:
    """Two steps; launches overlap, and one inside another ends no gap."""
    launches = [
        Launch("nvjet_a", 0, 4000),
        Launch("nvjet_b", 1000, 1000),
        Launch("x", 6000, 2000),
        Launch("nvjet_a", 8000, 1000),
    ]
    assert shares(launches, 2) == [Share("matrix products", 1.5, 3.0), Share(OTHER, 0.5, 1.0)]
    assert [s.name for s in shares(launches, 2, by_class=False)] == ["nvjet_a", "x", "nvjet_b"]
    assert idle_ms(launches, 2) == 1.0 and idle_ms([], 1) == 0
    text = table(launches, 2, "cuda")
    assert "| matrix products | 2 | 3.00 | 60.0% |" in text and "| nothing runs | 0 | 1.00 | 20.0% |" in text
    assert "nothing runs" not in table(launches, 2, "cpu")


def test_a_run_is_profiled_and_stays_what_it_is(tmp_path: Path) -> None:
    assert train_here(tmp_path, "name=plain").code == 0
    result = train_here(tmp_path, "name=seen", "callbacks.profile=true")
    assert result.code == 0, result.err
    folder = tmp_path / "runs" / "seen" / "profile"
    assert {path.name for path in folder.iterdir()} == {"step.md", "step.svg", "trace.json.gz"}
    text = (folder / "step.md").read_text()
    assert "Mean of 3 steps on cpu." in text and "| matrix products |" in text and "| optimiser |" in text
    assert text in result.out and "profile      " in result.out
    with gzip.open(folder / "trace.json.gz", "rt") as file:
        assert any(event.get("name") == "aten::mm" for event in json.load(file)["traceEvents"])
    assert rows(tmp_path / "runs" / "seen") == rows(tmp_path / "runs" / "plain")


def test_a_run_that_is_too_short_to_profile_says_so(tmp_path: Path) -> None:
    """The eleventh step is the first that is profiled."""
    result = train_here(tmp_path, "name=a", "callbacks.profile=true", "trainer.max_steps=10")
    assert result.code == 0, result.err
    assert "begins after 10 steps, and 10 are to come. Set trainer.max_steps to 13 or more" in result.out
    assert not (tmp_path / "runs" / "a" / "profile").exists()
    result = train_here(tmp_path, "ckpt=a", "trainer.max_steps=21", tiny=False)
    assert "nothing is profiled" not in result.out
    assert "Mean of 1 steps on cpu." in (tmp_path / "runs" / "a" / "profile" / "step.md").read_text()


@pytest.mark.parametrize("override", ["callbacks.profile=3", "callbacks.metrics=true"])
def test_what_is_no_switch_is_refused(override: str, tmp_path: Path) -> None:
    result = train_here(tmp_path, override)
    assert result.code == 1 and override.split("=")[0] in result.err and "Traceback" not in result.err
