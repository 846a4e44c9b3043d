"""What a backward does: products, FLOPs, bytes to and from DRAM, of those that kept P and those that compute
it again. A part of the study `backward_recompute`.

As a program it is what Nsight Compute runs: a forward and a backward of each point given.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from scripts.measure.instruments.bench_points import Shape

if TYPE_CHECKING:
    from attention.base import Attention
    from scripts.measure.instruments.counters import Counts
    from scripts.measure.instruments.timing import Contestant

Counted = dict[tuple[str, Shape], dict[str, Any] | str]  # what ncu counted, or why nothing

NOT_YET = "not counted"
SEPARATOR = "spin_kernel"  # what torch.cuda._sleep launches, and nothing else


@dataclass(frozen=True)
class Kind:
    """keeps: whether P is there when the backward begins. products: matrix products over the scores in it.
    skips: whether tiles of the future are left out."""

    keeps: bool
    products: int
    skips: bool


# Contestants besides those of conf/attention: the formulas under other ways to keep what they need.
FORMULAS = ("naive_checkpointed", "naive_compiled", "standard_compiled")


def contestants(names: list[str]) -> dict[str, Attention]:
    """Implementations of conf/attention, and FORMULAS."""
    from attention import registry
    from scripts.measure.instruments.textbook import Checkpointed, Compiled

    made = {
        "naive_checkpointed": lambda: Checkpointed("naive_checkpointed"),
        "naive_compiled": lambda: Compiled(registry.build("naive"), "naive_compiled"),
        "standard_compiled": lambda: Compiled(registry.build("standard"), "standard_compiled"),
    }
    return {name: made[name]() if name in made else registry.build(name) for name in names}


@functools.cache
def shared_instance(name: str) -> Attention:
    """One of each name, to be asked what it declares."""
    return contestants([name])[name]


def kind_of(name: str, shape: Shape) -> Kind:
    """What an implementation declares of its backward. With P at hand four products are left: dV = P^T dO, dP
    = dO V^T, dQ = dS K, dK = dS^T Q. S = Q K^T again is the fifth; two passes (one for dQ, one for dK and dV)
    make S and dP twice: seven. A checkpointed formula runs its forward again, as far as something is kept of
    it: not P V."""
    from scripts.measure.instruments.contestants import call_of

    costs = shared_instance(name).costs(call_of(shape, "cuda"))
    keeps = costs.writes_scores and costs.saved_bytes > 0
    return Kind(keeps, costs.backward_matmuls, skips=not costs.writes_scores)


def flops_done(kind: Kind, shape: Shape) -> float:
    """2 B H N^2 D a product; half of it where the future is skipped, as is usual (the diagonal's tiles are
    whole)."""
    whole = 2 * shape.batch * shape.heads * shape.tokens**2 * shape.head_dim
    return kind.products * whole * (0.5 if kind.skips and shape.causal else 1.0)


def model_bytes(name: str, shape: Shape) -> float | None:
    """DRAM bytes of the backward by the model of costs/roofline.py, for an L2 that holds no matrix of scores;
    None for what Inductor wrote."""
    from model.config import GPTConfig
    from model.costs.roofline import attention_work
    from model.costs.run import Run
    from scripts.measure.instruments.textbook import Compiled

    if isinstance(shared_instance(name), Compiled):
        return None
    config = GPTConfig(
        vocab_size=1,
        seq_len=shape.tokens,
        n_head=shape.heads,
        n_embd=shape.heads * shape.head_dim,
        causal=shape.causal,
    )
    run = Run(config, shape.batch, shared_instance(name), 4 if shape.dtype == "fp32" else 2)
    return attention_work(run)[1].bytes


def counted(points: list[tuple[str, Shape]]) -> Counted:
    """What ncu counts of each: bytes read and written in the forward and in the backward; or why nothing.

    Raises:
        NoCounters: for none of them.
    """
    from scripts.measure.instruments.counters import count

    asked = json.dumps([[name, asdict(shape)] for name, shape in points])
    said, launches = count([sys.executable, "-m", __name__, asked], marked=True)
    answers = [json.loads(line) for line in said.splitlines() if line.startswith('{"reason"')]
    answers += [{"reason": "the program ended before it", "parts": 0}] * (len(points) - len(answers))
    parts, found = iter(split(launches)), {}
    for point, answer in zip(points, answers, strict=True):
        mine = list(itertools.islice(parts, answer["parts"]))
        lacking = len(mine) < 2 or any("dram_read_bytes" not in part for part in mine)
        no_counts = "ncu has no launch of it" if lacking else None
        reason = answer["reason"] or no_counts
        found[point] = reason or dict(zip(("forward", "backward"), mine, strict=True))
    return found


def split(launches: list[tuple[str, Counts]]) -> list[dict[str, Any]]:
    """Sums over what was launched between separators, with the number of kernels."""
    from scripts.measure.instruments.counters import gathered

    parts: list[dict[str, Any]] = []
    mine: list[Counts] = []
    for name, counts in launches:
        if SEPARATOR not in name:
            mine.append(counts)
            continue
        parts.append(gathered(mine) | {"launches": len(mine)})
        mine = []
    return parts


def main() -> None:
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # ncu would look into each of those processes
    from scripts.measure.instruments.contestants import Field
    from scripts.measure.instruments.timing import clean_up, probe
    from scripts.measure.runner import failure

    asked = [(name, Shape(**of)) for name, of in json.loads(sys.argv[1])]
    built = contestants(list(dict.fromkeys(name for name, _ in asked)))
    for name, shape in asked:
        reason, parts = None, 0
        try:
            field = Field(shape, "cuda")
            built[name].require(field.call("backward"))
            contestant = field.contestant(name, built[name], "backward")
            probe(contestant)  # compiles and warms up, unseen
            parts = 2
            marked(contestant)
        except Exception as error:  # the next may do better
            reason = failure(error)["reason"]
        field = contestant = None
        clean_up()
        print(json.dumps({"reason": reason, "parts": parts}), flush=True)


def marked(contestant: Contestant) -> None:
    """A forward and a backward for ncu to see, a separator after each, whatever becomes of them."""
    import torch

    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    separators = 2
    try:
        out = contestant.prepare()
        torch.cuda._sleep(1)
        separators = 1
        contestant.run(out)
    finally:
        for _ in range(separators):
            torch.cuda._sleep(1)
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


if __name__ == "__main__":
    main()
