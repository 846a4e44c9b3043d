"""torch.nn.functional.scaled_dot_product_attention, with PyTorch's own choice of kernel or a forced one.

What SDPA does otherwise than the contract, and this adapter minds: its `is_causal` is aligned top-left (with
one query and five keys it sees one key), it lets NaN through a mask, and it has no softcap and no lse. The
flash kernel on CUDA takes no mask. Its fused kernels on CUDA read 16 bytes at a time without a check: q, k, v
and the gradient of the output are copied where a row of theirs begins elsewhere, as views at odd offsets do.
cuDNN's backward under a mask, where half a tile of 128 keys is left, gives NaN for rows whose lse is below
-88.7: it is not taken there (PyTorch's issue 196678).
"""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from attention.base import (
    FEATURES,
    FLOATS,
    LOW_PRECISION,
    MATMUL_KERNELS,
    Attention,
    AttentionCall,
    AttentionOptions,
    Capabilities,
    Costs,
    Declaration,
    Kernels,
)
from attention.call import NEEDS_ATTN_MASK
from attention.declaration import (
    accumulator_bytes,
    lse_bytes,
    padded_statistic_bytes,
    q_bytes,
    q_fp32_bytes,
    scores_bytes,
)
from attention.geometry import (
    align_to_16_bytes,
    block_mask_of,
    relative_bias_of,
    relative_positions,
    visible,
    zero_beyond_lengths,
)
from conf.values import UserError

