"""What the rows of studies/kv_cache.py say: tables, a picture, sentences; nothing is measured."""

from __future__ import annotations

from scripts.measure.report.steps import Steps, Way, chosen, exponent, factors, halves, integrated
from scripts.measure.rows import trusted
from scripts.measure.studies import Report, Row, Table

COMMAND = "python scripts/study.py kv_cache"
QUESTION = "What does a KV cache save in generation, and does it multiply with what tiled attention saves?"


def said(way: Way) -> str:
    return f"{way[0]}, {'cache' if way[1] else 'no cache'}"


def report(rows: list[Row], draw: bool = True) -> Report:
    """draw: False leaves the picture out."""
    steps = Steps(rows)
    tables = [counts(rows), caches(rows), tokens(steps), sums(steps), checks(rows, steps), growth(steps)]
    tables = [table for table in tables if len(table.lines) > 1]
    pictures = {"": picture(rows, steps)} if draw and steps.lengths else {}
    return Report(QUESTION, COMMAND, tables, pictures, notes(rows, steps), finding(steps))


def counts(rows: list[Row]) -> Table:
    lines = [["tokens", "cache", "computed", "formula"]]
    for row in chosen(rows, passed="count"):
        point, result = row["point"], row["result"]
        cached = "yes" if point["kv_cache"] else "no"
        lines.append(
            [f"{point['new_tokens']:,}", cached, f"{result['kv_computations']:,}", f"{result['formula']:,}"]
        )
    return Table("Keys and values that a layer computes in generating tokens from one", lines)


def caches(rows: list[Row]) -> Table:
    found = chosen(rows, passed="cache_bytes")
    most = {row["point"]["model"]: row for row in reversed(found)}  # the first of each model has all heads
    lines = [["model", "layers", "heads", "KV heads", "tokens", "MiB", "formula", "smaller by"]]
    for row in found:
        p, result = row["point"], row["result"]
        all_heads = most[p["model"]]["result"]["allocated_bytes"]
        figures = (result["allocated_bytes"], result["formula_bytes"])
        lines.append(
            [p["model"], *(f"{p[key]:,}" for key in ("n_layer", "heads", "kv_heads", "seq_len"))]
            + [f"{value / 2**20:,.1f}" for value in figures]
            + [f"{all_heads / figures[0]:.1f}x"]
        )
    return Table("Memory of a KV cache, allocated, in 16 bits", lines)


def tokens(steps: Steps) -> Table:
    head = ["tokens", *map(said, steps.ways)]
    if len(steps.names) == 2:
        head += [f"{steps.names[0]} / {steps.names[1]}: prefill", "decode"]
    lines = [head]
    for length in steps.lengths:
        ms = [steps.per_token(way)[length] for way in steps.ways]
        line = [f"{length:,}", *(f"{value:.3f}" for value in ms)]
        lines.append(line + ([f"{ms[0] / ms[1]:.2f}x", f"{ms[2] / ms[3]:.2f}x"] if len(ms) == 4 else []))
    title = "One token after so many, ms of the device (without the cache also the prefill of so many)"
    return Table(title, lines)


def sums(steps: Steps) -> Table:
    lines = [["tokens", *map(said, steps.ways), "cache", steps.names[-1] if steps.names else "tiled"]]
    lines[0] += ["product", "both", "both / product"]
    for new in steps.lengths:
        four = steps.four(new)
        if four is None or len(steps.names) != 2:
            continue
        saved = factors(four, steps.names)
        line = [f"{new:,}", *(f"{seconds:.3f}" for seconds in four.values())]
        lines.append(
            line + [f"{value:.2f}{'x' if key != 'stacking' else ''}" for key, value in saved.items()]
        )
    return Table("Generating tokens from one, s, integrated from steps of the device; what each saves", lines)


def checks(rows: list[Row], steps: Steps) -> Table:
    lines = [["tokens", "way", "measured s", "integrated s", "measured / integrated", "tokens/s"]]
    for row in chosen(rows, passed="generate"):
        point, result = row["point"], row["result"]
        name, new = point["implementation"], point["new_tokens"]
        way = name, point["kv_cache"]
        alike = steps.total(way, new) if way[1] else integrated(steps.eager.get(name, {}), new)
        line = [f"{new:,}", said(way), f"{result['seconds']:.3f}"]
        line += ["-", "-"] if alike is None else [f"{alike:.3f}", f"{result['seconds'] / alike:.2f}"]
        lines.append([*line, f"{result['tokens_per_s']:,.0f}"])
    title = (
        "Whole generations by model/generation against steps as it runs them (without the cache from Python)"
    )
    return Table(title, lines)


def growth(steps: Steps) -> Table:
    lines = [["way", "lengths", "exponent", "lengths", "exponent"]]
    for way in steps.ways:
        line = [said(way)]
        for half in halves(steps.totals(way)):
            p = exponent(half)
            line += ["-", "-"] if p is None else [f"{min(half):,} to {max(half):,}", f"{p:.2f}"]
        lines.append(line)
    return Table("Exponents of the whole time in the tokens generated, integrated, shorter and longer", lines)


