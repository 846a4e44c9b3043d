"""Tiles of fa3 (csrc/ladder/fa3.cu, fa3_backward.cu): which a call takes, their shared memory and defines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# Registers of a thread that copies, and of one that computes, by the warp groups that compute: at most as
# many in all as the launch has, 65,536.
_REGISTERS = {2: (24, 240), 3: (32, 160), 4: (24, 112)}


@dataclass(frozen=True)
class HopperTile:
    """Warp groups that compute, of 64 queries each; keys of a tile; tiles of K and of V in flight; tiles of Q
    that there is room for; whether O is staged in Q's buffer, and whether the groups take turns with the
    tensor cores. `teams`: how many such sets of warp groups a block has, each with tiles of its own, so that
    one computes while another begins or ends a tile."""

    warp_groups: int
    bc: int
    stages: int
    q_stages: int
    o_over_q: bool = False
    ping_pong: bool = True
    teams: int = 1

    def shared_bytes(self, head_dim: int) -> int:
        """Q, K, V and, where it has room of its own, O."""
        rows = 64 * self.warp_groups * (self.q_stages + (not self.o_over_q)) + 2 * self.stages * self.bc
        return 2 * self.teams * tile_head_dim(head_dim) * rows

    def defines(self, head_dim: int) -> dict[str, int]:
        copying, computing = _REGISTERS[self.teams * self.warp_groups]
        return {
            "PADDED_D": tile_head_dim(head_dim),
            "USED_D": used_columns(head_dim, tile_head_dim(head_dim)),
            "TEAMS": self.teams,
            "WARP_GROUPS": self.warp_groups,
            "BC": self.bc,
            "STAGES": self.stages,
            "Q_STAGES": self.q_stages,
            "O_OVER_Q": int(self.o_over_q),
            "PINGPONG": int(self.ping_pong),
            "PRODUCER_REGISTERS": copying,
            "CONSUMER_REGISTERS": computing,
        }


_USED = (32, 64, 80, 96, 112, 128)  # columns that are multiplied, up to 128


def used_columns(head_dim: int, padded: int) -> int:
    """Columns that are multiplied, of `padded` in shared memory."""
    return next((n for n in _USED if n >= head_dim), padded)


# The forward's tiles, by the padded head dim; docs/kernels.md has the speeds that decided (H200).
# Up to 64, for few keys or with options: two teams of two warp groups, which spill with no option alone.
_TEAMS = {
    32: HopperTile(2, 64, 5, q_stages=2, ping_pong=False, teams=2),
    64: HopperTile(2, 64, 5, q_stages=2, o_over_q=True, ping_pong=False, teams=2),
}
# At 64 for more keys: one team of four, which reads K and V from the L2 half as often and needs less power.
_FOUR, _FOUR_KEYS = HopperTile(4, 64, 6, q_stages=1), 1024
# Up to 64 for many keys, except under a causal mask at 64: three warp groups.
_LONG, _LONG_KEYS = HopperTile(3, 128, 3, q_stages=1), 4096
# Beyond 64, two warp groups where three would spill (documents, dropout), at 192 and 256, and up to _FEW_KEYS
# keys, where tiles of 192 queries fit calls badly.
_TWO = {
    96: HopperTile(2, 128, 3, q_stages=2),
    128: HopperTile(2, 128, 2, q_stages=2),
    160: HopperTile(2, 112, 2, q_stages=2, o_over_q=True),
    192: HopperTile(2, 112, 2, q_stages=1, o_over_q=True),
    256: HopperTile(2, 80, 2, q_stages=1, o_over_q=True),
}
_FEW_KEYS = {96: 1024, 128: 512, 160: 256}
# Else three warp groups, on as many keys as their registers hold; 80 for tiles of 128 of which 80 columns are
# multiplied.
_THREE = {
    80: HopperTile(3, 96, 2, q_stages=1),
    96: HopperTile(3, 96, 3, q_stages=1),
    128: HopperTile(3, 80, 3, q_stages=1),
    160: HopperTile(3, 64, 4, q_stages=1, o_over_q=True),
}
# In tiles of 128 columns, on fewer keys with a window or up to _SHORT_KEYS keys: less of a tile is hidden.
_THREE_SHORT, _SHORT_KEYS = HopperTile(3, 64, 3, q_stages=1), 2048
# With a block mask: tiles of queries and keys that blocks of 128 x 128 are whole numbers of.
_SPARSE = _TEAMS | {d: _TWO[d] for d in (96, 128)}
_SPARSE |= {d: HopperTile(2, 64, 2, q_stages=1, o_over_q=True) for d in (160, 192, 256)}


def tile_head_dim(head_dim: int) -> int:
    """The head dim that tiles have: the next there are tiles for.

    For 72 and 80 columns it is 128, of which 80 are multiplied: 1.08x of multiplying 96 of 96 at T = 8k.
    """
    return 128 if 64 < head_dim <= 80 else next(d for d in _SPARSE if d >= head_dim)


def forward_tile(head_dim: int, tk: int, defines: Mapping[str, int | str]) -> HopperTile:
    """The forward's tile for `tk` keys and the options that `defines` names."""
    width = tile_head_dim(head_dim)
    if defines["BLOCK_MASK"]:
        return _SPARSE[width]
    if width <= 64:
        few = tk <= (_FOUR_KEYS if width == 64 else _LONG_KEYS)
        if few or any(defines[name] for name in ("HAS_LEFT", "SOFTCAP", "DOCUMENT_IDS")):
            return _TEAMS[width]
        slower = width == 32 or not defines["HAS_RIGHT"] or defines["ALIBI"] or defines["DROPOUT"]
        return _LONG if slower and tk > _LONG_KEYS else _FOUR
    if tk <= _FEW_KEYS.get(width, tk) or defines["DOCUMENT_IDS"] or defines["DROPOUT"]:
        return _TWO[width]
    if width == 128 and (tk <= _SHORT_KEYS or defines["HAS_LEFT"]):
        return _THREE_SHORT
    return _THREE[width if used_columns(head_dim, width) > 80 else 80]


