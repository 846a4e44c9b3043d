"""compare.py: rounding or a fault, whose, where; on random tensors and in a trained model."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor

from attention.naive import NaiveAttention
from attention.tiled import TiledAttention
from ops.options import AttentionOptions
from scripts.compare import USUAL, main, parse, random_problem
from scripts.measure.instruments.diagnosis import conclusion, examine
from tests.running import ROOT, train_here

SHAPE = {"batch": 2, "heads": 4, "kv_heads": 2, "seq_len": 72, "head_dim": 16}


class Faulty(NaiveAttention):
    """Naive with a fault of its output, or other bits at every call."""

    def __init__(self, fault: str):
        super().__init__("faulty")
        self.fault, self.calls = fault, 0

    def attend(self, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, seed: Tensor | None):
        self.calls += 1
        if self.fault == "scale":
            options = options._replace(scale=1.05 * options.scale)
        out, lse = super().attend(q, k, v, options, seed)
        i = torch.arange(q.shape[2]).view(-1, 1)
        if self.fault == "head":
            out = torch.cat((out[:, :-1], 1.05 * out[:, -1:]), dim=1)
        if self.fault == "tail":
            out = torch.where(i >= 64, 1.1 * out, out)
        if self.fault == "one percent":
            out = 1.01 * out
        if self.fault == "nan":
            out = out.masked_fill(i == 5, torch.nan)
        if self.fault == "dk":
            out = out + 0.1 * (k[:, :, :1].sum() - k[:, :, :1].sum().detach())
        if self.fault == "bits":
            out = out * (1 + 2**-23 * (self.calls % 2))
        return out, lse


def verdict(fault: str, dtype: torch.dtype = torch.float32, **keys) -> tuple[str, bool]:
    problem = random_problem({**USUAL, **SHAPE, **keys}, "cpu", dtype)
    findings = examine(["faulty", "tiled"], [Faulty(fault), TiledAttention(32, 32)], problem, 2**28)
    assert {f.tensor for f in findings if f.name == "tiled"} == {"out", "lse", "dq", "dk", "dv"}
    assert not any(f.fault for f in findings if f.name != "faulty")
    said, faulty = conclusion(["faulty", "tiled"], findings)
    return "\n".join(said), faulty


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("scale", "Nearly all entries are wrong: check scale, mask and softmax"),
        ("head", "Only in heads 3: check how heads are indexed"),
        ("tail", "Only from position 64 on, in the last tile of 16 or 32 or 64: check"),
        ("nan", "It contains NaN or infinity"),
        ("dk", "in faulty: the error of dk is"),
    ],
)
def test_a_fault_is_named_with_what_it_looks_like(fault: str, words: str) -> None:
    text, faulty = verdict(fault)
    assert faulty and words in text and "tiled: only rounding error" in text
    if fault == "nan":
        assert "i=5," in text
    if fault == "dk":
        assert "Only at positions 0 to 0 of 72" in text and "error of out is" not in text


def test_an_old_key_is_understood_with_a_notice(capsys: pytest.CaptureFixture[str]) -> None:
    assert parse(["segments=3"])["document_ids"] == 3
    assert "note: the command line has segments, which is now called document_ids." in capsys.readouterr().err


def test_a_row_has_as_many_documents_as_asked_for() -> None:
    for n in (1, 3, 72):
        problem = random_problem({**USUAL, **SHAPE, "document_ids": n}, "cpu", torch.float32)
        assert [len(row.unique()) for row in problem.options["document_ids"]] == [n, n]


def test_rounding_is_called_rounding() -> None:
    text, faulty = verdict("none", softcap=5.0, window=9, alibi=True, document_ids=3)
    assert not faulty and "faulty: only rounding" in text and "is rounding error" in text
    assert "differ between two calls" not in text


def test_other_bits_at_every_call_are_said() -> None:
    text, faulty = verdict("bits")
    assert not faulty and "faulty: out, dq, dk, dv differ between two calls" in text


def test_errors_that_are_small_but_everywhere_are_doubtful() -> None:
    text, faulty = verdict("one percent", torch.bfloat16)
    assert not faulty and "DOUBTFUL[/yellow] faulty: no single error of out is too large" in text
    assert "DOUBTFUL[/yellow] tiled" not in text and "is rounding error" not in text
    assert "DOUBTFUL" not in verdict("none", torch.bfloat16)[0]
    assert verdict("one percent")[1]  # in fp32 it is a fault


def test_a_part_stands_for_a_long_call() -> None:
    problem = random_problem({**USUAL, **SHAPE, "heads": 8, "kv_heads": 8}, "cpu", torch.float32)
    findings = examine(["faulty"], [Faulty("scale")], problem, most=1)
    assert "h=" in next(f.fault for f in findings if f.name == "faulty" and f.tensor == "out")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["heds=4"], "heds=4: write key=value"),
        (["heads"], "heads: write key=value"),
        (["batch=0"], "batch=0: it needs a whole number"),
        (["softcap=hot"], "softcap=hot"),
        (["softcap=-3"], "softcap=-3: it needs a number above 0"),
        (["softcap=nan"], "softcap=nan: it needs a number above 0"),
        (["softcap=inf"], "softcap=inf: it needs a number above 0"),
        (
            ["seed=9223372036854775808"],
            "seed=9223372036854775808: it needs a whole number, at least 0, below",
        ),
        (["seq_len=4", "document_ids=5"], "document_ids=5 seq_len=4: a document has at least a token"),
        (["heads=3", "kv_heads=2"], "heads=3 kv_heads=2: heads has to be a multiple"),
        (["kv_heads=8"], "heads=4 kv_heads=8: heads has to be a multiple"),
        (["alibi=1"], "alibi=1: it needs true or false"),
        (["ckpt=last"], "go together"),
        (["ckpt=last", "text=a", "heads=2"], "heads=2: with ckpt="),
    ],
)
def test_wrong_keys_are_named(arguments: list[str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parse(arguments)


def run(*arguments: str) -> int:
    with (
        mock.patch.object(sys, "argv", ["compare.py", "device=cpu", *arguments]),
        pytest.raises(SystemExit) as stop,
    ):
        main()
    return stop.value.code


def test_the_command(capsys) -> None:
    shape = [f"{key}={value}" for key, value in SHAPE.items()]
    assert run("attention=tiled", "against=sdpa", *shape) == 0
    out = capsys.readouterr().out
    assert "q (2, 4, 72, 16), k and v (2, 2, 72, 16), float32, causal=True" in out
    assert "plain formula" in out and "tiled: only rounding" in out and "sdpa: only rounding" in out
    with mock.patch("conf.compose.build_attention", lambda cfg, name=None: Faulty("scale")):
        assert run("attention=tiled", *shape) == 1
    assert run("attention=naive") == 2 and "both naive" in capsys.readouterr().err
    assert run("attention=sdpa", "softcap=3") == 2 and "softcap" in capsys.readouterr().err
    assert run("attention=sdpa", "dtype=int8") == 2 and "error: dtype=int8:" in capsys.readouterr().err
    assert run("attention=sdpa", f"seq_len={2**40}") == 2  # not 1, which is a fault
    assert "Out of memory" in capsys.readouterr().err


def test_in_a_trained_model(tmp_path: Path, capsys) -> None:
    steps = ("trainer.max_steps=2", "trainer.val_check_interval=2")
    assert train_here(tmp_path, "name=a", *steps).code == 0
    with contextlib.chdir(tmp_path):
        asked = ("ckpt=last", "text=attention is all you need", "attention=tiled")
        assert run(*asked) == 0
        out = capsys.readouterr().out
        assert "16 of the text's 24 predictions" in out and "100.0%" in out and "layer" in out
        with mock.patch("conf.compose.build_attention", lambda cfg, name=None: Faulty("head")):
            assert run(*asked, "dtype=bf16") == 1
        assert "BUG in tiled: the error of layer" in capsys.readouterr().out
        assert run("ckpt=last", "text=a") == 2 and "at least two" in capsys.readouterr().err


def test_help_waits_for_nothing() -> None:
    code = "import sys; sys.argv.append('--help'); from scripts.compare import main; main()"
    code += "; print({'torch', 'hydra'} & set(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "rounding error, or a bug" in out.stdout and out.stdout.endswith("set()\n")
