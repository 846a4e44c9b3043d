"""What is written from results and declarations: that it is true, and that it is current."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys

import pytest
import torch

from attention.base import LOW_PRECISION, Attention, Capabilities
from scripts import bench_ladder, report
from scripts.measure.instruments.bench_points import Shape
from scripts.measure.report import advice, capabilities, ranking, summary
from scripts.measure.rows import key_of
from tests.running import ROOT

H100 = (9, 0)


def row(name, passed, ms, *, tokens=1024, head_dim=64, causal=True, gpu="NVIDIA H200", window=None, **result):
    decode = passed == "decode"
    shape = Shape(1, 2, 2, tokens, head_dim, causal, "bf16", decode=decode, window=window, kv_lengths=decode)
    point = shape.point(name, passed)
    result = {
        "status": "ok", "ms_median": ms, "tflops": shape.flops(passed) / ms / 1e9, "error_ratio": 0.5,
        "kernels_ok": True, "peak_mib": 1.0, "gb_per_s": 1 / ms, "copy_gb_per_s": 4000.0,
    } | result  # fmt: skip
    machine = {"gpu": gpu, "date": "2026-11-21", "torch": "2.11", "triton": "3.6.0"}
    return {"key": key_of(point), "run_id": "r", "point": point, "result": result, "machine": machine}


def both(name, forward, backward, **more):
    return [row(name, "forward", forward, **more), row(name, "backward", backward, **more)]


def training(rows, dim=64, longest=1024):
    return ranking.ranking(rows).get((H100, 16, "training", "causal", dim, longest))


def test_a_newer_row_of_the_same_point_counts():
    old, new = row("triton", "forward", 2), row("triton", "forward", 1)
    new["machine"]["date"] = "2026-11-22"
    elsewhere, other = row("triton", "forward", 1, tokens=512), row("triton", "forward", 1, gpu="NVIDIA H100")
    assert ranking.newest([old], [new, elsewhere, other]) == [new]
    assert ranking.newest([new], [old]) == [new]
    wrong, same_day = row("triton", "forward", 1, error_ratio=1.5), row("triton", "forward", 3)
    assert ranking.newest([old], [wrong]) == [old] and ranking.newest([old], [same_day]) == [same_day]


def test_training_is_forward_and_backward_and_lengths_count_alike():
    rows = both("triton", 1, 5) + both("flex", 3, 2)  # 6 : 5
    rows += both("triton", 10, 20, tokens=512) + both("flex", 15, 45, tokens=512)  # 1 : 2
    found = ranking.ranking(rows)
    assert training(rows) == pytest.approx({"triton": 1.2**0.5, "flex": 2**0.5})
    assert list(found[H100, 16, "forward", "causal", 64, 1024]) == ["triton", "flex"]
    assert set(found) == {(H100, 16, purpose, "causal", 64, 1024) for purpose in ("training", "forward")}


@pytest.mark.parametrize(
    "bad",
    [{"error_ratio": 1.01}, {"kernels_ok": False}, {"status": "error", "error_ratio": None}],
)
def test_who_is_wrong_anywhere_is_left_out(bad):
    rows = both("triton", 1, 1) + both("flex", 2, 2) + both("triton", 1, 1, tokens=512, **bad)
    assert list(training(rows + both("flex", 2, 2, tokens=512))) == ["flex"]


def test_who_was_never_judged_is_left_out_and_who_was_once_is_not():
    rows = both("triton", 1, 1, error_ratio=None) + both("flex", 2, 2)
    assert list(training(rows)) == ["flex"]
    rows += both("triton", 1, 1, tokens=512) + both("flex", 2, 2, tokens=512)
    assert list(training(rows)) == ["triton", "flex"]


def test_no_time_somewhere_comes_after_a_time_everywhere():
    rows = both("triton", 1, 1) + both("flex", 9, 9) + both("flex", 9, 9, tokens=512)
    rows += [row("triton", "forward", 1, tokens=512), row("triton", "backward", 1, tokens=512, status="oom")]
    assert list(training(rows)) == ["flex", "triton"]
    assert training([row("triton", "forward", 1)]) is None  # no backward, no training


def test_points_where_some_were_not_measured_do_not_count():
    rows = both("triton", 1, 1) + both("flex", 2, 2) + both("flex", 2, 2, tokens=512)
    assert training(rows) == pytest.approx({"triton": 1.0, "flex": 2.0})


def test_classes_of_calls():
    rows = both("flex", 1, 1, tokens=2048, head_dim=96) + both("flex", 1, 1, causal=False)
    rows += [*both("flex", 1, 1, window=100), row("flex", "decode", 1, head_dim=320)]
    rows += both("naive", 1, 1) + both("flex", 1, 1, gpu="Unheard of")  # not ranked
    assert list(ranking.ranking(rows)) == [
        (H100, 16, "training", "causal", 128, None),
        (H100, 16, "training", "full", 64, 1024),
        (H100, 16, "training", "masked", 64, 1024),
        (H100, 16, "forward", "causal", 128, None),
        (H100, 16, "forward", "full", 64, 1024),
        (H100, 16, "forward", "masked", 64, 1024),
        (H100, 16, "decode", "masked", 256, 1024),
    ]


def test_options_that_few_have_rank_nobody():
    rows = both("cuda_fa3", 2, 2, window=100) + both("triton", 1, 1, window=100)
    for row in rows[2:]:
        row["point"]["features"] = "sparsity=local:8"
    assert set(ranking.ranking(rows)[H100, 16, "training", "masked", 64, 1024]) == {"cuda_fa3"}


def generated(name, tokens_per_s, batch=1, new=512, compile=True):
    point = {
        "implementation": name, "batch": batch, "model": "gpt2", "prompt": 128, "new_tokens": new,
        "dtype": "bfloat16", "kv_cache": True, "compile": compile,
    }  # fmt: skip
    return {
        "point": point,
        "result": {"status": "ok", "tokens_per_s": tokens_per_s},
        "machine": {"gpu": "NVIDIA H200"},
    }


def test_compiled_decoding_is_ranked_by_tokens_a_second():
    rows = [generated("auto", 9), generated("naive", 4), generated("triton", 1), generated("triton", 8, 32)]
    rows += [generated("naive", 4, 32), generated("sdpa", 9, compile=False), generated("naive", 1, new=2000)]
    found = ranking.compiled_decode(rows)
    assert found == {(H100, 16, "compiled decode", "masked", None, 1024): pytest.approx(
        {"naive": 2**0.5, "triton": 2.0}
    )}  # fmt: skip


def test_the_table_that_auto_reads(tmp_path):
    rows = both("sdpa_cudnn", 1, 1) + both("flex", 2, 2) + both("flex", 1, 1, tokens=2048)
    ranks = ranking.ranking(rows) | ranking.compiled_decode([generated("naive", 4), generated("sdpa", 2)])
    path = tmp_path / "auto_table.py"
    path.write_text(ranking.table_source(ranks))
    table = runpy.run_path(str(path))
    assert table["MEASURED"][H100, 16, "training", "causal"] == (
        (64, 1024, "sdpa_cudnn flex"),
        (64, None, "flex"),
    )
    assert table["MEASURED"][H100, 16, "compiled decode", "masked"] == ((None, 1024, "naive sdpa"),)
    assert all(len(line) <= 110 for line in path.read_text().splitlines())


class Odd(Attention):
    """Declares what no implementation of ours does, on a machine that lacks its library."""

    capabilities = Capabilities(
        features=frozenset({"softcap", "bias", "gqa", "kv_lengths"}),
        devices=frozenset({"cuda"}),
        dtypes=LOW_PRECISION - {torch.bfloat16},
        min_arch=(10, 0),
        max_arch=(11, 0),
        max_head_dim=128,
        head_dim_multiple=8,
        forward_only_features=frozenset({"kv_lengths"}),
    )

    def unsupported_reasons(self, call):
        return [*super().unsupported_reasons(call), "Odd is not installed: pip install odd"]


def test_cells_are_what_is_declared_whatever_is_installed():
    where, dims, *features, deterministic = capabilities.Asked(Odd("odd")).cells()
    assert (where, dims, deterministic) == ("CUDA sm_100 to sm_110: fp16", "up to 128, multiples of 8", "-")
    assert dict(zip(capabilities.FEATURES, features, strict=True)) == {
        "window": "-", "ALiBi": "-", "relative bias": "-", "documents": "-", "block-sparse": "-",
        "softcap": "yes", "bias": "yes, no gradient", "dropout": "-", "kv_lengths": "forward only",
        "GQA": "yes", "lse": "-",
    }  # fmt: skip


def test_memory_is_by_the_growth_of_the_peak():
    def peaks(name, small, large, **more):
        return [
            row(name, "backward", 1, tokens=t, peak_mib=p, **more) for t, p in ((1024, small), (2048, large))
        ]

    rows = peaks("tiled", 8, 16) + peaks("naive", 8, 30) + peaks("flex", 8, 30, window=5)
    rows += [row("triton", "backward", 1), row("sdpa", "forward", 1, peak_mib=None)]
    # what another head dim takes at a length of its own says nothing of growth
    rows += [row("tiled", "backward", 1, tokens=4096, peak_mib=99, head_dim=128)]
    assert capabilities.memory(rows) == {"tiled": "O(T)", "naive": "O(T^2)"}


def test_advice_says_the_fastest_and_the_time_of_the_others():
    rows = both("triton", 1, 1) + both("flex", 2, 3) + both("flex", 1, 1, tokens=4096)
    head, _, line, forward = advice.table(ranking.ranking(rows)).splitlines()
    assert "T up to 1,024 | T above 1,024" in head
    assert line == "| sm_90, 16 bits | training, causal | up to 64 | **triton**, flex 2.50x | **flex** |"
    assert "| forward only, causal | up to 64 | **triton**, flex 2.00x |" in forward


@pytest.fixture
def checkout(tmp_path):
    """A checkout's documents and results; what writes them, and what it has written."""
    rows = (
        both("triton", 1.0, 2.0) + both("sdpa_cudnn", 0.5, 4.0) + both("flash2", 1, 1, status="unsupported")
    )
    rows += [*both("naive", 0.1, 0.1, error_ratio=3.0), row("triton", "decode", 0.02, tokens=4096)]
    folder = tmp_path / "results" / "attention"
    folder.mkdir(parents=True)
    (folder / "h200.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (tmp_path / "attention").mkdir()
    (tmp_path / "ops").mkdir()
    (tmp_path / "docs").mkdir()
    for path, names in (
        ("docs/measuring.md", ("results",)),
        ("attention/README.md", ("capabilities", "advice")),
        ("ops/README.md", ("ladder",)),
    ):
        blocks = "".join(
            f"<!-- {name}: of results -->\nold\n<!-- end of {name} -->\nkept\n" for name in names
        )
        (tmp_path / path).write_text(blocks)
    return tmp_path


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["report.py", *map(str, arguments)])
    report.main()


