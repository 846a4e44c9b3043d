"""What the rows of longest_context say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from scripts.measure.studies import Report, Row, Table

COMMAND = "python scripts/study.py longest_context"
QUESTION = "How long a context trains on one GPU, and which attention ends it?"
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


def cells(ends: list[Found]) -> list[list[str]]:
    """Lines of cells, the head first."""
    head = [
        "",
        "longest that fits",
        "shortest that does not",
        "peak MiB",
        "predicted longest",
        "measured / predicted",
    ]
    lines = [[*head, "s a step", "x naive"]]
    base = next((one.tokens for one in ends if one.name == STANDARD), 0)
    for one in ends:
        if one.fits is None:
            lines.append([one.name, one.reason or "none", *[""] * 6])
            continue
        result, fails = one.fits, f"{one.fails:,}" if one.fails else one.reason
        predicted = result["predicted_longest"]
        line = [one.name, f"{one.tokens:,}", fails, f"{result['peak_mib']:,.0f}", f"{predicted:,}"]
        line += [f"{one.tokens / predicted:.2f}" if one.fails else "", f"{result['ms_median'] / 1e3:.2f}"]
        lines.append([*line, f"{one.tokens / base:.1f}" if base else ""])
    return lines


def notes(ends: dict[Key, list[Found]]) -> list[str]:
    said = []
    for key, mine in ends.items():
        timed = [one for one in mine if one.fits]
        naive = next((one for one in timed if one.name == STANDARD), None)
        if naive and naive.fails and timed[0] is not naive:
            best = timed[0]
            more = "" if best.fails else ", and memory did not end it: longer steps were not tried"
            said.append(
                f"{heading(key)}: {STANDARD} is out of memory at T = {naive.fails:,}; {best.name} trains "
                f"T = {best.tokens:,}, {best.tokens / naive.tokens:.1f}x as long{more}."
            )
    errors = {
        one.name: one.tokens / one.fits["predicted_longest"] - 1
        for mine in ends.values()
        for one in mine
        if one.fits and one.fails
    }
    if errors:
        name = max(errors, key=lambda name: abs(errors[name]))
        most = f"{100 * abs(errors[name]):.1f}% of T at most ({name})"
        said.append(f"The prediction of model/costs/memory.py is off by {most}.")
    return said


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


def report(rows: list[Row]) -> Report:
    ends = found(rows)
    tables = [Table(heading(key), cells(mine)) for key, mine in ends.items()]
    return Report(QUESTION, COMMAND, tables, {"": picture(rows, ends)}, notes(ends))
