"""The benchmarks' command lines, and the names of the files their rows go to."""

import argparse
import json
import sys
from importlib import import_module

import pytest

from scripts import bench_serve
from scripts.measure import rows
from scripts.measure.machine import ROOT, command, gpu_slug
from scripts.measure.rows import rows_file


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100-80gb-hbm3"),
        ("NVIDIA A100-SXM4-40GB", "a100-sxm4-40gb"),
        ("NVIDIA GeForce RTX 4090", "geforce-rtx-4090"),
        ("Tesla T4", "tesla-t4"),
        ("AMD Instinct / MI300X", "amd-instinct-mi300x"),
    ],
)
def test_gpu_slug(name, slug):
    assert gpu_slug(name) == slug


@pytest.mark.parametrize(
    ("script", "arguments", "words"),
    [
        ("bench_generate", "--model gptx", ("--model", "'gptx'", "gpt2")),
        ("bench_generate", "--attention foo", ("--attention", "'foo'", "naive")),
        ("bench_generate", "--batch 1 0", ("--batch", "0 is no whole number, at least 1")),
        ("bench_generate", "--weight-dtype int4", ("--weight-dtype", "'int4'", "int8")),
        ("bench_generate", "--new many", ("--new", "many is no whole number")),
        ("bench_generate", "--new 1", ("--new 1", "2 or more")),
        ("bench_generate", "--prompt 1025", ("--prompt 1025", "context has 1024 tokens", "--seq-len")),
        ("bench_generate", "--no-cache --compile", ("--no-cache --compile", "leave one out")),
        ("bench_serve", "--new 1 1", ("--new 1 1", "2 or more")),
        ("bench_serve", "--slots 0", ("--slots", "0 is no whole number, at least 1")),
        ("bench_train", "--attention foo", ("--attention", "'foo'", "naive")),
        ("bench_train", "--batch -1", ("--batch", "at least 1")),
        ("bench_train", "--batch 0", ("--batch", "at least 1")),
        ("bench_train", "--steps 30", ("--steps 30", "first 20 do not count", "at least 40")),
        ("bench_attention", "--short --seq-len 64", ("--short", "leave out --seq-len")),
        ("bench_attention", "--short --pass decode", ("--short", "of a square")),
        ("roofline", "--tiles --stages cuda_naive", ("--tiles --stages cuda_naive", "leave --stages out")),
    ],
)
def test_a_wrong_argument_is_named(script, arguments, words, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [f"{script}.py", *arguments.split()])
    with pytest.raises(SystemExit) as stop:
        import_module(f"scripts.{script}").arguments()
    err = capsys.readouterr().err
    assert stop.value.code == 2 and all(word in err for word in words), err


@pytest.mark.parametrize("script", ["bench_generate", "bench_serve"])
@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("foo", "foo has no value: write foo=..."),
        ("model.n_head=5", "n_head=5"),
        ("model.nope=1", "nope"),
        ("seq_len=64", "--set seq_len=64: it takes keys of model and attention"),  # the row would say 64
        ("attention=naive", "--set attention=naive: it takes keys"),  # and auto, for a run of naive
    ],
)
def test_a_wrong_override_is_one_message(script, override, words, tmp_path, monkeypatch, capsys):
    out = str(tmp_path / "cpu.jsonl")
    monkeypatch.setattr(sys, "argv", [f"{script}.py", "--model", "tiny", "--out", out, "--set", override])
    with pytest.raises(SystemExit) as stop:
        import_module(f"scripts.{script}").main()
    err = capsys.readouterr().err
    assert stop.value.code == 1 and err.startswith("error: ") and words in err, err


def test_what_cannot_be_a_file_of_rows_is_said_before_measuring(tmp_path):
    taken = tmp_path / "taken"
    taken.write_text("")
    assert rows_file(str(tmp_path / "new" / "h200.jsonl")) == tmp_path / "new" / "h200.jsonl"
    assert rows_file(str(taken)) == taken  # rows are appended
    for wrong in (taken / "h200.jsonl", tmp_path):
        with pytest.raises(argparse.ArgumentTypeError, match="is in the way: name a new file"):
            rows_file(str(wrong))


