"""Where the wrong entries of a tensor lie, and what that suggests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from scripts.accuracy import Part, Result


def explain(tensor: str, got: Tensor, reference: Result, limit: float, part: Part) -> str:
    """Where the worst entry is, and what the pattern of wrong entries suggests."""
    exact = reference[tensor]
    error = (got.double() - exact).abs().nan_to_num(torch.inf, torch.inf)
    error = error.masked_fill(got.double() == exact, 0)  # an infinity that is right
    wrong = error > limit
    at = [int(i) for i in torch.unravel_index(error.argmax(), error.shape)]
    names = ("b", "h", "j" if tensor in ("dk", "dv") else "i", "d")[: len(at)]
    heads = part.kv_heads if tensor in ("dk", "dv") else part.heads
    shown = [part.rows[at[0]], heads[at[1]], *at[2:]] if exact.ndim in (3, 4) and tensor != "dbias" else at
    where = ", ".join(f"{n}={i}" for n, i in zip(names, shown, strict=True))
    share = 100 * float(wrong.double().mean())
    text = f"{share:.3g}% of the entries are wrong; the worst is ({where}): "
    text += f"{float(got[tuple(at)]):.4g} where {float(exact[tuple(at)]):.4g} is right."
    return " ".join([text, *suggestions(tensor, got, wrong, reference, heads)])


def suggestions(tensor: str, got: Tensor, wrong: Tensor, reference: Result, heads: list[int]) -> list[str]:
    """Sentences about where the wrong entries lie and where not."""
    found = []
    if not got.isfinite().all() and reference[tensor].isfinite().all():
        found.append("It holds NaN or infinity: an overflow, 0 * inf, or memory that nothing wrote.")
    if tensor == "dbias":
        return found
    by_head = wrong.flatten(2).any(2).any(0)
    if not by_head.all():
        bad = [heads[i] for i in by_head.nonzero().flatten().tolist()]
        found.append(f"Only heads {', '.join(map(str, bad))}: look at how heads are indexed.")
    if not wrong.flatten(1).any(1).all():
        found.append("Not in every batch row: look at strides, segments and lengths of that row.")
    by_token = wrong.any(-1) if wrong.ndim == 4 else wrong  # (B, H, T)
    lse = reference["lse"]
    if by_token.shape == lse.shape and lse[by_token].isinf().all():
        found.append("Only rows that see no key: they have to give 0.")
    bad = by_token.flatten(0, 1).any(0).nonzero().flatten()
    first, last, length = int(bad[0]), int(bad[-1]), by_token.shape[2]
    tiles = [str(n) for n in (16, 32, 64, 128, 256) if n < length and first >= (length - 1) // n * n]
    if tiles:
        found.append(
            f"Only from position {first} on, in the last tile of {' or '.join(tiles)}: look at the bounds of "
            "partial tiles."
        )
    elif (first, last) != (0, length - 1):
        found.append(f"Only at positions {first} to {last} of {length}: look at masks and tile borders.")
    if wrong.ndim == 4:
        dims = wrong.flatten(0, 2).any(0).nonzero().flatten()
        if (ends := (int(dims[0]), int(dims[-1]))) != (0, wrong.shape[3] - 1):
            found.append(f"Only in dimensions {ends[0]} to {ends[1]} of {wrong.shape[3]}: padding of D?")
    if float(wrong.double().mean()) > 0.2:
        found.append(
            "It is nearly everywhere: scale, mask or softmax."
            if tensor in ("out", "lse")
            else "It is nearly everywhere: a factor, or a term of the gradient that is missing."
        )
    return found
