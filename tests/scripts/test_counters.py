"""Nsight Compute: what it prints, what it is asked, and why it may count nothing; no ncu is needed."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest

from scripts.measure.instruments import counters, ladder
from scripts.measure.instruments.bench_points import Shape
from scripts.measure.instruments.ladder import Point

# As ncu prints it, with --csv --page raw and units of its own choice.
HEAD = (
    '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size",'
    '"Device","CC","dram__bytes_read.sum","dram__bytes_write.sum","gpu__time_duration.sum",'
    '"launch__registers_per_thread","lts__t_sectors_srcunit_tex.sum",'
    '"sm__warps_active.avg.pct_of_peak_sustained_active",'
    '"smsp__sass_thread_inst_executed_op_fadd_pred_on.sum"'
)
SAID = f"""==PROF== Connected to process 4711 (/usr/bin/python3.12)
==PROF== Profiling "tilegpt_naive_scores" - 0: 0%....50%....100% - 4 passes
==PROF== Profiling "tilegpt_naive_softmax" - 1: 0%....50%....100% - 4 passes
==PROF== Disconnected from process 4711
{HEAD}
"","","","","","","","","","","","Mbyte","Kbyte","usecond","register/thread","sector","%","inst"
"0","4711","python3.12","127.0.0.1","tilegpt_naive_scores","1","7","(256, 1, 1)","(1,024, 16, 1)","0","9.0",\
"1,234.50","2.25","1,500","96","1,000,000","75.5","12,345"
"1","4711","python3.12","127.0.0.1","tilegpt_naive_softmax","1","7","(256, 1, 1)","(32,768, 1, 1)","0","9.0",\
"0.5","n/a","500","32","24","25.5","55"
"""


def test_what_ncu_prints_in_base_units() -> None:
    (name, first), (other, second) = counters.parse(SAID)
    assert (name, other) == ("tilegpt_naive_scores", "tilegpt_naive_softmax")
    assert first["dram__bytes_read.sum"] == pytest.approx(1.2345e9)
    assert first["dram__bytes_write.sum"] == pytest.approx(2250)
    assert first["gpu__time_duration.sum"] == pytest.approx(1.5e-3)
    assert first["lts__t_sectors_srcunit_tex.sum"] == 1_000_000
    assert "dram__bytes_write.sum" not in second  # n/a
    assert second["smsp__sass_thread_inst_executed_op_fadd_pred_on.sum"] == 55
    assert counters.parse("==PROF== Connected\n==ERROR== ERR_NVGPUCTRPERM - no permission\n") == []


@pytest.mark.parametrize(
    ("text", "unit", "value"),
    [
        ("1,024", "byte", 1024),
        ("1.5", "Gbyte", 1.5e9),
        ("2", "Kbyte", 2000),
        ("7", "nsecond", 7e-9),
        ("7", "us", 7e-6),
        ("7", "msecond", 7e-3),
        ("7", "s", 7),
        ("3", "Minst", 3e6),
        ("45.5", "%", 45.5),
        ("12", "register/thread", 12),
        ("12", "", 12),
        ("n/a", "byte", None),
        ("", "", None),
    ],
)
def test_units(text: str, unit: str, value: float | None) -> None:
    assert counters.in_base_unit(text, unit) == (value if value is None else pytest.approx(value))


def test_the_kernels_of_a_call_are_added_up() -> None:
    found = counters.gathered(counts for _, counts in counters.parse(SAID))
    assert found["dram_read_bytes"] == pytest.approx(1.235e9)
    assert "dram_write_bytes" not in found  # one of them has none
    assert found["ms"] == pytest.approx(2)
    assert found["l2_bytes"] == 32 * 1_000_024
    assert found["occupancy_percent"] == pytest.approx((75.5 * 1.5 + 25.5 * 0.5) / 2)
    assert "fp32_flops" not in found and "fadd_flops" not in found  # of three kinds two are missing
    flops = {
        f"smsp__sass_thread_inst_executed_op_{name}_pred_on.sum": 5.0 for name in ("ffma", "fadd", "fmul")
    }
    assert counters.gathered([flops | {"sm__inst_executed_pipe_tensor_op_hmma.sum": 3.0}]) == {
        "tensor_flops": 3 * 4096,
        "fp32_flops": 20,
    }
    assert counters.gathered([]) == {}


@pytest.fixture
def ncu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts a program called ncu on the PATH, which writes its --log-file, runs nothing and notes its
    arguments."""
    monkeypatch.setattr(counters, "_unknown", set())
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def install(log: str, printed: str = "", knows: str = "") -> Path:
        (tmp_path / "log").write_text(log)
        (tmp_path / "printed").write_text(printed)
        failing = ""
        if knows:  # another metric is an error that names it as a pattern
            failing = (
                f'case "$*" in *{knows}*) echo "==ERROR== Failed to find metric regex:^'
                f'{knows.replace(".", "[.]")}$" | sed "s/\\[.\\]/\\\\\\\\./g"; exit 1;; esac\n'
            )
        script = tmp_path / "ncu"
        script.write_text(
            f'#!/bin/bash\necho "$*" >> {tmp_path}/arguments\n{failing}'
            'while [ "$1" != --log-file ]; do shift; done\n'
            f'cat {tmp_path}/log > "$2"\ncat {tmp_path}/printed\n'
        )
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        return tmp_path / "arguments"

    return install


