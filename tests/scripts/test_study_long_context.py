"""The study long_context_quality: its documents, what a target may see, and the whole command on a CPU."""

from __future__ import annotations

import dataclasses
import random
import sys
import time
from concurrent.futures import Executor, Future, ThreadPoolExecutor

import numpy as np
import pytest
import torch

from attention.sdpa import SDPAAttention
from data.tokenizers import ByteTokenizer
from data.tokens import TokenFile, TrainWindows
from model.gpt import GPT, GPTConfig
from scripts.measure.instruments import long_context_runs as runs
from scripts.measure.instruments import long_documents, same_tokens
from scripts.measure.instruments import loss_by_position as losses
from scripts.measure.instruments.long_documents import documents, gather, held_out_groups, own
from scripts.measure.rows import read
from scripts.measure.studies import long_context_quality as study
from tests.running import train_here
from tests.scripts.test_study_long_context_report import speed

TINY = ["model.n_layer=1", "model.n_embd=32", "data.tokenizer.kind=byte", "trainer.accelerator=cpu"]
TINY += ["callbacks.checkpoints.every=10", "callbacks.checkpoints.keep=9", "schedule.warmup_steps=2"]


def write(path, seed, lines=60):
    """Lines of words, no two files with a line in common; the same every time."""
    draw = random.Random(seed)
    words = ["".join(draw.choices("abcdefghij", k=6)) for _ in range(200)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(" ".join(draw.choices(words, k=5)) + "\n" for _ in range(lines)))
    return path


@pytest.fixture
def packages(tmp_path):
    """(package, file) of 12 packages of two files each."""
    return [
        (f"package{i}", write(tmp_path / f"site/package{i}/{name}.py", 2 * i + at))
        for i in range(12)
        for at, name in enumerate(("one", "two"))
    ]


def test_what_is_no_long_text_is_left_out_and_a_copy_counts_once(packages, tmp_path):
    bad = {"short": b"pass\n", "binary": b"\0" * 4000, "latin": b"\xe9" * 4000, "table": b"1," * (1 << 18)}
    for name, content in bad.items():
        (tmp_path / name).write_bytes(content * (2 if name == "table" else 1))
        packages.append((name, tmp_path / name))
    copy = tmp_path / "copy.py"
    copy.write_bytes(packages[0][1].read_bytes())
    found = documents([*packages, ("vendor", copy), ("gone", tmp_path / "gone.py")], 1000)
    assert len(found) == 24 and [d.sha256 for d in found] == sorted(d.sha256 for d in found)
    assert found == documents([("vendor", copy), *reversed(packages)], 1000)  # whatever the order


def test_whole_packages_are_held_out_without_what_training_has_already(packages, tmp_path, monkeypatch):
    monkeypatch.setattr(long_documents, "HELD_OUT", 0.6)  # of twelve packages, so that there are some
    groups = held_out_groups(documents(packages, 1000), 0.6)
    assert 6 <= len(groups) <= 9
    # under a held-out package's name a fork of a training file: a line of its own, and the rest copied
    original = next(path for group, path in packages if group not in groups)
    fork = tmp_path / "fork.py"
    fork.write_text(original.read_text() + "a line that the original does not have\n")
    made = gather([*packages, (groups[0], fork)], tmp_path / "out", 1000, 10**9)
    texts = {
        part: [p.read_text() for p in (tmp_path / "out" / part).iterdir()]
        for part in ("training", "held_out")
    }
    assert made["held_out"]["repeats_left_out"] == 1 and fork.read_text() not in texts["held_out"]
    for group, path in packages:
        inside = group in made["held_out"]["packages"]
        assert (path.read_text() in texts["held_out"], path.read_text() in texts["training"]) == (
            inside,
            not inside,
        )
    assert made["training"]["files"] == len(texts["training"]) and made["found"]["packages"] == 12
    assert gather([], tmp_path / "out", 1000, 10**9) == made  # complete: nothing is looked at again


def test_of_two_processes_one_gathers(packages, tmp_path, monkeypatch):
    """The other would remove what the first has copied."""
    asked = []

    def slowly(*given):
        asked.append(given)
        time.sleep(0.3)
        return documents(*given)

    monkeypatch.setattr(long_documents, "documents", slowly)
    with ThreadPoolExecutor(2) as pool:  # each with its own lock, as processes have
        made = list(pool.map(lambda _: gather(packages, tmp_path / "out", 1000, 10**9), range(2)))
    assert len(asked) == 1 and made[0] == made[1]


