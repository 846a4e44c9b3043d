"""Triton kernels compiled for a GPU that is not there: registers, spills, shared memory, instructions.

A process of its own, without TRITON_INTERPRET: `python -m tests.ops.ahead` reads JSON lists of `Build`s as
dictionaries, one a line, and prints a `Compiled` each, a line of JSON, in the same order.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ops.options import MASK_BLOCK
from ops.triton import configs


@dataclass(frozen=True)
class Build:
    """One kernel as ops/triton/attention.py launches it: forward, dkdv, dq, decode or combine; or cached, of
    ops/triton/attend_cache.py: one query of each row, or a chunk; `extras` fp8, int8 or int4 and paged too.

    `masked`: causal; `extras`: softcap, alibi, bias, bias_grad, relative_bias, dropout, document_ids,
    kv_lengths, block_mask, pointers (tensors that descriptors cannot load); `split`: whether decode splits
    the keys.
    """

    kind: str
    arch: tuple[int, int]
    bits: int
    head_dim: int
    masked: bool
    extras: tuple[str, ...] = ()
    split: bool = True

    @property
    def has_options(self) -> bool:
        return bool(set(self.extras) - {"pointers", "block_mask"})

    @property
    def bias_with_grad(self) -> str:
        names = {"relative_bias": "relative_bias", "bias_grad": "bias"}
        return next((bias for name, bias in names.items() if name in self.extras), "")

    @property
    def block_d(self) -> int:
        return max(16, 1 << (self.head_dim - 1).bit_length())

    @property
    def describable(self) -> bool:
        return not {"kv_lengths", "pointers"} & set(self.extras)

    @property
    def tile(self) -> configs.Tile | configs.DecodeTile:
        facts = self.arch, self.bits, self.block_d
        if self.kind == "cached":
            from ops.triton.attend_cache import cache_tile

            rows, stored = 256 if "chunk" in self.extras else 4, next(iter(STORED.keys() & self.extras), None)
            return cache_tile(rows, self.bits, self.block_d, stored, "paged" in self.extras)
        if self.kind in ("decode", "combine"):
            return configs.decode_tile(*facts, full=not self.split, desc=self.describable)
        sparse = "block_mask" in self.extras
        return configs.tile(self.kind, *facts, self.masked, self.has_options, self.bias_with_grad, sparse)

    def __str__(self) -> str:
        words = [self.kind, "sm_{}{}".format(*self.arch), f"{self.bits} bits", f"D={self.head_dim}"]
        words += ["masked"] * self.masked + list(self.extras) + ["whole"] * (not self.split)
        return f"{' '.join(words)}: {self.tile}"


@dataclass(frozen=True)
class Compiled:
    what: str
    registers: int
    spilled_bytes: int
    shared_bytes: int
    instructions: dict[str, int] = field(default_factory=dict)  # how often in the PTX


INSTRUCTIONS = {
    "wgmma": "wgmma.mma_async",
    "tma": "cp.async.bulk.tensor",
    "mma": "mma.sync",
    "bf16": ".f32.bf16.bf16",
    "cp.async": "cp.async.c",
}


def _kernel(kind: str) -> Any:
    from ops.triton import backward, backward_dq, cached, decode, forward

    return {
        "cached": cached._tilegpt_attend_cache,
        "forward": forward._tilegpt_attention_forward,
        "dkdv": backward._tilegpt_attention_backward_dkdv,
        "dq": backward_dq._tilegpt_attention_backward_dq,
        "decode": decode._tilegpt_decode_split,
        "combine": decode._tilegpt_decode_combine,
    }[kind]


def _constants(build: Build) -> dict[str, Any]:
    tile, sizes = build.tile, {"D": build.head_dim, "BLOCK_D": build.block_d}
    if build.kind == "combine":
        return sizes | {"SPLITS": 128, "PDL": tile.pdl}
    if build.kind == "cached":
        int4 = "int4" in build.extras
        part = build.block_d // 2 if int4 else build.block_d
        shape = {"HEADS_PER_KV": 4, "BLOCK_M": tile.m, "BLOCK_N": tile.n, "PART": part, "PARTS": 1 + int4}
        masks = {"HAS_LEFT": False, "HAS_RIGHT": build.masked, "SOFTCAP": "softcap" in build.extras}
        how = {"EXACT": build.bits == 32, "SPLIT": build.split, "PDL": build.split and build.arch >= (9, 0)}
        return {"D": build.head_dim, "PAGE": 16 * ("paged" in build.extras)} | shape | masks | how
    constants = sizes | {
        "HEADS_PER_KV": 1,
        "BLOCK_N": tile.n,
        "HAS_LEFT": False,
        "HAS_RIGHT": build.masked,
        "SOFTCAP": "softcap" in build.extras,
        "DROPOUT": "dropout" in build.extras,
        "EXACT": build.bits == 32,
        "DESC": tile.desc and build.describable,
        "REACH": 128 * ("relative_bias" in build.extras),  # as T5's
        "SLOPES_B": 0,
    }
    if build.kind == "decode":
        pdl = tile.pdl and build.split
        return constants | {"HEADS_PER_KV": 4, "BLOCK_M": 16, "SPLIT": build.split, "PDL": pdl}
    late = not {"softcap", "alibi", "bias", "relative_bias"} & set(build.extras)
    constants |= {"BLOCK_M": tile.m, "SCALE_LATE": late, "MASK_BLOCK": MASK_BLOCK}
    if build.kind == "dq":
        constants |= {"BIAS_ROWS": "bias_grad" in build.extras, "BIAS_COLS": "bias_grad" in build.extras}
    return constants if build.kind == "dkdv" else constants | {"EVEN_K": "kv_lengths" not in build.extras}


# What each optional tensor is to the kernel where the call has it.
OPTIONAL = {
    "alibi_slopes": ("alibi", "*fp32"),
    "bias": ("bias", "*{dtype}"),
    "dbias": ("bias_grad", "*fp32"),
    "relative_bias": ("relative_bias", "*fp32"),
    "by_distance": ("relative_bias", "*fp32"),
    "q_document_ids": ("document_ids", "*i32"),
    "k_document_ids": ("document_ids", "*i32"),
    "ranges": ("document_ids", "*i32"),
    "blocks": ("block_mask", "*i32"),
    "kv_lengths": ("kv_lengths", "*i32"),
    "seed": ("dropout", "*i64"),
}


STORED = {"fp8": "*fp8e4nv", "int8": "*i8", "int4": "*u8"}
CACHED = {"k_scale": "*bf16", "v_scale": "*bf16", "table": "*i32", "kv_lengths": "*i32"}


def _absent(name: str, build: Build) -> bool:
    if build.kind == "cached" and name in CACHED:
        needs = {"k_scale": STORED, "v_scale": STORED, "table": {"paged"}, "kv_lengths": None}[name]
        return needs is not None and not set(needs) & set(build.extras)
    return name in OPTIONAL and OPTIONAL[name][0] not in build.extras


def _type(name: str, build: Build, constants: dict[str, Any]) -> str:
    """The argument's type, as Triton writes it."""
    dtype = "bf16" if build.bits == 16 else "fp32"
    if build.kind == "cached" and name in CACHED:
        return CACHED[name]
    if build.kind == "cached" and name in ("k", "v"):
        return next((STORED[kind] for kind in build.extras if kind in STORED), f"*{dtype}")
    if name in OPTIONAL:
        return OPTIONAL[name][1].format(dtype=dtype)
    if name in {"decode": ("k", "v"), "cached": ()}.get(build.kind, ("q", "k", "v", "dout")):
        rows = constants["BLOCK_N" if name in ("k", "v") else "BLOCK_M"]
        descriptor = f"tensordesc<{dtype}[1, 1, {rows}, {constants['BLOCK_D']}]>"
        return descriptor if constants["DESC"] else f"*{dtype}"
    statistics = ("lse", "padded_lse", "delta", "parts", "statistics")
    if name in statistics or (name == "out" and build.kind in ("decode", "cached") and build.split):
        return "*fp32"
    if name in ("q", "out", "dq", "dk", "dv"):
        return f"*{dtype}"
    return "fp32" if name in ("scale", "softcap", "keep_scale") else "i32"


