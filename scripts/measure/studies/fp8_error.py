"""How exact is attention in fp8: one scale a tensor, block scales, the Hadamard transform? (claim 30)

    python scripts/study.py fp8_error

On the inputs of FlashAttention-3 (Shah et al. 2024, section 4.3): q, k and v of N(0, 1), and N(0, 100) added
to one value in a thousand. fp8 (e4m3) is simulated: q, k, v and the unnormalised probabilities are rounded to
it, products and sums are fp32; so it runs on a CPU, in 6 minutes. The errors depend on N, which the
paper's figures do not name: 512, 2,048 and, with half the draws, 8,192 tokens. A row of
results/fp8_error/<gpu or cpu>.jsonl has `rmse` of the output against fp64, over all draws and heads,
`rmse_all` of each draw. Implementations:

fp16, bf16        q, k, v and the probabilities in 16 bits
tensor            fp8, one scale for all of q, of k and of v
blocks            a scale for each 128 tokens of a head
hadamard          q and k times an orthogonal matrix of signs, which spreads an outlier over D values
hadamard_blocks   both
scaled_p          both, and the probabilities times 256 before they are rounded, where e4m3 has more steps
int8_scores       as scaled_p, but q and k of 8-bit integers: after the transform they have no outliers, and
                  integers divide what is left into finer steps than e4m3, with its 3 bits behind the point
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Callable
from typing import Any

from scripts.measure.report.tables import fmt
from scripts.measure.rows import positive
from scripts.measure.runner import Run, parser, run_study
from scripts.measure.studies import Point, Report, Table

STUDY = "fp8_error"
GPU_S = 0
NAMES = ("fp16", "bf16", "tensor", "blocks", "hadamard", "hadamard_blocks", "scaled_p", "int8_scores")
TITLES = {"tensor": "one scale a tensor", "blocks": "block scales", "hadamard": "Hadamard transform"}
TITLES |= {"hadamard_blocks": "both", "scaled_p": "both, probabilities times 256"}
TITLES |= {"int8_scores": "both, probabilities times 256, q and k of 8-bit integers"}
BLOCK, MOST = 128, 448.0  # tokens that share a scale; e4m3's largest number
HEADS = 4
TOKENS = (512, 2048, 8192)
LONG, FEW = 8192, 4  # from so many tokens on, at most so many draws

Row = dict[str, Any]


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    made = parser(__doc__, STUDY)
    made.add_argument("--tokens", type=positive, nargs="+", default=list(TOKENS))
    made.add_argument("--head-dim", type=positive, default=128, help="a power of two")
    few = f"of the inputs (default: 8; at most {FEW} from {LONG:,} tokens on)"
    made.add_argument("--draws", type=positive, default=8, help=few)
    options = made.parse_args(given)
    if options.head_dim & (options.head_dim - 1):
        made.error(f"--head-dim {options.head_dim}: the Hadamard transform needs a power of two")
    if odd := [tokens for tokens in options.tokens if tokens > BLOCK and tokens % BLOCK]:
        made.error(f"--tokens {odd[0]}: beyond {BLOCK}, block scales need a multiple of {BLOCK}")
    return options


def points(options: argparse.Namespace) -> list[Point]:
    """Those of an N one after the other."""
    found: list[Point] = []
    for tokens in options.tokens:
        draws = min(options.draws, FEW) if tokens >= LONG else options.draws
        of = {"study": STUDY, "pass": "forward", "seq_len": tokens, "head_dim": options.head_dim}
        found += [of | {"heads": HEADS, "draws": draws, "implementation": name} for name in NAMES]
    return found


def inputs(point: Point, seed: int, device: str) -> Any:
    """q, k, v (3, H, T, D) in fp64."""
    import torch

    g, shape = torch.Generator().manual_seed(seed), (3, point["heads"], point["seq_len"], point["head_dim"])
    usual, outliers = (torch.randn(shape, generator=g, dtype=torch.float64) for _ in range(2))
    return (usual + 10 * outliers * (torch.rand(shape, generator=g) < 0.001)).to(device)


def hadamard(size: int) -> Any:
    """The orthogonal matrix H S / sqrt(D) (D, D) in fp32: Sylvester's, with random signs."""
    import torch

    h = torch.ones(1, 1)
    for _ in range(int(math.log2(size))):
        h = torch.cat((torch.cat((h, h), 1), torch.cat((h, -h), 1)))
    signs = torch.randint(0, 2, (size, 1), generator=torch.Generator().manual_seed(1)) * 2.0 - 1
    return signs * h / math.sqrt(size)