def test_the_text_is_bounded_and_its_digest_knows_contents_alone(packages, tmp_path):
    size = packages[0][1].stat().st_size
    one = gather(packages, tmp_path / "one", 1000, 3 * size)
    assert 3 * size <= one["training"]["bytes"] < 5 * size
    renamed = [(group, path.rename(path.with_suffix(".txt"))) for group, path in packages]
    assert gather(renamed, tmp_path / "two", 1000, 3 * size) == one
    write(renamed[0][1], 99)
    assert gather(renamed, tmp_path / "three", 1000, 3 * size)["found"]["sha256"] != one["found"]["sha256"]
    with pytest.raises(ValueError, match="it takes two, one to train"):
        gather(own(str(renamed[0][1]), "*"), tmp_path / "four", 1000, 10**6)


@pytest.mark.parametrize("span, context", [(64, 16), (64, 64), (48, 8), (64, 4), (60, 16)])
def test_a_target_counts_in_the_window_that_gives_it_most(span, context):
    starts = losses.window_starts(span, context)
    chosen = losses.most_context(starts, span, context)
    for position in range(span):
        covering = [start for start in starts if start <= position < start + context]
        assert starts[chosen[position]] == min(covering)
        seen = position - min(covering) + 1
        assert (
            seen == position + 1 if position < context else context - max(1, context // 8) < seen <= context
        )


def test_losses_are_those_of_the_model_given_what_precedes():
    torch.manual_seed(0)
    tokens = np.random.default_rng(1).integers(0, 50, (3, 33))
    model = GPT(GPTConfig(50, seq_len=16, n_layer=1, n_head=2, n_embd=16, position="rope"), SDPAAttention())
    found = losses.evaluate(model.eval(), tokens, 16, 4, torch.device("cpu"))
    expected = np.empty((3, 32))
    for position in range(32):
        first = max(0, -(-(position - 15) // 2) * 2)  # windows move on by 2
        ids = torch.from_numpy(tokens[:, first : position + 1])
        with torch.inference_mode():
            last = model(ids)[:, -1, :50].log_softmax(-1)
        expected[:, position] = -last[range(3), tokens[:, position + 1]]
    assert found["loss"] == pytest.approx(expected.mean(), abs=1e-5)
    assert found["loss_last_half"] == pytest.approx(expected[:, 16:].mean(), abs=1e-5)
    assert found["loss_by_document"] == pytest.approx(expected.mean(1).tolist(), abs=2e-5)
    assert found["loss_by_position"] == [
        [middle, pytest.approx(expected[:, part].mean(), abs=2e-5)]
        for middle, part in ((8.5, slice(16)), (20.5, slice(16, 24)), (28.5, slice(24, 32)))
    ]
    with torch.inference_mode():  # two windows that follow each other
        sums = [
            model(
                torch.from_numpy(tokens[:, at : at + 16]),
                targets=torch.from_numpy(tokens[:, at + 1 : at + 17]),
            )
            for at in (0, 16)
        ]
    assert found["loss_chunked"] == pytest.approx(float(sum(sums)) / 96, abs=1e-5)


def test_documents_that_are_long_enough_are_evaluated_from_their_start():
    tokens = losses.evaluation_tokens(["abcdef", "ab", "abcde", "xyzwv"], ByteTokenizer(), 5, 2)
    assert tokens.tolist() == [[256, *b"abcde"]] * 2
    with pytest.raises(ValueError, match=r"none of the 1 held-out documents has 5 tokens"):
        losses.evaluation_tokens(["ab"], ByteTokenizer(), 5, 2)


def test_every_context_sees_the_same_tokens_in_every_step():
    file = TokenFile.from_array(np.arange(1000, dtype=np.uint16))
    steps = {}
    for context in (8, 16, 32):
        windows = same_tokens.BlockWindows(file, context, 5, block=32)
        batches = np.arange(60 * 32 // context).reshape(30, -1)  # two passes, 64 tokens a step
        steps[context] = [windows.batch(batch)["input_ids"].ravel().tolist() for batch in batches]
    assert steps[8] == steps[16] == steps[32]
    assert len(set(np.concatenate(steps[32][:15]))) == 30 * 32  # a pass has no token twice
    assert (windows.starts(np.arange(30)) == TrainWindows(file, 32, 5).starts(np.arange(30))).all()
    with pytest.raises(ValueError, match="a multiple of seq_len=12"):
        same_tokens.BlockWindows(file, 12, 5, block=32)


class Here(Executor):
    """A pool that works at submission, in this thread: a run wants the main one, for its signals."""

    def __init__(self, workers): ...

    def submit(self, function, *arguments):
        future = Future()
        future.set_result(function(*arguments))
        return future


class FakeProcess:
    """In the place of a timed training point in a process."""

    def __init__(self, target, timeout_s, beside):
        assert target == runs.POINT and beside == 0

    def start(self, request, wait):
        assert "--steps=20" in request["words"] and not wait
        self.seq_len = next(word for word in request["words"] if word.startswith("seq_len="))

    def ready(self): ...

    def end(self): ...

    def result(self):
        return speed(1.0) | {"tokens_per_s": 1000.0, "of": self.seq_len}


@pytest.mark.long
def test_the_whole_study_on_a_cpu_and_again(packages, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("scripts.measure.instruments.long_documents.installed", lambda: iter(packages))
    monkeypatch.setattr(runs, "Worker", FakeProcess)
    monkeypatch.setattr(study, "ThreadPoolExecutor", Here)
    trained = []

    def here(self, words):
        trained.append(words)
        done = train_here(tmp_path, *words, tiny=False)
        return {"status": "error" if done.code else "ok", "reason": done.err}

    monkeypatch.setattr(runs.Trainings, "_trained", here)
    out = tmp_path / "rows.jsonl"
    words = ["--work", str(tmp_path), "--out", str(out), "--contexts", "16", "32", "--seeds", "2"]
    words += ["--tokens", "1000", "--step-tokens", "128", "--least-bytes", "1000", "--documents", "2"]
    monkeypatch.setattr(sys, "argv", ["long_context_quality.py", *words, *TINY])
    study.main()
    rows = sorted(
        read(out).values(), key=lambda r: [r["point"][key] for key in ("measured", "seed", "seq_len")]
    )
    assert [(r["point"]["measured"], r["point"]["seed"], r["point"]["seq_len"]) for r in rows] == [
        *(("loss", seed, context) for seed in (1337, 1338) for context in (16, 32)),
        *(("speed", 1337, context) for context in (16, 32)),
    ]
    assert all(r["result"]["status"] == "ok" for r in rows)
    losses_of = [r["result"]["loss"] for r in rows[:4]]
    assert len(set(losses_of)) == 4 and max(losses_of) < np.log(257)  # it has learnt something
    point, corpus = rows[0]["point"], rows[0]["result"]["corpus"]
    # one pass, short of it by less than a step and two windows
    assert -128 - 64 <= point["tokens"] - corpus["training"]["tokens"] <= 0
    assert corpus["evaluated"] == rows[3]["result"]["corpus"]["evaluated"] and point["micro_batch"] == 8
    assert str(tmp_path) not in str(point) and rows[1]["point"]["micro_batch"] == 4
    assert all(r["point"]["settings"] == rows[0]["point"]["settings"] for r in rows)
    assert rows[5]["result"]["train_s"] == point["tokens"] / 1000
    said = capsys.readouterr().out
    assert "less that of 16" in said and "sha256" in said and out.with_suffix(".svg").is_file()

    kept = [line for line in out.read_text().splitlines() if rows[0]["key"] not in line]
    out.write_text("\n".join(kept) + "\n")  # a row is lost
    run = next((tmp_path / "runs").glob("long-context-16-1337-*"))
    sorted(run.glob("checkpoints/step-*.ckpt"))[-1].unlink()  # and its run had not come to its end
    study.main()
    again = next(r for r in read(out).values() if r["point"] == point)
    assert trained[4:] == [
        [f"ckpt={run.name}", f"data._target_={same_tokens.TARGET}", "+data.block=32"]
    ]  # it went on, and nothing else ran
    assert again["result"]["loss"] == rows[0]["result"]["loss"] and again["result"]["wall_s"] is None


@pytest.mark.long
def test_a_run_in_a_process_ends_well_and_says_why_it_failed(packages, tmp_path, monkeypatch):
    monkeypatch.setattr("scripts.measure.instruments.long_documents.installed", lambda: iter(packages))
    monkeypatch.setattr(sys, "argv", ["x", "--contexts", "16", "--work", str(tmp_path), *TINY])
    options = study.settled(study.arguments(), "cpu")
    options.tokens, options.step_tokens, options.least_bytes, options.at_once = 500, 64, 1000, 2
    plan = runs.planned(study.STUDY, options, "cpu", [1])
    plan = dataclasses.replace(plan, steps=2, overrides=[*plan.overrides, "trainer.max_steps=2"])
    trainings = runs.Trainings(plan, False)
    done = trainings.train(plan.losses[0])
    assert done["status"] == "ok" and done["wall_s"] > 0 and plan.final(plan.losses[0]).is_file()
    monkeypatch.setattr(runs, "TRAIN", "tests.scripts.children:out_of_memory")
    failed = runs.Trainings(plan, True).train(plan.losses[0])
    said = "the point's process was ended with exit code 1: error: out of memory on a GPU"
    assert failed == {"status": "oom", "reason": said} and plan.final(plan.losses[0]) is None


@pytest.mark.parametrize(
    "words", [["--contexts", "96", "128"], ["--contexts", "48", "64", "--step-tokens", "64"]]
)
def test_contexts_that_do_not_fit_a_step_are_refused(words, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["x", *words])
    with pytest.raises(ValueError, match=f"--contexts {words[1]}: it has to divide"):
        study.settled(study.arguments(), "cpu")