def notes(rows: list[Row], steps: Steps) -> list[str]:
    found = []
    pair = {row["point"]["kv_cache"]: row["result"] for row in chosen(rows, passed="count", new_tokens=100)}
    if len(pair) == 2:
        without, within = (pair[on]["kv_computations"] for on in (False, True))
        found.append(
            f"100 tokens take {without:,} computations of a key and a value without a cache, {within:,} with "
            "it."
        )
    found += [measured_factor(rows, new) for new in (100, 512, 1024)]
    found.append(large_cache(rows))
    if (longest := longest_of_four(steps)) is not None:
        found.append(stacked(steps, longest))
        longer = {way: halves(steps.totals(way))[1] for way in steps.ways}
        powers = [f"{p:.2f} ({said(way)})" for way, of in longer.items() if (p := exponent(of)) is not None]
        if powers:
            lengths = next(iter(longer.values()))
            found.append(
                f"From {min(lengths):,} to {max(lengths):,} tokens the time of the device of all of them "
                f"grows with the exponents {', '.join(powers)}."
            )
    bad = [row for row in rows if not trusted(row["result"])]
    found += [f"Left out: {described(row)}" for row in bad]
    return [note for note in found if note]


def longest_of_four(steps: Steps) -> int | None:
    """The most tokens that all four ways were timed for."""
    full = [new for new in steps.lengths if steps.four(new)]
    return full[-1] if full and len(steps.names) == 2 else None


def finding(steps: Steps) -> str:
    if (new := longest_of_four(steps)) is None:
        return ""
    saved, tiled = factors(steps.four(new), steps.names), steps.names[1]
    each = f"{saved['cache']:.1f}x, {tiled} {saved['tiled']:.1f}x, both {saved['both']:.1f}x"
    return f"Over {new:,} tokens the cache saves {each}."


def stacked(steps: Steps, new: int) -> str:
    """Whether cache and tiled attention multiply in generating `new` tokens."""
    four, tiled = steps.four(new), steps.names[1]
    saved = factors(four, steps.names)
    how = "multiply" if 0.9 <= saved["stacking"] <= 1.1 else "do not multiply"
    how = "more than multiply" if saved["stacking"] > 1.1 else how
    within = four[steps.names[0], True] / four[tiled, True]
    return (
        f"At {new:,} tokens the cache saves {saved['cache']:.1f}x, {tiled} {saved['tiled']:.1f}x and both "
        f"{saved['both']:.1f}x, where the product is {saved['product']:.1f}x: they {how}, as {tiled} is "
        f"worth {saved['tiled']:.2f}x without the cache and {within:.2f}x with it."
    )


def large_cache(rows: list[Row]) -> str:
    """Llama-2-70B's, with the KV heads it has and with as many as query heads."""
    size = {
        row["point"]["kv_heads"]: row["result"]["allocated_bytes"]
        for row in chosen(rows, passed="cache_bytes", model="Llama-2-70B", seq_len=4096)
    }
    if not {8, 64} <= size.keys():
        return ""
    return (
        f"At 4,096 tokens Llama-2-70B's cache takes {size[8] / 1e9:.2f} GB ({size[8] / 2**30:.2f} GiB) with "
        f"its 8 KV heads, and would take {size[64] / 1e9:.2f} GB ({size[64] / 2**30:.2f} GiB) with 64."
    )


def measured_factor(rows: list[Row], new: int) -> str:
    """What the cache saves of whole generations of `new` tokens."""
    found = {
        (row["point"]["implementation"], row["point"]["kv_cache"]): row["result"]["seconds"]
        for row in chosen(rows, passed="generate", new_tokens=new)
    }
    names = [name for name, cached in found if cached and (name, False) in found]
    if not names:
        return ""
    each = " and ".join(f"{found[name, False] / found[name, True]:.1f}x with {name}" for name in names)
    return (
        f"A whole generation of {new:,} tokens is faster with the cache by {each}; without it the host "
        "issues every kernel of every step, with it a CUDA graph does on a GPU, which is part of that."
    )


def described(row: Row) -> str:
    point, result = row["point"], row["result"]
    why = (
        result.get("reason") or f"error ratio {result.get('error_ratio')}, kernels {result.get('kernels_ok')}"
    )
    tokens = point.get("seq_len") or point.get("new_tokens")
    return f"{point['implementation']} {point['pass']} {tokens} cache {point.get('kv_cache')}: {why}"


def picture(rows: list[Row], steps: Steps) -> str:
    """Left the time of a token, right that of all, by the tokens."""
    from scripts.measure.report.figures import Line, canvas, panel, svg

    some = next(row["point"] for row in rows if row["point"]["pass"] == "step")
    title = f"Generation with and without a KV cache, {some['model'].split()[0]}, one row, {some['dtype']}"
    figure, axes = canvas(rows, title, 2)
    each, whole = [], []
    for place, way in enumerate(steps.ways):
        times = {float(x): ms for x, ms in steps.per_token(way).items() if x in steps.lengths}
        each.append(Line(said(way), times, place))
        whole.append(Line(said(way), {float(x): y for x, y in steps.totals(way).items()}, place))
    panel(axes[0, 0], each, "One token after so many", "tokens before it", "ms of the device")
    panel(axes[0, 1], whole, "All tokens, integrated from steps", "tokens generated", "s of the device")
    return svg(figure, rows)