def test_rows_name_no_folder_of_this_machine(tmp_path, monkeypatch):
    script = ROOT / "scripts" / "bench_attention.py"
    monkeypatch.syspath_prepend(script.parent)  # as Python does for a script
    monkeypatch.setattr(sys, "argv", [str(script), "--causal", "--out", str(tmp_path), "--fresh", "--out=x"])
    assert command().split()[1:] == ["scripts/bench_attention.py", "--causal", "--fresh"]
    monkeypatch.setattr(sys, "argv", [f"{ROOT}/scripts/study.py numerics", "--fresh"])
    assert command().split()[1:] == ["scripts/study.py", "numerics", "--fresh"]
    monkeypatch.syspath_prepend(tmp_path / "site")
    result = {
        "status": "unsupported",
        "reason": f"{tmp_path}/site/library/kernels.so is missing",
        "ms": [1.5],
    }
    row = rows.append(tmp_path / "rows.jsonl", {"study": "x"}, result)
    assert row["result"] == result | {"reason": "library/kernels.so is missing"}


def test_training_contestants_are_timed_in_turns(monkeypatch):
    """Both compile before either is timed; a round of each after the other; what fails says so."""
    from scripts.measure.instruments import training_turns

    told = []

    class Fake:
        def __init__(self, target, beside):
            assert (target, beside) == (training_turns.POINT, 1)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            told.append((self.name, "end"))

        def start(self, request, wait):
            assert wait
            self.name = request["words"][0]

        def ready(self):
            told.append((self.name, "ready"))

        def go(self):
            told.append((self.name, "go"))

        def result(self):
            return {"status": "error", "reason": "why"} if self.name == "b" else {"status": "ok"}

    monkeypatch.setattr("scripts.measure.worker.Worker", Fake)
    found = training_turns.in_turns({"ours": ["a"], "theirs": ["b"]})
    assert found == {"ours": {"status": "ok"}, "theirs": {"status": "error", "reason": "why"}}
    turn = [("a", "go"), ("a", "ready"), ("b", "go"), ("b", "ready")]
    assert told == [("a", "ready"), ("b", "ready"), *turn * training_turns.ROUNDS, ("b", "end"), ("a", "end")]


def test_a_training_benchmark_is_a_point_of_its_recipe(monkeypatch):
    from scripts import bench_train
    from scripts.measure.instruments.training_point import arguments
    from scripts.measure.sweep_points import composed

    monkeypatch.setattr(
        sys, "argv", ["bench_train.py", "--seq-len", "2048", "--batch", "32", "--attention=sdpa"]
    )
    words = bench_train.words_of(bench_train.arguments(), "sdpa")
    point = arguments(words)
    assert (point.warm_up, point.steps, point.rounds, point.peer) == (20, 60, 5, None)
    cfg, _ = composed(point.overrides)
    assert (cfg.seq_len, cfg.data.batch_size, cfg.tokens_per_step) == (2048, 32, 65536)
    assert cfg.attention.name == "sdpa" and cfg.model.bias is False and cfg.data.corpus.vocab_size == 50304
    monkeypatch.setattr(sys, "argv", ["bench_train.py", "--nanogpt", "model.py"])
    theirs = arguments(bench_train.words_of(bench_train.arguments(), None))
    assert theirs.peer == "nanogpt=model.py" and (theirs.warm_up, theirs.steps, theirs.rounds) == (20, 60, 5)


