"""How an attention implementation of our own becomes a pair of PyTorch ops.

All share one schema, so that schema, fakes and autograd are written once, here:

    tilegpt::<name>(q, k, v, <options>, settings) -> (out, lse)
    tilegpt::<name>_backward(dout, q, k, v, out, lse, <options>, settings)
        -> (dq, dk, dv, dbias, drelative_bias)

and the same for q, k and v that are views of one tensor, qkv (B, T, (Hq + 2 Hkv) D), whose gradient is
written as one, where three would be copied into it:

    tilegpt::<name>_packed(qkv, <options>, settings, heads, kv_heads) -> (out, lse)
    tilegpt::<name>_packed_backward(dout, qkv, out, lse, <options>, settings, heads, kv_heads)
        -> (dqkv, dbias, drelative_bias)

torch.compile sees each as one opaque node. Registered with `Library.define` and `impl`, which costs 9 us a
call where `torch.library.custom_op` costs 17 us.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ops.cache_view import CachedTensor, CacheView
from ops.options import AttentionOptions, flattened, gathered

# What `flattened` makes of AttentionOptions: window_left and window_right are the band around the diagonal,
# -1 for unbounded, causal is window_right = 0; softcap = 0 is off. `settings` are the implementation's own
# (tile sizes, say).
_OPTIONS = (
    "Tensor? alibi_slopes, Tensor? bias, Tensor? q_document_ids, Tensor? k_document_ids, Tensor? kv_lengths, "
    "Tensor? block_mask, Tensor? relative_bias, Tensor? dropout_seed, float scale, int window_left, "
    "int window_right, float softcap, float dropout_p, int[] settings"
)
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
    """Registers tilegpt::`name`, tilegpt::`name`_packed and their backward ops; gives the forward op that
    fits as `call(q, k, v, options, dropout_seed, settings)`, with normalised AttentionOptions.

    `forward(q, k, v, options, dropout_seed, settings)` gives out, made by `empty_as(q)`, and lse (B, Hq, Tq),
    contiguous, fp32 (fp64 for fp64). `backward(dout, q, k, v, out, lse, options, dropout_seed, settings,
    bias_grad)` gives dq, dk, dv and dbias, made by `gradients` or `empty_as` and `torch.empty_like` of bias;
    without `bias_grad` dbias is `q.new_empty(0)`. Where there is a relative_bias, its gradient comes fifth,
    contiguous. Nothing may alias an input. `key` is the dispatch key: "CUDA" for kernels. `check(q, k, v,
    options)` runs in the fake implementation: for who calls the op itself.
    """

    def fake(q: Tensor, k: Tensor, v: Tensor, *flat: Any) -> tuple[Tensor, Tensor]:
        if check is not None:
            check(q, k, v, gathered(flat)[0])
        return _fake_forward(q, k, v)

    forward, backward_op = with_flat_options(forward), backward_with_flat_options(backward)
    plain = _register(name, _Q_K_V, (forward, backward_op), (fake, _fake_backward), key)
    functions = packed_forward(forward), packed_backward(backward)
    fakes = packed_forward(fake), _fake_packed_backward
    packed = _register(f"{name}_packed", _PACKED, functions, fakes, key)

    def call(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        options: AttentionOptions,
        dropout_seed: Tensor | None,
        settings: list[int],
    ) -> tuple[Tensor, Tensor]:
        flat = flattened(options, dropout_seed, settings)
        if options.packed is None:
            return plain(q, k, v, *flat)
        return packed(options.packed, *flat, q.shape[1], k.shape[1])

    return call


_Q_K_V = ("q", "k", "v"), _OPTIONS
_PACKED = ("qkv",), f"{_OPTIONS}, int heads, int kv_heads"


def _register(
    name: str,
    signature: tuple[tuple[str, ...], str],
    functions: tuple[Callable[..., Any], Callable[..., Any]],
    fakes: tuple[Callable[..., Any], Callable[..., Any]],
    key: str,
) -> Any:
    """The ops `name` and `name`_backward of inputs and options as `signature` names them, by one of
    `functions` each; gives the first."""
    inputs, options = signature
    taken = ", ".join(f"Tensor {x}" for x in inputs)
    grads = ", ".join("Tensor" for _ in range(len(inputs) + 2))
    _LIBRARY.define(f"{name}({taken}, {options}) -> (Tensor, Tensor)")
    saved = f"Tensor dout, {taken}, Tensor out, Tensor lse"
    _LIBRARY.define(f"{name}_backward({saved}, {options}, bool bias_grad) -> ({grads})")
    qualified, names = f"tilegpt::{name}", (name, f"{name}_backward")
    for each, function, fake in zip(names, functions, fakes, strict=True):
        _LIBRARY.impl(each, function, key)
        torch.library.register_fake(f"tilegpt::{each}", fake, lib=_LIBRARY)
    forward_op, backward_op = (getattr(torch.ops.tilegpt, each).default for each in names)
    _differentiate(name, forward_op, _derivative(forward_op, backward_op, len(inputs)))
    _differentiate(f"{name}_backward", backward_op, _end_of_derivatives(qualified, backward_op))
    return forward_op


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
        # not in a compiled call, which cannot look
        if not torch.compiler.is_compiling() and not view.one_table:
            raise ValueError(f"{name} got two block tables; it needs keys and values in the same blocks")
        return op(q, k, v, k_scale, v_scale, table, lengths, *flattened(options, None, []))

    return call


def _derivative(forward_op: Any, backward_op: Any, inputs: int) -> type[torch.autograd.Function]:
    """Of an op whose first `inputs` arguments are q, k and v, or one that holds them."""

    class Differentiable(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
            out, lse = _below_autograd(forward_op, args)
            options = args[inputs:]
            ctx.mark_non_differentiable(lse)
            ctx.set_materialize_grads(False)  # lse has none: zeros for it would be filled in each backward
            tensors, ctx.plain = options[:_N_TENSORS], options[_N_TENSORS:]
            ctx.bias_grad = ctx.needs_input_grad[inputs + _BIAS]
            ctx.save_for_backward(*args[:inputs], out, lse, *tensors)
            return out, lse

        @staticmethod
        def backward(ctx: Any, dout: Tensor | None, dlse: None) -> tuple[Tensor | None, ...]:
            n_options = _N_TENSORS + len(ctx.plain)
            if dout is None:
                return (None,) * (inputs + n_options)
            *dqkv, dbias, drelative_bias = backward_op(dout, *ctx.saved_tensors, *ctx.plain, ctx.bias_grad)
            grads = [None] * n_options
            grads[_BIAS] = dbias if ctx.bias_grad else None
            grads[_RELATIVE_BIAS] = drelative_bias if ctx.needs_input_grad[inputs + _RELATIVE_BIAS] else None
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
        return _five(backward(dout, q, k, v, out, lse, *gathered(flat[:-1]), flat[-1]))

    return run


def _five(grads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return grads if len(grads) == 5 else (*grads, grads[0].new_empty(0))


def unpacked(qkv: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """q (B, Hq, T, D), k and v (B, Hkv, T, D), views of qkv (B, T, (Hq + 2 Hkv) D)."""
    by_head = qkv.unflatten(2, (heads + 2 * kv_heads, -1)).transpose(1, 2)
    return by_head.split((heads, kv_heads, kv_heads), dim=1)


def gradients(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> tuple[Tensor, Tensor, Tensor]:
    """Uninitialised dq, dk and dv: views of `options.packed`, or each as `empty_as` has it."""
    if options.packed is not None:
        return unpacked(options.packed, q.shape[1], k.shape[1])
    return empty_as(q), empty_as(k), empty_as(v)


def packed_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward(q, k, v, *flat)` as a function of the arguments of the packed op."""

    def run(qkv: Tensor, *flat: Any) -> Any:
        *flat, heads, kv_heads = flat
        return forward(*unpacked(qkv, heads, kv_heads), *flat)

    return run


