"""SDPA's backends: what is forced runs, and PyTorch's own reasons against it are passed on.

Without a GPU PyTorch's chooser is asked about its CPU kernel, or stood in for by one that keeps what it is
asked.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from attention import sdpa
from attention.base import AttentionCall, UnsupportedAttention
from attention.sdpa import SDPAAttention
from ops.options import AttentionOptions
from tests.grid import Case, make_inputs

FORCED = ("flash", "efficient", "cudnn")
ENABLED = {
    "flash": torch.backends.cuda.flash_sdp_enabled,
    "efficient": torch.backends.cuda.mem_efficient_sdp_enabled,
    "cudnn": torch.backends.cuda.cudnn_sdp_enabled,
    "math": torch.backends.cuda.math_sdp_enabled,
}
PLAIN = AttentionOptions(scale=1.0)
BIAS_GRAD = frozenset({"bias", "bias_grad"})


def _call(**changes: Any) -> AttentionCall:
    shape = {"batch": 8, "heads": 6, "kv_heads": 6, "tq": 5, "tk": 5, "head_dim": 64}
    kind = {"purpose": "training", "device": "cuda", "arch": (9, 0), "dtype": torch.bfloat16}
    return AttentionCall(**(kind | shape | {"backward": True} | changes))


# What PyTorch 2.11 says when no kernel is left: all three kernels have their say.
SPEECH = """Memory efficient kernel not used because:
Of efficient. (Triggered internally at sdp_utils.cpp:898.)
Flash attention kernel not used because:
Of flash. (Triggered internally at sdp_utils.cpp:900.)
And more of flash.
cuDNN attention kernel not used because:
Of cudnn.""".splitlines()
OWN_WORDS = {
    "flash": ["Of flash.", "And more of flash."],
    "efficient": ["Of efficient."],
    "cudnn": ["Of cudnn."],
}


class _Library:
    """Stands in for torch._fused_sdp_choice: keeps what it was asked, warns of `words`, and may give up."""

    def __init__(self, *words: str, agrees: bool = False):
        self.words, self.agrees = words, agrees
        self.enabled: set[str] = set()
        self.asked: tuple[Any, ...] = ()
        self.loud = False

    def __call__(self, *asked: Any, enable_gqa: bool = False) -> int:
        self.asked, self.loud = (*asked, enable_gqa), torch.is_warn_always_enabled()
        self.enabled = {name for name, enabled in ENABLED.items() if enabled()}
        for word in self.words:
            warnings.warn(word, UserWarning, stacklevel=1)
        if not self.agrees:
            raise RuntimeError("No available kernel. Aborting execution.\nException raised from ...")
        return 0


@pytest.mark.parametrize("backend", FORCED)
def test_the_librarys_words_are_passed_on(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    library = _Library(*SPEECH)
    monkeypatch.setattr(torch, "_fused_sdp_choice", library)
    expected = [f"SDPA's {backend} kernel: {word}" for word in OWN_WORDS[backend]]
    for _ in range(2):  # a filter that lets a warning through once must not silence the second
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert sdpa._library_reasons(backend, _call(), False, "cpu") == expected
    assert library.enabled == {backend}
    # Words that PyTorch says once in a process are said again, and only here.
    assert library.loud and not torch.is_warn_always_enabled()


@pytest.mark.parametrize("backend", FORCED)
def test_silence(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for words in ((), ("Only a remark.",)):
        monkeypatch.setattr(torch, "_fused_sdp_choice", _Library(*words, agrees=True))
        assert sdpa._library_reasons(backend, _call(), False, "cpu") == []
    monkeypatch.setattr(torch, "_fused_sdp_choice", _Library())
    assert sdpa._library_reasons(backend, _call(), False, "cpu") == [
        f"SDPA's {backend} kernel: No available kernel. Aborting execution."
    ]


def test_real_words() -> None:
    """PyTorch's own, of its CPU kernel."""
    assert sdpa._library_reasons("flash", _call(), False, "cpu") == []
    assert sdpa._library_reasons("flash", _call(features=frozenset({"bias"})), True, "cpu") == []
    for _ in range(2):
        (reason,) = sdpa._library_reasons("flash", _call(features=frozenset({"dropout"})), False, "cpu")
        assert "SDPA's flash kernel: " in reason and "dropout" in reason
    with torch.no_grad():  # a call with a backward, asked about from outside of one
        assert sdpa._library_reasons("flash", _call(features=BIAS_GRAD), True, "cpu")
    assert sdpa._library_reasons("efficient", _call(), False, "cpu")  # there is none


