"""How an attention implementation of our own becomes a pair of PyTorch ops.

All share one schema, so that schema, fakes and autograd are written once, here:

    tilegpt::<name>(q, k, v, <options>, tuning) -> (out, lse)
    tilegpt::<name>_backward(dout, q, k, v, out, lse, <options>, tuning)
        -> (dq, dk, dv, dbias, drelative_bias)

torch.compile sees each as one opaque node. Registered with `Library.define` and `impl`, which costs 9 us a
call where `torch.library.custom_op` costs 17 us.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ops.cache_view import CachedTensor, CacheView
from ops.options import AttentionOptions, flattened, gathered

# What `flattened` makes of AttentionOptions: window_left and window_right are the band around the diagonal,
# -1 for unbounded, causal is window_right = 0; softcap = 0 is off. `tuning` is the implementation's own (tile
# sizes, say).
_OPTIONS = (
    "Tensor? alibi_slopes, Tensor? bias, Tensor? q_document_ids, Tensor? k_document_ids, Tensor? kv_lengths, "
    "Tensor? block_mask, Tensor? relative_bias, Tensor? dropout_seed, float scale, int window_left, "
    "int window_right, float softcap, float dropout_p, int[] tuning"
)
_N_OPTIONS = _OPTIONS.count(",") + 1
_N_TENSORS = _OPTIONS.count("Tensor?")
_BIAS, _RELATIVE_BIAS = 1, 6  # among the options
_LIBRARY = torch.library.Library("tilegpt", "FRAGMENT")


def register_attention(
    name: str,
    forward: Callable[..., tuple[Tensor, Tensor]],
    backward: Callable[..., tuple[Tensor, ...]],
    key: str = "CompositeExplicitAutograd",
    check: Callable[..., None] | None = None,
) -> Callable[..., tuple[Tensor, Tensor]]:
    """Registers tilegpt::`name` and tilegpt::`name`_backward; gives the forward op as
    `call(q, k, v, options, dropout_seed, tuning)`, with normalised AttentionOptions.

    `forward(q, k, v, options, dropout_seed, tuning)` gives out, made by `empty_as(q)`, and lse (B, Hq, Tq),
    contiguous, fp32 (fp64 for fp64). `backward(dout, q, k, v, out, lse, options, dropout_seed, tuning,
    bias_grad)` gives dq, dk, dv and dbias, made by `empty_as` of q, k and v and `torch.empty_like` of bias;
    without `bias_grad` dbias is `q.new_empty(0)`. Where there is a relative_bias, its gradient comes fifth,
    contiguous. Nothing may alias an input. `key` is the dispatch key: "CUDA" for kernels. `check(q, k, v,
    options)` runs in the fake implementation, because a call compiled by torch.compile skips the checks of
    `Attention.forward`.
    """
    _LIBRARY.define(f"{name}(Tensor q, Tensor k, Tensor v, {_OPTIONS}) -> (Tensor, Tensor)")
    _LIBRARY.define(
        f"{name}_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {_OPTIONS}, "
        "bool bias_grad) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
    )
    _LIBRARY.impl(name, with_flat_options(forward), key)
    _LIBRARY.impl(f"{name}_backward", backward_with_flat_options(backward), key)
    qualified = f"tilegpt::{name}"

    def fake(q: Tensor, k: Tensor, v: Tensor, *flat: Any) -> tuple[Tensor, Tensor]:
        if check is not None:
            check(q, k, v, gathered(flat)[0])
        return _fake_forward(q, k, v)

    torch.library.register_fake(qualified, fake, lib=_LIBRARY)
    torch.library.register_fake(f"{qualified}_backward", _fake_backward, lib=_LIBRARY)
    forward_op = getattr(torch.ops.tilegpt, name).default
    backward_op = getattr(torch.ops.tilegpt, f"{name}_backward").default

    _differentiate(name, forward_op, _derivative(forward_op, backward_op))
    _differentiate(f"{name}_backward", backward_op, _end_of_derivatives(qualified, backward_op))

    def call(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        options: AttentionOptions,
        dropout_seed: Tensor | None,
        tuning: list[int],
    ) -> tuple[Tensor, Tensor]:
        return forward_op(q, k, v, *flattened(options, dropout_seed, tuning))

    return call


def register_cached_attention(
    name: str, forward: Callable[[Tensor, CacheView, AttentionOptions], tuple[Tensor, Tensor]]
) -> Callable[[Tensor, CacheView, AttentionOptions], tuple[Tensor, Tensor]]:
    """Registers tilegpt::`name`, attention of q to a CacheView, forward only; gives it as
    `call(q, view, options)` with normalised AttentionOptions, of which `forward` uses the band, scale,
    softcap and ALiBi slopes."""
    _LIBRARY.define(
        f"{name}(Tensor q, Tensor k, Tensor v, Tensor? k_scale, Tensor? v_scale, Tensor? table, "
        f"Tensor lengths, {_OPTIONS}) -> (Tensor, Tensor)"
    )

    def run(
        q: Tensor, k: Tensor, v: Tensor, k_scale: Any, v_scale: Any, table: Any, lengths: Tensor, *flat: Any
    ) -> tuple[Tensor, Tensor]:
        view = CacheView(CachedTensor(k, k_scale, table), CachedTensor(v, v_scale, table), lengths)
        return forward(q, view, gathered(flat)[0])

    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(
        f"tilegpt::{name}", lambda q, k, v, *rest: _fake_forward(q, k, v), lib=_LIBRARY
    )
    op = getattr(torch.ops.tilegpt, name).default

    def call(q: Tensor, view: CacheView, options: AttentionOptions) -> tuple[Tensor, Tensor]:
        (k, k_scale, table), (v, v_scale, _), lengths = view
        return op(q, k, v, k_scale, v_scale, table, lengths, *flattened(options, None, []))

    return call


def _derivative(forward_op: Any, backward_op: Any) -> type[torch.autograd.Function]:
    class Differentiable(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
            out, lse = _below_autograd(forward_op, args)
            q, k, v, *options = args
            ctx.mark_non_differentiable(lse)
            ctx.set_materialize_grads(False)  # lse has none: zeros for it would be filled in each backward
            tensors, ctx.plain = options[:_N_TENSORS], options[_N_TENSORS:]
            ctx.bias_grad = ctx.needs_input_grad[3 + _BIAS]
            ctx.save_for_backward(q, k, v, out, lse, *tensors)
            return out, lse

        @staticmethod
        def backward(ctx: Any, dout: Tensor | None, dlse: None) -> tuple[Tensor | None, ...]:
            if dout is None:
                return (None,) * (3 + _N_OPTIONS)
            q, k, v, out, lse, *tensors = ctx.saved_tensors
            *dqkv, dbias, drelative_bias = backward_op(
                dout, q, k, v, out, lse, *tensors, *ctx.plain, ctx.bias_grad
            )
            grads = [None] * _N_OPTIONS
            grads[_BIAS] = dbias if ctx.bias_grad else None
            grads[_RELATIVE_BIAS] = drelative_bias if ctx.needs_input_grad[3 + _RELATIVE_BIAS] else None
            return *dqkv, *grads

    return Differentiable


def _end_of_derivatives(qualified: str, backward_op: Any) -> type[torch.autograd.Function]:
    class Once(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> tuple[Tensor, ...]:
            return _below_autograd(backward_op, args)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> None:
            raise NotImplementedError(
                f"{qualified} has no second derivative (double backward); attention=naive has"
            )

    return Once


def with_flat_options(forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward` as a function of the flat arguments of an op."""

    def run(q: Tensor, k: Tensor, v: Tensor, *flat: Any) -> Any:
        return forward(q, k, v, *gathered(flat))

    return run


