"""Claim 31: block-sparse attention beside dense, from results/attention."""

from __future__ import annotations

from scripts.measure.claims import Figures, Results, Row, claim, command_of, listed, missing, ms, name
from scripts.measure.rows import key_of

SPARSE = "sparsity="  # the pattern follows, in the features of a row
PASSES = ("forward", "backward")


@claim(
    31,
    "Block-sparse FlashAttention is faster in proportion to the blocks left, at like accuracy.",
    theirs="""2.8x against 2.4x on Long Range Arena at like accuracy; traffic O(N D + N^2 D^2 s / M) with s
        the share of blocks kept""",
    source="paper",
    # In proportion: 1 / s times as fast as dense, give or take a tenth, whatever the pattern, pass and head
    # dim; in part half of that at least. Like accuracy is claimed, too: without it never more than in part.
    holds=lambda f: f.least >= 0.9 and f.most <= 1.1 and f.like_accuracy,
    partly=lambda f: f.least >= 0.5,
    differ=("features",),
    apart=("implementation", "pass", "seq_len", "head_dim", "causal"),
    figure="{forward} of the gain in proportion forward, {backward} backward; accuracy not tested",
    why="""
        {names}, each over itself without a pattern in the same run, N = {seq_len:,}, causal, bf16. The share
        of the blocks of 128 x 128 under the diagonal that are kept, and the gain in proportion: {patterns}.
        Measured: {gains}. The times of triton include the kernels that list the blocks.

        Neither the accuracy on Long Range Arena nor the 2.8x against 2.4x there are tested here: no
        block-sparse model was trained on it. Nor is the traffic, which was not counted.
        """,
)
def in_proportion(results: Results) -> Figures:
    pairs = beside_dense(results)
    shares = {pattern(sparse): kept(sparse) for _, sparse in pairs}
    gains: dict[tuple[str, int], dict[str, list[float]]] = {}  # by pass and head dim, then by pattern
    parts: dict[str, list[float]] = {passed: [] for passed in PASSES}
    for dense, sparse in sorted(pairs, key=lambda pair: at(pair[1])):
        p, gain = sparse["point"], ms(dense) / ms(sparse)
        gains.setdefault(at(sparse)[1:], {}).setdefault(pattern(sparse), []).append(gain)
        parts[p["pass"]].append(gain * shares[pattern(sparse)])
    every = [part for of in parts.values() for part in of]
    return Figures(
        {id(row): row for pair in pairs for row in pair}.values(),
        command=f"{command_of('attention')} --sparsity dense {' '.join(shares)} --causal",
        names=" and ".join(dict.fromkeys(name(sparse) for _, sparse in pairs)),
        seq_len=pairs[0][0]["point"]["seq_len"],
        patterns=listed("{} {:.3f}, {:.2f}x", [(each, s, 1 / s) for each, s in shares.items()], "; "),
        gains=listed("{}, D = {}, {}", [(*where, span_of(of)) for where, of in gains.items()], "; "),
        **{passed: f"{min(parts[passed]):.0%} to {max(parts[passed]):.0%}" for passed in PASSES},
        least=min(every),
        most=max(every),
        like_accuracy=False,  # no rows: see the sentence
    )


def beside_dense(results: Results) -> list[tuple[Row, Row]]:
    """Dense and sparse rows in bf16 of one run that are alike in all else. Raises NotMeasured without both
    passes."""
    rows = results.ok("attention", passed=PASSES, dtype="bfloat16")
    found = {(row.get("run_id"), key_of(row["point"])): row for row in rows}
    pairs = []
    for row in rows:
        if row["point"]["features"].startswith(SPARSE):
            dense = found.get((row.get("run_id"), key_of(row["point"] | {"features": ""})))
            pairs += [(dense, row)] if dense else []
    for passed in PASSES:
        if not any(row["point"]["pass"] == passed for _, row in pairs):
            raise missing("attention", passed=passed, features=f"{SPARSE}..., and dense ones in the same run")
    return pairs


def at(row: Row) -> tuple[int, str, int]:
    """Where it is said: the order of its pass, the pass, the head dim."""
    p = row["point"]
    return PASSES.index(p["pass"]), p["pass"], p["head_dim"]


def pattern(row: Row) -> str:
    return row["point"]["features"].removeprefix(SPARSE)


def kept(row: Row) -> float:
    """s, the share of the blocks that the pattern keeps of those that the mask leaves."""
    from model.sparsity import kept_share
    from scripts.measure.instruments.bench_points import Shape

    p = row["point"]
    shape = Shape(1, 1, 1, p["kv_len"], p["head_dim"], p["causal"], "bf16", sparsity=pattern(row))
    return kept_share(shape.kept, p["causal"])


def span_of(gains: dict[str, list[float]]) -> str:
    return listed("{} {:.2f}x to {:.2f}x", [(each, min(of), max(of)) for each, of in gains.items()])
