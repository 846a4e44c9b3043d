"""Rows are found by their points, whatever the config has got since; other sources are measured again."""

from __future__ import annotations

import fcntl
import json
import shutil
import subprocess
from pathlib import Path

import pytest

from conf import renames
from conf.values import UserError
from scripts.measure import rows, sources
from scripts.measure.machine import ROOT, machine
from scripts.measure.rows import Kept, append, key_of, load, read, trusted

FILES = sorted((ROOT / "results").glob("*/*.jsonl"))
POINT = {"study": "probe", "implementation": "naive", "pass": "forward", "seq_len": 8, "causal": True}
OK = {"status": "ok", "ms_median": 1.0}
TRAINED = {"implementation": "sdpa", "pass": "train", "model": "gpt2"}
SERVED = {"implementation": "sdpa", "study": "serve", "model": "gpt2"}
ADDED = ("from __future__", "added = 1\nfrom __future__")  # to a source, which is read and not run


def points(path: Path) -> list[dict]:
    return [json.loads(line)["point"] for line in path.read_text().splitlines()]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.parent.name)
def test_every_committed_row_is_found(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its own point, after a key of the config was renamed, and after a new one came with its default."""
    there = read(path)
    assert {key_of(rows.today(point, 1)) for point in points(path)} == set(there)
    monkeypatch.setattr(renames, "RENAMED", {"optim.lr": "optim.rate", "checkpointing": "recompute"})
    later = read(path)
    assert len(later) == len(there)
    for row in later.values():
        assert "checkpointing" not in row["point"] and "optim.lr" not in row["point"].get("settings", {})
        asked = row["point"] | {"a_new_key": None, "another_new_key": False}
        assert later[key_of(asked)] is row


@pytest.mark.parametrize("study", ["seqlen_scaling", "speedup_end_to_end", "encoder_short"])
def test_a_sweep_finds_what_is_committed_of_it(study: str) -> None:
    """Rows of schema 1 have a digest in place of settings; a point as it is asked today has their key."""
    from scripts.measure.sweep_points import point_of, smaller, study_of, tasks

    overrides = [f"experiment={study}"]
    if study == "seqlen_scaling":
        overrides += [
            "sweep.grid.attention=[triton,naive]",
            "sweep.grid.seq_len=[1024,8192]",
        ]
    one = study_of(overrides)
    there = read(ROOT / "results" / study / "h200.jsonl")
    for asked in (point_of(one, task, "cuda") for task in tasks(one)):
        assert key_of(asked.fields) in there, asked.fields
        if there[key_of(asked.fields)]["result"]["status"] == "oom" and asked.fields["micro_batch"] > 1:
            assert any(key_of(point.fields) in there for point in smaller(one, asked, "cuda"))
    other = point_of(study_of([*overrides, "optim.lr=0.5"]), tasks(one)[0], "cuda")
    assert key_of(other.fields) not in there


def test_a_changed_default_is_another_point_and_rows_keep_what_they_had(monkeypatch) -> None:
    old = {"study": "probe", "settings": {}}
    monkeypatch.setattr(renames, "DEFAULTS", [(3, "optim.lr", 6e-4, 1e-3)])
    assert rows.today(old, 2)["settings"] == {"optim.lr": 6e-4} != rows.today(old, 3)["settings"] == {}
    asked = {"study": "probe", "settings": {"optim.lr": 1e-3}}  # by a row that named what is usual now
    assert rows.today(asked, 2) == rows.today(old, 3)


def test_renames_reach_overrides_and_nested_keys(monkeypatch) -> None:
    monkeypatch.setattr(renames, "RENAMED", {"optim.lr": "optim.rate", "model.norms": "model.norm"})
    words = ("optim.lr=1", "+optim.lr=1", "~model.norms", "model=gpt2")
    assert [renames.override(word) for word in words] == [
        "optim.rate=1", "+optim.rate=1", "~model.norm", "model=gpt2",
    ]  # fmt: skip
    both = {"optim": {"lr": 1, "rate": 2, "betas": [1]}, "model": {"norms": {"kind": "rms"}}, "seed": 3}
    assert renames.config(both) == {
        "optim": {"rate": 2, "betas": [1]}, "model": {"norm": {"kind": "rms"}}, "seed": 3,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("result", "said"),
    [
        ({}, True),
        ({"error_ratio": 1.0, "kernels_ok": True, "learns": True}, True),
        ({"error_ratio": 1.01}, False),
        ({"error_ratio": None}, False),
        ({"kernels_ok": False}, False),
        ({"kernels_ok": None}, False),
        ({"learns": False}, False),
        ({"status": "oom"}, False),
    ],
)
def test_what_may_be_trusted(result: dict, said: bool) -> None:
    assert trusted(OK | result) is said


def test_what_is_kept(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    row = append(out, POINT, OK)
    assert row["machine"]["code"] == sources.code(POINT) and row["schema"] == rows.SCHEMA
    assert Kept(out).done(POINT | {"features": ""}) and not Kept(out).done(POINT | {"seq_len": 9})
    assert not Kept(out, fresh=True).done(POINT)
    failed = {"status": "error", "reason": "lost"}
    append(out, POINT, failed)
    assert Kept(out).row(POINT) and not Kept(out).done(POINT)
    append(out, POINT, failed | {"timeout_s": 5})
    assert Kept(out).done(POINT) and Kept(out).todo([POINT, POINT | {"causal": False}]) == [
        POINT | {"causal": False}
    ]
    for other in ({"torch": "1.0"}, {"code": "of other sources"}):
        text = out.read_text().splitlines()[-1]
        stale = json.loads(text)
        stale["machine"] |= other
        (tmp_path / "stale.jsonl").write_text(json.dumps(stale) + "\n")
        assert not Kept(tmp_path / "stale.jsonl").done(POINT)
        assert Kept(tmp_path / "stale.jsonl", missing=True).done(POINT)
    same = stale | {
        "machine": machine() | {"code": sources.code(POINT), "date": "1999-01-01", "commit": "old"}
    }
    (tmp_path / "stale.jsonl").write_text(json.dumps(same) + "\n")
    assert Kept(tmp_path / "stale.jsonl").done(POINT)


def test_a_row_without_a_digest_goes_by_the_sources_of_its_commit(monkeypatch) -> None:
    """Of rows from before there were digests: fresh as long as what ran is what would run now."""
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    if not head:
        pytest.skip("no git history here")
    asked = []

    def code(point: dict, root: Path = ROOT) -> str:
        asked.append(root)
        return "same" if point["implementation"] == "naive" or root == ROOT else "other"

    monkeypatch.setattr(sources, "code", code)
    row = {"point": POINT, "machine": {"commit": head}}
    assert sources.is_of_today(row) and not sources.is_of_today(
        row | {"point": POINT | {"implementation": "x"}}
    )
    assert (asked[0] / "attention" / "naive.py").is_file() and asked[0] != ROOT
    for commit in (None, f"{head[:7]}-dirty", "0" * 40, "--output=x"):
        assert not sources.is_of_today({"point": POINT, "machine": {"commit": commit}})
    assert sources.is_of_today({"point": POINT, "machine": {"commit": None, "code": "same"}})


def test_contestants_of_one_shape_are_measured_together(tmp_path: Path) -> None:
    mine = {name: POINT | {"implementation": name} for name in ("naive", "sdpa", "tiled")}
    out = tmp_path / "rows.jsonl"
    append(out, mine["naive"], OK)
    append(out, mine["sdpa"], {"status": "error", "reason": "the device is lost"})
    assert Kept(out).beside(mine) == ["naive", "tiled"]
    append(out, mine["tiled"], OK)
    assert Kept(out).beside(mine) == []


def test_rows_as_a_table(tmp_path: Path) -> None:
    append(tmp_path / "a" / "cpu.jsonl", POINT, OK)
    append(tmp_path / "b" / "cpu.jsonl", POINT | {"study": "b"}, {"status": "oom", "reason": "no room"})
    table = load(tmp_path)
    assert list(table.study) == ["probe", "b"] and list(table.trusted) == [True, False]
    assert table.ms_median[0] == 1 and table["machine.torch"].nunique() == 1
    assert table.row[1]["result"]["reason"] == "no room"


def test_a_file_concerns_those_who_run_it(tmp_path: Path) -> None:
    for folder in ("attention", "conf", "data", "model", "ops", "scripts/measure/instruments"):
        shutil.copytree(
            ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__", "prepared")
        )
    all_of_them = {"naive", "triton", "cuda", "cuda_fa2", "sdpa_cudnn", "nanoGPT", "auto"}

    def codes() -> dict[str, str]:
        sources._digest.cache_clear()
        asked = {name: {"implementation": name, "pass": "train", "model": "gpt2"} for name in all_of_them}
        return {name: sources.code(point, tmp_path) for name, point in asked.items()}

    before = codes()
    for path, concerned in {
        "ops/csrc/ladder/fa2.cu": {"cuda", "cuda_fa2", "auto"},
        "ops/csrc/lib/mma.cuh": {"cuda", "cuda_fa2", "triton", "auto"},  # triton's decode/attend_cache.cu
        "attention/auto_table.py": {"auto"},
        "attention/geometry.py": all_of_them,
        "ops/triton/backward_dq.py": {"triton", "auto"},
        "model/costs/memory.py": set(),  # predicts
        "model/gpt.py": all_of_them,
    }.items():
        text = (tmp_path / path).read_text()
        commented = text + ("\n# a comment\n" if path.endswith(".py") else "\n// a comment\n")
        (tmp_path / path).write_text(commented)
        assert codes() == before, path  # as of the comment alone nothing else runs
        (tmp_path / path).write_text(f"{commented}\nint_ = 1;\n")
        assert {name for name, code in codes().items() if code != before[name]} == concerned, path
        if path.startswith("model"):
            alone = {"implementation": "naive", "pass": "forward"}
            assert sources.code(alone, tmp_path) == sources.code(alone)
        (tmp_path / path).write_text(text)


@pytest.mark.parametrize(
    ("point", "path", "change", "stale"),
    [
        ({"implementation": "tiled"}, "conf/attention/tiled.yaml", ("block_q: 128", "block_q: 64"), True),
        ({"implementation": "tiled"}, "conf/attention/tiled.yaml", ("# queries", "# the queries"), False),
        ({"implementation": "auto"}, "conf/attention/tiled.yaml", ("block_q: 128", "block_q: 64"), True),
        ({"implementation": "naive"}, "conf/attention/tiled.yaml", ("block_q: 128", "block_q: 64"), False),
        ({"implementation": "cuda_fa1"}, "conf/attention/cuda_fa1.yaml", ("stage: fa1", "stage: fa2"), True),
        (TRAINED, "model/training/schedules.py", ADDED, True),
        (SERVED, "model/training/schedules.py", ADDED, False),
        (TRAINED | {"optimizer": "muon"}, "model/training/muon.py", ADDED, True),
        (TRAINED | {"optimizer": "adamw"}, "model/training/muon.py", ADDED, False),
        (TRAINED | {"settings": {"optim": "muon"}}, "model/training/muon.py", ADDED, True),
        (TRAINED | {"dtype": "fp8"}, "model/training/fp8.py", ADDED, True),
        (TRAINED | {"dtype": "bf16-mixed"}, "model/training/fp8.py", ADDED, False),
        (TRAINED | {"study": "long_range"}, "model/classifier.py", ADDED, True),
        (TRAINED | {"study": "long_range"}, "data/classification.py", ADDED, True),
        (TRAINED | {"study": "long_range", "task": "listops"}, "data/listops.py", ADDED, True),
        (TRAINED | {"study": "long_range", "task": "matching"}, "data/listops.py", ADDED, False),
        (SERVED, "model/generation/engine.py", ADDED, True),
        (SERVED, "model/generation/serve.py", ADDED, True),
        (SERVED | {"study": "generate"}, "model/generation/serve.py", ADDED, False),
    ],
)
def test_a_row_is_stale_when_what_it_ran_has_changed(
    tmp_path: Path, point: dict, path: str, change: tuple[str, str], stale: bool
) -> None:
    for folder in ("attention", "conf", "data", "model", "ops", "scripts/measure/instruments"):
        (tmp_path / folder).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / folder).symlink_to(ROOT / folder)
    before = sources.code(point, tmp_path)
    assert before == sources.code(point)
    top = tmp_path / path.split("/")[0]
    top.unlink()
    shutil.copytree(ROOT / top.name, top, ignore=shutil.ignore_patterns("__pycache__", "prepared"))
    text = (tmp_path / path).read_text()
    assert change[0] in text
    (tmp_path / path).write_text(text.replace(*change, 1))
    sources._digest.cache_clear()
    assert (sources.code(point, tmp_path) != before) is stale


def test_what_the_yamls_say_today_is_what_the_classes_or_their_names_say() -> None:
    """So that rows from before options counted are as fresh as they were."""
    assert not any(map(sources.options, rows.choices("attention")))


@pytest.mark.parametrize("fresh", [False, True])
def test_half_a_row_waits_for_its_end(tmp_path: Path, fresh: bool) -> None:
    """Which another process is writing, or has left without one; a mistake has the number of its line."""
    path = tmp_path / "rows.jsonl"
    append(path, POINT, OK)
    append(path, POINT | {"seq_len": 16}, OK)
    whole, last = path.read_text().splitlines(keepends=True)
    half = len(whole) + last.index("}}") if "}}" in last[:-3] else len(whole) + 40
    path.write_text((whole + last)[:half])
    kept = Kept(path, fresh)
    path.write_text(whole + last)
    kept.update()
    assert kept.done(POINT | {"seq_len": 16}) and kept.done(POINT) is not fresh
    with open(path, "a") as file:
        file.write('{"point": {"a": {}}}\n')
    with pytest.raises(UserError, match="line 3: that is no row"):
        kept.update()


def test_a_file_is_read_when_nobody_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, locks = tmp_path / "rows.jsonl", []
    append(path, POINT, OK)
    monkeypatch.setattr(fcntl, "flock", lambda file, how: locks.append(how))
    Kept(path)
    assert locks == [fcntl.LOCK_SH]