def packed_backward(backward: Callable[..., Any]) -> Callable[..., Any]:
    """What `backward` does not write into the views that it is given is copied there."""

    def run(dout: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, *flat: Any) -> tuple[Tensor, ...]:
        *flat, heads, kv_heads, bias_grad = flat
        options, seed, settings = gathered(flat)
        options = options._replace(packed=empty_as(qkv))
        views = unpacked(options.packed, heads, kv_heads)
        q, k, v = unpacked(qkv, heads, kv_heads)
        *grads, dbias, drelative_bias = _five(
            backward(dout, q, k, v, out, lse, options, seed, settings, bias_grad)
        )
        for view, grad in zip(views, grads, strict=True):
            if grad.data_ptr() != view.data_ptr():
                view.copy_(grad)
        return options.packed, dbias, drelative_bias

    return run


def _differentiate(name: str, op: Any, function: type[torch.autograd.Function]) -> None:
    """Gives the op `function` as its derivative. torch.library.register_autograd would do the same, but looks
    every argument up in the schema in each call: 98 of the 361 us that a host took for a forward and a
    backward of the Triton op with stubs for its kernels."""

    def differentiable(*args: Any) -> tuple[Tensor, ...]:
        if forward_ad._current_level >= 0:
            _refuse_tangents(f"tilegpt::{name}", args)
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*args):
            if torch._C._are_functorch_transforms_active():
                raise NotImplementedError(
                    f"tilegpt::{name} has no derivative within torch.func (grad, vjp, jacrev): call "
                    "torch.autograd.grad outside of it; attention=naive has"
                )
            return function.apply(*args)
        return _below_autograd(op, args)

    _LIBRARY.impl(name, differentiable, "Autograd")


