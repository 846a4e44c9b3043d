"""The GPT: names, initialisation, every option, the loss, and what reaches the attention contract."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from attention.base import FEATURES, Attention, Capabilities
from attention.naive import NaiveAttention
from model.gpt import GPT, Block, GPTConfig, alibi_slopes, apply_rope, rope_table, without_storage

TINY: dict[str, Any] = {"vocab_size": 50, "seq_len": 16, "n_layer": 2, "n_head": 4, "n_embd": 32}


class Spy(Attention):
    """The reference, remembering what it was asked."""

    capabilities = Capabilities(features=frozenset(FEATURES))

    def __init__(self) -> None:
        super().__init__("spy")
        self.naive = NaiveAttention()
        self.calls: list[dict[str, Any]] = []

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        self.calls.append({"q": q, "k": k, "v": v, **options})
        return self.naive(q, k, v, **options)


def build(seed: int = 0, checkpointing: bool = False, **changes: Any) -> tuple[GPT, Spy]:
    torch.manual_seed(seed)
    spy = Spy()
    return GPT(GPTConfig(**{**TINY, **changes}), spy, checkpointing=checkpointing), spy


def tokens(batch: int = 2, length: int = 16, seed: int = 1) -> Tensor:
    return torch.randint(50, (batch, length), generator=torch.Generator().manual_seed(seed))


def test_names_and_shapes_are_gpt2s() -> None:
    net, _ = build(n_layer=1)
    block = {
        "ln_1.weight": (32,), "ln_1.bias": (32,), "attn.c_attn.weight": (96, 32), "attn.c_attn.bias": (96,),
        "attn.c_proj.weight": (32, 32), "attn.c_proj.bias": (32,), "ln_2.weight": (32,), "ln_2.bias": (32,),
        "mlp.c_fc.weight": (128, 32), "mlp.c_fc.bias": (128,), "mlp.c_proj.weight": (32, 128),
        "mlp.c_proj.bias": (32,),
    }  # fmt: skip
    expected = {
        "transformer.wte.weight": (64, 32), "transformer.wpe.weight": (16, 32),
        **{f"transformer.h.0.{name}": shape for name, shape in block.items()},
        "transformer.ln_f.weight": (32,), "transformer.ln_f.bias": (32,), "lm_head.weight": (64, 32),
    }  # fmt: skip
    assert {name: tuple(value.shape) for name, value in net.state_dict().items()} == expected
    assert net.lm_head.weight is net.transformer.wte.weight


@pytest.mark.parametrize(
    ("changes", "gone", "new"),
    [
        ({"bias": False}, "transformer.h.0.mlp.c_fc.bias", None),
        ({"position": "rope"}, "transformer.wpe.weight", None),
        ({"position": "alibi"}, "transformer.wpe.weight", None),
        ({"position": "t5"}, "transformer.wpe.weight", "transformer.relative_attention_bias.weight"),
        ({"norm": "rmsnorm"}, "transformer.ln_f.bias", None),
        ({"qk_norm": True}, None, "transformer.h.1.attn.q_norm.weight"),
    ],
)
def test_options_add_and_drop_weights(changes: dict, gone: str | None, new: str | None) -> None:
    plain, other = (set(build(**c)[0].state_dict()) for c in ({}, changes))
    assert gone is None or (gone in plain and gone not in other)
    assert new is None or (new in other and new not in plain)
    assert not any("rope" in name or "slopes" in name for name in other)


@pytest.mark.parametrize("position", ["learned", "rope", "alibi", "t5", "none"])
def test_without_storage_are_the_same_names_and_shapes(position: str) -> None:
    changes = {"bias": False, "norm": "rmsnorm", "qk_norm": True} if position == "rope" else {}
    config = GPTConfig(vocab_size=9, seq_len=256, n_layer=1, n_head=2, n_embd=8, position=position, **changes)
    own = GPT(config, NaiveAttention()).state_dict()
    found = without_storage(config).state_dict()
    assert [*found] == [*own] and all(found[name].is_meta for name in found)
    assert all(found[name].shape == own[name].shape and found[name].dtype == own[name].dtype for name in own)


def test_without_storage_there_are_no_large_tables() -> None:
    """Which a config from someone else can make so: here 2^47 angles, and 2^21 slopes."""
    sizes: dict[str, Any] = {"vocab_size": 9, "seq_len": 2**21, "n_layer": 1, "sparsity": "local"}
    rope = without_storage(GPTConfig(**sizes, n_head=1, n_embd=2, head_dim=2**24, position="rope"))
    alibi = without_storage(GPTConfig(**sizes, n_head=2**21, n_embd=2**21, position="alibi"))
    assert not [*rope.buffers(), *alibi.buffers()]


def test_initialisation_is_scaled_by_depth() -> None:
    net, _ = build(n_layer=8, n_embd=128, vocab_size=512)
    block = net.transformer.h[3]
    for module in (block.attn.c_attn, block.mlp.c_fc, net.transformer.wte):
        assert module.weight.std().item() == pytest.approx(0.02, rel=0.05)
    for module in (block.attn.c_proj, block.mlp.c_proj):
        assert module.weight.std().item() == pytest.approx(0.02 / math.sqrt(16), rel=0.05)
    assert not block.attn.c_attn.bias.any()
    assert torch.equal(block.ln_1.weight, torch.ones(128))


def test_loss_at_the_start_is_that_of_a_guess_and_leaves_padding_out() -> None:
    net, _ = build()
    x, y = tokens(), tokens(seed=2)
    y[0, :5] = -1
    logits = net(x)
    assert logits.shape == (2, 16, 64)
    expected = F.cross_entropy(
        logits[..., :50].reshape(-1, 50), y.flatten(), ignore_index=-1, reduction="sum"
    )
    loss = net(x, targets=y)
    assert torch.equal(loss, expected)
    assert loss.item() / 27 == pytest.approx(math.log(50), rel=0.05)
    net(x, targets=y).backward()
    with torch.no_grad():  # of the padding only what the tied matrix gets as an output would move: nothing
        assert not net.lm_head.weight.grad[50:].any()
        net.lm_head.weight[50:] = 100.0
    assert torch.equal(net(x, targets=y), expected)


@pytest.mark.parametrize(
    ("changes", "option", "value"),
    [
        ({"window": 3}, "window", (3, 0)),
        ({"window": 3, "causal": False}, "window", (3, 3)),
        ({"softcap": 0.01}, "softcap", 0.01),
        ({"causal": False}, "causal", False),
        ({"position": "alibi"}, "alibi_slopes", alibi_slopes(4)),
    ],
)
def test_options_reach_the_contract_and_change_the_function(changes: dict, option: str, value: Any) -> None:
    net, spy = build(**changes)
    plain, plain_spy = build(position="none") if option == "alibi_slopes" else build()
    for parameter in (*net.parameters(), *plain.parameters()):  # larger weights, so that scores differ
        parameter.data.mul_(5)
    out, other = net(tokens()), plain(tokens())
    assert len(spy.calls) == 2  # a call a layer
    seen = spy.calls[1][option]
    assert torch.equal(seen, value) if isinstance(value, Tensor) else seen == value
    assert plain_spy.calls[0][option] != seen if not isinstance(value, Tensor) else True
    assert not torch.allclose(out, other, atol=1e-4)
    defaults = {"causal": True, "window": None, "softcap": None, "kv_lengths": None, "document_ids": None}
    assert {key: plain_spy.calls[0][key] for key in defaults} == defaults


@pytest.mark.parametrize(
    "changes", [{"position": p} for p in ("rope", "alibi", "t5", "none")] + [{"norm": "rmsnorm"},
    {"mlp": "swiglu"}, {"qk_norm": True}, {"n_kv_head": 2}, {"n_kv_head": 1}, {"tie_embeddings": False}]
)  # fmt: skip
def test_each_variant_is_another_function_that_trains(changes: dict) -> None:
    net, spy = build(**changes)
    plain, _ = build()
    assert not torch.allclose(net(tokens()), plain(tokens()), atol=1e-5)
    assert spy.calls[0]["k"].shape == (2, changes.get("n_kv_head", 4), 16, 8)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    losses = []
    for _ in range(6):
        losses.append(loss := net(tokens(), targets=tokens(seed=2)))
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is not None for p in net.parameters())
        optimizer.step()
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("position", ["learned", "rope", "alibi", "t5", "none"])
def test_only_none_cannot_tell_the_order_of_the_past(position: str) -> None:
    net, _ = build(position=position, n_layer=1)
    for parameter in net.parameters():
        parameter.data.mul_(5)
    x = tokens(1)
    swapped = x.clone()
    swapped[0, :8] = x[0, :8].flip(0)
    same = torch.allclose(net(x)[0, -1], net(swapped)[0, -1], atol=1e-4)
    assert same == (position == "none")


def test_causal_means_no_token_sees_what_follows() -> None:
    x = tokens(1)
    later = x.clone()
    later[0, 9:] = (x[0, 9:] + 1) % 50
    for changes in ({}, {"position": "rope", "qk_norm": True, "n_kv_head": 2, "mlp": "swiglu"}):
        net, _ = build(**changes)
        assert torch.equal(net(x)[0, :9], net(later)[0, :9])
    net, _ = build(causal=False)
    assert not torch.allclose(net(x)[0, :9], net(later)[0, :9])


def test_document_ids_keep_documents_apart() -> None:
    net, _ = build(position="rope")
    x = tokens(1)
    ids = torch.tensor([[0] * 6 + [1] * 10], dtype=torch.int32)
    other = x.clone()
    other[0, :6] = (x[0, :6] + 1) % 50
    assert torch.equal(net(x, document_ids=ids)[0, 6:], net(other, document_ids=ids)[0, 6:])
    assert not torch.allclose(net(x)[0, 6:], net(other)[0, 6:])


def test_the_two_dropouts_are_apart_and_off_in_eval() -> None:
    for changes, outside, inside in (
        ({"dropout": 0.3}, True, 0.0),
        ({"attn_dropout": 0.4}, False, 0.4),
    ):
        net, spy = build(**changes)
        net.train()
        modules = [m for m in net.modules() if isinstance(m, torch.nn.Dropout)]
        assert {m.p for m in modules} == {changes.get("dropout", 0.0)} and len(modules) == 5
        torch.manual_seed(3)
        net(tokens())
        assert [call["dropout_p"] for call in spy.calls] == [inside] * 2
        assert (net.transformer.drop(torch.ones(100)) == 0).any() == outside
        net.eval()
        assert torch.equal(net(tokens()), net(tokens()))
        assert spy.calls[-1]["dropout_p"] == 0.0


def test_one_dtype_reaches_attention_under_autocast() -> None:
    net, spy = build(position="rope", qk_norm=True)
    with torch.autocast("cpu", torch.bfloat16):
        net(tokens())
    assert {spy.calls[0][name].dtype for name in "qkv"} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("changes", "packed"),
    [({}, True), ({"n_kv_head": 2}, True), ({"position": "rope"}, False), ({"qk_norm": True}, False)],
)
def test_queries_keys_and_values_have_one_gradient_where_nothing_lies_between(
    changes: dict[str, Any], packed: bool
) -> None:
    net, spy = build(**changes)
    net(torch.arange(16).view(2, 8))
    with torch.no_grad():
        net(torch.arange(16).view(2, 8))
    assert [call["packed"] is not None for call in spy.calls] == [packed] * 2 + [False] * 2


def test_heads_and_mlp_may_have_widths_of_their_own() -> None:
    net, spy = build(n_layer=1, head_dim=12, n_kv_head=2, mlp_hidden=40, bias=False, qkv_bias=True)
    block = {
        "ln_1.weight": (32,), "attn.c_attn.weight": (96, 32), "attn.c_attn.bias": (96,),
        "attn.c_proj.weight": (32, 48), "ln_2.weight": (32,), "mlp.c_fc.weight": (40, 32),
        "mlp.c_proj.weight": (32, 40),
    }  # fmt: skip
    assert {name: tuple(x.shape) for name, x in net.transformer.h[0].state_dict().items()} == block
    net(tokens())
    assert spy.calls[0]["q"].shape == (2, 4, 16, 12) and spy.calls[0]["v"].shape == (2, 2, 16, 12)


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_norm_eps_reaches_every_norm(norm: str) -> None:
    usual, other = (
        {m.eps for m in build(norm=norm, norm_eps=e)[0].modules() if hasattr(m, "eps")} for e in (None, 0.1)
    )
    assert (usual, other) == ({1e-5 if norm == "layernorm" else 1e-6}, {0.1})


def test_weights_may_know_more_positions_than_seq_len() -> None:
    net, _ = build(max_positions=40)
    assert net.transformer.wpe.weight.shape == (40, 32) and net(tokens()).shape == (2, 16, 64)


def test_rope_scaling_slows_what_it_says() -> None:
    """Angles of position 1 are the frequencies: of D = 8 and base 10,000 these are 1, 0.1, 0.01, 0.001, which
    turn 15.9, 1.59, 0.159 and 0.0159 times in 100 tokens."""
    plain, linear, llama3 = (
        rope_table(2, 8, 1e4, scaling)[1, 1].double().asin()
        for scaling in (None, ["linear", 4], ["llama3", 4, 1, 4, 100])
    )
    assert torch.allclose(linear, plain / 4, atol=1e-6)
    kept = (100 * 0.1 / (2 * math.pi) - 1) / 3
    expected = plain * torch.tensor([1, kept + (1 - kept) / 4, 1 / 4, 1 / 4]).double()
    assert torch.allclose(llama3, expected, atol=1e-6)


def test_context_sizes_the_position_table_and_too_much_is_refused() -> None:
    net, _ = build(seq_len=24)
    assert net.transformer.wpe.weight.shape == (24, 32)
    assert net(tokens(length=24)).shape == (2, 24, 64)
    with pytest.raises(ValueError, match=r"25 tokens are more than the model's context of 24: .*seq_len"):
        net(tokens(length=25))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_head": 5}, r"model.n_embd=32 does not divide into model.n_head=5 heads: .*\[1, 2, 4, 8\]"),
        ({"n_kv_head": 3}, "model.n_kv_head=3 does not divide model.n_head=4"),
        ({"n_kv_head": 0}, "model.n_kv_head=0"),
        ({"position": "rope", "n_embd": 20}, "rope needs an even head dim, and it is 5: change"),
        ({"position": "rope", "head_dim": 7}, "rope needs an even head dim, and it is 7: change"),
        (
            {"mlp_hidden": 0},
            "model.mlp_hidden=0: it needs to be a whole number, at least 1 and at most 16777216, or null",
        ),
        ({"norm_eps": 0.0}, "model.norm_eps=0.0: it needs to be a number above 0, or null"),
        ({"qkv_bias": 1}, "model.qkv_bias=1: choose true or false"),
        ({"max_positions": 8}, "seq_len=16 is beyond the 8 positions that the weights know"),
        ({"rope_scaling": "yarn"}, r"model.rope_scaling=yarn: it needs to be \[linear, factor\] or"),
        ({"rope_scaling": ["linear", 2, 3]}, r"model.rope_scaling=\['linear', 2, 3\]: it needs to be"),
        ({"rope_scaling": []}, r"model.rope_scaling=\[\]: it needs to be"),
        ({"rope_scaling": {"linear": 2}}, "model.rope_scaling={'linear': 2}: it needs to be"),
        ({"rope_scaling": ["linear", 0]}, "model.rope_scaling: factor=0: it needs to be a number above 0"),
        ({"rope_scaling": ["llama3", 8, 4, 1, 64]}, "low needs to be below high"),
        ({"position": "sinus"}, "model.position=sinus: choose one of learned, rope, alibi, t5, none"),
        ({"norm": "batch"}, "model.norm=batch: choose one of layernorm, rmsnorm"),
        ({"mlp": "relu"}, "model.mlp=relu: choose one of gelu, swiglu"),
        ({"dropout": 1.0}, r"model.dropout=1.0: it needs to be a number, at least 0 and below 1"),
        ({"attn_dropout": -0.1}, r"model.attn_dropout=-0.1"),
        (
            {"window": -1},
            "model.window=-1: it needs to be a whole number, at least 0 and at most 2147483647, or null",
        ),
        ({"softcap": 0.0}, "model.softcap=0.0: it needs to be a number above 0, or null"),
        ({"n_layer": 0}, "model.n_layer=0"),
        ({"seq_len": 0}, "seq_len=0"),
    ],
)
def test_config_errors_name_the_key(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GPTConfig(**{**TINY, **changes})


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_checkpointing_gives_the_same_gradients(dropout: float) -> None:
    gradients = []
    for checkpointing in (False, True):
        net, spy = build(checkpointing=checkpointing, dropout=dropout, attn_dropout=dropout)
        net.train()
        torch.manual_seed(5)
        net(tokens(), targets=tokens(seed=2)).backward()
        gradients.append([p.grad for p in net.parameters()])
        assert len(spy.calls) == (4 if checkpointing else 2)  # recomputed
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_alibi_slopes_are_the_papers() -> None:
    eight = [2.0**-i for i in range(1, 9)]
    assert alibi_slopes(8).tolist() == eight
    between = [2.0 ** -(i + 0.5) for i in range(4)]  # every other of the 16-head sequence
    assert alibi_slopes(12).tolist() == pytest.approx(eight + between)


def test_rope_depends_on_distance_alone() -> None:
    table = rope_table(64, 8, 10_000.0)
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(8, generator=generator) for _ in range(2))

    def score(i: int, j: int) -> float:
        a, b = (apply_rope(x.view(1, 1, 1, 8), table[:, p : p + 1]) for x, p in ((q, i), (k, j)))
        return (a * b).sum().item()

    assert score(5, 2) == pytest.approx(score(43, 40), abs=1e-5)
    assert score(0, 0) == pytest.approx((q @ k).item(), abs=1e-6)
    assert abs(score(5, 2) - score(5, 3)) > 1e-3
    # by hand: the pair (x_0, x_4) turns by one radian a position
    x = torch.tensor([1.0, 0, 0, 0, 0, 0, 0, 0]).view(1, 1, 1, 8)
    turned = apply_rope(x, table[:, 1:2]).flatten()
    assert turned[0].item() == pytest.approx(math.cos(1)) and turned[4].item() == pytest.approx(math.sin(1))


def test_tables_stay_in_fp32() -> None:
    net, _ = build(position="rope")
    expected = net.rope.clone()
    net.to(torch.bfloat16)
    assert net.rope.dtype == torch.float32 and torch.equal(net.rope, expected)


@pytest.mark.parametrize(
    ("part", "name"), [("attn", "c_attn"), ("attn", "c_proj"), ("mlp", "c_fc"), ("mlp", "c_proj")]
)
def test_a_layer_in_the_place_of_a_product_is_not_passed_by(
    part: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adapters, say, which give their base's weight as theirs."""

    class Adapted(torch.nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 1

    for condition in ("fuses", "pays"):
        monkeypatch.setattr(f"model.gpt.{condition}", lambda x, out_features: True)
    torch.manual_seed(0)
    layer = getattr(Block(GPTConfig(vocab_size=50, n_head=2, n_embd=32), NaiveAttention()), part)
    x = torch.randn(2, 3, 32)
    before = layer(x, x)
    getattr(layer, name).__class__ = Adapted
    change = layer(x, x) - before
    if name == "c_proj":
        torch.testing.assert_close(change, torch.ones_like(change), atol=1e-6, rtol=0)
    assert change.abs().min() > 0
