"""Refusals before any tensor exists."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch

from attention.base import Attention, Capabilities, UnsupportedAttention
from model.calls import attention_calls, require
from model.config import GPTConfig


class Narrow(Attention):
    """A GPU and nothing that decoding asks for."""

    capabilities: ClassVar[Capabilities] = Capabilities(devices=frozenset({"cuda"}), backward=False)


def test_a_reason_is_said_once_for_all_calls_that_have_it() -> None:
    facts = {"device": torch.device("cpu"), "dtype": torch.float32}
    calls = attention_calls(GPTConfig(vocab_size=8, seq_len=16), 2, 1, **facts)
    with pytest.raises(UnsupportedAttention) as caught:
        require(Narrow("narrow"), list(calls.values()))
    assert caught.value.reasons[0].startswith("training, validation, prefill, decode: no cpu")
    assert [reason.partition(":")[0] for reason in caught.value.reasons[1:]] == [
        "training",
        "decode",
        "decode",
    ]