def backward_with_flat_options(backward: Callable[..., Any]) -> Callable[..., Any]:
    """`backward` as a function of the flat arguments of an op; always with five gradients."""

    def run(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *flat: Any) -> Any:
        grads = backward(dout, q, k, v, out, lse, *gathered(flat[:-1]), flat[-1])
        return grads if len(grads) == 5 else (*grads, q.new_empty(0))

    return run


def _differentiate(name: str, op: Any, function: type[torch.autograd.Function]) -> None:
    """Gives the op `function` as its derivative. torch.library.register_autograd would do the same, but looks
    every argument up in the schema in each call: 98 of the 361 us that a host took for a forward and a
    backward of the Triton op with stubs for its kernels."""

    def differentiable(*args: Any) -> tuple[Tensor, ...]:
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*args):
            return function.apply(*args)
        return _below_autograd(op, args)

    _LIBRARY.impl(name, differentiable, "Autograd")


def _below_autograd(op: Any, args: tuple[Any, ...]) -> tuple[Tensor, ...]:
    with torch._C._AutoDispatchBelowAutograd():
        return op(*args)


def empty_as(x: Tensor) -> Tensor:
    """An uninitialised tensor like x (B, H, T, D), for a result: strides in x's order, so that a model that
    works in (B, T, H, D) need not copy; contiguous where x overlaps itself and D would not be innermost."""
    made = torch.empty_like(x)
    return made if made.shape[3] == 1 or made.stride(3) == 1 else x.new_empty(x.shape)


def _fake_forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    lse_dtype = torch.promote_types(q.dtype, torch.float32)
    return empty_as(q), q.new_empty(q.shape[:3], dtype=lse_dtype)


def _fake_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *options: Any
) -> tuple[Tensor, ...]:
    bias, relative_bias, bias_grad = options[_BIAS], options[_RELATIVE_BIAS], options[-1]
    dbias = torch.empty_like(bias) if bias_grad else q.new_empty(0)
    drelative_bias = q.new_empty(0) if relative_bias is None else relative_bias.new_empty(relative_bias.shape)
    return empty_as(q), empty_as(k), empty_as(v), dbias, drelative_bias
