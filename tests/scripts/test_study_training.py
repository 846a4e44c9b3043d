"""The studies of training points: what their rows say, and the command."""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ElementTree

import pytest

from scripts import sweep
from scripts.measure import sweep_points
from scripts.measure.report import sweep_bars, sweep_report, training
from scripts.measure.studies import (
    encoder_short,
    lora,
    million_tokens,
    seqlen_scaling,
    speedup_end_to_end,
    step_memory,
    transformers_llama,
)
from tests.scripts.studies import fake_result, row_of

# tokens/s by implementation, not compiled and compiled
SPEEDS = {"transformers eager": (100, None), "transformers SDPA": (150, None), "standard": (120, 250)}
SPEEDS |= {"sdpa_cudnn": (300, 400), "triton": (310, 450), "cuda": (290, 440)}
SPEEDS |= {"auto": (320, 460), "transformers tilegpt-auto": (160, None)}
SPEEDS |= {"sdpa_efficient": (200, 300), "sdpa_flash": (250, 375)}


def rows_of(*overrides: str) -> list[dict[str, object]]:
    """Of an experiment, measured on an H200 at SPEEDS."""
    study, found = sweep_points.study_of(list(overrides)), []
    for task in sweep_points.tasks(study):
        point = sweep_points.point_of(study, task, "cuda").fields
        speed = 1e3 * SPEEDS[point["implementation"]][point["compile"]]
        result = fake_result(tokens_per_s=speed, ms_median=65536e3 / speed, mfu=speed / 1e6)
        found.append(row_of(point, result))
    return found


def test_end_to_end():
    rows = rows_of("experiment=speedup_end_to_end", "sweep.grid.model=[gpt2]")
    assert len(rows) == 2 + 8 and {row["point"]["micro_batch"] for row in rows} == {16}
    assert {row["point"]["tokens_per_step"] for row in rows} == {65536}
    report = speedup_end_to_end.report(rows)
    (table,) = report.tables
    assert table.title == "gpt2, 65,536 tokens a step, bf16-mixed, T = 1,024"
    assert table.lines[0][:3] == ["", "tokens/s", "x transformers eager"]
    assert table.lines[1] == ["transformers eager", "100,000", "1.00x", "655.4", "10%", "50", "16"]
    assert [line[0] for line in table.lines[1:4]] == ["transformers eager", "standard", "transformers SDPA"]
    assert table.lines[-1][:3] == ["triton, compiled", "450,000", "4.50x"]
    (note,) = report.notes
    assert note.startswith(
        "gpt2: triton, compiled trains at 450,000 tokens/s: 4.50x the speed of Hugging Face's GPT-2 with"
    )
    assert "3.00x that of Hugging Face's with SDPA, 1.80x that of our model with standard attention" in note
    assert note.endswith("and 2.58x if neither is compiled (triton).")
    assert report.found == "gpt2: 4.50x Hugging Face's eager speed, 1.80x of it due to attention."
    ElementTree.fromstring(report.pictures[""])
    assert "450,000  4.50x  0.0 GiB" in re.findall(r"<!-- (.*?) -->", report.pictures[""])


@pytest.mark.long
def test_a_baseline_that_does_not_fit_gives_way_to_the_next():
    rows = rows_of("experiment=speedup_end_to_end", "sweep.grid.model=[gpt2]")
    rows[0]["result"] = {"status": "oom", "reason": "out"}
    assert sweep_bars.label(sweep_bars.baseline(rows)) == "standard"
    assert sweep_bars.table("", rows).lines[1][:3] == ["transformers eager", "oom", ""]
    half = {**rows[0], "point": rows[0]["point"] | {"micro_batch": 8}, "result": fake_result()}
    assert sweep_bars.baseline([*rows, half]) is half  # in smaller micro-batches
    assert len(sweep_bars.best([*rows, half])) == len(rows)
    again = {**half, "result": fake_result(tokens_per_s=2.0)}
    assert sweep_bars.baseline([*rows, half, again]) is again  # the newest of one point


