"""attention=auto: whom it tries in which order, and what it says."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from attention import auto, registry
from attention.auto import DEFAULT, LAST, AutoAttention, order, table_key
from attention.base import Attention, AttentionCall, Capabilities, UnsupportedAttention
from attention.call import call_fields
from attention.flash_lib import FlashLibAttention
from attention.registry import build
from ops.options import AttentionOptions
from tests.running import ROOT

H100 = (9, 0)
TABLE = {
    (H100, 16, "training", "causal"): (
        (64, 1024, "short other"),
        (64, None, "long other"),
        (128, 1024, "wide short"),
    ),
    (H100, 16, "decode", "causal"): ((128, None, "sdpa_cudnn other"),),
    (H100, 16, "forward", "masked"): ((64, None, "windowed"),),
    (H100, 16, "compiled decode", "masked"): ((None, 1024, "naive other"),),
}


def call(*features: str, **changes) -> AttentionCall:
    facts = {
        "purpose": "call", "device": "cuda", "arch": H100, "dtype": torch.bfloat16, "batch": 1, "heads": 2,
        "kv_heads": 2, "tq": 1024, "tk": 1024, "head_dim": 64, "features": frozenset(features),
        "backward": True,
    }  # fmt: skip
    return AttentionCall(**(facts | changes))


@pytest.fixture
def table(monkeypatch):
    monkeypatch.setattr(auto, "MEASURED", TABLE)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (call(), ("training", "causal")),
        (call(causal=False, backward=False), ("forward", "full")),
        (call("window"), ("training", "masked")),
        (call("softcap"), ("training", "causal")),  # of the scores: no mask
        (call(tq=512), ("training", "masked")),  # bottom-right, which SDPA has to be given as a mask
        (call(tq=1, backward=False), ("decode", "causal")),
        (call("kv_lengths", tq=1, backward=False), ("decode", "masked")),
    ],
)
def test_kinds_of_calls(asked, expected):
    assert table_key(asked) == expected


@pytest.mark.parametrize(
    ("asked", "first", "words"),
    [
        (call(), "short", "causal training, D <= 64, T <= 1,024"),
        (call(tk=1025, tq=1025), "long", "causal training, D <= 64"),
        (call(head_dim=8), "short", "D <= 64"),
        (call(head_dim=96), "wide", "D <= 128"),
        (call(head_dim=256), "wide", "D <= 128"),  # the nearest
        (call(head_dim=128, tq=8192, tk=8192), "wide", "D <= 128, T <= 1,024"),  # no longer one is known
        (call("window", backward=False), "windowed", "masked forward"),
        (call("window"), "short", "causal training"),
        (call("kv_lengths", tq=1, backward=False), "other", "those last that write"),
        (call(tq=1, backward=False), "sdpa_cudnn", "decode, D <= 128"),
    ],
)
def test_the_line_of_the_table(table, asked, first, words):
    found = order(asked)
    assert found.names[0] == first and words in found.source
    assert found.names[-3:] == LAST and found.measured == len(found.names) - 3


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"arch": (8, 0)}, DEFAULT["cuda"]),
        ({"dtype": torch.float32}, DEFAULT["cuda"]),
        ({"causal": False}, DEFAULT["cuda"]),
        ({"device": "cpu", "arch": None}, DEFAULT["cpu"]),
        ({"device": "xpu", "arch": None}, ()),
        ({"arch": (8, 0), "features": frozenset({"window"})}, ("triton", "flex", *LAST)),
    ],
)
def test_the_default_order_where_nothing_is_measured(table, changes, names):
    assert order(call(**changes)).names == names and not order(call(**changes)).measured


def test_a_compiled_step_decodes_in_an_order_of_its_own(table, monkeypatch):
    short, long = (call("kv_lengths", tq=1, tk=tk, backward=False) for tk in (1024, 1025))
    assert order(short, compiled=True).names == ("naive", "other", "sdpa", "tiled")
    assert order(short).names[:2] == ("other", "sdpa_cudnn")
    assert order(call(), compiled=True) == order(call())
    monkeypatch.setattr(auto, "MEASURED", {})
    assert order(short, compiled=True).names == auto.COMPILED_DECODE
    assert order(long, compiled=True).names == ("triton", "flex", *LAST)


class Picky(Attention):
    """Softcap and nothing else; `short` is not installed."""

    capabilities = Capabilities(features=frozenset({"softcap"}))

    def unsupported_reasons(self, call):
        missing = ["Picky 2 is not installed (no module): pip install picky"] if self.name == "short" else []
        return super().unsupported_reasons(call) + missing


@pytest.fixture
def picky(table, monkeypatch):
    made = {name: Picky(name) for name in ("short", "other")}
    monkeypatch.setattr(registry, "build", lambda name: made.get(name) or build(name))
    return AutoAttention()


def test_it_says_what_it_chose_and_what_it_passed_over(picky):
    name, why = picky.choice(call())
    assert name == "other"
    assert why == (
        "the fastest on sm_90 of those measured for causal training, D <= 64, T <= 1,024: short > other > "
        "sdpa > ...; passed over short: Picky 2 is not installed"
    )
    name, why = picky.choice(call("dropout"))
    assert name == "sdpa" and why == (
        "on sm_90 none of those measured for causal training, D <= 64, T <= 1,024 can; the first of sdpa "
        "> tiled > naive that can; passed over short: no dropout, Picky 2 is not installed; other: no dropout"
    )


def test_deterministic_algorithms_are_kept_to(picky, monkeypatch):
    asked = call("softcap")
    assert picky.choice(asked)[0] == "other"
    torch.use_deterministic_algorithms(True)
    try:
        name, why = picky.choice(asked)
        assert name == "tiled" and "other: no deterministic backward" in why
        assert picky.choice(call())[0] == "sdpa"  # PyTorch holds its own operators to it
        line = {(H100, 16, "forward", "causal"): ((64, None, "other"),)}
        monkeypatch.setattr(auto, "MEASURED", line)
        assert picky.choice(call("softcap", backward=False))[0] == "other"  # a forward adds in one order
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_choice_is_made_again_once_warnings_are_errors(picky, monkeypatch):
    """Of a live call: under warn_only the nondeterministic one may run."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: H100)
    asked = call("softcap")
    facts = {
        name: getattr(asked, name) for name in call_fields(*3 * [torch.empty(1, 1, 1, 1)], AttentionOptions())
    }
    try:
        for warn_only, expected in ((True, "other"), (False, "tiled")):
            torch.use_deterministic_algorithms(True, warn_only=warn_only)
            assert picky._memoised_choice(0, False, facts) == expected
    finally:
        torch.use_deterministic_algorithms(False)


