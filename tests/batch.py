"""Batches of random calls, in a worker of tests/fuzz.py: see there."""

from __future__ import annotations

import json
import os
import random
import tempfile
import time
import traceback
import warnings
from dataclasses import MISSING, fields, replace
from typing import IO, Any

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.database import DirectoryBasedExampleDatabase

from attention.base import Attention
from tests.attention.agreement import Fault, check, summary
from tests.attention.calls import Call, kind_of_call, usable, vary
from tests.grid import NAMES, build
from tests.running import REPORTED

CALLS, CALLS_COMPILED = 50, 400  # in a batch at most, without and with a call that compiled something
SECONDS = 5.0  # of a batch's calls that compile nothing
QUICK = 0.5  # seconds of a call that compiles nothing
SHRINK_SECONDS = 20.0
CPU_TOKENS, INTERPRETED_TOKENS = 130, 40


def device_of(name: str | None) -> str:
    """Where to run; on a CPU triton's kernels are interpreted, as in the tests."""
    device = name or ("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(1)
    if device == "cpu":
        import tests.conftest  # noqa: F401
    return device


class Batches:
    """What one worker process keeps: implementations, and which kinds of failures it has shrunk."""

    def __init__(self, device: str | None, names: str | None, answers: IO[str]):
        self.device, self.answers = device_of(device), answers
        self.names = names.split(",") if names else NAMES
        self.built: dict[str, Attention] = {}
        self.shrunk: set[tuple[str, str]] = set()
        self.database = DirectoryBasedExampleDatabase(tempfile.mkdtemp(prefix="fuzz"))
        warnings.simplefilter("ignore")

    def run(self, number: int) -> None:
        """Batch `number`, and then its end."""
        r = random.Random(number)
        name = r.choice(self.names)
        attention = self.built[name] = self.built.get(name) or build(name)
        able = usable(attention, self.device)
        kind = kind_of_call(r.choice, attention, self.device, able and r.random() < 0.95)
        most = 300 if self.device == "cuda" else INTERPRETED_TOKENS if name == "triton" else CPU_TOKENS
        batch = _Batch(self, attention, kind)
        examples = CALLS_COMPILED if able else 10

        @seed(number)
        @settings(
            max_examples=examples,
            database=self.database,
            deadline=None,
            phases=(Phase.generate, Phase.shrink),
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
            print_blob=False,
        )
        @given(st.data())
        def calls(data: Any) -> None:
            batch.one(vary(lambda some: data.draw(st.sampled_from(some)), kind, most))

        try:
            calls()
        except Fault:
            batch.simplify()
        except Exception as error:
            error.__notes__ = []  # hypothesis's draws, behind which the parent would not find the error
            raise
        self.answer(end=True)

    def answer(self, **said: Any) -> None:
        print(json.dumps(said), file=self.answers, flush=True)


class _Batch:
    """The calls of one kind: those that failed are known, and after a while no others are sought."""

    def __init__(self, batches: Batches, attention: Attention, kind: Call):
        self.batches, self.attention = batches, attention
        self.quick, self.calls, self.most = 0.0, 0, CALLS
        self.failing: Fault | None = None  # what is being shrunk
        self.simplest: Call | None = None
        self.faults: dict[Call, Fault] = {}
        self.until = 0.0

    def one(self, call: Call) -> None:
        """Runs and reports a call; raises the Fault that hypothesis is to shrink."""
        if self.failing is not None:
            return self._again(call)
        if self.quick > SECONDS or self.calls >= self.most:
            return None
        self.calls += 1
        began = time.monotonic()
        fault, refused = self._check(call)
        passed = time.monotonic() - began
        self.quick += passed if passed < QUICK else 0
        self.most = self.most if passed < QUICK else CALLS_COMPILED
        if fault is None:
            self.batches.answer(name=self.attention.name, refused=refused)
            return None
        self._report(call, fault)
        key = (self.attention.name, fault.kind)
        if key in self.batches.shrunk:
            return None
        self.batches.shrunk.add(key)
        self.failing, self.simplest, self.until = fault, call, time.monotonic() + SHRINK_SECONDS
        self.faults[call] = fault
        raise fault

    def _again(self, call: Call) -> None:
        """While hypothesis shrinks: the same kind of fault only, and in the end what is known only."""
        if call not in self.faults and time.monotonic() < self.until:
            fault, _ = self._check(call)
            if fault is not None and fault.kind == self.failing.kind:
                self.faults[call], self.simplest = fault, call
        if call in self.faults:
            raise self.faults[call]

    def simplify(self) -> None:
        """Each field of what hypothesis left, one after the other, to its default, where it still fails."""
        call, fault = self.simplest, self.faults[self.simplest]
        until = time.monotonic() + SHRINK_SECONDS
        simpler = True
        while simpler and time.monotonic() < until:
            simpler = False
            for f in fields(Call):
                if f.default is MISSING or getattr(call, f.name) == f.default or time.monotonic() > until:
                    continue
                candidate = replace(call, **{f.name: f.default})
                found, _ = self._check(candidate)
                if found is not None and found.kind == fault.kind:
                    call, fault, simpler = candidate, found, True
        self._report(call, fault, shrunk=True)

    def _report(self, call: Call, fault: Fault, shrunk: bool = False) -> None:
        said = {"name": self.attention.name, "kind": fault.kind, "call": repr(call)}
        self.batches.answer(**said, message=str(fault)[:2000], shrunk=shrunk)

    def _check(self, call: Call) -> tuple[Fault | None, str | None]:
        print(call, file=self.batches.answers, flush=True)
        try:
            return None, check(self.attention, call, self.batches.device)
        except Fault as fault:
            found = fault
        except Exception as error:  # of the judging, or of a kernel, which says so later
            found = Fault(f"judging, {summary(error)}", "".join(traceback.format_exception(error))[-1500:])
            self.batches.shrunk.add(
                (self.attention.name, found.kind)
            )  # is no call's fault, so stays as it is
        if self.batches.device == "cuda" and _poisoned():
            self._report(call, found)
            os._exit(REPORTED)  # no call of this process works any more
        return found, None


def _poisoned() -> bool:
    try:
        torch.cuda.synchronize()
        return False
    except RuntimeError:
        return True
