"""The command that says which kernels ran: its verdict, its refusals, and a user's mistakes."""

import sys

import pytest

from conf.command import user_errors
from scripts.which_kernel import FEATURES, main

SMALL = ["batch=1", "heads=2", "seq_len=32", "head_dim=16", "dtype=fp32"]


pytestmark = pytest.mark.usefixtures("on_a_cpu")


@pytest.fixture
def which(monkeypatch, capfd):
    """Runs the command: (exit code, stdout, stderr)."""

    def which(*arguments):
        monkeypatch.setattr(sys, "argv", ["which_kernel.py", *SMALL, *arguments])
        try:
            code = user_errors(main)()
        except SystemExit as stop:
            code = stop.code
        return code, *capfd.readouterr()

    return which


def test_what_was_asked_for_ran(which):
    code, out, _ = which("attention=naive")
    assert code == 0
    assert "asked for naive, ran matrix products on the CPU (aten::bmm)" in out
    assert "q (1, 2, 32, 16)" in out and "forward and backward" in out
    shares = [float(line.split("%")[0]) for line in out.splitlines() if "%" in line]
    assert 99 < sum(shares) < 101


def test_something_else_ran(which):
    code, out, _ = which("attention=sdpa_flash", "attention.backend=math")
    assert code == 1
    assert (
        "asked for sdpa_flash, but ran matrix products on the CPU (aten::bmm), where FlashAttention-2" in out
    )


def test_auto_says_what_it_chose(which):
    code, out, _ = which("attention=auto", "pass=forward")
    assert code == 0 and "auto chose sdpa: the fastest on cpu" in out and "which chose sdpa, ran" in out
    assert "forward only" in out


def test_a_refusal_gives_the_reasons(which):
    code, out, err = which("attention=sdpa_cudnn", "features=softcap")
    assert code == 2 and not out
    assert "no softcap" in err and "SDPA's cudnn kernel has no cpu" in err


def test_too_little_memory_is_no_verdict(which):
    code, out, err = which("attention=sdpa", f"seq_len={2**40}")
    assert code == 2 and not out and err.startswith("error: Out of memory") and "smaller seq_len=" in err


def test_an_old_feature_is_understood_with_a_notice(which):
    code, out, err = which("attention=naive", "features=segments")
    assert code == 0 and "features: document_ids" in out
    assert "note: the command line has segments, which is now called document_ids." in err


@pytest.mark.parametrize("passed", ["both", "decode"])
def test_every_feature_can_be_asked_for(which, passed):
    features = [name for name in FEATURES if name != "bias"]
    code, out, _ = which("attention=naive", f"pass={passed}", f"features={','.join(features)}")
    named = out.splitlines()[0].partition("features: ")[2]
    # under no_grad a bias has no gradient
    assert code == 0 and all(name in named or name == "bias_grad" for name in features)
    assert ("bias_grad" in named) is (passed == "both")


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("atention=naive", "write key=value with a key of attention, batch"),
        ("attention=foo", "attention=foo: choose auto"),
        ("seq_len=0", "seq_len=0: it needs a whole number, at least 1"),
        ("features=windows", "features=windows: choose of window"),
        ("pass=all", "pass=all: choose forward"),
        ("causal=1", "causal=1: choose true, false"),
        ("kv_heads=3", "needs to be a multiple of kv_heads=3"),
        ("attention.backend=x", "backend"),
    ],
)
def test_mistakes_are_one_message(which, argument, words):
    code, _, err = which("attention=sdpa", argument)
    assert code == 1 and words in err and "Traceback" not in err