def test_flash_attn_is_not_given_what_only_values_can_tell(monkeypatch):
    line = {(H100, 16, "training", "masked"): ((64, None, "flash9 tiled"),)}
    monkeypatch.setattr(auto, "MEASURED", line)
    flash = FlashLibAttention(2)  # which can do all of this, were it here
    flash.unsupported_reasons = lambda call: []
    monkeypatch.setattr(registry, "build", lambda name: flash if name == "flash9" else build(name))
    monkeypatch.setattr(registry, "names", lambda: ["flash9", "naive", "sdpa", "tiled"])
    monkeypatch.setattr(registry, "shared_instance", registry.build)
    assert AutoAttention().choice(call("window"))[0] == "flash9"
    name, why = AutoAttention().choice(call("window", tq=2048))
    assert name == "tiled" and "flash9: not every window for more queries than keys" in why
    name, why = AutoAttention().choice(call("document_ids"))
    assert name == "tiled" and "flash9: reads document ids on the host" in why


def test_nobody_can():
    with pytest.raises(UnsupportedAttention, match="no xpu: runs on"):
        AutoAttention().choice(call(device="xpu", arch=None))


def test_live_calls_are_chosen_by_class_of_length(monkeypatch):
    """Of a call with tensors the class is asked: one key, short, long; and whether the lengths are equal."""
    seen = []
    monkeypatch.setattr(AutoAttention, "choice", lambda self, c, compiled: seen.append(c) or ("naive", ""))
    attention = AutoAttention()
    attention._build("naive")
    for tq, tk in ((1, 1), (1, 5), (7, 7), (3, 1024), (1025, 1025), (1, 4096), (6, 5), (1, 6)):
        q, k = torch.randn(1, 1, tq, 4), torch.randn(1, 1, tk, 4)
        attention.attend(q, k, k, AttentionOptions(scale=1.0), None)
    assert [(c.tq, c.tk) for c in seen] == [
        (1, 1), (1, 1024), (1024, 1024), (1023, 1024), (2048, 2048), (1, 2048), (1025, 1024),
    ]  # fmt: skip


def test_lengths_of_a_compiled_call_are_dynamic_within_their_class():
    counter, attention = CompileCounter(), AutoAttention()
    compiled = torch.compile(lambda q: attention(q, q, q), backend=counter, fullgraph=True)
    for tokens, compilations in ((100, 1), (200, 2), (1024, 2), (1500, 3), (2000, 3)):
        q = torch.randn(1, 1, tokens, 8)
        torch.testing.assert_close(compiled(q), attention(q, q, q))
        assert counter.frame_count == compilations


def test_the_choice_is_marked_as_the_compiler_marks_constants():
    def constant():
        pass

    assert vars(torch.compiler.assume_constant_result(constant)) == vars(AutoAttention._memoised_choice)


def test_every_name_of_an_order_is_in_conf():
    lines = [line for entry in auto.MEASURED.values() for line in entry]
    names = {name for _, _, text in lines for name in text.split()}
    names |= {*LAST, *auto.COMPILED_DECODE}.union(*DEFAULT.values())
    assert names <= set(registry.names())


@pytest.mark.long
def test_auto_is_imported_without_what_it_may_choose():
    """(torch itself may import triton.)"""
    code = "import sys, attention.auto; print(*sorted(m for m in sys.modules if m.startswith('attention.')))"
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = ("auto", "auto_table", "base", "call", "checks", "declaration", "geometry", "registry")
    assert ran.stdout.split() == [f"attention.{name}" for name in loaded]