@pytest.mark.parametrize(
    ("changes", "masked", "mask", "causal"),
    [
        ({}, False, None, True),
        ({"causal": False}, False, None, False),
        ({"tq": 1}, False, None, False),  # one query sees every key
        ({"tq": 3}, True, (torch.bool, (1, 1, 3, 5), False), False),
        ({"features": frozenset({"window"})}, True, (torch.bool, (1, 1, 5, 5), False), False),
        ({"features": frozenset({"alibi"})}, True, (torch.bfloat16, (1, 1, 5, 5), False), False),
        ({"features": frozenset({"bias"})}, True, (torch.bfloat16, (1, 1, 5, 5), False), False),
        ({"features": BIAS_GRAD}, True, (torch.bfloat16, (1, 1, 5, 5), True), False),
        ({"features": BIAS_GRAD, "kv_heads": 2}, True, (torch.bfloat16, (1, 3, 5, 5), True), False),
        ({"features": frozenset({"dropout"}), "kv_heads": 2}, False, None, True),
        ({"backward": False, "dtype": torch.float16}, False, None, True),
    ],
)
def test_the_library_is_asked_about_the_call(
    changes: dict[str, Any], masked: bool, mask: Any, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = _Library(agrees=True)
    monkeypatch.setattr(torch, "_fused_sdp_choice", library)
    call = _call(**changes)
    sdpa._library_reasons("efficient", call, masked, "cpu")
    (q, k, v, got, dropout, is_causal, gqa), group = library.asked, call.heads // call.kv_heads
    assert q.shape == (1, group, call.tq, 64) and k.shape == v.shape == (1, 1, call.tk, 64)
    assert q.dtype == call.dtype and q.requires_grad == call.backward
    assert mask == (None if got is None else (got.dtype, tuple(got.shape), got.requires_grad))
    if got is not None:  # the kernels want a last stride of 1, as live masks have; a row is all it costs
        assert got.stride(-1) == 1 and got.untyped_storage().nbytes() == call.tk * got.element_size()
    assert is_causal == causal and gqa == (group > 1)
    assert (dropout > 0) == ("dropout" in call.features)


def test_live_masks_have_a_last_stride_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    masks: list[Any] = []

    def library(q: Any, k: Any, v: Any, mask: Any, *rest: Any, **options: Any) -> Any:
        masks.append(mask)
        return torch.zeros_like(q)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", library)
    for tq, tk in ((5, 7), (5, 1), (1, 7)):
        q, k = torch.zeros(2, 3, tq, 8), torch.zeros(2, 3, tk, 8)
        transposed, channels_last = (
            torch.zeros(2, 3, tk, tq).mT,
            torch.zeros(tq, tk, 2, 3).permute(2, 3, 0, 1),
        )
        for bias in (transposed, channels_last, torch.zeros(3, tq, 1), torch.zeros(tk)):
            SDPAAttention("efficient").attend(q, k, k, PLAIN._replace(bias=bias), None)
            SDPAAttention("efficient").attend(q, k, k, PLAIN._replace(bias=bias, window=(2, 0)), None)
    assert len(masks) == 24 and all(mask.stride(-1) == 1 for mask in masks)


def test_a_right_bound_under_causal_needs_no_mask() -> None:
    """It says nothing, so that AttentionCall does not name it; the flash kernel on CUDA has no masks."""
    ops = _ops("flash", "cpu", window=(-1, 3))
    assert ops == _ops("flash", "cpu") and "where" not in ops


@pytest.mark.parametrize("backend", FORCED)
def test_the_library_is_asked_last_and_refuses_for_all(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def reasons(backend: str, call: AttentionCall, masked: bool) -> list[str]:
        asked.append(masked)
        return ["no luck"]

    monkeypatch.setattr(sdpa, "_library_reasons", reasons)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    attention = SDPAAttention(backend, f"sdpa_{backend}")
    assert attention.unsupported_reasons(_call()) == ["no luck"]
    with pytest.raises(UnsupportedAttention, match="no luck"):
        attention.require(_call())
    own = attention.unsupported_reasons(_call(dtype=torch.float32))
    assert len(own) == 1 and "float32" in own[0] and asked == [False, False]
    if backend != "flash":
        attention.unsupported_reasons(_call(features=frozenset({"document_ids"})))
        attention.unsupported_reasons(_call(tq=3))
        assert asked[2:] == [True, True]


@pytest.mark.parametrize(
    ("backend", "changes", "words"),
    [
        ("flash", {"features": frozenset({"window", "bias"})}, ["no bias", "no window"]),
        ("flash", {"tq": 3}, ["Tq = Tk or Tq = 1"]),
        ("flash", {"device": "cpu", "arch": None, "features": frozenset({"dropout"})}, ["no dropout"]),
        ("efficient", {"dtype": torch.float32}, ["no float32"]),
        ("efficient", {"kv_heads": 2}, ["no gqa"]),
        ("cudnn", {"tq": 192, "tk": 192, "backward": True, "features": frozenset({"window"})}, ["192 keys"]),
        ("cudnn", {"tq": 192, "tk": 192, "backward": True}, []),
        ("efficient", {"device": "cpu", "arch": None}, ["efficient kernel has no cpu: it runs on cuda"]),
        ("cudnn", {"features": frozenset({"bias", "bias_grad"})}, ["no bias_grad"]),
        ("cudnn", {"features": frozenset({"lse", "softcap"})}, ["no lse", "no softcap"]),
        ("cudnn", {"device": "cpu", "arch": None}, ["cudnn kernel has no cpu: it runs on cuda"]),
        ("math", {"features": frozenset({"softcap"})}, ["no softcap"]),
        ("auto", {"features": frozenset({"window", "bias", "bias_grad"}), "dtype": torch.float32}, []),
    ],
)
def test_what_each_backend_lacks(
    backend: str, changes: dict[str, Any], words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    reasons = SDPAAttention(backend).unsupported_reasons(_call(**changes))
    assert len(reasons) == len(words)
    assert all(word in reason for word, reason in zip(words, reasons, strict=True)), reasons


def test_unknown_backend() -> None:
    with pytest.raises(ValueError, match="backend is 'fast'; SDPA has auto, flash, efficient, cudnn, math"):
        SDPAAttention("fast")


class _Ops(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


KERNELS = {
    "flash": "_scaled_dot_product_flash_attention",
    "efficient": "_scaled_dot_product_efficient_attention",
    "cudnn": "_scaled_dot_product_cudnn_attention",
}


def _ops(backend: str, device: str, *features: str, **options: Any) -> list[str]:
    inputs = make_inputs(Case("ops", 32, 32, 64, features=frozenset(features)), device, torch.bfloat16)
    with _Ops() as ops, torch.no_grad():
        SDPAAttention(backend)(inputs.q, inputs.k, inputs.v, **(inputs.options | options))
    return [name.split(".")[0] for name in ops.names]


def test_forced_kernel_runs_on_a_cpu() -> None:
    assert "_scaled_dot_product_flash_attention_for_cpu" in _ops("flash", "cpu")
    math = _ops("math", "cpu")
    assert "_softmax" in " ".join(math) and not any("flash" in name for name in math)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", KERNELS)
def test_forced_kernel_runs_on_cuda(backend: str) -> None:
    assert KERNELS[backend] in _ops(backend, "cuda")
    if backend != "flash":
        for feature in ("bias", "alibi", "window", "document_ids", "kv_lengths"):
            assert KERNELS[backend] in _ops(backend, "cuda", feature)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("backend", "changes", "word"),
    [
        ("flash", {"head_dim": 512}, "256"),
        ("efficient", {"head_dim": 60}, "divisible by 8"),
        ("cudnn", {"head_dim": 60}, "multiple of 8"),
        ("cudnn", {"tq": 1, "tk": 1}, "sequence length 1"),
    ],
)
def test_the_library_has_words_each_time(backend: str, changes: dict[str, Any], word: str) -> None:
    first, second = (SDPAAttention(backend).unsupported_reasons(_call(**changes)) for _ in range(2))
    assert first == second and len(first) == 1
    assert first[0].startswith(f"SDPA's {backend} kernel: ") and word in first[0]
