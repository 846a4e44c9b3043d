"""The flash-attn library (Dao et al.), versions 2, 3 and 4, behind the contract.

Each version's low-level forward and backward are one op, tilegpt::flash2 and so on (ops/library.py), so that
all compile alike, in one graph. What the library does otherwise than the contract, and this adapter minds:

- its layout is (B, T, H, D): transposed views go in and out, and nothing is copied where q is such a view;
- documents go by cumulative lengths (flash_documents.py), at one host synchronisation per tensor of ids;
- version 2's lse is +inf for a row that sees no key, and lacks slope * (i + Tk - Tq) under causal ALiBi;
- version 2's dropout draws from a generator: it is put at a seed of ours, drawn on the CPU, for the call;
- versions 3 and 4 read V beyond `kv_lengths`, so that a call with them copies V; and beyond a document, so
  that a NaN in one may reach the queries of another, of any row of the batch.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from attention.base import (
    FEATURES,
    Attention,
    AttentionCall,
    AttentionOptions,
    Costs,
    Declaration,
    must_be_deterministic,
)
from attention.declaration import accumulator_bytes, k_bytes, lse_bytes, padded_statistic_bytes, q_bytes
from attention.flash_documents import documents
from attention.flash_versions import VERSIONS, LibraryCall
from attention.geometry import align_to_16_bytes
from conf.values import UserError
from ops.library import empty_as, register_attention


def _forward(version: int, q: Tensor, k: Tensor, v: Tensor, *op_args: Any) -> tuple[Tensor, Tensor]:
    library, call = VERSIONS[version], _library_options(*op_args)
    varlen = call.documents is not None
    out, lse = library.forward(library.load(), call, *(_to_library_layout(x, varlen) for x in (q, k, v)))
    out = _from_library_layout(out, q)
    if varlen:
        lse = lse.unflatten(1, (q.shape[0], q.shape[2])).transpose(0, 1)  # (H, B * Tq) -> (B, H, Tq)
        if call.documents.keyless is not None:
            keyless = call.documents.keyless.unsqueeze(1)  # (B, 1, Tq)
            # +inf, not -inf: backward's exp(s - lse) is to be 0.
            out, lse = out.masked_fill_(keyless.unsqueeze(-1), 0), lse.masked_fill(keyless, torch.inf)
    return out, lse.contiguous()


def _backward(
    version: int, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *op_args: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    library, call = VERSIONS[version], _library_options(*op_args[:-1])
    varlen = call.documents is not None
    if varlen:
        lse = lse.transpose(0, 1).flatten(1).contiguous()  # (B, H, Tq) -> (H, B * Tq)
        if call.documents.keyless is not None:
            dout = dout.masked_fill(call.documents.keyless[:, None, :, None], 0)
    inputs = {"q": q, "k": k, "v": v}
    tensors = {name: _to_library_layout(x, varlen) for name, x in inputs.items()}
    grads = {f"d{name}": torch.empty_like(x) for name, x in tensors.items()}
    tensors |= {
        "dout": _to_library_layout(dout, varlen),
        "out": _to_library_layout(out, varlen),
        "softmax_lse": lse,
    }
    library.backward(library.load(), call, **tensors, **grads)
    dq, dk, dv = (_from_library_layout(grads[f"d{name}"], x) for name, x in inputs.items())
    return dq, dk, dv, q.new_empty(0)


def _library_options(
    options: AttentionOptions, dropout_seed: Tensor | None, settings: list[int]
) -> LibraryCall:
    """The op's options as flash_versions.py takes them. Raises UserError for document ids that do not fit."""
    found = None if options.document_ids is None else documents(*options.document_ids)
    left, right = options.band
    position_dependent = left >= 0 or right >= 0 or options.alibi_slopes is not None
    if found is not None and position_dependent and not found.ends_on_diagonal:
        raise UserError(
            "document_ids: a document of the queries ends elsewhere on the diagonal than among the keys, and "
            "the flash-attn library aligns causal, window and ALiBi with each document's end; pass the keys "
            "of each document up to its last query, or use attention=tiled"
        )
    return LibraryCall(options, found, dropout_seed, bool(settings[0]) or must_be_deterministic())


def _to_library_layout(x: Tensor, varlen: bool) -> Tensor:
    """(B, H, T, D) -> (B, T, H, D), or packed (B * T, H, D); a copy only where 16-byte reads need one."""
    x = x.transpose(1, 2)
    return align_to_16_bytes(x.flatten(0, 1) if varlen else x)


def _from_library_layout(x: Tensor, like: Tensor) -> Tensor:
    """The way back, in the strides of empty_as(`like`), as an op must give; a copy where they differ."""
    batch, _, tokens, _ = like.shape
    x = (x.unflatten(0, (batch, tokens)) if x.ndim == 3 else x).transpose(1, 2)
    strides = empty_as(torch.empty_like(like, device="meta")).stride()
    same = all(a == b or n == 1 for a, b, n in zip(x.stride(), strides, x.shape, strict=True))
    return x if same else empty_as(like).copy_(x)


