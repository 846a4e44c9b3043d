"""The README's picture, from made-up rows and from those of the repository."""

from __future__ import annotations

import re

from scripts.measure.report import overview, sweep_report
from tests.running import ROOT
from tests.scripts.studies import results
from tests.scripts.test_claims import row
from tests.scripts.test_sweep_report import fake_rows


def peaks():
    """Attention of GPT-2's heads: naive's memory as N^2 until it is out of it, triton's as N."""
    alike = {"passed": "both", "batch": 1, "heads": 12, "dtype": "bfloat16", "causal": True}
    return [
        row("attention_memory", implementation=name, seq_len=n, **alike, result=result)
        for name, power in (("naive", 2), ("triton", 1), ("flex", 1))
        for n in (512, 1024, 2048, 4096)
        for gone in [name == "naive" and n == 4096]
        for result in [{"status": "oom"} if gone else {"status": "ok", "peak_mib": n**power / 512}]
    ]


def test_memory_grows_as_fitted_and_ends_and_tokens_are_beside_it():
    rows = overview.drawn(peaks(), fake_rows())
    assert {each["point"]["implementation"] for each in rows} == {"naive", "triton"}
    texts = re.findall(r"<!-- (.*?) -->", overview.picture(rows))
    assert {"naive, as T^2.00 (out of memory at 4k)", "triton, as T^1.00"} <= set(texts)
    assert {"peak memory, MiB", "tokens/s", "naive (out of memory at 4k)"} <= set(texts)


def test_whole_steps_take_the_place_of_attention_once_they_are_measured(tmp_path):
    steps = [
        each
        | {"point": each["point"] | {"study": "step_memory", "tokens_per_step": each["point"]["seq_len"]}}
        for each in fake_rows()
        if each["point"]["micro_batch"] in (64, 32, 1)
    ]
    results(tmp_path, attention_memory=peaks(), step_memory=steps, seqlen_scaling=fake_rows())
    ((path, picture),) = overview.written(tmp_path).items()
    texts = re.findall(r"<!-- (.*?) -->", picture)
    assert path == tmp_path / "overview.svg" and "memory of a training step of one sequence" in texts
    assert "a layer's attention, forward and backward, one sequence" not in texts
    (said,) = sweep_report.panels(steps)
    assert said == "gpt2, one sequence a step, bf16-mixed"


def test_the_picture_shows_the_rows_that_there_are():
    assert not overview.written(ROOT / "results")
