"""fa3, the stage for Hopper: its tiles, what TMA can copy, and on a GPU that no schedule changes a bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from ops.cuda import hopper
from ops.cuda.call import Call
from ops.cuda.hopper_tiles import by_query_head, stores_first_dq
from ops.options import MASK_BLOCK, AttentionOptions
from tests.ops.recorded import SHARED_BYTES

STATIC_BYTES = 1024  # mbarriers and slots, and what the tiles' alignment takes
OF_A_TILE = ("HAS_RIGHT", "HAS_LEFT", "SOFTCAP", "ALIBI", "DROPOUT", "DOCUMENT_IDS", "BLOCK_MASK")


@pytest.mark.parametrize("head_dim", [8, 64, 72, 96, 112, 128, 160, 200, 256])
@pytest.mark.parametrize("tk", [256, 1024, 4096, 16384])
@pytest.mark.parametrize(
    "on", [(), ("HAS_RIGHT",), ("HAS_RIGHT", "HAS_LEFT"), ("SOFTCAP",), ("DOCUMENT_IDS",), ("BLOCK_MASK",)]
)
def test_a_tile_fits(head_dim: int, tk: int, on: tuple[str, ...]) -> None:
    defines = dict.fromkeys(OF_A_TILE, 0) | dict.fromkeys(on, 1)
    tile = hopper.forward_tile(head_dim, tk, defines)
    assert tile.shared_bytes(head_dim) + STATIC_BYTES <= SHARED_BYTES[9, 0]
    found = tile.defines(head_dim)
    assert found["PADDED_D"] >= found["USED_D"] >= head_dim
    if "BLOCK_MASK" in on:  # whole tiles in a block of the mask
        assert MASK_BLOCK % (64 * tile.warp_groups) == MASK_BLOCK % tile.bc == 0
    # of the registers that the launch has
    groups = tile.teams * tile.warp_groups
    each = (1 << 16) // (128 * (groups + 1)) // 8 * 8
    assert found["PRODUCER_REGISTERS"] + groups * found["CONSUMER_REGISTERS"] <= each * (groups + 1)


def test_the_tile_follows_the_call() -> None:
    plain = dict.fromkeys(OF_A_TILE, 0)
    causal = plain | {"HAS_RIGHT": 1}
    window, documents, alibi = (causal | {name: 1} for name in ("HAS_LEFT", "DOCUMENT_IDS", "ALIBI"))
    calls = [(256, causal), (2048, causal), (8192, causal), (8192, plain)]
    calls += [(8192, window), (8192, documents), (8192, alibi)]
    teams, two, three, four = (2, 2), (1, 2), (1, 3), (1, 4)
    for head_dim, expected in {
        32: [(teams, 64), (teams, 64), (three, 128), (three, 128), (teams, 64), (teams, 64), (three, 128)],
        64: [(teams, 64), (four, 64), (four, 64), (three, 128), (teams, 64), (teams, 64), (three, 128)],
        80: [(two, 128), (three, 64), (three, 96), (three, 96), (three, 64), (two, 128), (three, 96)],
        96: [(two, 128), (three, 96), (three, 96), (three, 96), (three, 96), (two, 128), (three, 96)],
        128: [(two, 128), (three, 64), (three, 80), (three, 80), (three, 64), (two, 128), (three, 80)],
        160: [(two, 112), (three, 64), (three, 64), (three, 64), (three, 64), (two, 112), (three, 64)],
        256: [(two, 80)] * 7,
    }.items():
        tiles = [hopper.forward_tile(head_dim, *call) for call in calls]
        assert [((tile.teams, tile.warp_groups), tile.bc) for tile in tiles] == expected


def test_what_tma_can_copy_is_not_copied_before() -> None:
    packed = torch.randn(2, 5, 3, 4, 64, dtype=torch.bfloat16)  # (B, T, 3, H, D)
    q, k, _ = packed.permute(2, 0, 3, 1, 4)
    for x in (q, k, q[:1], q[:, :, ::2], q.contiguous()):
        assert hopper._mappable(x) is x
    wide = torch.randn(2, 4, 5, 68, dtype=torch.bfloat16)
    for x in (wide[..., :64], packed.flatten()[1:1281].view(2, 2, 5, 64), q[:, :1].expand(2, 4, 5, 64)):
        copy = hopper._mappable(x)
        assert copy is not x and copy.is_contiguous() and torch.equal(copy, x)


@pytest.mark.parametrize("head_dim", [8, 64, 72, 128, 136, 200, 256])
@pytest.mark.parametrize(
    "on", [(), ("HAS_RIGHT",), ("SOFTCAP",), ("DROPOUT", "HAS_RIGHT"), ("ALIBI",), ("BLOCK_MASK",)]
)
def test_a_backward_tile_fits(head_dim: int, on: tuple[str, ...]) -> None:
    options = dict.fromkeys(("DROPOUT", "ALIBI", "LENGTHS", *OF_A_TILE), 0)
    tile = hopper.backward_tile(head_dim, options | dict.fromkeys(on, 1))
    assert tile.shared_bytes(head_dim) + STATIC_BYTES <= SHARED_BYTES[9, 0]
    found = tile.defines(head_dim)
    assert found["PADDED_D"] >= found["USED_D"] >= head_dim
    assert found["BR"] == 64 or (found["PADDED_D"], found["BR"]) == (64, 128)
    plain = found["PADDED_D"] <= 128 and set(on) <= {"HAS_RIGHT", "BLOCK_MASK"}
    assert (tile.late_dq and tile.late_dk) == plain
    if "BLOCK_MASK" in on:
        assert MASK_BLOCK % tile.br == MASK_BLOCK % tile.bc == 0
    # a warp group's columns are whole blocks
    shares = found["PADDED_D"] // tile.warp_groups
    assert found["PADDED_D"] <= 128 or shares % found["BOX_COLUMNS"] == 0
    assert 128 * (found["PRODUCER_REGISTERS"] + tile.warp_groups * found["CONSUMER_REGISTERS"]) <= 1 << 16
    assert (tile.warp_groups == 3) == (found["PADDED_D"] == 192 and set(on) <= {"HAS_RIGHT"})
    # P as it was rounded is 0 where dropout hides it, and has no softcap's derivative.
    if {"SOFTCAP", "DROPOUT"} & set(on):
        assert not found["LATE_DQ"] and not found["LATE_DK"] and found["BR"] == 64


@pytest.mark.parametrize(
    ("options", "deterministic", "stage"),
    [
        ({"causal": False, "window": (5, 3)}, 0, "fa3"),
        ({}, 1, "fa2"),
        ({"softcap": 3.0}, 0, "fa3"),
        ({"alibi_slopes": torch.ones(2)}, 0, "fa3"),
        ({"dropout_p": 0.1}, 0, "fa3"),
    ],
    ids=str,
)
def test_which_backward(
    options: dict[str, Any], deterministic: int, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.empty(1, 2, 8, 64, dtype=torch.bfloat16, device="meta")
    monkeypatch.setattr(hopper, "run_backward", lambda *_: "fa3")
    monkeypatch.setattr(hopper, "fa2_backward", lambda *_: "fa2")
    asked = AttentionOptions(scale=0.125, **options), torch.tensor(5), [deterministic], False
    assert hopper.fa3_backward(x, x, x, x, x, x, *asked) == stage


@pytest.mark.parametrize(
    ("tk", "head_dim", "on", "faster"),
    [
        (1024, 128, (), True),
        (1025, 128, (), False),
        (1024, 136, (), False),
        (16384, 128, ("HAS_LEFT",), True),
        (16384, 128, ("DOCUMENT_IDS",), True),
        (16384, 64, ("BLOCK_MASK",), True),
        (16384, 128, ("BLOCK_MASK",), True),
        (1024, 136, ("BLOCK_MASK",), False),
    ],
)
def test_where_dq_is_not_cleared(tk: int, head_dim: int, on: tuple[str, ...], faster: bool) -> None:
    assert stores_first_dq(tk, head_dim, dict.fromkeys(OF_A_TILE, 0) | dict.fromkeys(on, 1)) == faster


@pytest.mark.parametrize(
    ("tq", "head_dim", "heads_per_kv", "others", "faster"),
    [
        (512, 128, 4, (True, False, False), False),
        (1024, 128, 4, (True, False, False), True),
        (1024, 64, 4, (True, False, False), False),
        (2048, 64, 4, (True, False, False), True),
        (2048, 128, 2, (True, False, False), False),
        (4096, 128, 2, (True, False, False), True),
        (4096, 128, 4, (True, True, False), False),
        (8192, 128, 4, (True, True, False), True),
        (8192, 128, 4, (True, False, True), False),
        (16384, 128, 4, (True, False, True), True),
        (16384, 128, 4, (False, False, False), False),
        (16384, 128, 1, (True, False, False), False),
    ],
)
def test_where_blocks_of_a_query_head_are_faster(
    tq: int, head_dim: int, heads_per_kv: int, others: tuple[bool, bool, bool], faster: bool
) -> None:
    assert by_query_head(tq, head_dim, heads_per_kv, *others) == faster


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs sm_90"
)
@pytest.mark.parametrize("head_dim", [64, 128, 192])
def test_the_same_by_query_head(head_dim: int) -> None:
    """But for the rounding of each head's dK and dV."""
    q, dout = torch.randn(2, 2, 8, 1025, head_dim, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, 2, 2, 1153, head_dim, device="cuda", dtype=torch.bfloat16)
    asked = AttentionOptions(scale=head_dim**-0.5)
    out, lse = hopper.fa3_forward(q, k, v, asked)
    tile = hopper.backward_tile(head_dim, Call(q, k, v, asked).defines)
    together, split = (
        hopper.run_backward(dout, q, k, v, out, lse, Call(q, k, v, asked), tile, each)
        for each in (False, True)
    )
    for x, y in zip(together[:3], split[:3], strict=True):
        assert (x.float() - y.float()).norm() < 2**-7 * x.float().norm()