_OPS = {
    version: register_attention(
        f"flash{version}", partial(_forward, version), partial(_backward, version), "CUDA"
    )
    for version in VERSIONS
}


class FlashLibAttention(Attention):
    """flash-attn 2, 3 or 4. Version 3 follows its source and recorded signatures: not run on a GPU here.

    Args:
        version: 2 (flash_attn; Ampere and later), 3 (flash_attn_interface; Hopper) or 4 (flash_attn.cute;
            Hopper and Blackwell).
        deterministic: a backward that gives the same bits each time, slower and with more memory.
    """

    uses_our_dropout_mask: ClassVar[bool] = False

    def __init__(self, version: int, deterministic: bool = False, name: str | None = None):
        if version not in VERSIONS:
            raise UserError(
                f"version is {version!r}; the flash-attn library has {', '.join(map(str, VERSIONS))}"
            )
        super().__init__(name or f"flash{version}")
        self.version, self.deterministic = version, deterministic
        library = VERSIONS[version]
        self.capabilities = replace(library.capabilities, deterministic=deterministic)
        self.declaration = Declaration(
            "library",
            (library.kernels,),
            compilation=library.compilation,
        )

    def unsupported_reasons(self, call: AttentionCall) -> list[str]:
        library, reasons = VERSIONS[self.version], super().unsupported_reasons(call)
        for features in map(sorted, library.mutually_exclusive):
            if call.features.issuperset(features):
                needs = ", or ".join(FEATURES[feature] for feature in features)
                reasons.append(f"no {' with '.join(features)}: needs {needs}")
        blackwell = call.arch is not None and call.arch >= (10, 0)
        if self.version == 4 and blackwell and 128 < call.head_dim != 256:
            reasons.append(
                f"no head dim {call.head_dim} on Blackwell: needs at most 128, or 256 (model.n_embd)"
            )
        if self.version == 4 and call.backward and call.head_dim % 32:
            # 4.0.0b36 on an H200: at 40 and 80 dQ errs 21 to 56 times as much as allowed; at 32, 64, 96, 128,
            # 160, 192 and 256 it is right.
            reasons.append(
                f"no gradient with head dim {call.head_dim}: needs a multiple of 32 "
                "(model.n_embd / model.n_head)"
            )
        deterministic = self.deterministic or must_be_deterministic()
        if self.version == 3 and deterministic and call.backward and call.head_dim > 192:
            reasons.append(
                "no deterministic backward above head dim 192: needs attention.deterministic=false and "
                "deterministic=false"
            )
        return reasons + [reason for reason in [library.unavailable_reason()] if reason]

    def reasons_against_auto(self, call: AttentionCall) -> list[str]:
        found = []
        if "document_ids" in call.features:
            # Values decide whether it can, and to know them the host waits for the device.
            found.append("reads document ids on the host: needs to be asked for by name")
        if "window" in call.features and call.tq > call.tk:
            found.append("not every window for more queries than keys: needs to be asked for by name")
        return found

    def costs(self, call: AttentionCall, compiled: bool = False) -> Costs:
        """lse; in the backward dQ's accumulator, and the padded statistics of rows: delta, from version 3 on
        lse_log2 too. With GQA, version 2 writes dk and dv for each query head before it sums them; versions 3
        and 4 sum them in fp32, for each K/V head."""
        gqa, statistic = call.kv_heads < call.heads, padded_statistic_bytes(call)
        if self.version == 2:
            more = statistic + (2 * q_bytes(call) if gqa else 0)
        else:
            more = 2 * statistic + (2 * 4 * k_bytes(call) // call.dtype.itemsize if gqa else 0)
        return Costs(lse_bytes(call), accumulator_bytes(call) + more)

    def draw_seed(self, dropout_p: float, device: torch.device) -> Tensor | None:
        """On the CPU, from where the library's generator is set: one on the device would have to be read."""
        return None if dropout_p == 0 else torch.randint(0, 2**63 - 1, (), dtype=torch.int64)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, dropout_seed: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        if options.alibi_slopes is not None:
            options = options._replace(alibi_slopes=options.alibi_slopes.float().contiguous())
        out, lse = _OPS[self.version](q, k, v, options, dropout_seed, [int(self.deterministic)])
        if options.return_lse:
            slopes, (left, right) = options.alibi_slopes, options.band
            if slopes is not None and right == 0 and not 0 <= left < k.shape[2]:
                lse = lse - slopes.view(-1, 1) * _diagonal(q, k, options.kv_lengths)
            lse = lse.masked_fill(lse == torch.inf, -torch.inf)
        return out, lse


def _diagonal(q: Tensor, k: Tensor, kv_lengths: Tensor | None) -> Tensor:
    """i + Tk - Tq, the key on the diagonal of each query: (B or 1, 1, Tq)."""
    tq = q.shape[2]
    i = torch.arange(tq, device=q.device).view(1, 1, -1)
    return i + (k.shape[2] if kv_lengths is None else kv_lengths.view(-1, 1, 1)) - tq