def rounded(x: Any, blocks: bool, integers: bool = False) -> Any:
    """x (H, T, D) in fp32 as fp8 has it: scaled so that the largest of a tensor, or of a block, is e4m3's;
    integers: as those of 8 bits have it."""
    import torch

    cut = x.unflatten(1, (-1, min(BLOCK, x.shape[1]))) if blocks else x[None]
    step = cut.abs().amax((-2, -1) if blocks else None, keepdim=True).clamp_min(1e-30)
    step = step / (127.0 if integers else MOST)
    cut = (cut / step).round() if integers else (cut / step).to(torch.float8_e4m3fn).float()
    return (cut * step).reshape(x.shape)


def by_head(q: Any, k: Any, v: Any, weighted: Callable[[Any], Any] = lambda p: p) -> Any:
    """The output (H, T, D) for q, k, v (H, T, D), a head at a time, as scores of 8,192 tokens in fp64 take
    0.5 GB a head; weighted: what becomes of the unnormalised probabilities that V is multiplied by."""
    import torch

    out = torch.empty_like(q)
    for head in range(len(q)):
        scores = q[head] @ k[head].mT / math.sqrt(q.shape[-1])
        p = scores.sub_(scores.amax(-1, keepdim=True)).exp_()
        out[head] = weighted(p) @ v[head] / p.sum(-1, keepdim=True)
    return out


def attention(name: str, x: Any) -> Any:
    """The output (H, T, D) of the scheme `name` for q, k, v (3, H, T, D)."""
    import torch

    if name in ("fp16", "bf16"):
        dtype = torch.float16 if name == "fp16" else torch.bfloat16
        return by_head(*x.to(dtype).float(), lambda p: p.to(dtype).float())
    q, k, v = x.float()
    finer = name in ("scaled_p", "int8_scores")
    if "hadamard" in name or finer:
        turn = hadamard(q.shape[-1]).to(q.device)
        q, k = q @ turn, k @ turn
    blocks, times = "blocks" in name or finer, 256.0 if finer else 1.0
    q, k = (rounded(each, blocks, name == "int8_scores") for each in (q, k))
    return by_head(q, k, rounded(v, blocks), lambda p: (p * times).to(torch.float8_e4m3fn).float() / times)


def measured(of: list[Point], device: str) -> list[dict[str, Any]]:
    """Of schemes with the same inputs: what is exact is computed once for each draw."""
    squares: list[list[float]] = [[] for _ in of]
    for seed in range(of[0]["draws"]):
        x = inputs(of[0], seed, device)
        exact = by_head(*x)
        for point, found in zip(of, squares, strict=True):
            found.append(float((attention(point["implementation"], x).double() - exact).square().mean()))
    return [
        {"status": "ok", "rmse": math.sqrt(sum(found) / len(found)), "rmse_all": [*map(math.sqrt, found)]}
        for found in squares
    ]


def measure(options: argparse.Namespace, run: Run) -> None:
    left = run.left(points(options), "about 6 min on two cores, 4 of them for 8,192 tokens")
    for _, mine in itertools.groupby(left, lambda point: point["seq_len"]):
        run.group(list(mine), lambda of: measured(of, run.device), said)


def said(point: Point, result: dict[str, Any]) -> str:
    return f"N = {point['seq_len']:,}, {point['implementation']}: {result.get('rmse', result['status'])}"


def report(rows: list[Row]) -> Report:
    """The table of the rows, by N; nothing is measured."""
    found: dict[str, dict[str, float]] = {}
    for row in sorted(rows, key=lambda row: [row["point"][key] for key in ("head_dim", "seq_len", "draws")]):
        if row["result"]["status"] == "ok":
            p = row["point"]
            shape = f"N = {p['seq_len']:,}, D = {p['head_dim']}"
            found.setdefault(shape, {})[p["implementation"]] = row["result"]["rmse"]

    def cell(of: dict[str, float], name: str) -> str:
        return f"{of[name]:.2e} ({fmt(over(of, name), '.2f', '-')})" if name in of else ""

    lines = [["", *found]]
    for name in NAMES:
        cells = [cell(of, name) for of in found.values()]
        lines += [[TITLES.get(name, name), *cells]] if any(cells) else []
    both = {shape: over(of, "hadamard_blocks") for shape, of in found.items()}
    less = "; ".join(f"{factor:.2f}x less at {shape}" for shape, factor in both.items() if factor)
    return Report(
        "How exact is attention in fp8, and what do block scales and the Hadamard transform change?",
        f"python scripts/study.py {STUDY}",
        [Table("RMSE of the output against fp64 (that of one scale a tensor over it)", lines)],
        found=f"Error with Hadamard and block scales beside one scale a tensor: {less}." if less else "",
    )


def over(errors: dict[str, float], name: str) -> float | None:
    """How many times the error of one scale a tensor is that of a scheme."""
    return errors["tensor"] / errors[name] if {"tensor", name} <= errors.keys() else None


def main() -> None:
    run_study(STUDY, arguments(), measure, report)
