"""The kernels of a decoding step compiled for Hopper without a GPU, by `python -m tests.ops.ahead_step`: a
line of JSON for each, of GPT-2 124M and XL at batch 1, of attention in groups, and of quantised caches."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

SHAPES = {"124M": (768, 12), "XL": (1600, 25)}  # width, heads
SMS = 132
POINTERS = {"x": "*fp32", "qkv": "*bf16", "weight": "*bf16", "bias": "*bf16", "norm_weight": "*bf16"}
POINTERS |= {"norm_bias": "*bf16", "out": "*fp32", "statistics": "*fp32", "rope": "*fp32", "lengths": "*i64"}
POINTERS |= {"k_cache": "*bf16", "v_cache": "*bf16", "table": "*i32", "q": "*bf16", "q_norm": "*bf16"}
POINTERS |= {"k_norm": "*bf16", "k_scale": "*bf16", "v_scale": "*bf16", "weight_scale": "*bf16"}
INT8 = {"weight": "*i32", "norm_weight": "*fp32", "norm_bias": "*fp32"}  # beside weights in 8 bits
STORED = {"int8": ("*i8", 1, True), "int4": ("*u8", 2, True), "fp8": ("*fp8e4nv", 1, False)}  # parts, whole


def products() -> dict[str, dict[str, Any]]:
    """What -> the constants of a product."""
    found: dict[str, dict[str, Any]] = {}
    for name, (c, _) in SHAPES.items():
        plain = {"B": 1, "NORM": 0, "ACTIVATION": 0, "ADD": False}
        found |= {
            f"{name} QKV": plain | {"N": 3 * c, "K": c, "NORM": 1},
            f"{name} projection": plain | {"N": c, "K": c, "ADD": True},
            f"{name} MLP up": plain | {"N": 4 * c, "K": c, "NORM": 1, "ACTIVATION": 1},
            f"{name} MLP down": plain | {"N": c, "K": 4 * c, "ADD": True},
            f"{name} head": plain | {"N": 50_304, "K": c, "NORM": 1},
        }
    return found


def built(
    kernel: Any,
    constants: dict[str, Any],
    absent: set[str],
    warps: int,
    types: dict[str, str] | None = None,
) -> dict[str, Any]:
    """Registers, spills, and the loads before the wait for the kernel ahead, and how many by 16 bytes; types:
    of pointers, if others."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from tests.ops.ahead import _assembled

    signature, constexprs, attributes = {}, {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants or name in absent:
            signature[name], constexprs[(index,)] = "constexpr", constants.get(name)
        elif name in POINTERS or name == "slopes":
            signature[name] = (types or {}).get(name) or POINTERS[name]
            attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = "fp32" if name in ("eps", "scale", "softcap", "largest") else "i32"
    source = ASTSource(kernel, signature, constexprs, attributes)
    options = {"num_warps": warps, "launch_pdl": True}
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    registers, spilled = _assembled(ptx)
    loads = re.findall(r"ld\.global\S*", ptx.split("griddepcontrol.wait")[0])
    wide = sum("v4.b32" in load for load in loads)
    return {"registers": registers, "spilled_bytes": spilled, "ahead": len(loads), "ahead_wide": wide}


def main() -> None:
    from ops.triton import step
    from ops.triton.step_attention import _tilegpt_step_append, _tilegpt_step_attention
    from ops.triton.step_linear import _tilegpt_step_linear

    for int8, (what, constants) in itertools.product((False, True), products().items()):
        block_n, block_k, warps, programs = step.linear_tile(constants["N"], constants["K"], SMS)
        absent = set() if constants["NORM"] else {"norm_weight", "norm_bias"}
        absent |= set() if int8 else {"weight_scale"}
        tile = {"BLOCK_N": block_n, "BLOCK_K": block_k, "PDL": True}
        tile["TURNS"] = -(-constants["N"] // (block_n * programs))
        found = built(_tilegpt_step_linear, constants | tile, absent, warps, INT8 if int8 else None)
        loads = block_n * block_k // ((512 if int8 else 256) * warps)  # of 16 or 8 numbers a thread
        what += ", int8" * int8
        print(json.dumps({"what": what, "of_tile": loads} | found), flush=True)
    shapes = ((12, 1, 640, 64, 0), (384, 1, 640, 64, 0), (192, 1, 2176, 64, 16), (8, 4, 32_768, 128, 0))
    for programs, heads_per_kv, capacity, dim, page in shapes:
        keys, warps, splits = step.attention_tile(programs, heads_per_kv, capacity, dim, SMS)
        constants = {"B": 1, "H": 8 * heads_per_kv, "HEADS_PER_KV": heads_per_kv, "D": dim, "BLOCK_D": dim}
        constants |= {"BLOCK_N": keys, "PAGE": page, "SPLITS": splits}
        constants |= {"WINDOW": False, "SOFTCAP": False, "PDL": True}
        absent = {"q_norm", "k_norm", "slopes"} | (set() if page else {"table"})
        found = built(_tilegpt_step_attention, constants, absent, warps)
        what = f"attention of {programs} heads in groups of {heads_per_kv}, D = {dim}" + (
            f", blocks of {page}" if page else ""
        )
        loads = 2 * keys * dim // (256 * warps)
        print(json.dumps({"what": what, "of_tile": loads} | found), flush=True)
    for (kind, (stored, parts, whole)), page in itertools.product(STORED.items(), (0, 16)):
        constants = {"H": 32, "HEADS_PER_KV": 4, "D": 128, "BLOCK": 64, "PAGE": page}
        constants |= {"PARTS": parts, "WHOLE": whole}
        absent = set() if page else {"table"}
        caches = {"k_cache": stored, "v_cache": stored}
        found = built(_tilegpt_step_append, constants | {"PDL": True}, absent, 1, caches)
        print(json.dumps({"what": f"append, {kind}, blocks of {page}", "of_tile": 0} | found), flush=True)


if __name__ == "__main__":
    main()
