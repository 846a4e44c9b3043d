"""What do 8 and 4 bits, or blocks, change in a KV cache: bytes, time of attention, tokens/s, loss? (claim 38)

    python scripts/study.py kv_cache_kinds

Without a GPU only the loss. Rows of results/kv_cache_kinds/<gpu or cpu>.jsonl, by `pass`; `cache` is auto (16
bits), fp8, int8 or int4:

attention  one query a row over `kv_len` cached tokens, 32 query and 8 key heads of 128 channels, dense or in
           blocks of `block` tokens: time, `bytes_per_token` of a layer with scales; all kinds hold the same
           tokens, and error_ratio is the distance from naive's reading of the same cache, over 2% of it
generate   gpt2 with a context of 4,096: tokens/s of 64 tokens behind `prompt` of them
loss       a small GPT trained on the bytes of docs/*.md: nats a byte of the last tenth, in bf16, as when
           decoding over such a cache
"""

from __future__ import annotations

import argparse
import functools
import itertools
from typing import Any

from scripts.measure.machine import ROOT
from scripts.measure.report.tables import Record, listed, records, where
from scripts.measure.rows import positive
from scripts.measure.runner import Run, parser, run_study
from scripts.measure.studies import Point, Report, Row

STUDY = "kv_cache_kinds"
GPU_S, ESTIMATED = 120, True
KINDS = ("auto", "fp8", "int8", "int4")
BLOCKS = (None, 16, 64)
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
ALLOWED = 0.02
NEW, CONTEXT = 64, 4096


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    made = parser(__doc__, STUDY)
    made.add_argument("--steps", type=positive, default=400, help="of training the model whose loss is taken")
    return made.parse_args(given)


def points(options: argparse.Namespace, cuda: bool) -> list[Point]:
    """Those of a shape one after the other."""
    found: list[Point] = []
    if cuda:
        of = {"study": STUDY, "pass": "attention", "implementation": "triton", "dtype": "bfloat16"}
        of |= {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM}
        for batch, tokens, kind, block in itertools.product((1, 16), (8192, 32768), KINDS, BLOCKS):
            found.append(of | {"batch": batch, "kv_len": tokens, "cache": kind, "block": block})
        of = {"study": STUDY, "pass": "generate", "implementation": "auto", "model": "gpt2"}
        for batch, prompt, kind in itertools.product((1, 16), (512, CONTEXT - NEW), KINDS):
            how = {"batch": batch, "prompt": prompt, "new_tokens": NEW, "dtype": "bfloat16", "cache": kind}
            found.append(of | how)
    of = {"study": STUDY, "pass": "loss", "implementation": "naive", "dtype": "bfloat16"}
    return [*found, *(of | {"steps": options.steps, "cache": kind} for kind in KINDS)]


def measure(options: argparse.Namespace, run: Run) -> None:
    left = run.left(
        points(options, run.device == "cuda"), "about 2 min of an H200; the loss, minutes on a CPU"
    )
    for shape, points_of in itertools.groupby(left, lambda point: (point.get("batch"), point.get("kv_len"))):
        mine = list(points_of)
        if shape[1] is not None:
            run.group(mine, functools.partial(attention, device=run.device), said)
        elif shape[0] is not None:
            run.each(mine, generated, said)
        else:
            net, text = trained(options.steps, run.device)
            run.each(mine, lambda point, net=net, text=text: loss(net, text, point["cache"]), said)


def said(point: Point, result: dict[str, Any]) -> str:
    keys = ("batch", "kv_len", "prompt", "cache", "block")
    of = ", ".join(f"{key}={point[key]}" for key in keys if point.get(key))
    figures = (f"{key} {result[key]:.4g}" for key in ("ms_median", "tokens_per_s", "nats") if key in result)
    return f"{point['pass']}, {of}: {', '.join(figures) or result.get('reason', '')}"


def attention(of: list[Point], device: str) -> list[dict[str, Any]]:
    """All caches of a shape in turns."""
    import torch

    from attention import registry
    from scripts.measure.instruments.timing import Clock, Contestant, probe, spread

    dtype, generator = getattr(torch, of[0]["dtype"]), torch.Generator(device).manual_seed(0)
    shape = of[0]["batch"], KV_HEADS, of[0]["kv_len"], HEAD_DIM
    k, v = (torch.randn(shape, generator=generator, device=device, dtype=dtype) for _ in "kv")
    q = torch.randn(shape[0], HEADS, 1, HEAD_DIM, generator=generator, device=device, dtype=dtype)
    reader, naive = registry.build(of[0]["implementation"]), registry.build("naive")
    results, contestants = [], []
    with torch.inference_mode():
        for point in of:
            view = view_of(k, v, point["cache"], point["block"])
            expected, got = naive(q, view, None).float(), reader(q, view, None).float()
            result = {
                "status": "ok",
                "error_ratio": float((got - expected).norm() / expected.norm()) / ALLOWED,
            }
            result["bytes_per_token"] = (view.k.nbytes + view.v.nbytes) / (shape[0] * shape[2])
            results.append(result)
            contestants.append(Contestant(point["cache"], lambda _, view=view: reader(q, view, None)))
        times = Clock(0.1).alternate(contestants, [probe(each) for each in contestants])
    for result, took in zip(results, times, strict=True):
        result |= spread(took)
        moved = result["bytes_per_token"] * shape[0] * shape[2]
        result["gb_per_s"] = moved / result["ms_median"] / 1e6
    return results


