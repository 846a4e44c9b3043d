"""Child processes and what they answer; a study's run, its rows, and processes that share it."""

from __future__ import annotations

import errno
import fcntl
import re
import time
from pathlib import Path

import pytest

from scripts.measure.rows import read
from scripts.measure.runner import Run, parsed_with_overrides, parser
from scripts.measure.worker import Worker, once
from tests.scripts import children
from tests.scripts.studies import run_of

pytestmark = pytest.mark.sampled(3)

POINT = {"study": "probe", "implementation": "naive", "pass": "forward", "seq_len": 8}


def child(name: str) -> str:
    return f"{children.__name__}:{name}"


def test_a_process_answers_until_it_is_ended() -> None:
    with Worker(child("doubled")) as worker:
        assert [worker.ask({"number": n})["twice"] for n in (1, 2)] == [2, 4]
        assert "KeyError" in worker.ask({})["reason"] and worker.ask({"number": 3})["twice"] == 6
        worker.process.kill()
        assert worker.ask({"number": 4})["reason"] == "the point's process was killed by signal 9"


@pytest.mark.parametrize(
    ("name", "result"),
    [
        ("killed", {"status": "error", "reason": "the point's process was killed by signal 9"}),
        (
            "stopped",
            {"status": "error", "reason": "the point's process was ended with exit code 1: no such thing"},
        ),
        ("raised", {"status": "error", "reason": "TypeError: no such launch"}),
    ],
)
def test_how_a_process_fails_is_a_result(name: str, result: dict[str, str]) -> None:
    assert once(child(name), {}, 60) == result


@pytest.mark.long
def test_a_process_that_hangs_or_leaves_its_output_open_is_an_error() -> None:
    hung = once(child("hangs"), {}, 2)
    assert hung["status"] == "error" and hung["timeout_s"] == 2
    start = time.monotonic()
    assert "gone" in once(child("lasting"), {}, 60)["reason"]
    assert time.monotonic() - start < 25  # its child holds the output open


def test_a_company_goes_on_when_told(tmp_path: Path) -> None:
    """One is timed at a time: what each says of itself, in the order in which it happened."""
    a, b = (Worker(child("in_turns"), 60, beside=1) for _ in "ab")
    try:
        for worker, name in ((a, "a"), (b, "b")):
            worker.start({"name": name, "file": str(tmp_path / "said")}, wait=True)
        a.ready(), b.ready()
        b.go(), b.ready()
        a.go(), a.ready()
        assert b.result()["reason"].endswith("exit code 1: broken")
        assert a.result() == {"status": "ok", "beside": 1}
    finally:
        a.end(), b.end()
    lines = (tmp_path / "said").read_text().splitlines()
    assert sorted(lines[:2]) == ["a sets up", "b sets up"]
    assert lines[2:] == ["b is timed", "a is timed", "b is profiled", "a is profiled"]


@pytest.mark.long
def test_processes_share_the_points_of_a_run(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    run = run_of(out)
    asked = {"out": str(out), "point": POINT}
    with Worker(child("claims")) as other:
        assert other.ask(asked)["mine"]
        assert not run.claim(POINT) and run.claim(POINT | {"seq_len": 16})
    assert run.claim(POINT)  # it goes with the process
    with Worker(child("claims")) as other:
        done = {"status": "ok", "ms_median": 1.0}
        assert other.ask(asked | {"point": POINT | {"seq_len": 32}, "result": done})["mine"]
    assert not run.claim(POINT | {"seq_len": 32})  # it has its row


@pytest.mark.long
def test_a_claim_that_fails_halfway_leaves_the_rest_to_others(tmp_path: Path, monkeypatch) -> None:
    out, others = tmp_path / "rows.jsonl", [POINT | {"seq_len": n} for n in (16, 32)]
    run = run_of(out)
    with Worker(child("claims")) as first, Worker(child("claims")) as second:
        assert first.ask({"out": str(out), "point": others[0]})["mine"]
        assert not run.claim(others[1], others[0])
        assert second.ask({"out": str(out), "point": others[1]})["mine"]

    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", no_locks)
    with pytest.raises(OSError, match="No locks"):
        run.claim(POINT)


def test_a_file_of_rows_may_have_any_name(tmp_path: Path) -> None:
    out = tmp_path / "rows.lock"
    out.write_text("kept\n")
    run_of(out)
    assert out.read_text() == "kept\n" and (tmp_path / "rows.lock.lock").is_file()


@pytest.mark.parametrize(
    "words",
    [
        "--measured loss again seed=1 model.window=64",
        "seed=1 --measured loss again model.window=64",
        "seed=1 model.window=64 --measured loss again",
    ],
)
def test_overrides_may_stand_anywhere(words: str) -> None:
    made = parser(None, "x")
    made.add_argument("overrides", nargs="*")
    made.add_argument("--measured", nargs="+", choices=["speed", "loss", "again"])
    options = parsed_with_overrides(made, words.split())
    assert options.measured == ["loss", "again"] and options.overrides == ["seed=1", "model.window=64"]


def test_a_word_that_is_no_override_stays_a_value(capsys: pytest.CaptureFixture) -> None:
    made = parser(None, "x")
    made.add_argument("overrides", nargs="*")
    made.add_argument("--measured", nargs="+", choices=["speed", "loss"])
    options = parsed_with_overrides(made, ["--measured", "loss", "seed=1", "--out", "a=b.jsonl"])
    assert options.out.name == "a=b.jsonl" and options.overrides == ["seed=1"]
    with pytest.raises(SystemExit):
        parsed_with_overrides(made, ["--measured", "loss", "fast"])
    assert "invalid choice: 'fast'" in capsys.readouterr().err


def test_a_run_has_a_row_for_whatever_happens(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    options = parser("What.", "probe").parse_args(["--out", str(tmp_path / "rows.jsonl")])
    points = [POINT | {"seq_len": n} for n in (8, 16)]

    def measure(point: dict) -> dict:
        if point["seq_len"] == 16:
            raise RuntimeError("no such launch\nmore")
        return {"status": "ok", "ms_median": 1.0}

    for left, statuses in ((2, ["ok", "error"]), (1, ["ok", "error"])):  # an error is tried again
        run = Run("probe", options)
        run.each(run.left(points, "a second"), measure, lambda point, result: f"T={point['seq_len']}")
        printed = capsys.readouterr().out
        assert f"probe: {left} points" in printed and "a second. Rows in" in printed
        assert re.search(rf"\[{left}/{left}, \d+ s, \d+/min, about 0 s left\] T=16", printed)
        assert [row["result"]["status"] for row in read(options.out).values()] == statuses