BACKWARD_OPTIONS: list[dict[str, Any]] = [
    {"block_mask": True},
    {"causal": True},
    {"causal": False},
    {"window": (300, 0)},
    {"documents": 200},
    {"softcap": 20.0, "dropout_p": 0.1},
]


def half_of_all_blocks(tq: int, tk: int) -> torch.Tensor:
    """A block mask that keeps half, of 50 heads that each have their own."""
    made = torch.Generator().manual_seed(tq)
    rows, columns = -(-tq // MASK_BLOCK), -(-tk // MASK_BLOCK)
    return (torch.rand(1, 50, rows, columns, generator=made) < 0.5).cuda()


def forward(
    x: tuple[torch.Tensor, ...], options: dict[str, Any], **defines: int
) -> tuple[torch.Tensor, torch.Tensor]:
    call = Call(*x, AttentionOptions(scale=x[0].shape[3] ** -0.5, **options))
    return hopper.run_forward(
        x[0], call, hopper.forward_tile(x[0].shape[3], x[1].shape[2], call.defines), **defines
    )


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs sm_90"
)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("tokens", [63, 129, 191, 193, 385, 1025])
@pytest.mark.parametrize("options", [{"causal": True}, {"causal": False}, {"block_mask": True}], ids=str)
def test_the_same_bits_each_time_and_by_each_schedule(
    head_dim: int, tokens: int, options: dict[str, Any]
) -> None:
    """A race, or an order that barriers do not keep, shows as another bit. A wait that lasts traps."""
    same_bits(head_dim, tokens, options)


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs sm_90"
)
@pytest.mark.usefixtures("many_keys")
@pytest.mark.parametrize("head_dim", [32, 64, 80, 96, 128, 160])
@pytest.mark.parametrize("tokens", [193, 1025])
@pytest.mark.parametrize("causal", [True, False])
def test_the_same_bits_with_the_tiles_for_many_keys(head_dim: int, tokens: int, causal: bool) -> None:
    same_bits(head_dim, tokens, {"causal": causal})


