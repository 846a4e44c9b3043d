"""How much shared memory a block of our kernels takes, from their tables of tiles, with no GPU at hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from model.costs.gpus import GpuSheet
    from model.costs.memory import Run


def shared_memory(run: Run, gpu: GpuSheet) -> dict[str, int]:
    """Bytes that a block of our kernels keeps in shared memory, forward and backward, from their tables of
    tiles; of `triton` what the tiles of q, k, v and dout come to, to which its compiler adds some."""
    from model.costs.memory import family

    name, D, able = family(run), run.config.head_dim, gpu.shared_bytes
    if name == "triton":
        from ops.triton import configs

        width = max(32, 1 << (D - 1).bit_length())
        heavy = (
            run.config.softcap is not None or run.config.position == "alibi" or run.config.attn_dropout > 0
        )
        asked = (gpu.arch, 8 * run.value_bytes, width, run.config.causal, heavy)
        tiles = {kind: configs.tile(kind, *asked) for kind in ("forward", "dkdv", "dq")}
        walked = {"forward": "n", "dkdv": "m", "dq": "n"}  # by pairs: k and v, or q and dout
        return {
            f"{kind}, {tile.m} x {tile.n}": run.value_bytes * width * _rows(kind, tile, walked[kind])
            for kind, tile in tiles.items()
        }
    if name in ("cuda_fa1", "cuda_fa2"):
        from ops.cuda import tensor_cores as tc

        if name == "cuda_fa1":
            tile = tc.fa1_tile(D, able)
            return {f"forward, {tile.br} x {tile.bc}": tile.shared_bytes(D)}
        tile, back = tc._FORWARD[tc.padded(D)], tc.backward_tile(D, able)
        return {
            f"forward, {tile.br} x {tile.bc}": tile.shared_bytes(D),
            f"backward, {back.br} x {back.bc}": back.shared_bytes(D),
        }
    if name == "cuda_tiled" and run.value_bytes == 4 and gpu.arch >= (8, 0):
        from ops.cuda import planes, planes_backward

        backward = (planes_backward._DKDV, planes_backward._DQ)
        tables = {"forward": (planes._FORWARD,), "backward": backward}
        return {
            passed: max(
                planes.first_that_fits(table[planes.padded(D)], D, able).shared_bytes(D) for table in of
            )
            for passed, of in tables.items()
        }
    if name == "cuda_tiled":
        import torch

        from ops.cuda.plain import tile as plain_tile

        q = torch.empty(1, 1, 1, D, device="meta")
        both = {passed: plain_tile(q, passed == "backward") for passed in ("forward", "backward")}
        return {p: tile.shared_bytes(D, p == "backward") for p, tile in both.items()}
    return {"row of scores": 4 * run.config.seq_len} if name == "cuda_rowwise" else {}


def _rows(kind: str, tile: Any, walked: str) -> int:
    """Rows of a head that lie in shared memory: of what stays, one tile (q) or two, and two of what is
    walked, times the stages."""
    own, other = (tile.n, tile.m) if walked == "m" else (tile.m, tile.n)
    return own * (1 if kind == "forward" else 2) + 2 * other * tile.stages