def test_a_speed_with_another_kernel_is_marked_and_not_told():
    rows = rows_of("experiment=speedup_end_to_end", "sweep.grid.model=[gpt2]")
    best = next(row for row in rows if sweep_bars.label(row) == "triton, compiled")
    best["result"] |= {"kernels_ok": False, "verdict": "asked for triton, but ran another"}
    report = speedup_end_to_end.report(rows)
    assert report.tables[0].lines[-1][1] == "450,000 !"
    assert report.notes[0].startswith("gpt2: cuda, compiled trains at 440,000 tokens/s")
    assert report.notes[-1] == "triton at T = 1,024 ! asked for triton, but ran another"


@pytest.mark.long
def test_a_short_encoder():
    rows = rows_of("experiment=encoder_short")
    point = rows[0]["point"]
    assert (point["seq_len"], point["heads"], point["head_dim"], point["micro_batch"]) == (512, 16, 64, 32)
    assert not any(row["point"]["causal"] for row in rows)
    report = encoder_short.report(rows)
    assert "not causal" in report.tables[0].title and len(report.tables[0].lines) == 1 + 12
    assert report.notes[0].startswith("triton trains 2.583x as fast as naive attention, both without")
    assert report.notes[1] == "Among the fused implementations, triton is 1.55x as fast as sdpa_efficient."
    assert (
        report.notes[2].startswith("triton, compiled trains 1.80") and "with torch.compile" in report.notes[2]
    )
    assert report.found == "Fused attention: 2.583x without torch.compile, 1.800x with torch.compile."


def test_where_memory_ends_and_how_nanogpt_compares():
    rows = []
    for name, tokens, batch, speed in (
        ("nanoGPT", 1024, 64, 500), ("nanoGPT", 2048, 32, 400), ("cuda", 1024, 64, 500),
        ("cuda", 2048, 32, 450), ("naive", 1024, 64, 200), ("naive", 2048, 32, 0), ("naive", 2048, 16, 90),
        ("sdpa", 1024, 64, 550), ("sdpa", 2048, 32, 410), ("triton", 1024, 64, 300),  # and no more
    ):  # fmt: skip
        point = {"study": "seqlen_scaling", "implementation": name, "pass": "train", "model": "gpt2"}
        point |= {"seq_len": tokens, "micro_batch": batch, "tokens_per_step": 65536, "dtype": "bf16-mixed"}
        point |= {"features": "", "checkpointing": False, "settings": {}, "compile": True}
        result = fake_result(tokens_per_s=1e3 * speed) if speed else {"status": "oom", "reason": "out"}
        rows.append(row_of(point, result))
    report = seqlen_scaling.report(rows)
    assert report.notes == [
        "The fastest implementation trains at no less than 1.100x nanoGPT's speed at every length: sdpa "
        "1.100x at 1,024, cuda 1.125x at 2,048.",
        "naive is out of memory at T = 2,048 in one micro-batch; in smaller micro-batches it trains up to T "
        "= 2,048.",
        "These train up to T = 2,048 in one micro-batch: cuda, nanoGPT, sdpa.",
    ]
    assert report.found == (
        "The fastest implementation trains at 1.100x to 1.125x nanoGPT's speed at T = 1,024 to 2,048; naive "
        "is out of memory at T = 2,048 in one micro-batch."
    )
    # Another day's machine is slower: what is measured there is held against nanoGPT there.
    other = [
        row_of(one["point"], fake_result(tokens_per_s=speed), commit="e")
        for one, speed in ((rows[1], 3.5e5), (rows[8], 4.2e5))
    ]
    later = seqlen_scaling.report([*rows, *other])
    assert later.notes[0].endswith("sdpa 1.100x at 1,024, sdpa 1.200x at 2,048.")
    assert "450,000, 1.12x" in str(later.tables) and "420,000, 1.20x" in str(later.tables)
    alone = [row for row in rows if row["point"]["implementation"] != "nanoGPT"]
    assert seqlen_scaling.report(alone).found == ""
    assert len(report.tables) == 2 and not sweep_report.at_one_length(rows)


def test_how_the_memory_of_a_step_grows_and_where_it_ends():
    rows = rows_of("experiment=step_memory", "sweep.grid.attention=[sdpa_cudnn,triton]")
    for row in rows:
        tokens, quadratic = row["point"]["seq_len"], row["point"]["implementation"] == "triton"
        grows = tokens**2 / 1024 if quadratic else tokens
        row["result"] |= {"peak_mib": grows + 1024, "memory_split": {"parameters": 1000, "optimizer": 24}}
        if quadratic and tokens > 8192:
            row["result"] = {"status": "oom", "reason": "out"}
    report = step_memory.report(rows)
    assert report.found.endswith(
        "grows with T: triton as T^2.00 (out of memory at 16k), sdpa_cudnn as T^1.00."
    )
    assert report.notes[0].startswith("triton, the whole step: 2.0 GiB at T = 1,024, 5.0 GiB at T = 2,048")
    assert {row["point"]["tokens_per_step"] for row in rows} == {row["point"]["seq_len"] for row in rows}


