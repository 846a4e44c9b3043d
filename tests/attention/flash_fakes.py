"""The flash-attn library on a CPU: recorded signatures, and its conventions in naive's arithmetic (in fp64).

Whatever the adapter passes has to bind to the signature of the real function, and mean there what it should:
layout, window (-1 or None unbounded), softcap 0 for off, lse, and the oddities of each version.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from attention.flash_versions import VERSIONS
from attention.naive import attention_probs, attention_scores
from ops.options import AttentionOptions

# Names and defaults as in flash_attn 2.8.3.post2 (flash_attn_interface.py), hopper/flash_attn_interface.py at
# 0251105 (August 2026), and flash_attn_4 4.0.0b36 (flash_attn/cute/interface.py).
SIGNATURES = {
    2: {
        "_flash_attn_forward": "q, k, v, dropout_p, softmax_scale, causal, window_size_left, "
        "window_size_right, softcap, alibi_slopes, return_softmax",
        "_flash_attn_varlen_forward": "q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, "
        "dropout_p, softmax_scale, causal, window_size_left=-1, window_size_right=-1, softcap=0.0, "
        "alibi_slopes=None, return_softmax=False, block_table=None, leftpad_k=None, seqused_k=None, "
        "zero_tensors=False",
        "_flash_attn_backward": "dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, "
        "causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic, rng_state=None",
        "_flash_attn_varlen_backward": "dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, "
        "cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, window_size_left, "
        "window_size_right, softcap, alibi_slopes, deterministic, rng_state=None, zero_tensors=False",
        "flash_attn_with_kvcache": "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, "
        "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, "
        "causal=False, window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, "
        "num_splits=0, return_softmax_lse=False",
    },
    3: {
        "_flash_attn_forward": "q, k, v, k_new=None, v_new=None, qv=None, out_=None, cu_seqlens_q=None, "
        "cu_seqlens_k=None, cu_seqlens_k_new=None, seqused_q=None, seqused_k=None, max_seqlen_q=None, "
        "max_seqlen_k=None, page_table=None, kv_batch_idx=None, leftpad_k=None, rotary_cos=None, "
        "rotary_sin=None, seqlens_rotary=None, q_descale=None, k_descale=None, v_descale=None, "
        "softmax_scale=None, causal=False, window_size_left=-1, window_size_right=-1, attention_chunk=0, "
        "softcap=0.0, rotary_interleaved=True, scheduler_metadata=None, num_splits=1, pack_gqa=None, "
        "sm_margin=0",
        "_flash_attn_backward": "dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None, "
        "sequed_q=None, sequed_k=None, max_seqlen_q=None, max_seqlen_k=None, dq=None, dk=None, dv=None, "
        "softmax_scale=None, is_causal=False, window_size_left=-1, window_size_right=-1, softcap=0.0, "
        "deterministic=False, sm_margin=0",
        "flash_attn_with_kvcache": "q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, "
        "rotary_sin=None, cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, page_table=None, "
        "cu_seqlens_q=None, cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None, q_descale=None, "
        "k_descale=None, v_descale=None, softmax_scale=None, causal=False, window_size=(-1, -1), "
        "attention_chunk=0, softcap=0.0, rotary_interleaved=True, scheduler_metadata=None, num_splits=0, "
        "pack_gqa=None, sm_margin=0, return_softmax_lse=False",
    },
    4: {
        "_flash_attn_fwd": "q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, "
        "seqused_k=None, max_seqlen_q=None, max_seqlen_k=None, min_seqlen_k=None, page_table=None, "
        "softmax_scale=None, causal=False, softcap=None, window_size_left=None, window_size_right=None, "
        "learnable_sink=None, tile_mn=None, mma_pv_is_rs=None, intra_wg_overlap=None, num_threads=384, "
        "num_splits=1, pack_gqa=None, _arch=None, score_mod=None, mask_mod=None, block_sparse_tensors=None, "
        "return_lse=False, out=None, lse=None, aux_tensors=None, aux_scalars=None, q_descale=None, "
        "k_descale=None, v_descale=None, gather_kv_indices=None, scheduler_metadata=None, "
        "seqlen_k_per_split=None, disable_scheduler_metadata=False, gather_bwd_recompute_p=False",
        "_flash_attn_bwd": "q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, "
        "window_size_left=None, window_size_right=None, m_block_size=64, n_block_size=128, num_threads=256, "
        "pack_gqa=False, num_stages_Q=2, num_stages_dO=2, SdP_swapAB=False, dKV_swapAB=False, "
        "dQ_swapAB=False, AtomLayoutMSdP=2, AtomLayoutNdKV=2, AtomLayoutMdQ=2, V_in_regs=False, "
        "cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, max_seqlen_q=None, "
        "max_seqlen_k=None, deterministic=False, dq=None, dk=None, dv=None, score_mod=None, "
        "score_mod_bwd=None, mask_mod=None, aux_tensors=None, aux_scalars=None, block_sparse_tensors=None, "
        "dlse=None, learnable_sink=None",
    },
}


def fake_library(version: int, calls: list[dict[str, Any]]) -> ModuleType:
    """A module with the version's functions; each call is appended to `calls`, by the parameters' names."""
    module = ModuleType(VERSIONS[version].module)
    for name, parameters in SIGNATURES[version].items():
        backward = "backward" in name or "bwd" in name

        def run(arguments: dict[str, Any], name: str = name, backward: bool = backward) -> Any:
            calls.append({"function": name, **arguments})
            return (
                _Fake(version, arguments).backward() if backward else _Fake(version, arguments).forward(name)
            )

        # A def of its own, so that binding the call is Python's business.
        exec(f"def {name}({parameters}):\n    return run(locals())", namespace := {"run": run})
        setattr(module, name, namespace[name])
    return module


def install(monkeypatch: Any, version: int, module: ModuleType | None = None) -> list[dict[str, Any]]:
    """Puts the fake where the real library would be imported from; gives the list of its calls."""
    calls: list[dict[str, Any]] = []
    parts = VERSIONS[version].module.split(".")
    for i in range(1, len(parts)):
        monkeypatch.setitem(sys.modules, ".".join(parts[:i]), ModuleType(".".join(parts[:i])))
    monkeypatch.setitem(sys.modules, ".".join(parts), module or fake_library(version, calls))
    return calls


class _Fake:
    """One call: its arguments, in the library's layout, and what its kernels make of them."""

    def __init__(self, version: int, a: dict[str, Any]):
        self.version, self.a = version, a
        self.q, self.k, self.v = a["q"], a.get("k_cache", a["k"]), a.get("v_cache", a["v"])
        self.lengths = a.get("cache_seqlens") if "cache_seqlens" in a else a.get("seqused_k")
        self.cu_q, self.cu_k = a.get("cu_seqlens_q"), a.get("cu_seqlens_k")
        self.packed = self.cu_q is not None
        self.p, self.alibi = a.get("dropout_p", 0.0), a.get("alibi_slopes")
        left, right = a.get("window_size", (a.get("window_size_left"), a.get("window_size_right")))
        if version != 4:
            assert left is not None and right is not None
        assert version != 4 or all(side is None or side >= 0 for side in (left, right))
        self.left, self.right = (-1 if side is None else side for side in (left, right))
        self.causal, self.softcap = a.get("causal", a.get("is_causal")), a["softcap"]
        for x in (
            self.q,
            self.k,
            self.v,
            *(a[n] for n in ("dout", "out", "dq", "dk", "dv") if a.get(n) is not None),
        ):
            assert x.ndim == (3 if self.packed else 4) and x.stride(-1) == 1 and x.shape[-1] % 8 == 0
        for x in (self.cu_q, self.cu_k, self.lengths):
            assert x is None or (x.dtype == torch.int32 and x.is_contiguous())
        assert self.alibi is None or self.alibi.dtype == torch.float32
        assert not (self.p and self.softcap)
        if self.packed:
            assert int(self.cu_q.diff().max()) <= a["max_seqlen_q"], "more queries than max_seqlen_q"
            assert int(self.cu_k.diff().max()) <= a["max_seqlen_k"], "more keys than max_seqlen_k"
            assert self.cu_q[-1] == len(self.q) and self.cu_k[-1] == len(self.k)

    def pieces(self) -> list[tuple[Any, Any, Tensor | None]]:
        """(queries, keys, lengths): how to index one piece out of the tensors."""
        if not self.packed:
            return [
                (slice(b, b + 1), slice(b, b + 1), None if self.lengths is None else self.lengths[b : b + 1])
                for b in range(len(self.q))
            ]
        bounds = zip(self.cu_q.tolist(), self.cu_q[1:].tolist(), self.cu_k.tolist(), self.cu_k[1:].tolist())  # noqa: B905
        return [((None, slice(q0, q1)), (None, slice(k0, k1)), None) for q0, q1, k0, k1 in bounds]

    def scores(self, q: Tensor, k: Tensor, lengths: Tensor | None) -> Tensor:
        """(1, H, Tq, Tk) as the kernels have them."""
        tq, tk = q.shape[1], self.a["max_seqlen_k"] if self.packed else k.shape[1]
        left, right, causal = self.left, self.right, self.causal
        if self.version == 2:  # set_params_fprop and mha_fwd of csrc/flash_attn/flash_api.cpp
            left, right = (-1 if side >= tk else side for side in (left, right))
            right = 0 if causal else right
            causal_kernel = left < 0 and right == 0
            if (left < 0) != (right < 0):
                left, right = (tk if side < 0 else side for side in (left, right))
        scores = attention_scores(
            q.transpose(1, 2).double(),
            k.transpose(1, 2).double(),
            AttentionOptions(
                causal=causal,
                scale=self.a["softmax_scale"],
                window=(left, right),
                softcap=self.softcap or None,
                alibi_slopes=self.alibi,
                kv_lengths=lengths,
            ),
        )
        if self.alibi is not None and causal_kernel:  # slope * j in the place of -slope * |i + Tk - Tq - j|
            keys = k.shape[1] if lengths is None else int(lengths)
            scores = scores + self.alibi.view(-1, 1, 1) * (torch.arange(tq).view(-1, 1) + keys - tq)
        return scores

    def keep(self, shape: torch.Size, seed: int, piece: int) -> Tensor | float:
        if self.p == 0:
            return 1.0
        g = torch.Generator().manual_seed(seed % 2**62 + piece)
        return (torch.rand(shape, generator=g) >= self.p).double() / (1 - self.p)

    def forward(self, name: str) -> tuple[Tensor, ...]:
        out = torch.empty_like(self.q) if self.version == 2 else torch.empty(self.q.shape, dtype=self.q.dtype)
        rows = (self.q.shape[1], self.q.shape[0]) if self.packed else (len(self.q), *self.q.shape[2:0:-1])
        lse = torch.empty(rows)
        for n, (of_q, of_k, lengths) in enumerate(self.pieces()):
            q, k, v = self.q[of_q], self.k[of_k], self.v[of_k].double()
            scores = self.scores(q, k, lengths)
            p, row = attention_probs(scores)
            p = p * self.keep(p.shape, torch.initial_seed(), n)
            if self.version == 2:
                row = row.masked_fill(row == -torch.inf, torch.inf)
                if lengths is not None:  # version 2 clears what it does not load; TMA brings NaN along
                    v = v.masked_fill(torch.arange(v.shape[1]).view(-1, 1, 1) >= lengths, 0)
            v = v.repeat_interleave(q.shape[2] // v.shape[2], dim=2)
            piece = (p @ v.transpose(1, 2)).transpose(1, 2)
            if self.packed:
                out[of_q[1]], lse[:, of_q[1]] = piece[0], row[0]
            else:
                out[of_q], lse[of_q] = piece, row
        returned = 2 if name == "flash_attn_with_kvcache" and self.version == 2 else 4
        wants_lse = self.a.get("return_softmax_lse", self.a.get("return_lse", True))
        return (out, lse if wants_lse else None, *[None] * (returned - 2))

    def backward(self) -> None:
        """dS = P (dP - delta), with P from the lse as the forward gave it (Dao 2023, algorithm 2)."""
        a, group = self.a, self.q.shape[-2] // self.k.shape[-2]
        lse = a.get("softmax_lse", a.get("lse"))
        assert lse.dtype == torch.float32 and lse.is_contiguous()
        seed = int(a["rng_state"][0]) if self.p else 0
        assert not self.p or a["rng_state"][1] == 0
        for n, (of_q, of_k, _) in enumerate(self.pieces()):
            q, dout, out = (x[of_q].transpose(1, 2).double() for x in (self.q, a["dout"], a["out"]))
            k, v = (x[of_k].transpose(1, 2).double() for x in (self.k, self.v))
            k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
            row = lse[:, of_q[1]].unsqueeze(0) if self.packed else lse[of_q]
            row = row.masked_fill(row == -torch.inf, 0)  # as versions 3 and 4 do; version 2 has none
            p = torch.exp(self.scores(self.q[of_q], self.k[of_k], None) - row.unsqueeze(-1))
            keep = self.keep(p.shape, seed, n)
            delta = (dout * out).sum(-1, keepdim=True)
            ds = p * (keep * (dout @ v.transpose(-2, -1)) - delta)
            if self.softcap:
                capped = torch.tanh(q @ k.transpose(-2, -1) * a["softmax_scale"] / self.softcap)
                ds = ds * (1 - capped**2)
            dk, dv = ds.transpose(-2, -1) @ q * a["softmax_scale"], (p * keep).transpose(-2, -1) @ dout
            grads = {"dq": ds @ k * a["softmax_scale"]}
            grads |= {"dk": dk.unflatten(1, (-1, group)).sum(2), "dv": dv.unflatten(1, (-1, group)).sum(2)}
            for name, grad in grads.items():
                target = a[name][of_q if name == "dq" else of_k]
                target.copy_(grad.transpose(1, 2))
