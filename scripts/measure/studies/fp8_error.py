"""How exact is attention in fp8: one scale a tensor, block scales, the Hadamard transform? (claim 30)

    python scripts/study.py fp8_error

On the inputs of FlashAttention-3 (Shah et al. 2024, section 4.3): q, k and v of N(0, 1), and N(0, 100) added
to one value in a thousand. fp8 (e4m3) is simulated: q, k, v and the unnormalised probabilities are rounded to
it, products and sums are fp32; so it runs on a CPU, in a minute. A row of results/fp8_error/<gpu or
cpu>.jsonl has `rmse` of the output against fp64, over all draws and heads, `rmse_all`
of each. Implementations:

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
import math
from typing import Any

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

Row = dict[str, Any]


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    made = parser(__doc__, STUDY)
    made.add_argument("--tokens", type=positive, default=2048)
    made.add_argument("--head-dim", type=positive, default=128, help="a power of two")
    made.add_argument("--draws", type=positive, default=8, help="of the inputs")
    options = made.parse_args(given)
    if options.head_dim & (options.head_dim - 1):
        made.error(f"--head-dim {options.head_dim}: the Hadamard transform needs a power of two")
    return options


def points(options: argparse.Namespace) -> list[Point]:
    of = {"study": STUDY, "pass": "forward", "seq_len": options.tokens, "head_dim": options.head_dim}
    return [of | {"heads": HEADS, "draws": options.draws, "implementation": name} for name in NAMES]


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


def attention(name: str, x: Any) -> Any:
    """The output (H, T, D) of the scheme `name` for q, k, v (3, H, T, D)."""
    import torch

    if name in ("fp16", "bf16"):
        dtype = torch.float16 if name == "fp16" else torch.bfloat16
        q, k, v = x.to(dtype).float()
        round_p = lambda p: p.to(dtype).float()  # noqa: E731
    else:
        q, k, v = x.float()
        finer = name in ("scaled_p", "int8_scores")
        if "hadamard" in name or finer:
            turn = hadamard(q.shape[-1]).to(q.device)
            q, k = q @ turn, k @ turn
        blocks, times = "blocks" in name or finer, 256.0 if finer else 1.0
        q, k = (rounded(each, blocks, name == "int8_scores") for each in (q, k))
        v = rounded(v, blocks)
        round_p = lambda p: (p * times).to(torch.float8_e4m3fn).float() / times  # noqa: E731
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    p = (scores - scores.amax(-1, keepdim=True)).exp()
    return round_p(p) @ v / p.sum(-1, keepdim=True)


def measured(point: Point, device: str) -> dict[str, Any]:
    import torch

    squares = []
    for seed in range(point["draws"]):
        x = inputs(point, seed, device)
        q, k, v = x
        exact = torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), -1) @ v
        squares.append(float((attention(point["implementation"], x).double() - exact).square().mean()))
    rmse = math.sqrt(sum(squares) / len(squares))
    return {"status": "ok", "rmse": rmse, "rmse_all": [math.sqrt(square) for square in squares]}


def measure(options: argparse.Namespace, run: Run) -> None:
    left = run.left(points(options), "about 10 s each on two cores")
    run.each(left, lambda point: measured(point, run.device), lambda point, _: point["implementation"])


def report(rows: list[Row]) -> Report:
    """The table of the rows; nothing is measured."""
    found = {
        row["point"]["implementation"]: row["result"]["rmse"]
        for row in rows
        if row["result"]["status"] == "ok"
    }
    first = found.get("tensor")
    lines = [["", "RMSE", "one scale a tensor / this"]]
    for name in NAMES:
        if name in found:
            factor = f"{first / found[name]:.1f}x" if first else ""
            lines.append([TITLES.get(name, name), f"{found[name]:.2e}", factor])
    both = found.get("hadamard_blocks")
    said = (
        f"Hadamard and block scales: {first / both:.1f}x less error than one scale a tensor."
        if first and both
        else ""
    )
    question = "How exact is attention in fp8, and what do block scales and the Hadamard transform change?"
    return Report(
        question,
        f"python scripts/study.py {STUDY}",
        [Table("Error of the output against fp64", lines)],
        {},
        [],
        said,
    )


def main() -> None:
    run_study(STUDY, arguments(), measure, report)
