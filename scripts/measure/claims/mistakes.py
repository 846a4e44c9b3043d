"""Where the sources err or contradict each other: what they say, what is so, and what shows it, with our
figures where there are rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from scripts.measure.claims import NotMeasured, Results, Row, missing, of

MIB, GIB = 2**20, 2**30


@dataclass(frozen=True)
class Mistake:
    """about: the claims that it belongs to; shown: our evidence, from rows or by arithmetic."""

    about: tuple[int, ...]
    said: str
    fact: str
    shown: Callable[[Results], str] | None = None

    def evidence(self, results: Results) -> str:
        """ "" where there are no rows for it."""
        try:
            return self.shown(results) if self.shown else ""
        except NotMeasured:
            return ""


def beyond_the_peak(results: Results) -> str:
    from scripts.bench_ladder import claimed

    return f"\n\n{claimed()}\n"


def ladder_heads(results: Results) -> str:
    rows = results.ok("cuda_ladder", passed="forward", implementation="cuda_fa2", seq_len=4096, causal=False)
    one, many = (of(rows, heads=heads)["result"]["ms_median"] for heads in (1, 32))
    gpu = rows[0]["machine"]["gpu"]
    return f"Ours (fa2, {gpu}, N = 4096): {one:.3f} ms with one head, {many:.3f} ms with 32."


def naive_totals(results: Results) -> str:
    """Scores and Q, K, V, O of a head in fp32, D = 128."""
    said = []
    for tokens in (1024, 4096, 8192, 16384):
        scores, operands = 4 * tokens**2 / MIB, 4 * 4 * tokens * 128 / MIB
        said.append(f"{scores + operands:,.0f} MiB at {tokens:,}")
    return f"By arithmetic, a head in fp32: {', '.join(said)}."


def l2_rereads(results: Results) -> str:
    rows = results.ok("roofline", passed="forward", implementation="cuda_fa2", causal=True, head_dim=128)
    counted = [row for row in rows if "l2_bytes" in (row["result"].get("counters") or {})]
    if not counted:
        raise missing("roofline", counters="l2_bytes")
    row: Row = max(counted, key=lambda row: row["point"]["seq_len"])
    p = row["point"]
    once = 4 * 2 * p["batch"] * p["heads"] * p["seq_len"] * p["head_dim"]  # q, k, v, out in 16 bits
    times = row["result"]["counters"]["l2_bytes"] / once
    return (
        f"Counted on {row['machine']['gpu']} (fa2, N = {p['seq_len']:,}, causal): the L2 moved {times:.0f} "
        "times what Q, K, V and O take."
    )


def llama_cache(results: Results) -> str:
    def cache(heads: int) -> float:
        return 2 * heads * 128 * 2 * 80 * 4096 / GIB  # K and V, D = 128, 16 bits, 80 layers

    return f"By the formula: {cache(64):.1f} GiB with 64 KV heads, {cache(8):.2f} GiB with its 8."


MISTAKES = [
    Mistake(
        (10,),
        "Times of five kernels on an A100, 32 heads and no mask.",
        "At the longest N each of them takes more than the peak of an A100: they were not measured on one.",
        beyond_the_peak,
    ),
    Mistake(
        (10,),
        "The same times for one head, in the text beside that table.",
        "32 heads are 32 times the work; even one that leaves the GPU idle does not take as long as all.",
        ladder_heads,
    ),
    Mistake(
        (11,),
        'Totals of ~5, ~66 and ~260 MB; at N = 16384 "out of memory".',
        "They leave out part of Q, K, V and O, and 1 GB a head fills no card of 80 GB.",
        naive_totals,
    ),
    Mistake(
        (12,),
        "Code of tiled attention in plain PyTorch.",
        "It raises an error at the shape that is stated (it multiplies over the axis of heads of a (B, N, "
        "H, D) layout), rescales by a tile's maximum in the place of the running one, builds an N x N "
        "mask, and does not reset the peak before the baseline is measured.",
    ),
    Mistake(
        (10,),
        "A kernel whose threads return before a `__syncthreads`, and static shared arrays of 112 KB, "
        'elsewhere "64 KB per thread block".',
        "The first would be undefined behaviour; as launched, with a thread a row of the tile, none returns. "
        "Static shared memory ends at 48 KB, more has to be dynamic.",
    ),
    Mistake(
        (13,),
        'K and V are "read once".',
        "They are read once for each tile of queries, N / Br times; it is the scores that are never in "
        "memory.",
        l2_rereads,
    ),
    Mistake(
        (9, 20),
        "A flag of Hugging Face's for FlashAttention-2 gives FlashAttention-3; `TORCH_LOGS=+dynamo` shows "
        "the backend of SDPA.",
        "The flag gives version 2, and that log shows the compiler. Kernel names in a profile show what ran.",
    ),
    Mistake(
        (18,),
        "Llama-2-70B keeps 10.5 GB at 4,096 tokens.",
        "That is with 64 KV heads; it has 8. And MQA shrinks 64 heads 64 times, more than the 32 named.",
        llama_cache,
    ),
    Mistake(
        (14, 27),
        "An A100's HBM gives 2.0 TB/s in one source, 1.5 in another.",
        f"These are the 80 GB and the 40 GB card; the balance is {312 / 2.0:.0f} or {312 / 1.5:.0f} "
        "FLOP/byte.",
    ),
    Mistake(
        (27,),
        '"SRAM is 400x smaller" than HBM.',
        f"80 GB over 20 MB is {80e9 / 20e6:,.0f}.",
    ),
    Mistake(
        (21,),
        'Online softmax goes from "two passes to one", or "three to two, as one is impossible".',
        "Both are true: one pass for attention, whose output may be rescaled; two for softmax alone, which "
        "has to write every value.",
    ),
    Mistake(
        (32,),
        "Operations bound by memory are 0.02% of the FLOPs, beside matrix products of over 99.8%.",
        "The two differ by a factor of ten, and QK^T is a product that is bound by memory.",
    ),
    Mistake(
        (1,),
        "8 GB of scores are more than the weights of a model of 7B parameters.",
        f"Those are {7e9 * 2 / 1e9:.0f} GB in 16 bits.",
    ),
    Mistake(
        (17, 23),
        "A KV cache that is appended to with `torch.cat`, a prefill without a causal mask, a cache that is "
        "not reset.",
        "The first copies the cache every step; the second and third give wrong tokens.",
    ),
]