@dataclass(frozen=True)
class HopperBackwardTile:
    """Queries and keys of a tile; tiles of Q and of dO in flight; whether dQ is a tile late, and whether dK
    is waited for behind S of the next tile; warp groups that compute."""

    br: int
    bc: int
    stages: int
    do_stages: int
    late_dq: bool = False
    late_dk: bool = False
    warp_groups: int = 2

    def shared_bytes(self, head_dim: int) -> int:
        """K, V, at D <= 64 two tiles of each; Q, dO, with lse and delta; two tiles of dS (with three warp
        groups one); dQ; from 65 to 128 dK. For D > 128 as many of P as of dS too, and half of dQ."""
        row, wide = 2 * backward_head_dim(head_dim), backward_head_dim(head_dim) > 128
        scores = (8 if wide and self.warp_groups == 2 else 4) * self.bc
        query_bytes = (self.stages + self.do_stages) * (row + 4) + scores + (row if wide else 2 * row)
        key_tiles = {128: 4, 256: 3}.get(row, 2)
        return key_tiles * self.bc * row + self.br * query_bytes

    def defines(self, head_dim: int) -> dict[str, int]:
        copying, computing = _REGISTERS[self.warp_groups]
        return {
            "PADDED_D": backward_head_dim(head_dim),
            "USED_D": used_columns(head_dim, backward_head_dim(head_dim)),
            "BOX_COLUMNS": backward_columns(head_dim),
            "BR": self.br,
            "STAGES": self.stages,
            "DO_STAGES": self.do_stages,
            "LATE_DQ": int(self.late_dq),
            "LATE_DK": int(self.late_dk),
            "WARP_GROUPS": self.warp_groups,
            "PRODUCER_REGISTERS": copying,
            "CONSUMER_REGISTERS": computing,
        }


