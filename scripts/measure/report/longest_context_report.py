"""What the rows of longest_context say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from scripts.measure.report.pages import page
from scripts.measure.report.tables import listed
from scripts.measure.studies import Report, Row, Table

STANDARD = "naive"
Key = tuple[str, bool, bool, int]  # model, compile, checkpointing, loss_chunk


@dataclass(frozen=True)
class Found:
    """The end of a search: the longest row that fits, the T of the shortest that does not (0: none), and the
    reason why it was not followed to the end of memory."""

    point: dict[str, Any]
    fits: dict[str, Any] | None
    tokens: int
    fails: int
    reason: str

    @property
    def name(self) -> str:
        return self.point["implementation"]


def found(rows: list[Row]) -> dict[Key, list[Found]]:
    """Ends of the searches, the longest first."""
    searches: dict[Key, dict[str, list[Row]]] = {}
    for row in rows:
        p = row["point"]
        key = (p["model"], p["compile"], p["checkpointing"], p.get("loss_chunk", 0))
        searches.setdefault(key, {}).setdefault(p["implementation"], []).append(row)
    ends = {key: [end(mine) for mine in by_name.values()] for key, by_name in sorted(searches.items())}
    return {key: sorted(each, key=lambda one: -one.tokens) for key, each in ends.items()}


def end(rows: list[Row]) -> Found:
    by_length = {row["point"]["seq_len"]: row for row in rows}
    fits = [T for T, row in by_length.items() if row["result"]["status"] == "ok"]
    fails = [T for T, row in by_length.items() if row["result"]["status"] == "oom"]
    other = [row for row in by_length.values() if row["result"]["status"] not in ("ok", "oom")]
    longest = max(fits, default=0)
    result = by_length[longest]["result"] if fits else None
    reason = other[-1]["result"]["reason"] if other else ""
    return Found(rows[0]["point"], result, longest, min(fails, default=0), reason)


def heading(key: Key) -> str:
    model, compiled, checkpointing, chunk = key
    words = [model, "bf16, one row", "compiled" if compiled else "not compiled"]
    words += [f"loss of {chunk:,} tokens at a time"] if chunk else []
    return ", ".join([*words, "checkpointing" if checkpointing else "no checkpointing"])


def table(key: Key, ends: list[Found]) -> Table:
    base = next((one.tokens for one in ends if one.name == STANDARD), 0)

    def line(one: Found) -> list[str]:
        if one.fits is None:
            return [one.name, one.reason or "none"]
        result, predicted = one.fits, one.fits["predicted_longest"]
        fails = f"{one.fails:,}" if one.fails else one.reason
        cells = [one.name, f"{one.tokens:,}", fails, f"{result['peak_mib']:,.0f}", f"{predicted:,}"]
        cells += [f"{one.tokens / predicted:.2f}" if one.fails else "", f"{result['ms_median'] / 1e3:.2f}"]
        return [*cells, f"{one.tokens / base:.1f}" if base else ""]

    head = "|longest that fits|shortest that does not|peak MiB|predicted longest|measured / predicted"
    return listed(heading(key), f"{head}|s per step|relative to naive", ends, line)


def report(rows: list[Row]) -> Report:
    ends = found(rows)
    naive = {
        key: next((o for o in mine if o.fits and o.name == STANDARD), None) for key, mine in ends.items()
    }
    errors = {
        one.name: abs(one.tokens / one.fits["predicted_longest"] - 1)
        for mine in ends.values()
        for one in mine
        if one.fits and one.fails
    }
    return page(
        "longest_context",
        [table(key, mine) for key, mine in ends.items()],
        {"": picture(rows, ends)},
        beside=[
            (heading(key), one, best)
            for key, one in naive.items()
            if one and one.fails and (best := next(o for o in ends[key] if o.fits)) is not one
        ],
        off=max(errors.items(), key=lambda item: item[1], default=None),
    )


def picture(rows: list[Row], ends: dict[Key, list[Found]]) -> str:
    """Bars to the longest that fits, a cross at the shortest that does not, a line at the prediction."""
    from scripts.measure.report.figures import canvas, digest, drawing, svg

    if not drawing():
        return f"rows {digest(rows)}"
    title = "The longest context that fits (x: the next does not; line: predicted)"
    figure, grid = canvas(rows, title, 1, len(ends))
    figure.set_size_inches(9.5, 0.9 + sum(0.9 + 0.3 * len(mine) for mine in ends.values()))
    lengths = [T for mine in ends.values() for one in mine for T in marks(one)]
    most = max(lengths, default=1)
    grid[0, 0].get_gridspec().set_height_ratios([0.8 + len(mine) for mine in ends.values()])
    for axes, (key, mine) in zip(grid[:, 0], ends.items(), strict=True):
        bars(axes, [one for one in mine if one.fits], most)
        axes.xaxis.set_major_formatter(lambda number, _: f"{number:,.0f}")
        axes.set_title(heading(key), fontsize=9)
    grid[-1, 0].set_xlabel("T, tokens of context", fontsize=9)
    return svg(figure, rows)


def marks(one: Found) -> list[int]:
    """Every T that is drawn of a search."""
    return [one.tokens, one.fails, one.fits["predicted_longest"]] if one.fits else []


def bars(axes: Any, ends: list[Found], most: int) -> None:
    from scripts.measure.report.colours import colour_of

    for place, one in enumerate(ends):
        axes.barh(place, one.tokens, 0.66, color=colour_of(one.name))
        axes.plot([one.fits["predicted_longest"]] * 2, [place - 0.4, place + 0.4], color="black", lw=1.4)
        words = f"{one.tokens:,} tokens, {one.fits['peak_mib'] / 1024:,.0f} GiB"
        if one.fails:
            axes.plot(one.fails, place, "x", color="black", ms=6, mew=1.6)
        else:
            words += "\nnothing longer was tried"
        axes.text(max(marks(one)) + 0.02 * most, place, words, va="center", fontsize=8)
    axes.set_yticks(range(len(ends)), [one.name for one in ends], fontsize=8)
    axes.set_ylim(len(ends) - 0.4, -0.6)
    axes.set_xlim(0, 1.5 * most)
    axes.tick_params(axis="x", labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    axes.grid(alpha=0.25, axis="x")