def view_of(k: Any, v: Any, kind: str, block: int | None) -> Any:
    """A CacheView of k and v (B, Hkv, T, D), in blocks that are drawn for each row, or dense."""
    import torch

    from attention.base import CacheView
    from model.generation.view_cache import cached_tensor, write

    batch, heads, tokens, dim = k.shape
    size, device = block or tokens, k.device
    own = torch.randperm(batch * tokens // size, device=device).view(batch, -1) if block else None
    table = torch.arange(batch, device=device).unsqueeze(1) if own is None else own
    at = torch.arange(tokens, device=device).unsqueeze(0)
    sides = []
    for x in (k, v):
        shape = table.numel(), heads, size, dim
        side = cached_tensor(shape, kind, x.dtype, device, None if own is None else own.to(torch.int32))
        for row in range(batch):
            write(x[row : row + 1], side, kind, table[row : row + 1].gather(1, at // size), at % size)
        sides.append(side)
    return CacheView(*sides, torch.full((batch,), tokens, dtype=torch.int32, device=device))


@functools.cache
def gpt2() -> Any:
    from scripts.bench_generate import build

    return build("gpt2", "auto", CONTEXT, [])


def generated(point: Point) -> dict[str, Any]:
    """Medians of three runs after one that warms up."""
    import statistics

    import torch

    from model.generation.generate import generate

    shape, draw = (point["batch"], point["prompt"]), torch.Generator().manual_seed(1)
    prompts = torch.randint(50257, shape, generator=draw).tolist()
    runs = [generate(gpt2(), prompts, NEW, seed=seed, cache_dtype=point["cache"]) for seed in range(4)][1:]
    return {"status": "ok", "tokens_per_s": statistics.median(run.decode_tokens_per_s for run in runs)}


def trained(steps: int, device: str) -> tuple[Any, list[int]]:
    """A GPT of 4 layers and 128 channels, and the bytes that it has not seen."""
    import torch

    from attention import registry
    from model.gpt import GPT, GPTConfig

    text = b"".join(path.read_bytes() for path in sorted((ROOT / "docs").glob("*.md")))
    known, rest = torch.tensor(list(text[: len(text) * 9 // 10])), list(text[len(text) * 9 // 10 :])
    torch.manual_seed(0)
    config = GPTConfig(vocab_size=256, seq_len=128, n_layer=4, n_head=4, n_embd=128, position="rope")
    net = GPT(config, registry.build("naive")).to(device)
    optimizer, draw = torch.optim.AdamW(net.parameters(), lr=2e-3), torch.Generator().manual_seed(0)
    for _ in range(steps):
        at = torch.randint(len(known) - 129, (12, 1), generator=draw) + torch.arange(129)
        window = known[at].to(device)  # (12, 129)
        optimizer.zero_grad()
        (net(window[:, :-1], targets=window[:, 1:]) / (12 * 128)).backward()
        optimizer.step()
    return net.to(torch.bfloat16).eval(), rest


def loss(net: Any, text: list[int], kind: str) -> dict[str, Any]:
    from model.evaluation import score

    found = score(net, text[:8192], cache_dtype=kind)
    return {"status": "ok", "nats": found.nats / found.tokens}


def report(rows: list[Row]) -> Report:
    """The tables of the rows; nothing is measured."""
    found = where(records(rows), trusted=True)
    by = {name: where(found, passed=name) for name in ("attention", "generate", "loss")}
    plain = {
        (r.batch, r.kv_len): r.ms_median
        for r in by["attention"]
        if (r.cache, r.get("block")) == ("auto", None)
    }
    whole = {(r.batch, r.prompt): r.tokens_per_s for r in by["generate"] if r.cache == "auto"}
    known = {r.get("steps"): r.nats for r in by["loss"] if r.cache == "auto"}

    def of_attention(r: Record) -> str:
        start = f"{r.batch}|{r.kv_len:,}|{r.cache}|{r.get('block') or 'dense'}|{r.bytes_per_token:,.0f}"
        times = plain[r.batch, r.kv_len] / r.ms_median
        return f"{start}|{r.ms_median:.3f}|{r.gb_per_s:,.0f}|{times:.2f}"

    def of_text(r: Record) -> str:
        times = r.tokens_per_s / whole[r.batch, r.prompt]
        return f"{r.batch}|{r.prompt:,}|{r.cache}|{r.tokens_per_s:,.0f}|{times:.2f}"

    def of_loss(r: Record) -> str:
        return f"{r.cache}|{r.nats:.4f}|{r.nats / known[r.get('steps')] - 1:+.2%}"

    head = "rows|tokens|cache|blocks of|bytes a token and layer|ms|GB/s|times the speed of auto, dense"
    tables = [
        listed("Attention of one query a row", head, by["attention"], of_attention),
        listed("gpt2: tokens/s", "rows|prompt|cache|tokens/s|of auto", by["generate"], of_text),
        listed("Held-out text: nats a byte", "cache|nats|difference", by["loss"], of_loss),
    ]
    worst = max((abs(r.nats / known[r.get("steps")] - 1) for r in by["loss"]), default=None)
    answer = "" if worst is None else f"Fewer bits change the loss of held-out text by {worst:.2%} at most."
    return Report(
        "What do 8 and 4 bits, or blocks, change in a KV cache: bytes, speed and loss?",
        f"python scripts/study.py {STUDY}",
        [table for table in tables if len(table.lines) > 1],
        found=answer,
    )


def main() -> None:
    run_study(STUDY, arguments(), measure, report)
