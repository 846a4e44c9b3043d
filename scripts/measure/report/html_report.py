"""All results as one page that opens from disk, with the pictures inside, which answer to the mouse
(interactive.py): what each study says, and the rows of what has no report."""

from __future__ import annotations

import base64
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scripts.measure.report import interactive

if TYPE_CHECKING:
    from scripts.measure.report.results_page import Found

Row = dict[str, Any]

STYLE = """body { font: 15px/1.5 system-ui, sans-serif; max-width: 1200px; margin: 2em auto; color: #222 }
img { max-width: 100% } table { border-collapse: collapse; margin: 1em 0; font-size: 13px }
td, th { padding: 2px 10px; border-bottom: 1px solid #ddd; text-align: right }
td:first-child, th:first-child, .claims td, caption { text-align: left } caption { font-weight: 600 }"""
# What is shown of a row whose study has no table of its own, where it is there.
POINT = ("implementation", "pass", "model", "dtype", "batch", "micro_batch", "heads", "kv_heads", "head_dim")
POINT += ("seq_len", "kv_len", "causal", "features")
RESULT = (
    "status",
    "ms_median",
    "tflops",
    "gb_per_s",
    "tokens_per_s",
    "mfu",
    "peak_mib",
    "error_ratio",
    "verdict",
)


def page(results: Path) -> str:
    """The page of results/<study>/*, as HTML."""
    from scripts.measure.report.results_page import finding, reports

    parts = ["<!doctype html><meta charset=utf-8><title>tilegpt: results</title>", interactive.head()]
    parts += [f"<style>{STYLE}</style><h1>tilegpt: results</h1>", claimed(results)]
    told: set[str] = set()
    for found in reports(results):
        if found.study not in told:
            parts += [f"<h2>{escape(found.study)}</h2>", f"<p><b>{escape(found.report.question)}</b></p>"]
            said = finding(found.report)
            parts += [f"<p>{escape(said)}</p>"] * bool(said) + [f"<pre>{escape(found.report.command)}</pre>"]
            told.add(found.study)
        parts += report(results, found)
    for folder in sorted(path for path in results.iterdir() if path.is_dir() and path.name not in told):
        parts.append(f"<h2>{escape(folder.name)}</h2>")
        parts += [image(path.name, path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.svg"))]
        for path in sorted(folder.glob("*.jsonl")):
            parts += rows_of(path)
    return "\n".join(parts)


def claimed(results: Path) -> str:
    """results/CLAIMS.md's table, the reasons beside it."""
    from scripts.measure.claims import Results, all_claims, answered

    found = answered(Results(results))
    lines = [["", "what the sources claim", "their figures", "ours", "verdict", "why"]]
    for claim in all_claims():
        ours = found[claim.number]
        lines.append([str(claim.number), claim.claim, claim.theirs, ours.figure, ours.verdict, ours.why])
    return f"<h2>Claims</h2><div class=claims>{table('', lines)}</div>"


def report(results: Path, found: Found) -> list[str]:
    """A study's pictures, notes and tables, under the machine."""
    from scripts.measure.report.results_page import machine
    from scripts.measure.report.results_tables import drawn_elsewhere

    pictures = dict(found.report.pictures)
    for name in drawn_elsewhere(found.study, found.gpu, found.rows):
        if (path := results / found.study / name).is_file():
            pictures[name] = path.read_text(encoding="utf-8")
    return [
        f"<p>{escape(machine(found.rows))}</p>",
        *(image(f"{found.study} {name}", text) for name, text in pictures.items()),
        f"<ul>{''.join(f'<li>{escape(note)}' for note in found.report.notes)}</ul>",
        *(table(of.title, of.lines) for of in found.report.tables),
    ]


def image(name: str, svg: str) -> str:
    """The picture: one that answers to the mouse where it can be made, else the SVG."""
    if drawn := interactive.picture(svg):
        return f"<h3>{escape(name)}</h3>{drawn}"
    data = base64.b64encode(svg.encode()).decode()
    return f'<p><img alt="{escape(name)}" src="data:image/svg+xml;base64,{data}"></p>'


def rows_of(path: Path) -> list[str]:
    """A file of rows, under the machines, versions and commits behind them."""
    from scripts.measure.rows import with_baselines

    rows = with_baselines(path)
    if not rows:
        return []
    machines = dict.fromkeys(
        f"{of['gpu'] or 'CPU'}, torch {of['torch']}, {of['date']}, commit {of['commit']}: {of['command']}"
        for of in (row["machine"] for row in rows)
    )
    said = [f"<p>{'<br>'.join(map(escape, machines))}</p>"]
    columns = [("point", key) for key in POINT] + [("result", key) for key in RESULT]
    columns = [
        (part, key)
        for part, key in columns
        if any(isinstance(row[part].get(key), str | float | int) for row in rows)
    ]
    body = [[shown(row[part].get(key)) for part, key in columns] for row in rows]
    cells = table(f"{len(rows)} rows", [[key for _, key in columns], *body])
    return [*said, f"<details><summary>{escape(path.name)}</summary>{cells}</details>"]


def shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return "" if value is None or isinstance(value, dict) else str(value)


def table(title: str, cells: list[list[str]]) -> str:
    """cells: lines of them, the first the head."""
    head, *body = [[escape(cell.replace("**", "")) for cell in line] for line in cells]
    lines = [f"<tr><th>{'<th>'.join(head)}</tr>", *(f"<tr><td>{'<td>'.join(line)}</tr>" for line in body)]
    return f"<table><caption>{escape(title)}</caption>{''.join(lines)}</table>"