def test_training_speeds_are_compared_round_by_round(tmp_path, monkeypatch, capsys):
    from scripts import bench_train

    speeds = {"tilegpt attention=sdpa": 10.0, "tilegpt attention=naive": 30.0, "nanoGPT": 20.0}

    def turns(asked):
        assert asked.keys() == speeds.keys() and "attention=naive" in asked["tilegpt attention=naive"]
        ran = {"nvjet_sm90_tst_256x128": 36, "tilegpt_fa3_forward": 12, "fill": 1}
        common = {"status": "ok", "reason": None, "mfu": None, "peak_mib": 1024.0, "kernels": ran}
        return {
            name: common | {"ms_median": ms, "ms_by_round": [ms, ms * 1.5, ms, ms / 2, ms]}
            for name, ms in speeds.items()
        }

    model = tmp_path / "model.py"
    model.write_text("")
    out = tmp_path / "rows.jsonl"
    words = ["--attention", "sdpa", "naive", "--nanogpt", str(model), "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["bench_train.py", *words])
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(bench_train, "in_turns", turns)
    written = []  # rows.append asks the GPU that this machine lacks for its name
    monkeypatch.setattr(rows, "append", lambda path, point, result: written.append((path, point)))
    bench_train.main()
    said = capsys.readouterr().out
    assert "sdpa: 3.000x the speed of tilegpt attention=naive (3.000 to 3.000 in 5 rounds)" in said
    assert "sdpa: 2.000x the speed of nanoGPT" in said
    assert said.count("1.0  our CUDA kernels\n") == 3
    assert {point["implementation"] for _, point in written} == speeds.keys()
    assert {path for path, _ in written} == {out}


def test_the_ladder_is_printed_without_a_gpu(monkeypatch, capsys):
    from scripts import bench_ladder

    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["bench_ladder.py", "--plot-only"])
    bench_ladder.main()
    assert capsys.readouterr().out.startswith("NVIDIA H200, torch ")
    monkeypatch.setattr(sys, "argv", ["bench_ladder.py"])
    with pytest.raises(SystemExit, match="needs a CUDA GPU"):
        bench_ladder.main()


def test_generation_beyond_the_context_says_what_its_speed_includes(tmp_path, monkeypatch, capsys):
    out = tmp_path / "cpu.jsonl"
    for new in (4, 9):  # the last one is never fed: 8 + 8 tokens are more than 12
        words = f"--model tiny --set model.n_layer=1 --prompt 8 --new {new} --seq-len 12 --repeat 1 --out"
        monkeypatch.setattr(sys, "argv", ["bench_generate.py", *words.split(), str(out)])
        import_module("scripts.bench_generate").main()
    assert [json.loads(line)["result"]["reencoded"] for line in out.read_text().splitlines()] == [0, 1]
    assert capsys.readouterr().out.count("encoded 1 full contexts again, which its speed includes") == 1


def test_a_training_that_fails_leaves_the_others_their_rows(tmp_path, monkeypatch, capsys):
    from scripts import bench_train

    fine = {"status": "ok", "reason": None, "mfu": None, "peak_mib": 1024.0, "kernels": {}}
    fine |= {"ms_median": 10.0, "ms_by_round": [10.0] * 5}
    lost = {"status": "oom", "reason": "CUDA out of memory"}
    argv = ["bench_train.py", "--attention", "naive", "sdpa", "--out", str(tmp_path / "rows.jsonl")]
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    written = []
    monkeypatch.setattr(rows, "append", lambda path, point, result: written.append(point["implementation"]))
    monkeypatch.setattr(bench_train, "in_turns", lambda asked: dict(zip(asked, (lost, fine), strict=True)))
    with pytest.raises(SystemExit) as stop:
        bench_train.main()
    assert written == ["tilegpt attention=sdpa"] and "6,553,600" in capsys.readouterr().out
    said = str(stop.value)
    assert "attention=naive: CUDA out of memory" in said and "a smaller --batch" in said
    monkeypatch.setattr(bench_train, "in_turns", lambda asked: dict.fromkeys(asked, lost))
    with pytest.raises(SystemExit, match="these failed"):
        bench_train.main()
    assert len(written) == 1


@pytest.mark.parametrize(
    ("lengths", "slots", "steps"), [([5], 4, 5), ([2, 3, 4], 1, 9), ([4, 1, 1, 1], 2, 4), ([1, 1, 4], 2, 5)]
)
def test_an_ideal_schedule_fills_the_first_free_slot(lengths, slots, steps):
    assert bench_serve.ideal_steps(lengths, slots) == steps


@pytest.mark.long
def test_serving_is_measured(tmp_path, monkeypatch):
    out = tmp_path / "serve.jsonl"
    words = "--model tiny --requests 2 --prefix 8 --suffix 1 2 --new 1 3 --slots 1 --block 4 --repeat 1 --out"
    monkeypatch.setattr(sys, "argv", ["bench_serve.py", *words.split(), str(out)])
    bench_serve.main()
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    shared, apart, lengths = (row["result"] for row in rows)
    assert [shared["found"], apart["found"]] == [8, 0]
    assert shared["computed"] + 8 == shared["prompt_tokens"] == apart["computed"]
    assert lengths["tokens_per_s"] > 0 and lengths["of_ideal"] > 0 and lengths["memory_of_held"] >= 1