def ladder_row(name, passed, ms, tokens, heads=32, status="ok"):
    shape = Shape(1, heads, heads, tokens, 128, False, "bf16", study="cuda_ladder")
    found = {"ms_median": ms, "tflops": shape.flops(passed) / ms / 1e9} if status == "ok" else {}
    row = {"point": shape.point(name, passed), "result": {"status": status, **found}}
    return row | {"machine": {"gpu": "NVIDIA H200", "torch": "2.11.0", "date": "2026-11-21"}}


def test_the_ladder():
    """Stages in order, by N; what ran out of memory says so; fa2 over fa1 by heads."""
    rows = [ladder_row("cuda_fa2", "forward", ms, n) for n, ms in ((1024, 0.5), (4096, 2.0))]
    rows += [ladder_row("cuda_fa1", "forward", 10.0, 4096), ladder_row("cuda_fa2", "forward", 1.0, 4096, 8)]
    rows += [ladder_row("cuda_fa1", "forward", 8.0, 4096, 8)]
    rows += [ladder_row("cuda_naive", "forward", 0, 8192, status="oom")]
    lines = bench_ladder.block(rows).splitlines()
    assert "| `cuda_naive` |  |  | oom |" in lines
    tflops = 4 * 32 * 4096 * 4096 * 128 / 2.0 / 1e9
    assert f"| `cuda_fa2` | 0.5 ms, {tflops / 4:.3g} | 2 ms, {tflops:.3g} |  |" in lines
    assert [line for line in lines if line.endswith(("| 5.0 |", "| 8.0 |"))] == [
        "| 8 | 8 | 1 | 8.0 |", "| 32 | 10 | 2 | 5.0 |"
    ]  # fmt: skip