_BACKWARD_HEAD_DIMS = (64, 128, 192, 256)  # that tiles have in shared memory
# By the largest head dim.
_BACKWARD = {
    64: HopperBackwardTile(128, 128, 2, 2, late_dq=True),
    128: HopperBackwardTile(64, 128, 2, 2),
    192: HopperBackwardTile(64, 64, 2, 2),
    256: HopperBackwardTile(64, 64, 2, 1),
}
# No option but a causal mask or, up to D = 128, a block mask. On an H200, T = 4k, D = 96 and 128 are 1.03 to
# 1.10x as fast with late dQ and dK as without (a block mask, T = 16k: 1.03 to 1.06x), D = 64 is 1.00 to 1.04x
# as fast as with late dQ alone; with options that is 0.96 to 1.08x (with lengths at D = 128, 228 bytes are
# spilled). At D = 192 fa3_backward_three.cuh, which knows no option, is 1.06 to 1.12x as fast.
_BACKWARD_PLAIN = _BACKWARD | {
    64: HopperBackwardTile(128, 128, 2, 2, late_dq=True, late_dk=True),
    128: HopperBackwardTile(64, 128, 2, 2, late_dq=True, late_dk=True),
    192: HopperBackwardTile(64, 96, 2, 2, warp_groups=3),
}
# With a softcap or dropout, which need P in fp32 until dS is there: at D <= 64 that spills with 128 queries.
_BACKWARD_EXACT = _BACKWARD | {64: HopperBackwardTile(64, 128, 2, 2)}


_OPTIONS = ("SOFTCAP", "DROPOUT", "HAS_LEFT", "DOCUMENT_IDS", "ALIBI", "LENGTHS")


def backward_head_dim(head_dim: int) -> int:
    """The head dim that tiles of the backward have."""
    return next(d for d in _BACKWARD_HEAD_DIMS if d >= head_dim)


def backward_columns(head_dim: int) -> int:
    """Columns of a box in shared memory (hopper.cuh); beyond 128 each half of a row is whole boxes."""
    return 32 if backward_head_dim(head_dim) == 192 else 64


def backward_tile(head_dim: int, defines: Mapping[str, int | str]) -> HopperBackwardTile:
    """The backward's tile for the options that `defines` names."""
    tiles = _BACKWARD_EXACT if defines["SOFTCAP"] or defines["DROPOUT"] else _BACKWARD
    if not any(defines[name] for name in _OPTIONS) and (head_dim <= 128 or not defines["BLOCK_MASK"]):
        tiles = _BACKWARD_PLAIN
    return next(tile for largest, tile in tiles.items() if largest >= head_dim)


def stores_first_dq(tk: int, head_dim: int, defines: Mapping[str, int | str]) -> bool:
    """Whether the first of dQ that comes to a part of its fp32 accumulator is stored there, instead of added
    to zeros that are written first.

    Faster where few tiles of keys are added: on an H200, 16,384 tokens, T = 1k 1.02 to 1.03x (32 query heads
    on 8 1.10x), T = 16k with a window or documents of 1,024 0.99 to 1.03x, with a block mask 1.00 to 1.05x.
    Else slower, as blocks wait for each other and for the states: at T = 4k and 16k 0.94 to 1.02x, at D = 192
    and 256 0.85 to 0.99x.
    """
    if head_dim > 128:
        return False
    return tk <= 1024 or any(defines[name] for name in ("HAS_LEFT", "DOCUMENT_IDS", "BLOCK_MASK"))


def by_query_head(
    tq: int, head_dim: int, heads_per_kv: int, growing: bool, documents: bool, block_mask: bool
) -> bool:
    """Whether blocks of the backward compute dK and dV of one query head each, which are then summed, where
    `heads_per_kv` query heads share K and V; `growing`: see `Call.growing`.

    Under a causal mask, blocks of a K/V head, which go through its query heads in turn, are slower. On an
    H100, with 32 heads on 8, D = 128, T = 1k and 4k, blocks of a query head are 1.13 and 1.38x as fast; with
    16 on 1, 1.27 and 1.69x; without a mask 0.85 and 0.95x, as each query head's dK and dV are written and
    read, in 16 bits. (On an H200 1.14x at 4k, 1.15x at 16k.)
    """
    fewest = 16384 if block_mask else 8192 if documents else 1024
    return growing and tq >= fewest and tq * (heads_per_kv - 1) * head_dim > 1 << 18