def test_what_lora_saves():
    rows = rows_of("experiment=lora")
    full, adapters = rows
    assert adapters["point"]["features"] == "LoRA of rank 8" and full["point"]["features"] == ""
    full["result"] |= {"tokens_per_s": 5e5, "peak_mib": 25_000.0}
    adapters["result"] |= {"tokens_per_s": 6e5, "peak_mib": 20_000.0}
    report = lora.report(rows)
    assert (
        report.found == "LoRA of rank 8 takes 0.80x the memory and trains at 1.20x the speed of all weights."
    )
    assert "600,000 tokens/s with 20,000 MiB" in report.notes[0]
    assert lora.report([full]).found == ""


def test_our_attention_inside_transformers():
    rows = rows_of("experiment=transformers_llama")
    by_name = {row["point"]["implementation"]: row for row in rows}
    for name, speed in (("transformers SDPA", 4e4), ("transformers tilegpt-auto", 5e4), ("auto", 6e4)):
        by_name[name]["result"] |= {"tokens_per_s": speed, "peak_mib": 30_000.0}
    report = transformers_llama.report(rows)
    assert report.found.endswith("it trains at 1.250x the speed that it has with SDPA.")
    assert "60,000 tokens/s (1.500x)" in report.notes[1]
    point = rows[0]["point"]
    assert (point["kv_heads"], point["head_dim"], point["seq_len"]) == (8, 64, 8192)


def test_a_row_of_a_million_tokens():
    (row,) = rows_of("experiment=million_tokens")
    assert (row["point"]["seq_len"], row["point"]["checkpointing"]) == (2**20, True)
    assert million_tokens.report([row | {"result": {"status": "oom", "reason": "out"}}]).found == ""
    row["result"] |= {"ms_median": 150e3, "peak_mib": 81_920.0, "predicted_mib": 80_000.0, "piece": 32768}
    row["result"] |= {"loss": {"first": 11.0, "last": 11.0}, "loss_in_pieces": 11.0 * (1 - 2e-5)}
    report = million_tokens.report([row])
    assert report.found == "A step on one row of 1,048,576 tokens takes 150 s and 80.0 GiB."
    assert report.notes[0].endswith(
        "pieces of 32,768 tokens with the same weights, 10.999780, 2.0e-05 of it away."
    )
    assert report.notes[1] == "The peak is 1.02x the predicted 78.1 GiB."


STUDIES = [speedup_end_to_end, encoder_short, seqlen_scaling, step_memory, lora, transformers_llama]
STUDIES.append(million_tokens)


@pytest.mark.long
@pytest.mark.parametrize("study", STUDIES, ids=lambda study: study.EXPERIMENT)
def test_the_command_sweeps_a_small_version_on_a_cpu(study, tmp_path, monkeypatch, capsys):
    ran = []

    def once(target: str, request: dict[str, list[str]], _: float) -> dict[str, object]:
        ran.append(request["words"])
        return fake_result()

    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(sweep, "once", once)
    monkeypatch.setattr(sys, "argv", [f"{study.EXPERIMENT}.py", "--out", str(tmp_path / "cpu.jsonl")])
    training.run(study.EXPERIMENT, study.__doc__, study.SMALL, study.report)
    out = capsys.readouterr().out
    assert f"No GPU: a small version of {study.EXPERIMENT}" in out and (tmp_path / "cpu.svg").is_file()
    assert 2 <= len(ran) <= 6 and out.count(": 1,000 tokens/s") == len(ran)
    monkeypatch.setattr(sys, "argv", [f"{study.EXPERIMENT}.py", "--help"])
    training.run(study.EXPERIMENT, study.__doc__, study.SMALL, study.report)
    assert re.search(r"\s(minutes?|s)\sof\san?\s", capsys.readouterr().out) and len(ran) <= 6