def test_ncu_counts_each_point_of_a_program(ncu: Any) -> None:
    answers = [(2, None), (0, "CUDA out of memory")]
    ncu(SAID, "".join(json.dumps({"launched": n, "reason": why}) + "\n" for n, why in answers))
    points = [Point("cuda_naive", Shape(1, 32, 32, n, 128, True, "fp32")) for n in (1024, 16384, 32768)]
    first, *others = ladder.counted(points, quick=False)
    assert first["dram_read_bytes"] == pytest.approx(1.235e9)
    softmax = first["by_kernel"]["tilegpt_naive_softmax"]
    assert softmax == {"dram_read_bytes": 5e5, "l2_bytes": 24 * 32, "ms": 0.5, "occupancy_percent": 25.5}
    assert others == ["CUDA out of memory", "the program ended before it"]


def test_what_ncu_is_asked(ncu: Any) -> None:
    asked = ncu(SAID)
    counters.count(["python", "ladder.py"], quick=True)
    line = asked.read_text()
    assert "--metrics dram__bytes_read.sum,dram__bytes_write.sum,lts__t_sectors_srcunit_tex.sum" in line
    assert "smsp__sass" not in line and "--cache-control all" in line and "regex:^tilegpt_" in line
    assert line.rstrip().endswith("python ladder.py")


def test_a_metric_that_ncu_does_not_know_is_left_out(ncu: Any) -> None:
    asked = ncu(SAID, knows="dram__bytes_read.sum")
    counters.count(["python"], quick=True)
    first, second = asked.read_text().splitlines()
    assert "dram__bytes_read.sum" in first and "dram__bytes_read.sum" not in second
    assert "dram__bytes_op_read.sum" in second  # its other name


@pytest.mark.parametrize(
    ("log", "reason", "lasting"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission", "may not read the counters", True),
        ("==ERROR== Failed to initialize the profiler: LibraryNotLoaded", "ncu: Failed to initialize", True),
        ("==ERROR== The application returned an error code (1).", "ncu: The application returned", False),
        ("==WARNING== No kernels were profiled.", "ncu counted nothing: exit code 0", False),
    ],
)
def test_why_ncu_counts_nothing(ncu: Any, log: str, reason: str, lasting: bool) -> None:
    ncu(log)
    with pytest.raises(counters.NoCounters, match=reason) as refused:
        counters.count(["python"])
    assert refused.value.lasting == lasting


def test_without_ncu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(counters.NoCounters, match="no ncu on the PATH"):
        counters.count(["python"])
