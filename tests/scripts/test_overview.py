"""The README's picture, from made-up rows and from those of the repository."""

from __future__ import annotations

import re

from scripts.measure.report import overview
from tests.running import ROOT
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
    assert {"naive, as T^2.0 (out of memory at 4k)", "triton, as T^1.0"} <= set(texts)
    assert {"peak memory, MiB", "tokens/s", "naive (out of memory at 4k)"} <= set(texts)


def test_the_picture_shows_the_rows_that_there_are():
    assert not overview.written(ROOT / "results")