def _refuse_tangents(name: str, args: tuple[Any, ...]) -> None:
    """Of forward-mode differentiation, of which our ops know nothing: below autograd a tangent is lost."""
    for x in args:
        if isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None:
            raise NotImplementedError(
                f"{name} has no forward-mode derivative (torch.func.jvp, torch.autograd.forward_ad); "
                "attention=naive has"
            )


def _below_autograd(op: Any, args: tuple[Any, ...]) -> tuple[Tensor, ...]:
    with torch._C._AutoDispatchBelowAutograd():
        return op(*args)


def empty_as(x: Tensor) -> Tensor:
    """An uninitialised tensor like x (..., D), for a result: strides in x's order, so that a model that
    works in (B, T, H, D) need not copy; contiguous where x overlaps itself and D would not be innermost."""
    made = torch.empty_like(x)
    return made if made.stride(-1) == 1 or made.shape[-1] == 1 else x.new_empty(x.shape)


def rows_aligned(x: Tensor) -> bool:
    """Whether all rows of x (B, H, T, D) begin at multiples of 16 bytes, as TMA and cp.async read them. The
    stride of a dimension of one entry may be anything."""
    b, h, t, _ = x.stride()
    step = 16 // x.element_size()
    if x.data_ptr() % 16:
        return False
    # One test for all, as every call pays for it: three times as fast as those behind it.
    return (b | h | t) % step == 0 or not any(
        n > 1 and stride % step for n, stride in zip(x.shape, (b, h, t), strict=False)
    )


def _fake_forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    lse_dtype = torch.promote_types(q.dtype, torch.float32)
    return empty_as(q), q.new_empty(q.shape[:3], dtype=lse_dtype)


def _fake_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *options: Any
) -> tuple[Tensor, ...]:
    return empty_as(q), empty_as(k), empty_as(v), *_fake_learned(q, options)


def _fake_packed_backward(
    dout: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, *options: Any
) -> tuple[Tensor, ...]:
    return empty_as(qkv), *_fake_learned(qkv, options)


def _fake_learned(x: Tensor, options: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    """The gradients of a bias and of a relative bias, made of x where there are none."""
    bias, relative_bias, bias_grad = options[_BIAS], options[_RELATIVE_BIAS], options[-1]
    dbias = torch.empty_like(bias) if bias_grad else x.new_empty(0)
    drelative_bias = x.new_empty(0) if relative_bias is None else relative_bias.new_empty(relative_bias.shape)
    return dbias, drelative_bias
