"""The checks that every call passes through before an implementation sees it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ops.cache_view import CACHE_DTYPES, CachedTensor, CacheView
from ops.options import MASK_BLOCK, AttentionOptions


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def arch_name(arch: tuple[int, int] | None) -> str:
    return f"sm_{arch[0]}{arch[1]}" if arch else ""


def must_be_deterministic() -> bool:
    """Whether torch.use_deterministic_algorithms is on, and raises errors instead of warnings."""
    on = torch.are_deterministic_algorithms_enabled()
    return on and not torch.is_deterministic_algorithms_warn_only_enabled()


def call_key(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> tuple[Any, ...]:
    """A hashable key of everything that the checks of a call depend on; no value is read from a device."""
    settings = torch.is_grad_enabled(), must_be_deterministic()
    asked = [option if type(option) in _HASHABLE_TYPES else _hashable(option) for option in options]
    return (*settings, _tensor_key(q), _tensor_key(k), _tensor_key(v), *asked)


def cached_call_key(q: Tensor, view: CacheView, options: AttentionOptions) -> tuple[Any, ...]:
    """The same where `view` is read in place of k and v."""
    return torch.is_grad_enabled(), _tensor_key(q), *map(_hashable, (*view, *options))


# Hashable as they are, which most options of most calls have; a look here is faster than a call of Python's.
_HASHABLE_TYPES = frozenset({bool, int, float, type(None)})


def _hashable(option: Any) -> Any:
    if isinstance(option, Tensor):
        return _tensor_key(option)
    # A window from a config is a list, and document ids are a pair of tensors.
    return tuple(map(_hashable, option)) if isinstance(option, (list, tuple)) else option


def _tensor_key(t: Tensor) -> tuple[Any, ...]:
    return t.shape, t.dtype, t.device, t.requires_grad, t.stride()[-1:]


# A window that varies is a symbol to torch.compile.
_INTS = int, torch.SymInt


def _need(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def traced(context: Any, name: str) -> Any:
    """A local of the function that torch.compile traces, by its ComptimeContext: with fake tensors, and with
    symbols where a number may differ from call to call."""
    proxies = context.get_local(name).as_proxy()
    return tree_map_only(torch.fx.Proxy, lambda proxy: proxy.node.meta["example_value"], proxies)


def check_inputs(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> None:
    """Raises ValueError for a call that makes no sense for any implementation (shapes, dtypes, ranges)."""
    scale, dropout_p, bias, kv_lengths = options.scale, options.dropout_p, options.bias, options.kv_lengths
    _check_qkv(q, k, v)
    (batch, heads, tq, _), tk = q.shape, k.shape[2]
    _check_scores(q, options)
    # Compared, where math.isfinite() would have torch.compile make a graph of each scale.
    finite = scale is None or -math.inf < scale < math.inf
    _need(finite, f"scale is {scale}; it needs a finite number, or None")
    _need(0 <= dropout_p < 1, f"dropout_p is {dropout_p}; it needs 0 <= dropout_p < 1")
    if bias is not None:
        _check_tensor("bias", bias, q, floating=True)
        full = (batch, heads, tq, tk)
        fits = bias.ndim <= 4 and all(
            n in (1, m) for n, m in zip(reversed(bias.shape), reversed(full), strict=False)
        )
        _need(
            fits, f"bias is {tuple(bias.shape)}; it needs a shape that broadcasts to (B, Hq, Tq, Tk) = {full}"
        )
    if options.document_ids is not None:
        _check_document_ids(options.document_ids, q, tk)
    if kv_lengths is not None:
        _check_tensor("kv_lengths", kv_lengths, q, floating=False)
        _need(
            kv_lengths.shape == (batch,),
            f"kv_lengths is {tuple(kv_lengths.shape)}; it needs one length per sequence, ({batch},)",
        )
    if options.block_mask is not None:
        _check_block_mask(options.block_mask, q, tk)
    if options.relative_bias is not None:
        _check_tensor("relative_bias", options.relative_bias, q, floating=True)
        shape = tuple(options.relative_bias.shape)
        _need(
            len(shape) == 2 and shape[0] == heads and shape[1] >= 3 and shape[1] % 2 == 1,
            f"relative_bias is {shape}; it needs a number for each query head and distance from -R to R, "
            f"({heads}, 2 R + 1) with R at least 1",
        )
    if options.packed is not None:
        _check_packed(options.packed, q, k, v)


def _check_scores(q: Tensor, options: AttentionOptions) -> None:
    """Window, softcap and slopes; and that numbers are some, as a tensor's value is not read."""
    window, softcap, slopes = options.window, options.softcap, options.alibi_slopes
    for name in ("scale", "softcap", "dropout_p"):
        kind = type(getattr(options, name))
        _need(not issubclass(kind, Tensor), f"{name} is a {kind.__name__}; it needs a number: float({name})")
    if window is not None:
        sane = isinstance(window, (tuple, list)) and len(window) == 2
        sane = sane and all(w is None or (isinstance(w, _INTS) and w >= -1) for w in window)
        _need(
            sane,
            f"window is {window!r}; it needs (left, right), each an int >= 0, or -1 or None for unbounded",
        )
    _need(
        softcap is None or 0 < softcap < math.inf,
        f"softcap is {softcap}; it needs a finite number > 0, or None for off",
    )
    if slopes is not None:
        batch, heads = q.shape[:2]
        _check_tensor("alibi_slopes", slopes, q, floating=True)
        _need(
            slopes.shape in ((heads,), (batch, heads)),
            f"alibi_slopes is {tuple(slopes.shape)}; it needs one slope per query head, ({heads},), or "
            f"per batch row and query head, ({batch}, {heads})",
        )
        _need(
            not (slopes.requires_grad and torch.is_grad_enabled()),
            "alibi_slopes has requires_grad, but slopes are constants; detach them, or pass a learned `bias`",
        )