def compiled(build: Build) -> Compiled:
    """Pointers and the strides of q, k, v, out and their gradients are multiples of 16, as in a model."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel, constants = _kernel(build.kind), _constants(build)
    signature, constexprs, attributes = {}, {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants or _absent(name, build):
            signature[name], constexprs[(index,)] = "constexpr", constants.get(name)
            continue
        signature[name] = _type(name, build, constants)
        stride = name.endswith(("_b", "_h", "_t", "_n", "_p"))
        stride = stride and not name.startswith(("bias", "blocks", "table"))
        if signature[name].startswith("*") or stride:
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constexprs, attributes)
    target = GPUTarget("cuda", 10 * build.arch[0] + build.arch[1], 32)
    options = {"num_warps": build.tile.warps, "num_stages": build.tile.stages}
    if build.kind == "cached":
        options["maxnreg"] = build.tile.registers
    if build.kind == "combine":
        options = {"num_warps": 8}
    result = triton.compile(source, target=target, options=options)
    ptx = result.asm["ptx"]
    found = {name: ptx.count(text) for name, text in INSTRUCTIONS.items()}
    return Compiled(str(build), *_assembled(ptx), result.metadata.shared, found)


def _assembled(ptx: str) -> tuple[int, int]:
    """(registers of a thread, bytes spilled) by the assembler of triton's wheel."""
    from triton import knobs

    arch = re.search(r"\.target (\w+)", ptx)[1]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        command = [knobs.nvidia.ptxas.path, "-v", f"-arch={arch}", path, "-o", path.with_suffix(".cubin")]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    stores, loads = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log).groups()
    return int(re.search(r"Used (\d+) registers", log)[1]), int(stores) + int(loads)


if __name__ == "__main__":
    for given in (each for line in sys.stdin for each in json.loads(line)):
        build = Build(**{key: tuple(x) if isinstance(x, list) else x for key, x in given.items()})
        print(json.dumps(asdict(compiled(build))), flush=True)