def test_everything_is_written_once(checkout, monkeypatch, capsys):
    run(monkeypatch, "--root", checkout)
    written = capsys.readouterr().out.split(" written\n")[:-1]
    assert set(written) == {
        "docs/measuring.md", "attention/README.md", "attention/auto_table.py", "ops/README.md",
        "results/attention/h200.svg", "results/README.md", "results/attention/README.md", "results/CLAIMS.md",
        *(f"results/attention/h200_{passed}.svg" for passed in ("forward", "backward", "decode")),
    }  # fmt: skip
    speeds = (checkout / "docs" / "measuring.md").read_text()
    assert speeds.count("kept") == 1 and "\nold\n" not in speeds
    assert "![attention, TFLOP/s over T](../results/attention/h200.svg)" in speeds
    assert "|  | D 64, T 1k | decode, batch 1, 4k |" in speeds
    tflops = 4 * 2 * 1024 * 1024 * 64 / 2 / 1e9
    assert f"| `triton` | {tflops:.3f} / **{2.5 * tflops / 2:.3f}** | **20.0** |" in speeds
    assert re.search(r"\| `naive` \| \S+ ! / \S+ ! \|  \|", speeds) and "`flash2` | -" not in speeds
    advised = (checkout / "attention" / "README.md").read_text()
    assert "| `tiled` | not measured | CUDA, CPU: fp16 to fp64 | any |" in advised
    assert "**sdpa_cudnn**" in advised
    assert '"triton sdpa_cudnn"' in (checkout / "attention" / "auto_table.py").read_text()
    svg = (checkout / "results" / "attention" / "h200.svg").read_text()
    assert "<!-- forward, D 64, causal, 2 heads, batch 1, bfloat16; T = 1k -->" in svg
    named = {"h200.svg", "h200_forward.svg", "h200_backward.svg", "h200_decode.svg", "h200.jsonl"}
    there = {path.name for path in (checkout / "results" / "attention").iterdir()}
    assert there == named | {"README.md"}
    assert all(f"(../results/attention/{name})" in speeds for name in named - {"h200.jsonl"})
    run(monkeypatch, "--root", checkout, "--check")
    assert capsys.readouterr().out == "all up to date\n"