_PACKED = "(B, T, (Hq + 2 Hkv) D)"


def _check_packed(packed: Tensor, q: Tensor, k: Tensor, v: Tensor) -> None:
    (batch, heads, tokens, head_dim), kv_heads = q.shape, k.shape[1]
    shape = batch, tokens, (heads + 2 * kv_heads) * head_dim
    _need(packed.shape == shape, f"packed is {tuple(packed.shape)}; it needs {_PACKED} = {shape}")


def check_packed_views(packed: Tensor, q: Tensor, k: Tensor, v: Tensor) -> None:
    """That q, k and v are views of a `packed` of their shape: by their addresses, which are none of what a
    call's key has."""
    _need(
        _follow(packed, q, k, v, Tensor.data_ptr),
        f"q, k or v is no view of packed; it needs {_PACKED} of which they are views, in this order",
    )


def are_packed_views(packed: Tensor, q: Tensor, k: Tensor, v: Tensor) -> bool:
    """The same of fake tensors, which have no address, but a storage."""
    storages = {x.untyped_storage()._cdata for x in (packed, q, k, v)}
    return len(storages) == 1 and _follow(packed, q, k, v, lambda x: x.storage_offset() * x.element_size())


def _follow(packed: Tensor, q: Tensor, k: Tensor, v: Tensor, place: Callable[[Tensor], int]) -> bool:
    """Whether they lie in `packed` one behind the other; in few operations, as every call pays for it."""
    batch, token, step = packed.stride()
    strides, at = (batch, q.shape[3] * step, token, step), place(packed)
    for x in (q, k, v):
        if x.dtype != packed.dtype or place(x) != at:
            return False
        if x.stride() != strides:  # that of a dimension of one entry may be anything
            own = zip(x.shape, x.stride(), strides, strict=True)
            if not all(n == 1 or a == b for n, a, b in own):
                return False
        at += x.shape[1] * strides[1] * x.element_size()
    return True


def check_cached(q: Tensor, view: CacheView, options: AttentionOptions) -> None:
    """Raises ValueError for a call on a CacheView that makes no sense for any implementation."""
    k, v = view.k, view.v
    slopes = options.alibi_slopes
    _need(slopes is None or slopes.ndim == 1, "alibi_slopes (B, Hq) with a CacheView, which takes (Hq,)")
    never = ("bias", "document_ids", "kv_lengths", "block_mask", "relative_bias")
    given = [name for name in never if getattr(options, name) is not None]
    given += ["dropout_p"] * (options.dropout_p != 0)
    _need(not given, f"{', '.join(given)} with a CacheView, which takes neither: pass k and v")
    _need(
        options.scale is None or (math.isfinite(options.scale) and options.scale > 0),
        f"scale is {options.scale}; with a CacheView it needs a finite number above 0, or None",
    )
    _need(
        not (q.requires_grad and torch.is_grad_enabled()), "q has requires_grad: a CacheView has no gradient"
    )
    _check_cached_tensor("keys", k, q)
    _check_cached_tensor("values", v, q)
    shapes = f"got q {tuple(q.shape)}, keys {k.shape}, values {v.shape}"
    _need(q.ndim == 4 and k.shape == v.shape, f"{shapes}; q needs (B, Hq, Tq, D), keys and values one shape")
    _need(q.shape[3] > 0 and k.shape[1] > 0, f"{shapes}; heads and the head dim need to be at least 1")
    _need(
        q.shape[0] == k.shape[0] and q.shape[3] == k.shape[3] and q.shape[1] % k.shape[1] == 0,
        f"{shapes}; q and the cache need the same batch and head dim, and query heads a multiple of its own",
    )
    _need(
        k.data.dtype == v.data.dtype == q.dtype or k.dtype_name == v.dtype_name is not None,
        f"got q {q.dtype}, keys {k.data.dtype}, values {v.data.dtype}; they need q's dtype, or 8 or 4 bits "
        "with scales",
    )
    _check_scores(q, options)
    _need(view.lengths.device == q.device, f"lengths are on {view.lengths.device}, q on {q.device}")
    _need(
        view.lengths.dtype == torch.int32 and view.lengths.shape == (q.shape[0],),
        f"lengths are {view.lengths.dtype} {tuple(view.lengths.shape)}; they need torch.int32, (B,)",
    )


