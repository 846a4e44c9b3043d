"""How much shared memory a block of each stage of the CUDA ladder takes, from the stages' tables of tiles."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch


def shared_memory(
    stage: str,
    head_dim: int,
    dtype: torch.dtype,
    arch: tuple[int, int],
    max_bytes: int,
    keys: int,
    backward: bool,
) -> dict[str, int]:
    """Bytes by kernel, where a block may use `max_bytes` on a GPU of `arch`, for `keys` keys."""
    if stage == "rowwise":
        return {"row of scores": 4 * keys}
    if stage == "wmma":
        from ops.cuda.wmma import BC, BR, shared_bytes

        return {f"forward, {BR} x {BC}": shared_bytes(head_dim)}
    if stage == "fa1":
        from ops.cuda.tensor_cores import fa1_tile

        tile = fa1_tile(head_dim, max_bytes)
        return {f"forward, {tile.br} x {tile.bc}": tile.shared_bytes(head_dim)}
    if stage in ("fa2", "fa3"):
        made = _fa3(head_dim, keys, backward) if stage == "fa3" else _fa2(head_dim)
        return made | (_fa2_backward(head_dim, max_bytes) if backward and stage == "fa2" else {})
    if stage == "tiled":
        on_tensor_cores = dtype == torch.float32 and arch >= (8, 0)
        return (_split_fp16 if on_tensor_cores else _plain)(head_dim, max_bytes, backward)
    return {}


def fa2_tile(head_dim: int) -> Any:
    """The forward's tile of fa2."""
    from ops.cuda.tensor_cores import _FORWARD, padded

    return _FORWARD[padded(head_dim)]


def _fa2(head_dim: int) -> dict[str, int]:
    tile = fa2_tile(head_dim)
    return {f"forward, {tile.br} x {tile.bc}": tile.shared_bytes(head_dim)}


def _fa3(head_dim: int, keys: int, backward: bool) -> dict[str, int]:
    from ops.cuda.hopper_tiles import _BACKWARD, _BACKWARD_PLAIN, backward_head_dim, forward_tile

    tile = forward_tile(head_dim, keys, defaultdict(int, HAS_RIGHT=1))
    teams = f"{tile.teams} teams, " if tile.teams > 1 else ""
    made = {f"forward, {teams}{64 * tile.warp_groups} x {tile.bc}": tile.shared_bytes(head_dim)}
    if backward:
        width = backward_head_dim(head_dim)
        for back in dict.fromkeys((_BACKWARD[width], _BACKWARD_PLAIN[width])):
            made[f"backward, {back.br} x {back.bc}"] = back.shared_bytes(head_dim)
    return made


def _fa2_backward(head_dim: int, max_bytes: int) -> dict[str, int]:
    from ops.cuda.tensor_cores import backward_tile

    tile = backward_tile(head_dim, max_bytes)
    return {f"backward, {tile.br} x {tile.bc}": tile.shared_bytes(head_dim)}


def _split_fp16(head_dim: int, max_bytes: int, backward: bool) -> dict[str, int]:
    from ops.cuda import split_fp16, split_fp16_backward

    tables = {"forward": (split_fp16._FORWARD,)}
    if backward:
        tables["backward"] = (split_fp16_backward._DKDV, split_fp16_backward._DQ)
    width = split_fp16.padded(head_dim)
    return {
        passed: max(
            split_fp16.first_that_fits(of[width], head_dim, max_bytes).shared_bytes(head_dim) for of in every
        )
        for passed, every in tables.items()
    }


def _plain(head_dim: int, max_bytes: int, backward: bool) -> dict[str, int]:
    from ops.cuda.plain import tile

    q = torch.empty(1, 1, 1, head_dim, device="meta")
    passes = {"forward": False} | ({"backward": True} if backward else {})
    return {name: tile(q, back).shared_bytes(head_dim, back) for name, back in passes.items()}
