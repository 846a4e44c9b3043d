"""What makes no sense is refused with the words of what was given and what is needed."""

from __future__ import annotations

import pytest
import torch

from attention.base import AttentionCall, AttentionOptions, Capabilities, UnsupportedAttention
from attention.naive import NaiveAttention
from ops.library import unpacked

Q, K = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 5, 8)
INTS = torch.ones(2, 6, dtype=torch.int32)

BAD_INPUTS = {
    "three dimensions": (Q[0], K[0], K[0], {}, "4 dimensions"),
    "k and v differ": (Q, K, K[:, :, 1:], {}, "same shape"),
    "batch differs": (Q, K[:1], K[:1], {}, "same batch"),
    "heads do not divide": (Q[:, :3], K, K, {}, "query heads (3) need to be a multiple of the key heads (2)"),
    "dtypes differ": (Q, K.bfloat16(), K, {}, "got q torch.float32, k torch.bfloat16"),
    "integers": (Q.int(), K.int(), K.int(), {}, "floating"),
    "last dimension strided": (Q.transpose(2, 3).contiguous().transpose(2, 3), K, K, {}, "contiguous"),
    "window of three": (Q, K, K, {"window": (1, 2, 3)}, "(left, right)"),
    "window below -1": (Q, K, K, {"window": (-2, 0)}, "window is (-2, 0)"),
    "scale of infinity": (Q, K, K, {"scale": float("inf")}, "scale is inf"),
    "softcap of infinity": (Q, K, K, {"softcap": float("inf")}, "softcap is inf"),
    "keys alone": (Q, K, None, {}, "k without v"),
    "softcap of zero": (Q, K, K, {"softcap": 0.0}, "softcap is 0.0"),
    "dropout of one": (Q, K, K, {"dropout_p": 1.0}, "dropout_p is 1.0"),
    "slopes per key head": (Q, K, K, {"alibi_slopes": torch.ones(2)}, "one slope per query head, (4,)"),
    "slopes of other rows": (
        Q,
        K,
        K,
        {"alibi_slopes": torch.ones(3, 4)},
        "per batch row and query head, (2, 4)",
    ),
    "learned slopes": (Q, K, K, {"alibi_slopes": torch.ones(4, requires_grad=True)}, "constants"),
    "bias that does not fit": (
        Q,
        K,
        K,
        {"bias": torch.ones(5, 6)},
        "broadcasts to (B, Hq, Tq, Tk) = (2, 4, 6, 5)",
    ),
    "boolean bias": (Q, K, K, {"bias": torch.ones(6, 5) > 0}, "floating-point"),
    "relative bias of two sides": (Q, K, K, {"relative_bias": torch.ones(4, 6)}, "(4, 2 R + 1) with R at"),
    "relative bias per key head": (Q, K, K, {"relative_bias": torch.ones(2, 5)}, "(4, 2 R + 1) with R at"),
    "one tensor of document ids for two lengths": (Q, K, K, {"document_ids": INTS}, "pass a pair"),
    "document ids too short": (Q, K, K, {"document_ids": (INTS, INTS)}, "(B, T) = (2, 5)"),
    "int64 document ids": (Q, Q, Q, {"document_ids": INTS.long()}, "torch.int32"),
    "lengths per head": (Q, K, K, {"kv_lengths": INTS[0]}, "one length per sequence, (2,)"),
    "int64 lengths": (Q, K, K, {"kv_lengths": torch.tensor([1, 2])}, "torch.int32"),
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("case", BAD_INPUTS)
def test_bad_inputs(case: str, compiled: bool) -> None:
    q, k, v, options, words = BAD_INPUTS[case]
    attention = NaiveAttention()
    if compiled:
        torch._dynamo.reset()
        attention = torch.compile(attention, backend="eager")
    with pytest.raises(ValueError) as error:
        attention(q, k, v, **options)
    assert words in str(error.value) and not isinstance(error.value, UnsupportedAttention)


@pytest.mark.parametrize("name", ["scale", "softcap", "dropout_p"])
def test_numbers_are_no_tensors(name: str) -> None:
    """Whose value no check reads, and whose gradient would be lost."""
    with pytest.raises(ValueError, match=f"{name} is a Tensor; it needs a number"):
        NaiveAttention()(Q, K, K, **{name: torch.tensor(0.5)})


def test_a_verdict_is_kept_for_the_same_call_only() -> None:
    attention = NaiveAttention()
    attention(Q, K, K, window=(1, 0))
    attention(Q, K, K, window=[2, None])  # a list, as configs have them
    with pytest.raises(ValueError):
        attention(Q, K, K, window=(1, -3))
    slopes = torch.ones(Q.shape[1])
    attention(Q, K, K, alibi_slopes=slopes)
    with pytest.raises(ValueError, match="bias"):
        attention(Q, K, K, bias=slopes)  # as large, in another place
    pair = (INTS, INTS[:, :5])
    attention(Q, K, K, document_ids=pair)
    with pytest.raises(ValueError):
        attention(Q, K, K, document_ids=(INTS, INTS))


def test_views_are_compared_in_each_call() -> None:
    """Of packed inputs, also where dimensions of one entry have any stride; their key has no addresses."""
    attention = NaiveAttention()
    for batch, heads, kv_heads, tokens in ((2, 4, 2, 6), (1, 2, 1, 1), (1, 1, 1, 5)):
        qkv = torch.randn(batch, tokens, (heads + 2 * kv_heads) * 8)
        views = unpacked(qkv, heads, kv_heads)
        split = qkv.split((heads * 8, kv_heads * 8, kv_heads * 8), dim=-1)
        for q, k, v in (views, [x.unflatten(-1, (-1, 8)).transpose(1, 2) for x in split]):
            attention(q, k, v, packed=qkv)
        q, k, v = views
        for other in ((torch.zeros_like(q), k, v), (q, torch.zeros_like(k), v), (q, v, k)):
            with pytest.raises(ValueError, match="no view of packed"):
                attention(*other, packed=qkv)


@pytest.mark.parametrize("shape", [(0, 6, 64), (2, 0, 64)])
def test_packed_inputs_may_be_empty(shape: tuple[int, int, int]) -> None:
    """Without an address."""
    qkv = torch.randn(shape, requires_grad=True)
    out = NaiveAttention()(*unpacked(qkv, 4, 2), packed=qkv)
    assert torch.autograd.grad(out.sum(), qkv)[0].shape == qkv.shape


def test_all_reasons_and_remedies() -> None:
    able = Capabilities(
        devices=frozenset({"cuda"}), dtypes=frozenset({torch.bfloat16}), min_arch=(9, 0), max_head_dim=128,
        head_dim_multiple=8, features=frozenset({"bias"}), forward_only_features=frozenset({"bias"}),
    )  # fmt: skip
    call = AttentionCall(
        "training",
        "mps",
        (8, 0),
        torch.float32,
        1,
        4,
        2,
        8,
        8,
        129,
        features=frozenset({"window", "bias"}),
        backward=True,
    )
    text = "\n".join(able.reasons(call))
    for word in (
        "model.window=null",
        "model.n_kv_head=null",
        "no mps",
        "no float32",
        "sm_80",
        "sm_90",
        "129",
        "with bias",
    ):
        assert word in text, (word, text)
    assert able.reasons(AttentionCall("training", "cuda", (9, 0), torch.bfloat16, 1, 4, 4, 8, 8, 64)) == []


def test_a_call_implies_what_its_shape_says() -> None:
    call = AttentionCall("decode", "cpu", None, torch.float32, 1, 4, 2, 1, 8, 64, causal=False)
    assert call.features == {"gqa", "rectangular", "noncausal"}
    with pytest.raises(ValueError, match="unknown attention features"):
        AttentionCall("decode", "cpu", None, torch.float32, 1, 4, 4, 1, 8, 64, features=frozenset({"magic"}))
    live = AttentionCall.of(Q, K, K, AttentionOptions(window=(-1, 3), document_ids=INTS))
    assert live.features == {"gqa", "rectangular", "document_ids"}  # causal has no right side


@pytest.mark.parametrize("shape", [(0, 4, 4), (2, 0, 4), (2, 4, 0)])
def test_empty_inputs_have_gradients(shape: tuple[int, int, int]) -> None:
    batch, tq, tk = shape
    q, k = torch.randn(batch, 2, tq, 8, requires_grad=True), torch.randn(batch, 2, tk, 8, requires_grad=True)
    out, lse = NaiveAttention()(q, k, k, return_lse=True)
    assert out.shape == q.shape and not out.any() and (lse == -torch.inf).all()
    out.sum().backward()
    assert not q.grad.any() and not k.grad.any()
