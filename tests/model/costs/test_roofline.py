"""FLOPs, bytes and time at the roofline: against hand counts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from attention.registry import shared_instance
from model.costs.gpus import GPUS
from model.costs.roofline import Work, attention_work, step_work
from model.costs.run import Run
from model.gpt import GPTConfig

GPT2 = GPTConfig(vocab_size=50304, seq_len=1024, bias=False)
RUN = Run(GPT2, 2, shared_instance("triton"), 2)


def test_fused_attention_moves_its_tensors_once() -> None:
    forward, backward = attention_work(RUN)
    wide, lse = 2 * 1024 * 768 * 2, 4 * 2 * 12 * 1024
    assert forward.bytes == 4 * wide + lse
    assert backward.bytes == 8 * wide + lse
    assert forward.flops == 4 * 2 * 12 * 1024**2 * 64 / 2
    assert backward.flops == 2.5 * forward.flops


def test_unfused_attention_walks_the_scores_and_skips_nothing() -> None:
    forward, backward = attention_work(replace(RUN, attention=shared_instance("naive")))
    matrix = 4 * 2 * 12 * 1024**2
    assert forward.bytes - attention_work(RUN)[0].bytes == 14 * matrix
    assert backward.bytes - attention_work(RUN)[1].bytes == 25 * matrix
    assert forward.flops == 2 * attention_work(RUN)[0].flops
    assert backward.flops == 2 * forward.flops


def test_what_a_window_or_a_pattern_hides_is_skipped() -> None:
    whole = 4 * 2 * 12 * 1024**2 * 64

    def share(name: str = "triton", **changes: object) -> float:
        run = replace(RUN, attention=shared_instance(name), config=replace(GPT2, **changes))
        return attention_work(run)[0].flops / whole

    # 128 queries at the beginning see 1 to 128 keys, the others 129 each
    assert share(window=128) == (128 * 129 / 2 + 896 * 129) / 1024**2
    assert share(window=128, causal=False) == pytest.approx(
        (2 * (128 * 129 / 2 + 896 * 129) - 1024) / 1024**2
    )
    assert share(window=5000) == 0.5
    # 8 tiles on the diagonal and 7 below it, of 36
    assert share(sparsity="local", sparsity_blocks=2) == pytest.approx(0.5 * 15 / 36)
    # the window touches no more tiles than the pattern keeps
    assert share(sparsity="local", sparsity_blocks=2, window=128) == share(window=128)
    assert share("sdpa", window=128) == share("sdpa", sparsity="local") == 0.5
    assert share("naive", window=128) == 1


def test_a_step_is_six_flops_a_parameter_and_attention() -> None:
    N = 12 * 12 * 768**2 + 50304 * 768 + 25 * 768
    attention = 12 * (1 + 2.5) * attention_work(RUN)[0].flops
    assert step_work(RUN).flops == pytest.approx(6 * N * 2048 + attention, rel=1e-9)


def test_checkpointing_runs_the_blocks_forward_twice() -> None:
    more = step_work(replace(RUN, checkpointing=True)).flops - step_work(RUN).flops
    assert more == 2 * 12 * 12 * 768**2 * 2048 + 12 * attention_work(RUN)[0].flops


def test_the_roofline_is_the_slower_of_both() -> None:
    sheet = GPUS["h200"]
    assert Work(989e12, 1).seconds(sheet, 2) == 1 and Work(989e12, 1).bound(sheet, 2) == "compute"
    assert Work(1, 4.8e12).seconds(sheet, 2) == 1 and Work(1, 4.8e12).bound(sheet, 2) == "bandwidth"
    assert Work(67e12, 1).seconds(sheet, 4) == 1
    assert Work(1, 2) + Work(3, 4) == Work(4, 6) and Work(1, 2).times(3) == Work(3, 6)


def test_fp32_attention_of_ours_is_under_the_roof_of_tensor_cores() -> None:
    """In three products of 16 bits, Triton's in six; what else a step multiplies is under FMA's."""
    sheet, long = GPUS["h200"], replace(RUN, config=replace(GPT2, seq_len=65536), value_bytes=4)
    for name, flops in {"cuda": 989e12 / 3, "auto": 989e12 / 3, "triton": 989e12 / 6, "sdpa": 67e12}.items():
        run = replace(long, attention=shared_instance(name), arch=(9, 0))
        forward, _ = attention_work(run)
        assert forward.compute_seconds(sheet, 4) == pytest.approx(forward.flops / flops)
    step, attention = step_work(run), 12 * (attention_work(run)[0].flops + attention_work(run)[1].flops)
    ours = step_work(replace(run, attention=shared_instance("cuda")))
    fused = 12 * sum(work.flops for work in attention_work(replace(run, attention=shared_instance("cuda"))))
    dense = step.flops - attention
    assert ours.compute_seconds(sheet, 4) == pytest.approx(dense / 67e12 + fused / (989e12 / 3))
