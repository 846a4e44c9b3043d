"""The fuzzer finds a planted mistake, simplifies it, and goes on behind a process that dies or hangs."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from attention.naive import NaiveAttention
from tests.attention import agreement
from tests.attention.calls import Call
from tests.batch import Batches
from tests.running import ROOT


class Wrong(NaiveAttention):
    """A softcap gives NaN beyond 20 keys, which one draw shows."""

    def attend(self, q, k, v, options, seed):
        out, lse = super().attend(q, k, v, options, seed)
        return (out * torch.nan if options.softcap is not None and k.shape[2] > 20 else out), lse


def test_a_failure_is_simplified() -> None:
    answers = io.StringIO()
    batches = Batches("cpu", "naive", answers)
    batches.built["naive"] = Wrong()
    said, number = [], 9  # the first that has a softcap
    while not any(line.get("shrunk") for line in said):
        batches.run(number)
        said = [json.loads(line) for line in answers.getvalue().splitlines() if line.startswith("{")]
        number += 1
    assert said[-1] == {"end": True} and number < 30
    call = Call.parse(next(line["call"] for line in said if line.get("shrunk")))
    assert call.softcap is not None and call.tk > 20
    assert (call.batch, call.heads, call.lengths, call.bias, call.layouts) == (
        1, 1, None, None, ("contiguous",) * 4,
    )  # fmt: skip
    assert {line["name"] for line in said[:-1] if "name" in line} == {"naive"}


@pytest.mark.long
def test_a_mistake_in_judging_is_told_from_one_of_the_implementation(monkeypatch: pytest.MonkeyPatch) -> None:
    def judge(*anything: object) -> None:
        raise TypeError("two devices")

    monkeypatch.setattr(agreement, "_judge", judge)
    batches = Batches("cpu", "naive", answers := io.StringIO())
    batches.run(0)
    said = [json.loads(line) for line in answers.getvalue().splitlines() if line.startswith("{")]
    found = [line for line in said if "kind" in line]
    assert said[-1] == {"end": True} and {line["kind"] for line in found} == {
        "judging, TypeError: two devices"
    }
    assert not any(line["shrunk"] for line in found) and "in judge" in found[0]["message"]


@pytest.mark.slow
def test_the_command_counts_and_continues(tmp_path: Path) -> None:
    out = tmp_path / "fuzz.json"
    for total in (60, 120):
        command = ["-m", "tests.fuzz", "--calls", "60", "--workers", "1", "--device", "cpu"]
        command += ["--attention", "naive", "--out", str(out)]
        done = subprocess.run(
            [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stdout
        summary = json.loads(out.read_text())
        assert total <= summary["calls"] == sum(summary["implementations"]["naive"].values()) < total + 50
        assert f"--seed {summary['next_seed']}" in done.stdout
