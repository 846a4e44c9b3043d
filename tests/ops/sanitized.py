"""Calls for compute-sanitizer, a stage of the ladder a process: `python -m tests.ops.sanitized fa2`.

Small and odd: tiles cut by the ends, the diagonal, windows, documents and lengths, both ways to dQ, or in
stage tiled both ways to multiply.
"""

from __future__ import annotations

import sys

import torch

from attention.base import AttentionCall, AttentionOptions
from attention.cuda import PRODUCT_MODES, CudaStage
from tests.grid import Case, make_inputs

CASES = [
    Case("shape", 113, 203, 64, batch=1),
    Case("shape", 200, 200, 128, batch=1, kv_heads=2),
    Case("noncausal", 70, 300, 40, batch=1, features=frozenset({"noncausal"})),
    Case("masks", 150, 150, 96, batch=1, features=frozenset({"window", "softcap", "alibi", "dropout"})),
    Case("lengths", 130, 260, 64, features=frozenset({"kv_lengths", "document_ids"})),
    Case("strides", 113, 203, 64, batch=1, layout="sliced"),
    Case("no_key", 300, 70, 64, batch=1),  # whole tiles that see no key
    Case("no_key", 300, 70, 128, batch=1),
    Case("blocks", 300, 400, 64, kv_heads=2, features=frozenset({"block_mask"})),
    Case("blocks", 300, 300, 128, features=frozenset({"block_mask", "noncausal", "kv_lengths"})),
]


def main(stage: str) -> None:
    ran = 0
    ways = [{"products": products} for products in PRODUCT_MODES] if stage == "tiled" else []
    for options in ways or [{"deterministic": False}, {"deterministic": True}]:
        attention = CudaStage(stage, **options)
        dtype = torch.float32 if stage in ("plain", "naive", "rowwise", "tiled") else torch.bfloat16
        for case in CASES:
            inputs = make_inputs(case, "cuda", dtype)
            with torch.set_grad_enabled(attention.capabilities.backward):
                call = AttentionCall.of(inputs.q, inputs.k, inputs.v, AttentionOptions(**inputs.options))
                if attention.unsupported_reasons(call):
                    continue
                out = attention(inputs.q, inputs.k, inputs.v, **inputs.options)
            if out.requires_grad:
                out.backward(inputs.dout)
            torch.cuda.synchronize()
            ran += 1
    print(f"{stage}: {ran} calls")


if __name__ == "__main__":
    main(sys.argv[1])
