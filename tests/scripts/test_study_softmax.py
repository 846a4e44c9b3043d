"""The softmax in three passes and two: values of the kernels on a CPU, what the rows say, the claim."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ops import nvrtc
from scripts.measure.claims import FAILS, HOLDS, IN_PART, UNTESTED, Results, answered
from scripts.measure.instruments.softmax import DEFINES, KERNELS, softmax
from scripts.measure.rows import append
from scripts.measure.studies import softmax_passes
from tests.compilers import pinned
from tests.ops.cpu import GXX, Compiler


@pytest.mark.skipif(GXX is None, reason="needs g++")
@pytest.mark.parametrize("columns", [4, 1028, 3000])  # fewer than threads, a few more, some twice
def test_values(columns: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "kernel", Compiler(tmp_path))
    x = 30 * torch.randn(3, columns, generator=torch.Generator().manual_seed(columns))
    x[1] -= 1e4  # no maximum of 0 that nobody looked for
    x[2] = x[2].sort().values  # the maximum grows with every score
    for name in KERNELS:
        out = torch.full_like(x, torch.nan)
        softmax(name, x, out)
        torch.testing.assert_close(out, torch.softmax(x.double(), -1).float(), rtol=1e-5, atol=1e-7)


@pytest.mark.skipif(nvrtc.missing() is not None, reason=str(nvrtc.missing()))
@pinned("nvidia-cuda-nvrtc")
def test_compiles_without_spills() -> None:
    for name in KERNELS:
        cubin = nvrtc.build("bench/softmax.cu", DEFINES, "sm_90")
        used = cubin.kernels[f"tilegpt_softmax_{name}"]
        assert used.spilled_bytes == 0 and used.registers <= 64


def rows(folder: Path, three: float, two: float, cached: int = 0) -> Results:
    """cached: rows of no more scores are read once from DRAM."""

    def dram(reads: float, point: dict[str, Any]) -> float:
        return 1 if point["seq_len"] <= cached else reads

    out = folder / "softmax_passes" / "h200.jsonl"
    for point in softmax_passes.points():
        name = point["implementation"]
        result = {"status": "ok", "ms_median": {"three_passes": 0.3, "two_passes": 0.2}.get(name, 0.25)}
        reads = {"three_passes": three, "two_passes": two}.get(name)
        if reads:
            counters = {
                "l2_bytes": 2**30,
                "dram_read_bytes": dram(reads, point) * 2**28,
                "load_bytes": reads * 2**28,
            }
            result |= {"reads": reads, "counters": counters}
        append(out, point, result)
    text = out.read_text()
    out.write_text(text.replace('"gpu": null', '"gpu": "NVIDIA H200"'))
    return Results(folder)


def test_what_rows_say(tmp_path: Path) -> None:
    results = rows(tmp_path, 3.0, 2.0)
    (table,) = softmax_passes.report(results.rows("softmax_passes")).tables
    assert table.lines[1] == ["4,096", "three passes", "3.00", "4.00", "3.00", "0.300", "1,790"]
    assert table.lines[3][:5] == ["4,096", "torch", "", "", ""] and len(table.lines) == 13
    answer = answered(results)[39]
    assert answer.verdict == HOLDS and "1.50x at 4,096" in answer.why
    assert "written with three and two loads" in answer.why


def test_a_claim_that_does_not_hold(tmp_path: Path) -> None:
    found = answered(rows(tmp_path / "a", 3.0, 2.0, cached=4096))[39]
    assert found.verdict == IN_PART and "1.00 and 1.00 at 4,096, 3.00 and 2.00 at 32,768" in found.why
    assert found.figure == "3.00 and 2.00 reads from DRAM at N = 4,194,304, 1.00 and 1.00 at 4,096"
    assert answered(rows(tmp_path / "d", 3.0, 2.0, cached=2**30))[39].verdict == FAILS
    assert answered(rows(tmp_path / "b", 3.0, 3.0))[39].verdict == FAILS
    assert answered(Results(tmp_path / "c"))[39].verdict == UNTESTED