@pytest.mark.long
def test_a_new_result_makes_it_out_of_date(checkout, monkeypatch, capsys):
    run(monkeypatch, "auto", "results", "--root", checkout)
    with open(checkout / "results" / "attention" / "h200.jsonl", "a") as file:
        file.write("".join(json.dumps(r) + "\n" for r in both("flex", 0.1, 0.1)))
    capsys.readouterr()
    with pytest.raises(SystemExit, match=r"Run python scripts/report\.py"):
        run(monkeypatch, "auto", "results", "--root", checkout, "--check")
    assert capsys.readouterr().out.split(" is out of date\n")[:-1] == [
        "docs/measuring.md", *(f"results/attention/h200{of}.svg" for of in ("", "_forward", "_backward")),
        "attention/auto_table.py",
    ]  # fmt: skip


def test_without_results_it_says_so(tmp_path, checkout):
    (checkout / "results" / "attention" / "h200.jsonl").unlink()
    files = report.written(checkout, ("results", "advice"))
    assert len(files) == 2 and all("Nothing is measured yet" in text for text in files.values())


def test_mistakes_are_said(checkout, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        run(monkeypatch, "tables")
    assert "tables: choose of capabilities, results, overview, advice, auto" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run(monkeypatch, "studies", "--root", gone := checkout / "gone")
    assert not gone.exists() and "gone: it has no results; give a folder with" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run(monkeypatch, "studies", "--root", checkout, "--html", checkout)
    assert f"--html: {checkout} is in the way: name a new file" in capsys.readouterr().err
    (checkout / "attention" / "README.md").write_text("nothing")
    with pytest.raises(ValueError, match="0 blocks named capabilities"):
        run(monkeypatch, "capabilities", "--root", checkout)
    (checkout / "attention" / "README.md").unlink()
    with pytest.raises(SystemExit, match=r"attention.README.md is not there: --root needs"):
        run(monkeypatch, "capabilities", "--root", checkout)


def test_the_readme_shows_causal_bf16_and_two_batches_of_decoding():
    rows = [row("triton", passed, 1, head_dim=d) for d in (64, 96, 128) for passed in ("backward", "forward")]
    rows += both("flex", 1, 1, causal=False) + both("flex", 1, 1, window=9) + [row("flex", "decode", 1)]
    assert [key[:3] for key in summary.shown(rows)] == [
        ("forward", "bfloat16", 64), ("backward", "bfloat16", 64),
        ("forward", "bfloat16", 128), ("backward", "bfloat16", 128), ("decode", "bfloat16", 64),
    ]  # fmt: skip


@pytest.mark.long
def test_what_is_committed_is_current():
    """In a process of its own, as the command runs: with no GPU and no interpreter of triton's."""
    command = [sys.executable, "scripts/report.py", "--check"]
    environ = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environ)
    assert ran.returncode == 0, ran.stdout + ran.stderr