def same_bits(head_dim: int, tokens: int, options: dict[str, Any]) -> None:
    made = torch.Generator("cuda").manual_seed(tokens)
    x = tuple(
        torch.randn(3, 50, tokens, head_dim, device="cuda", dtype=torch.bfloat16, generator=made)
        for _ in range(3)
    )
    if "block_mask" in options:
        options = {"block_mask": half_of_all_blocks(tokens, tokens)}
    out, lse = forward(x, options)
    schedules = [{"PINGPONG": 0}, {"INTRA_GROUP_OVERLAP": 0}, {"PERSISTENT": 0}, {"BOUNDED_WAITS": 1 << 20}]
    for defines in schedules:
        assert all(map(torch.equal, (out, lse), forward(x, options, **defines))), defines
    for _ in range(100):
        assert all(map(torch.equal, (out, lse), forward(x, options)))


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs sm_90"
)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 160, 256])
@pytest.mark.parametrize("tq", [63, 129, 385, 1025])
@pytest.mark.parametrize("options", BACKWARD_OPTIONS, ids=str)
def test_the_same_dk_and_dv_each_time(head_dim: int, tq: int, options: dict[str, Any]) -> None:
    """As in the forward; of dQ the order of the additions may differ, and so its last bits."""
    made = torch.Generator("cuda").manual_seed(tq)
    tk = tq + 127
    q, dout, k, v = (
        torch.randn(3, 50, n, head_dim, device="cuda", dtype=torch.bfloat16, generator=made)
        for n in (tq, tq, tk, tk)
    )
    options = dict(options)
    if documents := options.pop("documents", 0):
        ids = torch.arange(tk, device="cuda", dtype=torch.int32).expand(3, tk) // documents
        options["document_ids"] = ids[:, tk - tq :].contiguous(), ids.contiguous()
    if "block_mask" in options:
        options["block_mask"] = half_of_all_blocks(tq, tk)
    seed = torch.tensor(5, device="cuda") if "dropout_p" in options else None
    asked = AttentionOptions(scale=head_dim**-0.5, **options), seed, [0]
    out, lse = hopper.fa3_forward(q, k, v, *asked)
    chosen = hopper.backward_tile(head_dim, Call(q, k, v, *asked).defines)
    exact = any(name in options for name in ("softcap", "dropout_p"))
    tiles = {chosen, replace(chosen, late_dq=False, late_dk=False)}
    if not exact and head_dim <= 128:
        tiles.add(replace(chosen, late_dq=True, late_dk=True))
    for tile in tiles:

        def backward(**defines: int) -> tuple[torch.Tensor, ...]:
            return hopper.run_backward(dout, q, k, v, out, lse, Call(q, k, v, *asked), tile, **defines)  # noqa: B023

        dq, dk, dv, _ = backward(BOUNDED_WAITS=1 << 20)
        for _ in range(50):
            again = backward()
            assert torch.equal(dk, again[1]) and torch.equal(dv, again[2])
            torch.testing.assert_close(dq, again[0], rtol=2**-7, atol=2**-9)
