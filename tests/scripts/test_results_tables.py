"""What the measurements that are no module of measure/studies say that they found."""

from __future__ import annotations

from typing import Any

from scripts.measure.report import results_tables
from tests.scripts.test_attention_report import made


def test_of_attention_the_fastest_and_the_fastest_of_ours_that_may_be_trusted() -> None:
    def both(name: str, forward: float, **result: Any) -> list[dict[str, Any]]:
        rows = []
        for passed, tflops in (("forward", forward), ("backward", forward / 2)):
            row = made(name, 1.0, **result, tflops=tflops)
            row["point"] = row["point"] | {"pass": passed, "head_dim": 128}
            row["machine"] = row["machine"] | {"torch": "2.11.0", "triton": "3.6.0"}
            rows.append(row)
        return rows

    rows = [
        *both("flash4", 700),
        *both("triton", 500),
        *both("cuda_fa2", 300),
        *both("sdpa", 900, error_ratio=2.0),
    ]
    assert results_tables.attention(rows).found == (
        "bf16, causal, D = 128, T = 1,024, forward / backward: fastest flash4, 700 / 350 TFLOP/s; fastest of "
        "ours triton, 500 / 250 TFLOP/s."
    )
    assert results_tables.attention(both("flash4", 700)).found == ""


def test_of_the_ladder_only_stages_of_one_length_with_their_dtypes() -> None:
    point = {"pass": "forward", "causal": True, "heads": 32, "head_dim": 128}
    rows = [
        {"point": point | {"implementation": name, "seq_len": n, "dtype": dtype},
         "result": {"status": status, "ms_median": ms * n, "tflops": 1.0}}
        for name, dtype, ms in (("cuda_naive", "float32", 8), ("cuda_tiled_fma", "float32", 6),
                                ("cuda_tiled", "float32", 4),
                                ("cuda_fa2", "bfloat16", 2), ("sdpa_cudnn", "bfloat16", 1))
        for n, status in ((4, "ok"), (8, "oom" if name == "cuda_naive" else "ok"))
    ]  # fmt: skip
    assert results_tables.ladder(rows).found == (
        "Causal forward, N = 4, ms: naive 32, tiled 24 (fp32, FMA units); tiled 16 (fp32, tensor cores); "
        "fa2 8, cuDNN 4 (bf16, tensor cores)."
    )
    assert results_tables.ladder(rows[2:]).found == ""


def test_of_training_the_fastest_of_ours_beside_nanogpt() -> None:
    point = {"model": "gpt2", "seq_len": 1024, "tokens_per_step": 65536, "dtype": "bf16-mixed"}
    figures = {"mfu": 0.5, "ms_median": 2.0, "ms_p10": 1.9, "ms_p90": 2.1, "peak_mib": 10.0}
    speeds = {"nanoGPT": 1000.0, "auto": 1015.0, "naive": 300.0}
    rows = [
        {"point": point | {"implementation": name}, "machine": {"commit": "a", "date": "2026-11-23"},
         "result": {"status": "ok", "tokens_per_s": speed} | figures}
        for name, speed in speeds.items()
    ]  # fmt: skip
    said = "T = 1,024: 1,015 tokens/s, 1.015x nanoGPT's (auto)."
    assert results_tables.training(rows).found == said
    assert results_tables.training(rows[1:]).found == "T = 1,024: 1,015 tokens/s (auto)."
    longer = [row | {"point": row["point"] | {"seq_len": 2048}} for row in rows[1:2]]
    both = results_tables.training([*rows, *longer]).found
    assert both == f"{said[:-1]}; T = 2,048: 1,015 (auto)."
    assert results_tables.training(rows[:1]).found == ""


def test_of_training_nanogpt_of_the_same_batch() -> None:
    point = {"model": "gpt2", "seq_len": 1024, "tokens_per_step": 65536, "dtype": "bf16-mixed"}
    figures = {"mfu": 0.5, "ms_median": 2.0, "ms_p10": 1.9, "ms_p90": 2.1, "peak_mib": 10.0}
    rows = [
        {"point": point | {"implementation": name, "micro_batch": batch},
         "machine": {"commit": "a", "date": "2026-11-23"},
         "result": {"status": "ok", "tokens_per_s": speed} | figures}
        for name, batch, speed in (("nanoGPT", 16, 500.0), ("auto", 64, 1000.0), ("nanoGPT", 64, 800.0))
    ]  # fmt: skip
    small, large = results_tables.training(rows).tables
    assert small.title.endswith("micro-batches of 16, compiled") and len(small.lines) == 2
    assert [line[:3] for line in large.lines[1:]] == [
        ["auto", "1,000", "1.250x"], ["nanoGPT", "800", "1.000x"]
    ]  # fmt: skip


def test_of_generation_rows_with_a_cache_and_without_stand_apart() -> None:
    point = {"model": "gpt2", "dtype": "bfloat16", "implementation": "auto", "prompt": 64, "new_tokens": 256}
    rows = [
        {"point": point | {"batch": batch, "kv_cache": cached, "seq_len": context},
         "result": {"status": "ok", "tokens_per_s": speed}}
        for batch, cached, context, speed in (
            (1, True, 1024, 100.0), (2, True, 1024, 150.0), (1, False, 1024, 900.0), (1, True, 2048, 500.0)
        )
    ]  # fmt: skip
    found = results_tables.generation(rows)
    assert [(table.title, len(table.lines) - 1) for table in found.tables] == [
        ("bfloat16, with a KV cache, a context of 1,024", 2),
        ("bfloat16, with a KV cache, a context of 2,048", 1),
        ("bfloat16, without a KV cache, a context of 1,024", 1),
    ]
    assert found.found == "gpt2 100 tokens/s at batch 1; gpt2 150 tokens/s at batch 2."
    (table,) = results_tables.generation(rows[:2]).tables
    assert table.title == "bfloat16, with a KV cache"


def test_of_generation_the_speed_by_batch() -> None:
    point = {"model": "gpt2", "dtype": "bfloat16", "implementation": "auto", "prompt": 64, "new_tokens": 256}
    rows = [
        {"point": point | {"batch": batch}, "result": {"status": status, "tokens_per_s": 1000.0 * batch}}
        for batch, status in ((32, "ok"), (1, "ok"), (64, "oom"))
    ]
    said = "gpt2 1,000 tokens/s at batch 1; gpt2 32,000 tokens/s at batch 32."
    slower = {
        "point": rows[1]["point"] | {"compile": True},
        "result": {"status": "ok", "tokens_per_s": 900.0},
    }
    assert results_tables.generation([*rows, slower]).found == said
    assert results_tables.generation(rows[2:]).found == ""


def test_of_characters_the_mean_of_the_best_losses_with_the_median_time() -> None:
    rest = {"last_val_loss": 1.6, "ms_median": 9.0, "peak_mib": 100.0}
    rows = [
        {
            "point": {"implementation": "auto", "compile": "blocks", "seed": seed, "caches": caches},
            "result": {"status": "ok", "best_val_loss": loss, "wall_s": seconds} | rest,
        }
        for seed, caches, loss, seconds in (
            (1, "cold", 1.4712, 50.0),
            (2, "cold", 1.4574, 64.2),
            (3, "cold", 1.4614, 56.0),
            (1, "warm", 1.4000, 30.0),
        )
    ]
    said = results_tables.characters(rows).found.split("; ")
    assert said[0] == "Best validation loss 1.4515 in the mean of 3 seeds"
    assert said[1] == "in total 56 s with cold caches, 30 s with warm caches (medians)."
