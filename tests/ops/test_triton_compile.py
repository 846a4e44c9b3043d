"""The Triton kernels with the tiles of ops/triton/configs.py, compiled for GPUs that need not be here: in
shared memory, without spills, and with the instructions that they are written for."""

from __future__ import annotations

import importlib
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ops import triton
from tests.compilers import pinned

pytestmark = [pinned("triton"), pytest.mark.sampled(3)]
ROOT = Path(__file__).resolve().parents[2]
# What a block may use (CUDA C++ programming guide, compute capabilities); sm_86 is as sm_89.
SHARED_BYTES = {(8, 0): 166_912, (8, 9): 101_376, (9, 0): 232_448}
ARCHES = list(SHARED_BYTES)
# Bytes that a thread may store and load by spilling: 16 bits none; fp32, whose three terms of each operand
# fill the registers from a head dim of 128 on, what the fastest of its tiles need: at 128 dK and dV in tiles
# of 64 x 32 spill 192 and take half the time of 16 x 64, which spill 116.
SPILLED_BYTES = {16: 0, 32: 192}
# The list of kept blocks takes two registers more than dK and dV have left at a head dim of 128.
SPILLED_WITH_BLOCKS = 8
Check = Callable[[list[dict]], list[dict]]
PASSES = ("forward", "dkdv", "dq")
HEAD_DIMS = (32, 64, 128, 256)
EXTRAS = ((), ("softcap", "alibi"), ("dropout",), ("document_ids",), ("bias",), ("kv_lengths",))
EXTRAS += (("block_mask",), ("relative_bias",), ("bias", "bias_grad"))


def build(kind: str, arch: tuple[int, int], bits: int, head_dim: int, masked: bool, *extras: str, split=True):
    return {
        "kind": kind,
        "arch": arch,
        "bits": bits,
        "head_dim": head_dim,
        "masked": masked,
        "extras": extras,
        "split": split,
    }