_BACKENDS = {
    "auto": None,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
_CPU_KERNEL = Kernels(
    "PyTorch's flash attention for CPUs", r"(?i)_scaled_dot_product_flash_attention_for_cpu"
)
_KERNELS = {
    "flash": (Kernels("FlashAttention-2 in PyTorch", r"(?i)\bpytorch_flash::"), _CPU_KERNEL),
    "efficient": (Kernels("memory-efficient attention", r"(?i)fmha_cutlass|PyTorchMemEffAttention"),),
    "cudnn": (Kernels("cuDNN", r"(?i)cudnn"),),
    "math": MATMUL_KERNELS,
}
# The headings of PyTorch's warnings on why it did not choose a backend.
_HEADINGS = {"flash": "flash attention", "efficient": "memory efficient", "cudnn": "cudnn attention"}
_SUPPORTED_FEATURES = frozenset(FEATURES) - {"softcap", "lse"}


def _capabilities(features: frozenset[str], device: str, dtypes: frozenset[torch.dtype]) -> Capabilities:
    # if a mask has no gradient, neither have the options that it is computed from
    constant = frozenset({"relative_bias"} if "bias_grad" not in features else ())
    return Capabilities(
        features=features, devices=frozenset({device}), dtypes=dtypes, forward_only_features=constant
    )


# By backend and device; `auto` and `math` run everything everywhere. Tried on torch 2.13 (CPU).
_SUPPORTED = {
    ("flash", "cpu"): _capabilities(_SUPPORTED_FEATURES - {"dropout", "bias_grad"}, "cpu", FLOATS),
    ("flash", "cuda"): _capabilities(_SUPPORTED_FEATURES - NEEDS_ATTN_MASK, "cuda", LOW_PRECISION),
    # In fp32 its products are sums of three TF32 products, with up to 2.6 times the allowed error (one query,
    # 239 keys, window, H200), so fp32 is left to the other kernels.
    ("efficient", "cuda"): _capabilities(_SUPPORTED_FEATURES - {"gqa"}, "cuda", LOW_PRECISION),
    ("cudnn", "cuda"): _capabilities(_SUPPORTED_FEATURES - {"bias_grad"}, "cuda", LOW_PRECISION),
}


class SDPAAttention(Attention):
    """F.scaled_dot_product_attention.

    Args:
        backend: auto (PyTorch chooses, and may take math), or one forced: flash, efficient, cudnn, math.
    """

    capabilities: ClassVar[Capabilities] = Capabilities(
        features=_SUPPORTED_FEATURES, devices=frozenset({"cpu", "cuda", "mps"}), deterministic_on_request=True
    )
    uses_our_dropout_mask: ClassVar[bool] = False

    def __init__(self, backend: str = "auto", name: str = "sdpa"):
        super().__init__(name)
        if backend not in _BACKENDS:
            raise UserError(f"backend is {backend!r}; SDPA has {', '.join(_BACKENDS)}")
        self.backend = backend
        self.declaration = Declaration(
            "PyTorch",
            _KERNELS.get(backend, tuple(kernels for each in _KERNELS.values() for kernels in each)),
            writes_scores=backend == "math",
            writes_masks=True,
            dispatches_to="kernels" if backend == "auto" else "",
        )

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, dropout_seed: Tensor | None
    ) -> tuple[Tensor, None]:
        causal, scale, window, dropout_p = options.causal, options.scale, options.window, options.dropout_p
        alibi_slopes, bias, kv_lengths = options.alibi_slopes, options.bias, options.kv_lengths
        tq, tk = q.shape[2], k.shape[2]
        if causal and window is not None and window[0] < 0:
            window = None  # a right bound says nothing
        # SDPA takes no symbolic bool, as a comparison of dynamic shapes would be; a branch is definite.
        gqa = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}
        relative_bias = options.relative_bias
        extras = (window, alibi_slopes, bias, options.document_ids, kv_lengths, options.block_mask)
        extras += (relative_bias,)
        if all(extra is None for extra in extras) and (not causal or tq == 1 or tq == tk):
            # One query at the bottom right sees every key, where is_causal would show it only the first.
            if tq == 1:
                causal = False
            return self._sdpa(q, k, v, None, dropout_p, causal, scale, gqa), None
        i, j = torch.arange(tq, device=q.device), torch.arange(tk, device=q.device)
        rel = relative_positions(i, j, tq, tk, kv_lengths)
        blocks = block_mask_of(options.block_mask, i, j)
        mask = visible(rel, j, options.band, kv_lengths, options.document_ids, blocks)
        # A row that sees no key may see them all, and its output is dropped: no NaN, not in gradients either.
        keyless = ~mask.any(dim=-1, keepdim=True)
        mask = mask | keyless
        # For cuDNN PyTorch 2.11 makes -65504 of a bool mask's False, and scores of a large q differ by more.
        needs_float_mask = q.is_cuda and q.dtype in LOW_PRECISION
        added_to_scores = [x for x in (alibi_slopes, bias, relative_bias) if x is not None]
        if added_to_scores or needs_float_mask:
            # SDPA adds them in q's dtype. In 16 bits, -100 +- 0.2 would be one number, and 1e5 none.
            wide = torch.promote_types(q.dtype, torch.float32) if added_to_scores else q.dtype
            added = torch.zeros((), dtype=wide, device=q.device) if bias is None else bias.to(wide)
            if alibi_slopes is not None:
                added = added - alibi_slopes.to(wide).view(-1, q.shape[1], 1, 1) * rel.abs()
            if relative_bias is not None:
                added = added + relative_bias_of(relative_bias, rel, wide)
            mask = torch.where(mask, added, -torch.inf)
            if wide != q.dtype:  # a shift of a whole row changes nothing
                most = mask.detach().amax(-1, keepdim=True)
                mask = (mask - most.masked_fill(most == -torch.inf, 0)).to(q.dtype)
            if mask.stride(-1) != 1:  # as that of a transposed bias, which the CUDA kernels refuse
                mask = mask.clone(memory_format=torch.contiguous_format)
        k, v = zero_beyond_lengths(k, kv_lengths), zero_beyond_lengths(v, kv_lengths)
        return self._sdpa(q, k, v, mask, dropout_p, False, scale, gqa).masked_fill(keyless, 0), None

    def _sdpa(self, q, k, v, mask, dropout_p, is_causal, scale, gqa) -> Tensor:
        forced = _BACKENDS[self.backend]  # an attribute could not be pickled, and with it no model
        if forced is None and q.is_cuda and q.dtype == torch.float32:
            forced = SDPBackend.MATH  # else PyTorch chooses `efficient`, see _SUPPORTED
        elif (
            forced is None
            and q.is_cuda
            and mask is not None
            and torch.is_grad_enabled()
            and _ends_in_half_a_tile(k.shape[2])
        ):
            forced = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
        in_place = _reads_in_place(q) and forced != SDPBackend.MATH
        if in_place:
            q, k, v = _without_illegal_access(q, k, v, mask)
        with nullcontext() if forced is None else sdpa_kernel(forced):
            out = F.scaled_dot_product_attention(q, k, v, mask, dropout_p, is_causal, scale=scale, **gqa)
        if in_place and out.requires_grad and not torch.compiler.is_compiling():
            out.register_hook(align_to_16_bytes)
        return out

    def costs(self, call: AttentionCall, compiled: bool = False) -> Costs:
        """M = 4 B H T^2, the bytes of the scores in fp32. With backend auto, PyTorch chooses its flash
        kernel, but the math backend for fp32 on CUDA, and on a CPU for dropout or a mask with a gradient. A
        window, kept tiles, or a causal call of fewer queries than keys is a mask of T^2 values of the
        call's dtype; documents are B such masks, ALiBi and relative positions H, together B H. The fused
        backends keep it, and out twice: before and after rows that see no key are set to zero. Of a mask with
        a gradient, the boolean mask is kept, a byte each.

        Fused backends: lse is kept. The backward has the padded row statistics delta and, except for flash,
        lse_log2, and the accumulator of dQ. With GQA, flash writes dk and dv per query head before it sums
        them.

        Math backend: the probabilities, and scaled copies of q, k, v, in fp32; in the backward dP and dS, and
        on a GPU one matrix more. Passes over the scores: Q K^T 1, mask 2, softmax 2, P V 1; dV and dP 2,
        softmax 3, dQ and dK 2."""
        features, on_gpu = call.features, call.device == "cuda"
        pairs = call.tq * call.tk * (call.batch if features & {"document_ids", "kv_lengths"} else 1)
        learned = bool(features & {"relative_bias", "bias_grad"}) and call.backward
        seen = pairs if learned else 0
        auto_takes_math = self.backend == "auto" and on_gpu and call.dtype == torch.float32
        if self.backend == "math" or auto_takes_math or (not on_gpu and (learned or "dropout" in features)):
            matrix = scores_bytes(call)
            dropout_bytes = matrix + (matrix // 4 if on_gpu else matrix) if "dropout" in features else 0
            kept = matrix + 3 * q_fp32_bytes(call) + seen + dropout_bytes
            matrices = 1 if compiled else 3 if on_gpu else 2
            moved = 6 * matrix, 7 * matrix
            return Costs(kept, matrices * matrix, 0, moved, writes_scores=True, backward_matmuls=4)
        kept, statistic = lse_bytes(call) + seen, padded_statistic_bytes(call)
        if features & NEEDS_ATTN_MASK or (call.causal and 1 < call.tq != call.tk):
            of_heads = features & {"alibi", "bias", "bias_grad", "relative_bias"}
            kept += pairs * (call.heads if of_heads else 1) * call.dtype.itemsize + q_bytes(call)
        if not on_gpu:
            return Costs(kept)
        if self.backend in ("auto", "flash"):
            gqa_bytes = 2 * q_bytes(call) if call.kv_heads < call.heads else 0
            return Costs(kept, statistic + accumulator_bytes(call) + gqa_bytes)
        return Costs(kept, 2 * statistic + accumulator_bytes(call))

    def unsupported_reasons(self, call: AttentionCall) -> list[str]:
        reasons = super().unsupported_reasons(call)
        if self.backend in ("auto", "math"):
            return reasons
        limits = _SUPPORTED.get((self.backend, call.device))
        if limits is None:
            devices = sorted(device for backend, device in _SUPPORTED if backend == self.backend)
            return [
                *reasons,
                f"SDPA's {self.backend} kernel has no {call.device}: it runs on {', '.join(devices)}",
            ]
        # Both tables name softcap and lse.
        reasons += [reason for reason in limits.reasons(call) if reason not in reasons]
        needs_attn_mask = bool(call.features & NEEDS_ATTN_MASK) or (call.causal and 1 < call.tq != call.tk)
        if (
            needs_attn_mask
            and self.backend == "flash"
            and call.device == "cuda"
            and not call.features & NEEDS_ATTN_MASK
        ):
            reasons.append("no causal mask for fewer or more queries than keys: needs Tq = Tk or Tq = 1")
        if self.backend == "cudnn" and needs_attn_mask and call.backward and _ends_in_half_a_tile(call.tk):
            reasons.append(
                f"no gradient for {call.tk} keys under a mask, where cuDNN's may be NaN: needs a multiple "
                "of 128, or attention=sdpa"
            )
        if not reasons and call.device == "cuda" and torch.cuda.is_available():
            reasons += _library_reasons(self.backend, call, needs_attn_mask)
        return reasons


def _ends_in_half_a_tile(tk: int) -> bool:
    return tk % 128 == 64


def _reads_in_place(q: Tensor) -> bool:
    """Whether the CUDA kernels read q, k and v as they are; other head dims are padded, in copies."""
    return q.is_cuda and q.dtype in LOW_PRECISION and q.shape[-1] % 8 == 0


def _without_illegal_access(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v in a form that the CUDA kernels read without an illegal access."""
    if not torch.compiler.is_compiling():  # Inductor copies odd strides itself; addresses are not known
        q, k, v = align_to_16_bytes(q), align_to_16_bytes(k), align_to_16_bytes(v)
    alone = not (q.requires_grad or k.requires_grad or v.requires_grad)
    if mask is not None and mask.requires_grad and alone:
        # For a mask's gradient alone PyTorch up to 2.13 keeps no lse, and its backward reads one (its issue
        # 148476): q is to require a gradient too, of zero. A copy, as torch.compile knows no view that does.
        q = q + mask[..., :0].sum()
    return q, k, v


def _library_reasons(
    backend: str, call: AttentionCall, needs_attn_mask: bool, device: str = "cuda"
) -> list[str]:
    """PyTorch's own reasons why a CUDA kernel cannot run.

    The function that chooses the backend raises them as warnings before it fails; functions such as
    torch.backends.cuda.can_use_flash_attention write them to stderr instead, where Python cannot read them.
    """
    heads_per_kv = call.heads // call.kv_heads  # one key head and its queries stand for all
    like = {"dtype": call.dtype, "device": device, "requires_grad": call.backward}
    # A length that torch.compile keeps as a symbol, a tensor would fix: any other stands for it.
    tq, tk = (n if isinstance(n, int) else 128 for n in (call.tq, call.tk))
    q = torch.empty(1, heads_per_kv, tq, call.head_dim, **like)
    k = torch.empty(1, 1, tk, call.head_dim, **like)
    mask = None
    if needs_attn_mask:
        # One row stands for all: no memory of Tq * Tk, and the kernels want a last stride of 1.
        added = bool(call.features & {"bias", "bias_grad", "alibi", "relative_bias"})
        row = torch.empty(tk, dtype=call.dtype if added else torch.bool, device=device)
        row.requires_grad_(call.backward and bool(call.features & {"bias_grad", "relative_bias"}))
        mask = row.expand(1, heads_per_kv if added else 1, tq, tk)
    is_causal = call.causal and tq > 1 and not needs_attn_mask
    dropout = 0.1 if "dropout" in call.features else 0.0
    always = torch.is_warn_always_enabled()
    with (
        warnings.catch_warnings(record=True) as said,
        sdpa_kernel(_BACKENDS[backend]),
        torch.set_grad_enabled(call.backward),
    ):
        warnings.simplefilter("always")
        torch.set_warn_always(True)  # some warnings come once per process, such as cuDNN's for one key
        try:
            torch._fused_sdp_choice(q, k, k, mask, dropout, is_causal, enable_gqa=heads_per_kv > 1)
            return []
        except RuntimeError as error:
            words = _chooser_warnings(backend, [str(w.message) for w in said]) or [
                str(error).strip().split("\n")[0]
            ]
        finally:
            torch.set_warn_always(always)
    return [f"SDPA's {backend} kernel: {word}" for word in words]


def _chooser_warnings(backend: str, said: list[str]) -> list[str]:
    """The warnings under the heading of `backend`."""
    words, ours = [], False
    for word in (text.split(" (Triggered internally")[0] for text in said):
        if word.endswith("kernel not used because:"):
            ours = word.lower().startswith(_HEADINGS[backend])
        elif ours:
            words.append(word)
    return words
