"""SDPA's backends: what is forced runs, and PyTorch's own reasons against it are passed on.

Without a GPU PyTorch's `can_use_*` are stood in for by functions that say what they are asked, and warn.
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
from tests.grid import Case, make_inputs

CAN_USE = {
    "flash": "can_use_flash_attention",
    "efficient": "can_use_efficient_attention",
    "cudnn": "can_use_cudnn_attention",
}
ENABLED = {
    "flash": torch.backends.cuda.flash_sdp_enabled,
    "efficient": torch.backends.cuda.mem_efficient_sdp_enabled,
    "cudnn": torch.backends.cuda.cudnn_sdp_enabled,
    "math": torch.backends.cuda.math_sdp_enabled,
}
BIAS_GRAD = frozenset({"bias", "bias_grad"})


def _call(**changes: Any) -> AttentionCall:
    shape = {"batch": 8, "heads": 6, "kv_heads": 6, "tq": 5, "tk": 5, "head_dim": 64}
    kind = {"purpose": "training", "device": "cuda", "arch": (9, 0), "dtype": torch.bfloat16}
    return AttentionCall(**(kind | shape | {"backward": True} | changes))


class _Library:
    """Stands in for `can_use_*`: keeps what it was asked, says `words`, and so refuses; silent, it agrees."""

    def __init__(self, *words: str, agrees: bool = False):
        self.words, self.agrees = words, agrees
        self.enabled: set[str] = set()
        self.asked: Any = None
        self.loud = False

    def __call__(self, params: Any, debug: bool = False) -> bool:
        assert debug  # without it PyTorch gives no reasons
        self.asked, self.loud = params, torch.is_warn_always_enabled()
        self.enabled = {name for name, enabled in ENABLED.items() if enabled()}
        for word in self.words:
            warnings.warn(word, UserWarning, stacklevel=1)
        return self.agrees


@pytest.mark.parametrize("backend", CAN_USE)
def test_the_librarys_words_are_passed_on(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    library = _Library(
        "head_dim should be a multiple of 8 (Triggered internally at sdp_utils.cpp:573.)", "And more."
    )
    monkeypatch.setattr(torch.backends.cuda, CAN_USE[backend], library)
    expected = [
        f"SDPA's {backend} kernel: head_dim should be a multiple of 8",
        f"SDPA's {backend} kernel: And more.",
    ]
    for _ in range(2):  # a filter that lets a warning through once must not silence the second
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert sdpa._library_reasons(backend, _call(), False, "cpu") == expected
    assert library.enabled == {backend}
    # Words that PyTorch says once in a process are said again, and only here.
    assert library.loud and not torch.is_warn_always_enabled()


@pytest.mark.parametrize("backend", CAN_USE)
def test_silence(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, CAN_USE[backend], _Library(agrees=True))
    assert sdpa._library_reasons(backend, _call(), False, "cpu") == []
    monkeypatch.setattr(torch.backends.cuda, CAN_USE[backend], _Library("Only a remark.", agrees=True))
    assert sdpa._library_reasons(backend, _call(), False, "cpu") == []
    monkeypatch.setattr(torch.backends.cuda, CAN_USE[backend], _Library())
    assert sdpa._library_reasons(backend, _call(), False, "cpu") == [
        f"SDPA's {backend} kernel refuses, without a word"
    ]


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
    monkeypatch.setattr(torch.backends.cuda, "can_use_efficient_attention", library)
    call = _call(**changes)
    sdpa._library_reasons("efficient", call, masked, "cpu")
    asked, group = library.asked, call.heads // call.kv_heads
    assert asked.query.shape == (1, group, call.tq, 64) and asked.key.shape == (1, 1, call.tk, 64)
    assert asked.query.dtype == call.dtype and asked.query.requires_grad == call.backward
    got = asked.attn_mask
    assert mask == (None if got is None else (got.dtype, tuple(got.shape), got.requires_grad))
    assert asked.is_causal == causal and asked.enable_gqa == (group > 1)
    assert (asked.dropout > 0) == ("dropout" in call.features)


@pytest.mark.parametrize("backend", CAN_USE)
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
        attention.unsupported_reasons(_call(features=frozenset({"segments"})))
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


def _ops(backend: str, device: str, features: frozenset[str] = frozenset()) -> list[str]:
    inputs = make_inputs(Case("ops", 32, 32, 64, features=features), device, torch.bfloat16)
    with _Ops() as ops, torch.no_grad():
        SDPAAttention(backend)(inputs.q, inputs.k, inputs.v, **inputs.options)
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
        assert KERNELS[backend] in _ops(backend, "cuda", frozenset({"bias"}))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("backend", "changes"),
    [("flash", {"head_dim": 512}), ("cudnn", {"head_dim": 60}), ("cudnn", {"tq": 1, "tk": 1})],
)
def test_the_library_has_words_each_time(backend: str, changes: dict[str, Any]) -> None:
    first, second = (SDPAAttention(backend).unsupported_reasons(_call(**changes)) for _ in range(2))
    assert first == second
    assert first or changes.get("tk") == 1  # which not every version refuses
    assert all(f"SDPA's {backend} kernel: " in reason for reason in first)