def _process(module: str) -> subprocess.Popen[str]:
    """A process of its own, in which triton compiles: here it interprets."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    return subprocess.Popen(
        [sys.executable, "-m", module],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, env=environment, text=True,
    )  # fmt: skip


@pytest.fixture(scope="module")
def compiled() -> Iterator[Check]:
    """Compiles with tests/ops/ahead.py, in one process for all tests."""
    with _process("tests.ops.ahead") as process:

        def compiled(builds: list[dict]) -> list[dict]:
            print(json.dumps(builds), file=process.stdin, flush=True)
            lines = [process.stdout.readline() for _ in builds]
            assert all(lines), "tests.ops.ahead has failed, see its stderr"
            return [json.loads(line) for line in lines]

        yield compiled


@pytest.fixture
def check(compiled: Check) -> Check:
    """The same, which has to fit."""

    def check(builds: list[dict]) -> list[dict]:
        wrong, found = [], compiled(builds)
        for given, got in zip(builds, found, strict=True):
            limit = SHARED_BYTES[given["arch"]]
            with_blocks = SPILLED_WITH_BLOCKS * ("block_mask" in given["extras"])
            spilled = max(SPILLED_BYTES[given["bits"]], with_blocks)
            if got["shared_bytes"] > limit or got["spilled_bytes"] > spilled:
                wrong.append(
                    f"{got['what']}: {got['registers']} registers, {got['spilled_bytes']} bytes spilled, "
                    f"{got['shared_bytes']} of {limit} bytes of shared memory"
                )
        assert not wrong, "\n".join(["these tiles do not fit:", *wrong])
        return found

    return check


@pytest.mark.parametrize("head_dims", [(64,), pytest.param((32, 128, 256), marks=pytest.mark.long)], ids=str)
@pytest.mark.parametrize("kind", PASSES)
def test_tiles_fit_hopper(check: Check, kind: str, head_dims: tuple[int, ...]) -> None:
    """Every tile of sm_90, and by wgmma and TMA."""
    builds = [build(kind, (9, 0), 16, d, masked) for d in head_dims for masked in (False, True)]
    for got in check(builds):
        # wgmma has 64 rows: dK and dV of 32 keys, all that a head dim of 256 leaves room for, go by mma.sync.
        other = kind == "dkdv" and "n=32" in got["what"]
        assert got["instructions"]["tma"], got
        assert bool(got["instructions"]["wgmma"]) != other and bool(got["instructions"]["mma"]) == other, got
    check([build(kind, (9, 0), 16, d, True, "softcap", "alibi") for d in head_dims])
    sparse = check([build(kind, (9, 0), 16, d, True, "block_mask") for d in head_dims])
    assert all(got["instructions"]["tma"] for got in sparse)


@pytest.mark.long
@pytest.mark.parametrize("kind", PASSES)
def test_tiles_fit_ampere_and_ada(check: Check, kind: str) -> None:
    """Every tile of sm_80, and by mma.sync and cp.async; sm_89 has the same in less shared memory."""
    builds = [build(kind, (8, 0), 16, d, d > 64) for d in HEAD_DIMS]
    builds += [build(kind, (8, 9), 16, d, d <= 64) for d in HEAD_DIMS]
    for got in check(builds):
        assert got["instructions"]["mma"] and not got["instructions"]["wgmma"], got
    assert any(got["instructions"]["cp.async"] for got in check(builds[:2]))
    check([build(kind, (8, 9), 16, d, True, "softcap", "alibi") for d in HEAD_DIMS])


@pytest.mark.long
@pytest.mark.parametrize("kind", PASSES)
def test_tiles_fit_in_fp32(check: Check, kind: str) -> None:
    """On tensor cores, six products of bf16 terms for each (TF32 would err beyond fp32); up to a head dim of
    64 without spills on sm_90."""
    ampere = check([build(kind, (8, 9), 32, d, True) for d in HEAD_DIMS])
    hopper = check([build(kind, (9, 0), 32, d, True) for d in HEAD_DIMS])
    for got in ampere + hopper:
        count = got["instructions"]
        assert count["mma"] + count["wgmma"] == count["bf16"], got
        # At least two products, of six terms' each, in two steps of 16 columns.
        assert count["bf16"] >= 24, got
    assert all(got["instructions"]["mma"] for got in ampere)
    # dK, dV of 32 keys by mma.sync are the fastest at a head dim of 128: wgmma needs 64
    assert all(got["instructions"]["wgmma"] for got in hopper[: 2 if kind == "dkdv" else 3])
    assert not any(got["spilled_bytes"] for got in hopper[:2])


@pytest.mark.long
def test_decode_fits(check: Check) -> None:
    builds = [build("decode", arch, 16, d, True) for arch in ((8, 9), (9, 0)) for d in (64, 128, 256)]
    builds += [
        build("decode", (9, 0), 16, 128, True, split=False),
        build("decode", (9, 0), 16, 128, True, "kv_lengths"),
    ]
    builds += [build("decode", (8, 9), 32, 128, True), build("combine", (9, 0), 16, 128, True)]
    found = check(builds)
    assert all(got["instructions"]["tma"] for got in found[3:6])


@pytest.mark.slow
@pytest.mark.parametrize("bits", [16, 32])
@pytest.mark.parametrize("arch", ARCHES, ids=lambda arch: "sm_{}{}".format(*arch))
@pytest.mark.parametrize("kind", (*PASSES, "decode", "combine"))
def test_every_tile_with_every_option(check: Check, kind: str, arch: tuple[int, int], bits: int) -> None:
    product = itertools.product(HEAD_DIMS, (False, True), EXTRAS if kind != "combine" else ((),))
    check([build(kind, arch, bits, d, masked, *extras) for d, masked, extras in product])


def test_the_check_finds_what_does_not_fit(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHARED_BYTES, (8, 9), 1000)
    with pytest.raises(AssertionError, match=r"forward sm_89 16 bits D=64.*registers.*of 1000 bytes"):
        check([build("forward", (8, 9), 16, 64, True)])


@pytest.mark.parametrize(
    "stored", ["int4", *(pytest.param(x, marks=pytest.mark.long) for x in ("", "fp8", "int8"))]
)
def test_the_cached_kernel_compiles_where_its_numbers_exist(check: Check, stored: str) -> None:
    """In blocks and not; no tile spills, and 4 bits become 16 by logical operations of two at once."""
    builds = [
        build("cached", arch, 16, 128, True, *[stored] * bool(stored), *paged)
        for arch in ((8, 0), (9, 0))
        for paged in ((), ("paged",))
        if stored != "fp8" or arch >= (8, 9)
    ]
    for got in check(builds):
        assert got["instructions"]["mma"] and got["instructions"]["cp.async"], got
    paged = *[stored] * bool(stored), "paged"
    check([build("cached", (9, 0), 16, d, True, *paged) for d in (64, 256)])
    check([build("cached", (9, 0), 16, d, True, *paged, "chunk") for d in (64, 128, 256)])


@pytest.mark.long
def test_a_decoding_step_asks_for_its_weights_before_it_waits() -> None:
    """A whole tile of weights, or of keys and values, by 16 bytes, and nothing spilled."""
    said, _ = _process("tests.ops.ahead_step").communicate()
    found = [json.loads(line) for line in said.splitlines()]
    wrong = [got for got in found if got["spilled_bytes"] or got["ahead_wide"] < got["of_tile"]]
    assert len(found) == 30 and not wrong, wrong


@pytest.mark.parametrize(
    ("given", "home", "kept_in"),
    [
        ({}, "home", "home/.triton/cache"),
        ({"TRITON_HOME": "other"}, "home", "other/.triton/cache"),
        ({"TRITON_CACHE_DIR": "mine"}, "home", "mine"),
        ({}, "nowhere", None),  # torch.compile finds a folder
    ],
)
def test_one_folder_keeps_what_is_compiled(
    given: dict[str, str], home: str, kept_in: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ours, and what torch.compile compiles, which obeys TRITON_CACHE_DIR: Triton's own."""
    for name in ("TRITON_HOME", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, "")  # or nothing would be restored
        monkeypatch.delenv(name)
    for name in ("home", "other"):
        (tmp_path / name).mkdir()
    for name, value in {"HOME": home, **given}.items():
        monkeypatch.setenv(name, str(tmp_path / value))
    taken = importlib.import_module("triton").knobs.cache.dir
    importlib.reload(triton)
    assert os.environ.get("TRITON_CACHE_DIR") == (str(tmp_path / kept_in) if kept_in else None)
    assert not given or taken == os.environ["TRITON_CACHE_DIR"]  # HOME it reads once


@pytest.mark.long
def test_that_folder_is_named_before_anything_is_compiled() -> None:
    """With any attention: also where the first of our kernels is the loss, loaded as it first runs."""
    code = "import sys, model.gpt; print('ops.triton' in sys.modules)"
    command = [sys.executable, "-c", code]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert said == "True\n"
