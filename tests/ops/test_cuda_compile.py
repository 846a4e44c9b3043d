"""The specialisations of the CUDA ladder, compiled for GPUs that need not be here: registers, spills, shared
memory and how many blocks share a multiprocessor, within budgets; and the instructions that are meant."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir

from attention.base import AttentionCall, AttentionOptions
from attention.cuda import STAGES
from ops import nvrtc
from ops.nvrtc_build import SOURCES
from tests.compilers import pinned
from tests.grid import CASES, Case, build, long_but, make_inputs
from tests.ops.recorded import SHARED_BYTES, Compiled, Launch, compiled, launches

pytestmark = [
    pytest.mark.sampled(6),
    pytest.mark.skipif(nvrtc.missing() is not None, reason=str(nvrtc.missing())),
    pinned("nvidia-cuda-nvrtc"),
]
CONF = Path(__file__).resolve().parents[2] / "conf"
ARCHES = list(SHARED_BYTES)


@dataclass(frozen=True)
class Budget:
    """Of a kernel, in every specialisation: at most so many registers and bytes spilled, at least so many
    blocks on a multiprocessor; instructions that are in its SASS, and that are not. With other options than a
    causal mask it may spill more: they are not what it is tuned for."""

    registers: int = 255
    spilled_bytes: int = 0
    spilled_with_options: int = 0
    blocks: int = 1
    has: tuple[str, ...] = ()
    has_not: tuple[str, ...] = ("HMMA",)


# Tensor cores, ldmatrix, cp.async.
TENSOR_CORES = ("HMMA", "LDSM", "LDGSTS")
# Every kernel of ops/csrc, by name.
BUDGETS = {
    "tilegpt_plain_scores": Budget(registers=64, blocks=4),
    "tilegpt_plain_softmax": Budget(registers=64, blocks=4),
    "tilegpt_plain_output": Budget(registers=64, blocks=4),
    "tilegpt_plain_dscores": Budget(registers=96, blocks=2),
    "tilegpt_plain_dq": Budget(registers=64, blocks=4),
    "tilegpt_plain_dkdv": Budget(registers=64, blocks=4),
    "tilegpt_fp8_rows": Budget(registers=128, blocks=2, has_not=()),  # both in test_cuda_fp8.py
    "tilegpt_fp8_values": Budget(registers=64, blocks=4, has_not=()),
    "tilegpt_naive_scores": Budget(registers=168),
    "tilegpt_naive_softmax": Budget(registers=64, blocks=4),
    "tilegpt_naive_output": Budget(registers=128, blocks=2),
    "tilegpt_rowwise_forward": Budget(registers=128),
    # All registers that there are for sums in fp32, and a few bytes spilled outside of the inner loops; more
    # with documents, or with dropout and a softcap.
    "tilegpt_tiled_forward": Budget(spilled_bytes=64, spilled_with_options=120),
    "tilegpt_tiled_dkdv": Budget(spilled_bytes=64, spilled_with_options=240),
    "tilegpt_tiled_dq": Budget(spilled_bytes=64, spilled_with_options=64),
    "tilegpt_largest": Budget(registers=40, blocks=6),
    "tilegpt_split_fp16": Budget(registers=32, blocks=6),
    # All registers that there are, and what is spilled is read once a tile, outside of the products.
    "tilegpt_tiled_split_fp16_forward": Budget(
        has=TENSOR_CORES, has_not=(), spilled_bytes=104, spilled_with_options=256
    ),
    "tilegpt_split_fp16_dkdv": Budget(
        has=TENSOR_CORES, has_not=(), spilled_bytes=128, spilled_with_options=128
    ),
    "tilegpt_split_fp16_dq": Budget(has=TENSOR_CORES, has_not=(), spilled_bytes=64, spilled_with_options=256),
    "tilegpt_delta": Budget(registers=64, blocks=4),
    "tilegpt_document_ranges": Budget(registers=40, blocks=3),  # of 512 threads: all that an sm_89 has
    "tilegpt_kept_tiles": Budget(registers=64, blocks=4),
    "tilegpt_wmma_forward": Budget(blocks=1, has=("HMMA", "LDSM"), has_not=()),
    # Where its rows begin, read once a step. (Less is spilled, 0 to 64 bytes, where a step's loads are
    # predicated by hand or O is written out in a pass of its own: both up to 10% slower.)
    "tilegpt_fa1_forward": Budget(has=TENSOR_CORES, has_not=(), spilled_bytes=96, spilled_with_options=96),
    # Of grouped heads at D = 128; 320 bytes with every option at once, at most 80 with two of them.
    "tilegpt_fa2_forward": Budget(has=TENSOR_CORES, has_not=(), spilled_bytes=64, spilled_with_options=320),
    # Some numbers, loaded once a tile of queries: of grouped heads at D = 64.
    "tilegpt_fa2_backward": Budget(has=TENSOR_CORES, has_not=(), spilled_bytes=48, spilled_with_options=256),
    "tilegpt_fa2_backward_dq": Budget(has=TENSOR_CORES, has_not=(), spilled_with_options=256),
    "tilegpt_backward_prepare": Budget(registers=32),
    "tilegpt_attend_bytes": Budget(has=("IMMA", "LDSM", "LDGSTS")),  # in test_attend_cache.py
    # Outside of the loop over keys, and in who copies.
    "tilegpt_fa3_forward": Budget(
        has=("HGMMA", "UTMALDG", "UTMASTG"), spilled_bytes=24, spilled_with_options=176
    ),
    # ptxas counts 168 for each thread; who computes has 240 by setmaxnreg. (ALiBi at D = 64 spills up to 88
    # bytes; with tiles of 64 queries nothing, but it takes 1.25 times as long.)
    "tilegpt_fa3_backward": Budget(
        has=("HGMMA", "UTMALDG", "UBLKRED", "UTMASTG"), spilled_bytes=0, spilled_with_options=88
    ),
    # With a causal mask: P in fp16 takes a conversion to be read back. With tiles that spill nothing, 0.95x.
    "tilegpt_fa3_backward, D = 128 in fp16": Budget(
        has=("HGMMA", "UTMALDG", "UBLKRED", "UTMASTG"), spilled_bytes=44, spilled_with_options=88
    ),
    # Of 160 registers dK and dV take 96; outside of the loop over queries.
    "tilegpt_fa3_backward, three warp groups": Budget(
        registers=128, has=("HGMMA", "UTMALDG", "UBLKRED", "UTMASTG"), spilled_bytes=80
    ),
    "tilegpt_fa3_backward_finish": Budget(registers=64, blocks=4),
    # Two blocks where a multiprocessor has 100 KiB, and registers for 64 KiB that they load at once.
    "tilegpt_fa2_backward_finish": Budget(registers=80, blocks=2),
}
# Defines of these, beyond a causal mask.
OPTIONS = ("HAS_LEFT", "SOFTCAP", "ALIBI", "DOCUMENT_IDS", "LENGTHS", "DROPOUT")
EVERYTHING = frozenset({"window", "softcap", "alibi", "document_ids", "kv_lengths", "dropout", "noncausal"})
# What models have, causal, and the most that a stage does; the covering list is slow.
USUAL = [((9, 0), (64,)), ((9, 0), (128,)), ((8, 9), (32, 128)), ((8, 0), (64,))]
HEAVY = [
    Case("heavy", 113, 203, 128, kv_heads=2, features=features)
    for features in (EVERYTHING, EVERYTHING | {"block_mask"})
]


def able(stage: str, case: Case, dtype: torch.dtype, arch: tuple[int, int]) -> bool:
    """Whether the stage declares that it runs `case`, in as many passes as it has."""
    stage_attention = build(f"cuda_{stage}")
    inputs = make_inputs(case, "cpu", dtype)
    with torch.set_grad_enabled(stage_attention.capabilities.backward):
        call = AttentionCall.of(inputs.q, inputs.k, inputs.v, AttentionOptions(**inputs.options))
    facts = {name: getattr(call, name) for name in AttentionCall.__dataclass_fields__}
    return not stage_attention.unsupported_reasons(AttentionCall(**facts | {"device": "cuda", "arch": arch}))


def budget_of(launch: Launch) -> Budget:
    defines = dict(launch.defines)
    half = ", D = 128 in fp16" if (defines.get("ELEMENT"), defines.get("HEAD_DIM")) == ("f16", 128) else ""
    kind = ", three warp groups" if defines.get("WARP_GROUPS") == 3 else half
    return BUDGETS.get(launch.name + kind, BUDGETS[launch.name])


@cache
def disassembler() -> str:
    spec = importlib.util.find_spec("triton")
    if spec is None:
        pytest.skip("triton, whose wheel has nvdisasm, is not installed")
    return str(Path(spec.origin).parent / "backends" / "nvidia" / "bin" / "nvdisasm")


@cache
def sections(code: bytes) -> list[str]:
    """Of a cubin's SASS; all its kernels are disassembled at once."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(code)
        command = [disassembler(), "--print-code", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return re.split(r"^\s*\.section\s+", text, flags=re.MULTILINE)


def sass(cubin: nvrtc.Cubin, kernel: str) -> Counter[str]:
    """How often each instruction is in one kernel, without its modifiers: HMMA for HMMA.16816.F32."""
    ours = sections(cubin.code)
    (section,) = (part for part in ours if part.startswith(f".text.{kernel},"))
    return Counter(re.findall(r"^\s*/\*\w+\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9]*)", section, re.MULTILINE))


def check(stage: str, cases: list[Case], dtype: torch.dtype, arch: tuple[int, int]) -> list[Compiled]:
    """Compiles what the cases launch, each specialisation once, and holds it to the budgets."""
    found, wrong = [], []
    for launch in dict.fromkeys(launch for case in cases for launch in launches(stage, case, dtype, arch)):
        try:
            each, budget = compiled(launch, arch), budget_of(launch)
        except nvrtc.CudaError as error:
            wrong.append(f"{launch}: {error}")
            continue
        found.append(each)
        heavy = any(dict(launch.defines).get(option) for option in OPTIONS)
        spilled = each.spilled_bytes > (budget.spilled_with_options if heavy else budget.spilled_bytes)
        over = each.registers > budget.registers or spilled or each.shared_bytes > SHARED_BYTES[arch]
        if over or each.blocks < budget.blocks:
            wrong.append(f"sm_{arch[0]}{arch[1]} {each}; {budget}")
    assert not wrong, "\n".join(["these do not fit:", *wrong])
    return found


def dtypes(stage: str) -> list[torch.dtype]:
    """One of 16 bits (float16 differs by two instructions) and fp32."""
    return [x for x in (torch.bfloat16, torch.float32) if x in STAGES[stage].capabilities.dtypes]


EACH = pytest.mark.parametrize(("stage", "dtype"), [(s, d) for s in STAGES for d in dtypes(s)], ids=str)
ON = pytest.mark.parametrize("arch", ARCHES, ids=lambda arch: "sm_{}{}".format(*arch))


@pytest.mark.parametrize(("arch", "head_dims"), long_but(USUAL, 0))
@EACH
def test_fits_and_does_as_meant(
    stage: str, dtype: torch.dtype, arch: tuple[int, int], head_dims: tuple[int, ...]
) -> None:
    if STAGES[stage].capabilities.min_arch > arch:
        pytest.skip(f"{stage} is for newer GPUs")
    cases = [Case("usual", 128, 128, head_dim) for head_dim in head_dims]
    for each in check(stage, cases, dtype, arch):
        if dict(each.launch.defines).get("HEAD_DIM") == head_dims[0]:
            budget = budget_of(each.launch)
            found = set(sass(each.cubin, each.launch.name))
            assert found.issuperset(budget.has), f"{each}: has {sorted(found)}, {budget}"
            assert not found & set(budget.has_not), f"{each}: has {sorted(found)}, {budget}"
            assert ("ACQBULK" in found) == each.launch.early  # the wait for the kernel before


@pytest.mark.long
@pytest.mark.parametrize(
    ("stage", "arch", "head_dims"),
    long_but(
        [*(("fa2", *each) for each in USUAL), *(("fa3", (9, 0), (d,)) for d in (64, 96, 128))], 0, len(USUAL)
    ),
)
def test_fits_with_a_block_mask(stage: str, arch: tuple[int, int], head_dims: tuple[int, ...]) -> None:
    """Within what is allowed without options."""
    sparse = frozenset({"block_mask"})
    cases = [Case("usual", 128, 128, d, kv_heads=kv, features=sparse) for d in head_dims for kv in (4, 2)]
    assert any(each.launch.name == "tilegpt_kept_tiles" for each in check(stage, cases, torch.bfloat16, arch))


@pytest.mark.long
@pytest.mark.parametrize(
    "arch", [pytest.param((8, 0), marks=pytest.mark.slow), (8, 9), (9, 0)], ids=["sm_80", "sm_89", "sm_90"]
)
@EACH
def test_fits_with_every_option(stage: str, dtype: torch.dtype, arch: tuple[int, int]) -> None:
    if STAGES[stage].capabilities.min_arch > arch:
        pytest.skip(f"{stage} is for newer GPUs")
    cases = [case for case in HEAVY if able(stage, case, dtype, arch)]
    assert cases or STAGES[stage].capabilities.features < EVERYTHING | {"gqa", "lse", "rectangular"}
    check(stage, cases, dtype, arch)


def shipped() -> list[Case]:
    """Causal, with the head dims and the groups of conf/model."""
    found = {}
    for path in sorted((CONF / "model").glob("*.yaml")):
        with initialize_config_dir(str(CONF), version_base="1.3"):
            model = compose("config", overrides=[f"model={path.stem}"]).model
        heads = model.n_kv_head or model.n_head
        case = Case("shipped", 128, 128, model.n_embd // model.n_head, 1, model.n_head, heads)
        found[case.head_dim, model.n_head // heads] = case
    return list(found.values())


@pytest.mark.long
@pytest.mark.parametrize("stage", ["tiled", "fa2", "fa3"])
def test_shipped_models_fit(stage: str) -> None:
    """On Hopper, by what attention=cuda trains them with."""
    dtype = dtypes(stage)[0]
    cases = [case for case in shipped() if able(stage, case, dtype, (9, 0))]
    assert {32, 64} <= {case.head_dim for case in cases}
    check(stage, cases, dtype, (9, 0))


@pytest.mark.slow
@ON
@EACH
def test_the_covering_list_fits(stage: str, dtype: torch.dtype, arch: tuple[int, int]) -> None:
    cases = [case for case in CASES if case.group != "empty" and able(stage, case, dtype, arch)]
    if STAGES[stage].capabilities.min_arch > arch:
        pytest.skip(f"{stage} is for newer GPUs")
    assert len(check(stage, cases, dtype, arch)) > 5


FA3_TILES = [
    (Case("usual", 128, 128, d, features=frozenset(f)), dtype)
    for d in (128, 96, 192, 256, 64, 80)
    for f in ((), ("noncausal",))
    for dtype in (torch.bfloat16, torch.float16)
]
FA3_TILES += [(Case("usual", 128, 128, 96, features=frozenset({"kv_lengths"})), torch.bfloat16)]
FA3_TILES += [  # the forward's for many keys
    (Case("usual", 64, tk, d, heads=1, kv_heads=1, features=frozenset(f)), torch.bfloat16)
    for tk, d in ((16384, 128), (1024, 128), (16384, 80), (16384, 96), (512, 160), (16384, 64))
    for f in (("noncausal",), ())
]


@pytest.mark.parametrize(("case", "dtype"), long_but(FA3_TILES, 0, 1, 2, 12, 25, 35), ids=str)
def test_the_tiles_of_fa3_fit(case: Case, dtype: torch.dtype) -> None:
    found = check("fa3", [case], dtype, (9, 0))
    assert any(each.launch.name == "tilegpt_fa3_backward" for each in found)
    assert not any("C75" in each.cubin.log for each in found), "serialised wgmmas"


def test_the_check_finds_what_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget that is too small, on the smallest kernel."""
    monkeypatch.setitem(BUDGETS, "tilegpt_naive_softmax", Budget(registers=1))
    with pytest.raises(
        AssertionError, match=r"tilegpt_naive_softmax .*HEAD_DIM=64.* registers, 0 bytes spilled"
    ):
        check("naive", [Case("usual", 128, 128)], torch.float32, (8, 0))


def test_every_kernel_has_a_budget() -> None:
    texts = (path.read_text() for path in SOURCES.rglob("*.cu"))
    kernels = {name for text in texts for name in re.findall(r"\btilegpt_\w+(?=\()", text)}
    assert kernels == {name.split(",")[0] for name in BUDGETS}
