"""The options of an attention call, in the one form used from the contract (attention/base.py) to the
kernels."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

MASK_BLOCK = 128  # queries and keys of a tile of `block_mask`


class AttentionOptions(NamedTuple):
    """The options of a call besides q, k and v. `Attention.forward` documents each of them.

    Normalised, as implementations and kernels receive it, `scale` is a number above 0, `window` None or
    (left, right) with -1 for unbounded, and `document_ids` None or a pair."""

    causal: bool = True
    scale: float | None = None
    window: tuple[int | None, int | None] | None = None
    softcap: float | None = None
    alibi_slopes: Tensor | None = None
    bias: Tensor | None = None
    document_ids: Tensor | tuple[Tensor, Tensor] | None = None
    kv_lengths: Tensor | None = None
    block_mask: Tensor | None = None
    relative_bias: Tensor | None = None
    dropout_p: float = 0.0
    return_lse: bool = False
    packed: Tensor | None = None  # in a backward: what dq, dk and dv are to be views of

    @property
    def band(self) -> tuple[int, int]:
        """`causal` and the normalised `window` as one band -left <= rel <= right around the diagonal; -1 is
        unbounded."""
        left, right = self.window or (-1, -1)
        return (left, 0) if self.causal else (left, right)

    @property
    def finite_softcap(self) -> float:
        """The normalised `softcap`, at least what keeps scale / softcap finite in fp32, as 0 times that is to
        be 0; 0: no softcap."""
        return max(self.softcap, 1e-37 * max(1.0, abs(self.scale))) if self.softcap else 0.0


def flattened(options: AttentionOptions, dropout_seed: Tensor | None, settings: list[int]) -> tuple[Any, ...]:
    """Normalised options as the arguments of an op, in the order of the schema of ops/library.py."""
    left, right = options.window or (-1, -1)
    right = 0 if options.causal else right
    ids, lengths = options.document_ids or (None, None), options.kv_lengths
    tensors = options.alibi_slopes, options.bias, *ids, lengths, options.block_mask, options.relative_bias
    numbers = options.scale, left, right, options.softcap or 0.0, options.dropout_p
    return *tensors, dropout_seed, *numbers, settings


def gathered(arguments: tuple[Any, ...]) -> tuple[AttentionOptions, Tensor | None, list[int]]:
    """The inverse of `flattened`: (options, dropout_seed, settings) from an op's arguments."""
    slopes, bias, q_ids, k_ids, lengths, blocks, relative, seed, *numbers, settings = arguments
    scale, left, right, softcap, dropout_p = numbers
    causal = right == 0
    right = -1 if causal else right
    window = (left, right) if left >= 0 or right >= 0 else None
    ids = None if q_ids is None else (q_ids, k_ids)
    options = AttentionOptions(
        causal, scale, window, softcap or None, slopes, bias, ids, lengths, blocks, relative, dropout_p
    )
    return options, seed, settings