def _check_cached_tensor(name: str, x: CachedTensor, q: Tensor) -> None:
    """The parts of the keys, or of the values: kernels read them by their addresses."""
    (data, scale, table), shape = x, tuple(x.data.shape)
    _need(data.ndim == 4, f"the {name} are {shape}; they need (N, Hkv, block, D)")
    for part, t in zip(x._fields, x, strict=True):
        _need(t is None or t.device == q.device, f"{part} of the {name} is not on {q.device}, where q is")
    if scale is not None:
        quantised = any(data.dtype == dtype for dtype, _ in CACHE_DTYPES.values())
        _need(quantised, f"the {name} are {data.dtype} with a scale, which 8 or 4 bits have; leave it out")
        needed = shape[0], shape[1], 2 if x.dtype_name == "int4" else 1, shape[2]
        _need(
            scale.shape == needed,
            f"the scale of the {name} is {tuple(scale.shape)}; it needs (N, Hkv, parts, block) = {needed}",
        )
    if table is not None:
        _need(table.dtype == torch.int32, f"the table of the {name} is {table.dtype}; it needs torch.int32")
        _need(table.ndim == 2, f"the table of the {name} is {tuple(table.shape)}; it needs (B, blocks)")


def _check_qkv(q: Tensor, k: Tensor, v: Tensor) -> None:
    shapes = f"got q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    _need(
        q.ndim == k.ndim == v.ndim == 4,
        f"{shapes}; attention needs 4 dimensions, q (B, Hq, Tq, D) and k, v (B, Hkv, Tk, D)",
    )
    _need(k.shape == v.shape, f"{shapes}; k and v need the same shape (B, Hkv, Tk, D)")
    _need(
        q.shape[0] == k.shape[0] and q.shape[3] == k.shape[3],
        f"{shapes}; q and k need the same batch (first) and head dim (last)",
    )
    _need(q.shape[3] > 0, f"{shapes}; the head dim needs to be at least 1")
    _need(
        k.shape[1] > 0 and q.shape[1] > 0 and q.shape[1] % k.shape[1] == 0,
        f"{shapes}; the query heads ({q.shape[1]}) need to be a multiple of the key heads ({k.shape[1]})",
    )
    _need(
        q.dtype == k.dtype == v.dtype and q.dtype.is_floating_point,
        f"got q {q.dtype}, k {k.dtype}, v {v.dtype}; they need one floating dtype (cast after rotary)",
    )
    _need(
        q.device == k.device == v.device,
        f"got q on {q.device}, k on {k.device}, v on {v.device}; they need one device",
    )
    for name, t in (("q", q), ("k", k), ("v", v)):
        _need(
            t.shape[3] == 1 or t.numel() == 0 or t.stride(3) == 1,
            f"{name} has strides {t.stride()}; its last dimension needs to be contiguous (stride 1)",
        )


def _check_tensor(name: str, t: Tensor, q: Tensor, *, floating: bool) -> None:
    _need(t.device == q.device, f"{name} is on {t.device}, q on {q.device}; move it there once, at start-up")
    if floating:
        _need(t.dtype.is_floating_point, f"{name} is {t.dtype}; it needs a floating-point dtype")
    else:
        _need(t.dtype == torch.int32, f"{name} is {t.dtype}; it needs torch.int32")


def _check_document_ids(document_ids: Any, q: Tensor, tk: int) -> None:
    batch, _, tq, _ = q.shape
    if isinstance(document_ids, Tensor):
        _need(
            tq == tk,
            f"document_ids is one tensor, but there are {tq} queries and {tk} keys; pass a pair for both",
        )
        document_ids = (document_ids, document_ids)
    _need(
        len(document_ids) == 2,
        f"document_ids has {len(document_ids)} entries; it needs a tensor or a pair (queries, keys)",
    )
    for name, t, length in zip(("queries", "keys"), document_ids, (tq, tk), strict=True):
        _check_tensor(f"document_ids of the {name}", t, q, floating=False)
        _need(
            t.shape == (batch, length),
            f"document_ids of the {name} is {tuple(t.shape)}; it needs (B, T) = ({batch}, {length})",
        )


def _check_block_mask(block_mask: Tensor, q: Tensor, tk: int) -> None:
    batch, heads, tq, _ = q.shape
    _need(block_mask.dtype == torch.bool, f"block_mask is {block_mask.dtype}; it needs torch.bool")
    _need(
        block_mask.device == q.device,
        f"block_mask is on {block_mask.device}, q on {q.device}; move it there once, at start-up",
    )
    tiles = -(-tq // MASK_BLOCK), -(-tk // MASK_BLOCK)
    shape = tuple(block_mask.shape)
    fits = len(shape) == 4 and shape[0] in (1, batch) and shape[1] in (1, heads) and shape[2:] == tiles
    _need(
        fits,
        f"block_mask is {shape}; it needs (1 or B, 1 or Hq, Tq / {MASK_BLOCK}, Tk / {MASK_BLOCK}), rounded "
        f"up: (1 or {batch}, 1 or {heads}, {tiles[0]}, {tiles[1]})",
    )
