"""What a version of the library is refused for: combinations, absence, breakage, another release."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from attention import flash_versions
from attention.base import FEATURES, AttentionCall, UnsupportedAttention
from attention.flash_lib import FlashLibAttention
from attention.flash_versions import VERSIONS
from tests.attention.flash_fakes import fake_library, install
from tests.grid import build


def call_of(**changes: Any) -> AttentionCall:
    plain = AttentionCall("training", "cuda", (9, 0), torch.bfloat16, 2, 4, 4, 32, 32, 64, backward=True)
    return replace(plain, **changes)


def test_what_does_not_go_together(monkeypatch: pytest.MonkeyPatch) -> None:
    def reasons(version: int, *features: str, deterministic: bool = False, **changes: Any) -> list[str]:
        install(monkeypatch, version)
        call = call_of(features=frozenset(features), **changes)
        return FlashLibAttention(version, deterministic).unsupported_reasons(call)

    for version in VERSIONS:
        assert not reasons(version) and not reasons(version, "document_ids", "window", "softcap", "lse")
        assert not reasons(version, "kv_lengths", backward=False)
        assert "no gradient with kv_lengths" in reasons(version, "kv_lengths")[0]
        [both] = reasons(version, "kv_lengths", "document_ids", backward=False)
        assert "document_ids with kv_lengths" in both and FEATURES["document_ids"] in both
        assert (
            "no bias" in reasons(version, "bias")[0] and "float32" in reasons(version, dtype=torch.float32)[0]
        )
        assert "head dim 59" in reasons(version, head_dim=59)[0] and reasons(version, head_dim=264)
    assert not reasons(2, "alibi", "dropout") and len(reasons(3, "alibi", "dropout")) == 2
    assert "dropout with softcap" in reasons(2, "dropout", "softcap")[0]
    assert "alibi with document_ids with lse" in reasons(2, "alibi", "document_ids", "lse")[0]
    assert "sm_80" in reasons(3, arch=(8, 0))[0] and not reasons(2, arch=(8, 0))
    assert "sm_100" in reasons(3, arch=(10, 0))[0] and not reasons(4, arch=(10, 0))
    assert "Blackwell" in reasons(4, arch=(10, 0), head_dim=192)[0] and not reasons(4, head_dim=192)
    assert not reasons(3, head_dim=256)
    assert "deterministic=false" in reasons(3, head_dim=256, deterministic=True)[0]
    with pytest.raises(ValueError, match="version is 5; the flash-attn library has 2, 3, 4"):
        FlashLibAttention(5)


class _Absent:
    """Finds no module of `names`, as if they were not installed."""

    def __init__(self, *names: str):
        self.names = names

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


@pytest.mark.parametrize("version", VERSIONS)
def test_absence(monkeypatch: pytest.MonkeyPatch, version: int) -> None:
    """Refused with the way to install it, beside the reason of the device."""
    for name in [n for n in sys.modules if n.split(".")[0] in ("flash_attn", "flash_attn_interface")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [_Absent("flash_attn", "flash_attn_interface"), *sys.meta_path])
    way = {2: "pip install flash-attn --no-build-isolation", 3: "hopper", 4: "pip install flash-attn-4"}[
        version
    ]
    attention = build(f"flash{version}")
    assert attention.version == version and attention.name == f"flash{version}"
    [reason] = attention.unsupported_reasons(call_of())
    assert f"FlashAttention-{version} is not installed" in reason and way in reason
    reasons = attention.unsupported_reasons(call_of(device="cpu", arch=None))
    assert len(reasons) == 2 and "no cpu" in reasons[0] and way in reasons[1]
    q = torch.randn(1, 2, 4, 16)
    with pytest.raises(UnsupportedAttention, match="is not installed"):
        attention(q, q, q)


@pytest.mark.parametrize("version", VERSIONS)
def test_breakage(monkeypatch: pytest.MonkeyPatch, version: int) -> None:
    """A library that is there and does not import is passed on in its own words."""

    attention = FlashLibAttention(version)
    for error, words in (
        (
            ImportError("flash_attn_2_cuda.so: undefined symbol: _ZN3c105ErrorC2E"),
            "undefined symbol: _ZN3c10",
        ),
        (ModuleNotFoundError("No module named 'cutlass'", name="cutlass"), "No module named 'cutlass'"),
        (OSError("libcudart.so.12: cannot open shared object file"), "libcudart.so.12"),
    ):

        def broken(name: str, error: Exception = error) -> ModuleType:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(flash_versions.importlib, "import_module", broken)
            [reason] = attention.unsupported_reasons(call_of())
        assert "cannot be imported" in reason and words in reason and VERSIONS[version].install in reason


@pytest.mark.parametrize("version", VERSIONS)
def test_another_release(monkeypatch: pytest.MonkeyPatch, version: int) -> None:
    """One whose functions take other parameters, or that has not got them, is refused at start-up."""
    attention, library = FlashLibAttention(version), fake_library(version, [])
    function = next(iter(VERSIONS[version].needs))
    setattr(library, function, lambda q, k, v, softcap, window_size: None)
    install(monkeypatch, version, library)
    [reason] = attention.unsupported_reasons(call_of())
    assert f"{function} takes no window_size_left, window_size_right" in reason
    assert VERSIONS[version].install in reason
    delattr(library, function)
    assert f"{function} takes no" in attention.unsupported_reasons(call_of())[0]

    # A function that torch.library has wrapped still tells its parameters.
    def wrapped(q: torch.Tensor, softcap: float) -> torch.Tensor:
        return q.clone()

    setattr(library, function, torch.library.custom_op("flash_fake::wrapped", wrapped, mutates_args=()))
    assert "window_size_left" in attention.unsupported_reasons(call_of())[0]
