"""What the index of results/README.md says that a study found."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from scripts.figures import undrawn
from scripts.findings import FINDINGS, SHORT, found
from scripts.results_page import reports
from tests.running import ROOT
from tests.scripts.test_attention_report import made

NOTES: dict[str, tuple[list[str], str]] = {
    "attention_speed": (
        ["N = 1,024, forward: a is 2.0x as fast as standard.",
         "N = 2,048, forward: b is 3.5x as fast as standard."],
        "Forward, the fastest is 2.0x (N = 1,024) to 3.5x (N = 2,048) as fast as standard attention.",
    ),
    "attention_memory": (
        ["forward: exponents of 7 to 8: x.", "forward + backward: exponents of 1.99 to 2.01: a.",
         "forward + backward: exponents of 0.98 to 1.02: b."],
        "Forward and backward, memory grows as N^2.01 where scores are written, as N^1.02 elsewhere.",
    ),
    "backward_recompute": (
        ["bf16: P again over P kept, the fastest of each: 2.9x at N = 512 (a over b), 6.1x at N = 4k (a)."],
        "To compute P again is 2.9x (N = 512) to 6.1x (N = 4k) as fast as to keep it.",
    ),
    "seqlen_scaling": (
        ["The fastest is at least 0.5x nanoGPT's speed at every length: a 1.029x at 1,024, b 0.5x at 2,048.",
         "naive is out of memory at T = 2,048 in one micro-batch."],
        "The fastest is 0.500x to 1.029x nanoGPT's speed at T = 1,024 to 2,048; naive is out of memory at "
        "2,048.",
    ),
    "kv_cache": (
        ["At 4,096 tokens the cache saves 9.6x, triton 6.2x and both 13.9x, where the product is 59.6x."],
        "Over 4,096 tokens the cache saves 9.6x, triton 6.2x, both 13.9x.",
    ),
}  # fmt: skip


@pytest.mark.parametrize("study", NOTES)
def test_figures_are_those_of_the_notes(study: str) -> None:
    notes, said = NOTES[study]
    assert found(study, [], notes) == said
    assert found(study, [], []) == ""


def test_without_a_finding_the_first_sentence_stands_if_short() -> None:
    assert found("unheard_of", [], ["It is 1.5x. And more.", "Other."]) == "It is 1.5x."
    assert found("unheard_of", [], ["x" * (SHORT + 1)]) == found("unheard_of", [], []) == ""


def test_of_attention_the_fastest_and_the_fastest_of_ours_that_may_be_trusted() -> None:
    def both(name: str, forward: float, **result: Any) -> list[dict[str, Any]]:
        rows = []
        for passed, tflops in (("forward", forward), ("backward", forward / 2)):
            row = made(name, 1.0, **result, tflops=tflops)
            row["point"] = row["point"] | {"pass": passed, "head_dim": 128}
            rows.append(row)
        return rows

    rows = [
        *both("flash4", 700),
        *both("triton", 500),
        *both("cuda_fa2", 300),
        *both("sdpa", 900, error_ratio=2.0),
    ]
    assert found("attention", rows, []) == (
        "D = 128, T = 1,024, forward / backward: fastest flash4, 700 / 350 TFLOP/s; fastest of ours triton, "
        "500 / 250 TFLOP/s."
    )
    assert found("attention", both("flash4", 700), []) == ""


def test_of_the_ladder_only_stages_of_one_length_with_their_dtypes() -> None:
    point = {"pass": "forward", "causal": True, "heads": 32, "head_dim": 128}
    rows = [
        {"point": point | {"implementation": name, "seq_len": n, "dtype": dtype},
         "result": {"status": status, "ms_median": ms * n}}
        for name, dtype, ms in (("cuda_naive", "float32", 8), ("cuda_tiled", "float32", 4),
                                ("cuda_fa2", "bfloat16", 2), ("sdpa_cudnn", "bfloat16", 1))
        for n, status in ((4, "ok"), (8, "oom" if name == "cuda_naive" else "ok"))
    ]  # fmt: skip
    assert found("cuda_ladder", rows, []) == (
        "Forward at N = 4: naive 32 ms (fp32), tiled 16 ms (fp32), fa2 8 ms (bf16), cuDNN 4 ms (bf16)."
    )


def test_every_committed_study_says_what_it_found_in_figures() -> None:
    """And each finding is of a study: a note that is worded otherwise would leave its cell empty."""
    with undrawn():
        said = {one.study: found(one.study, one.rows, one.report.notes) for one in reports(ROOT / "results")}
    assert set(FINDINGS) <= set(said)
    assert [study for study, words in said.items() if not re.search(r"\d", words)] == []
    best = json.loads(Path(ROOT / "results/shakespeare_char/h200.jsonl").read_text().splitlines()[-1])[
        "result"
    ]
    assert said["shakespeare_char"].startswith(f"Validation loss {best['best_val_loss']:.4f} at best, in ")
