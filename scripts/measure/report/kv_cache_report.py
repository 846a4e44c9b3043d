"""What the rows of studies/kv_cache.py say: tables, a picture, sentences; nothing is measured."""

from __future__ import annotations

from scripts.measure.report.pages import page
from scripts.measure.report.steps import Steps, Way, chosen, exponent, factors, halves, integrated
from scripts.measure.report.tables import Record, listed, records
from scripts.measure.studies import Report, Row, Table


def said(way: Way) -> str:
    return f"{way[0]}, {'cache' if way[1] else 'no cache'}"


def report(rows: list[Row]) -> Report:
    steps = Steps(rows)
    drawn = {"": picture(rows, steps)} if steps.lengths else {}
    full = [new for new in steps.lengths if steps.four(new)] if len(steps.names) == 2 else []
    longer = {way: halves(steps.totals(way))[1] for way in steps.ways}
    return page(
        "kv_cache",
        tables(rows, steps),
        drawn,
        names=steps.names,
        longest=full[-1] if full else None,  # that all four ways were timed for
        four=full and steps.four(full[-1]),
        saved=full and factors(steps.four(full[-1]), steps.names),
        longer=next(iter(longer.values()), {}),
        powers={said(way): p for way, of in longer.items() if (p := exponent(of)) is not None},
        counts={r.kv_cache: r.kv_computations for r in records(chosen(rows, passed="count", new_tokens=100))},
        factors={new: generated(rows, new) for new in (100, 512, 1024)},
        large={
            r.kv_heads: r.allocated_bytes for r in records(chosen(rows, model="Llama-2-70B", seq_len=4096))
        },
        bad=[r for r in records(rows) if not r.trusted],
    )


def generated(rows: list[Row], new: int) -> dict[str, float]:
    """What the cache saves of whole generations of `new` tokens, by implementation."""
    of = {
        (r.implementation, r.kv_cache): r.seconds
        for r in records(chosen(rows, passed="generate", new_tokens=new))
    }
    return {name: of[name, False] / of[name, True] for name, cached in of if cached and (name, False) in of}


def tables(rows: list[Row], steps: Steps) -> list[Table]:
    return [*counted(rows), *timed(steps), *checked(rows, steps)]


def counted(rows: list[Row]) -> list[Table]:
    caches = records(chosen(rows, passed="cache_bytes"))
    most = {r.model: r.allocated_bytes for r in reversed(caches)}  # the first of each model has all heads
    return [
        listed(
            "Pairs of a key and a value that a layer computes to generate tokens after a prompt of one",
            "tokens|cache|computed|formula",
            records(chosen(rows, passed="count")),
            lambda r: f"{r.new_tokens:,}|{'yes' if r.kv_cache else 'no'}|{r.kv_computations:,}|{r.formula:,}",
        ),
        listed(
            "Memory of a KV cache, allocated, in 16 bits",
            "model|layers|heads|KV heads|tokens|MiB|formula|smaller by",
            caches,
            lambda r: (
                f"{r.model}|{r.n_layer:,}|{r.heads:,}|{r.kv_heads:,}|{r.seq_len:,}|"
                f"{r.allocated_bytes / 2**20:,.1f}|{r.formula_bytes / 2**20:,.1f}|"
                f"{most[r.model] / r.allocated_bytes:.1f}x"
            ),
        ),
    ]


def timed(steps: Steps) -> list[Table]:
    ways, two = "|".join(map(said, steps.ways)), len(steps.names) == 2
    over = f"|{' / '.join(steps.names)}: prefill|decode" if two else ""

    def token(length: int) -> str:
        ms = [steps.per_token(way)[length] for way in steps.ways]
        line = "|".join([f"{length:,}", *(f"{value:.3f}" for value in ms)])
        return line + (f"|{ms[0] / ms[1]:.2f}x|{ms[2] / ms[3]:.2f}x" if two else "")

    def whole(new: int) -> str:
        four = steps.four(new)
        saved = [
            f"{value:.2f}{'x' * (key != 'stacking')}" for key, value in factors(four, steps.names).items()
        ]
        return "|".join([f"{new:,}", *(f"{seconds:.3f}" for seconds in four.values()), *saved])

    return [
        listed(
            "Device time of one token after this many, ms (without the cache: of a prefill of all)",
            f"tokens|{ways}{over}",
            steps.lengths,
            token,
        ),
        listed(
            "Device time of generating tokens after a prompt of one, s, integrated over steps; the speed-ups",
            f"tokens|{ways}|cache|{(steps.names or ['tiled'])[-1]}|product|both|both / product",
            [new for new in steps.lengths if two and steps.four(new)],
            whole,
        ),
    ]


def checked(rows: list[Row], steps: Steps) -> list[Table]:
    def check(r: Record) -> str:
        way = r.implementation, r.kv_cache
        new = r.new_tokens
        alike = steps.total(way, new) if r.kv_cache else integrated(steps.eager.get(way[0], {}), new)
        held = f"{alike:.3f}|{r.seconds / alike:.2f}" if alike else "-|-"
        return f"{new:,}|{said(way)}|{r.seconds:.3f}|{held}|{r.tokens_per_s:,.0f}"

    def growth(way: Way) -> str:
        fits = [(half, exponent(half)) for half in halves(steps.totals(way))]
        each = ["-|-" if p is None else f"{min(half):,} to {max(half):,}|{p:.2f}" for half, p in fits]
        return "|".join([said(way), *each])

    return [
        listed(
            "Whole generations, measured, and the integrated times of their steps (without the cache: "
            "launched from Python)",
            "tokens|way|measured s|integrated s|measured / integrated|tokens/s",
            records(chosen(rows, passed="generate")),
            check,
        ),
        listed(
            "Exponents of the growth of total time with generated tokens, for shorter and longer generations",
            "way|lengths|exponent|lengths|exponent",
            steps.ways,
            growth,
        ),
    ]


def picture(rows: list[Row], steps: Steps) -> str:
    """Left the time of a token, right that of all, by the tokens."""
    from scripts.measure.report.figures import Line, canvas, panel, svg

    some = next(row["point"] for row in rows if row["point"]["pass"] == "step")
    title = f"Generation with and without a KV cache, {some['model'].split()[0]}, one row, {some['dtype']}"
    figure, axes = canvas(rows, title, 2)
    each, whole = [], []
    for way in steps.ways:
        style = "-" if way[1] else "--"
        times = {float(x): ms for x, ms in steps.per_token(way).items() if x in steps.lengths}
        each.append(Line(said(way), times, style=style))
        whole.append(Line(said(way), {float(x): y for x, y in steps.totals(way).items()}, style=style))
    panel(axes[0, 0], each, "One token after so many", "tokens before it", "ms of the device")
    panel(axes[0, 1], whole, "All tokens, integrated from steps", "tokens generated", "s of the device")
    return svg(figure, rows)
