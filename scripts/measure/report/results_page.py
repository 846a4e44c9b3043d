"""The reports of all studies: results/README.md is their index, and each has a page beside its rows."""

from __future__ import annotations

import importlib
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from scripts.measure.machine import ROOT
from scripts.measure.measurements import Measurement, command_of, measurement, measurements
from scripts.measure.report.figures import undrawn
from scripts.measure.report.results_tables import REPORTS, drawn_elsewhere
from scripts.measure.report.tables import markdown
from scripts.measure.rows import CONF, by_gpu, read
from scripts.measure.studies import Report, Row

# The order of the index; what is not named here follows, by name.
ORDER = ("attention", "attention_speed", "attention_memory", "numerics", "cuda_ladder", "hopper")
ORDER += (
    "hopper_ablation",
    "roofline",
    "backward_recompute",
    "gpt2_124m",
    "fp8_training",
    "seqlen_scaling",
    "speedup_end_to_end",
    "memory_estimate",
)
ORDER += (
    "step_memory",
    "longest_context",
    "million_tokens",
    "long_context_quality",
    "encoder_short",
    "long_range",
)
ORDER += ("real_text", "parity", "shakespeare_char", "generate", "kv_cache", "prefill_decode")
SHORT = 160  # characters of a sentence that a table can hold
OPEN = 2  # tables of a study that are shown at once
HEAD = """# Results

Each study has a page with its question, the command that measures it, plots, findings and tables.
`python scripts/report.py` generates the pages and the plots from the rows in `<study>/<gpu>.jsonl`; no figure
is typed by hand. Each row is one measured point, with the machine, library versions, commit and command.
`python scripts/study.py all` measures everything again, which takes {takes} in all.

[CLAIMS.md](CLAIMS.md) tests claims of papers and tutorials against these results."""
# Commits of rows that are not in the history, and what is known of them.
LOST = {"ff0faf4": "which, by a note of that time, had the kernels of 3fddcab except for comments"}
LOST |= dict.fromkeys(("66450bd", "aa27a83", "ba3f580", "c65992d", "dce8006", "f496b4d"), "")


@dataclass(frozen=True)
class Found:
    """A study's rows of one GPU, and what they say."""

    study: str
    gpu: str
    rows: list[Row]
    report: Report

    def paths(self, results: Path) -> dict[Path, str]:
        """The pictures, by where they belong."""
        folder = results / self.study
        return {
            folder / f"{self.gpu}{f'_{name}' if name else ''}.svg": text
            for name, text in self.report.pictures.items()
        }


def report_of(study: str, rows: list[Row]) -> Report | None:
    """Of a module of measure/studies, of the roofline, or of training points of scripts/sweep.py; or None."""
    from scripts.measure.report import roofline_plot, sweep_report

    if (ROOT / "scripts" / "measure" / "studies" / f"{study}.py").is_file():
        module = importlib.import_module(f"scripts.measure.studies.{study}")
        if hasattr(module, "report"):
            return module.report(rows)
    if study in REPORTS:
        return REPORTS[study](rows)
    if study == "roofline":
        return roofline_plot.report(rows)
    points = sweep_report.points(rows)
    if not points:
        return None
    picture = {"": sweep_report.picture(points)}
    doubts = sweep_report.doubts(points)
    return Report(_purpose(study), command_of(study), sweep_report.tables(points), picture, doubts)


def _purpose(study: str) -> str:
    """What an experiment's file says of itself, first of all."""
    path = CONF / "experiment" / f"{study}.yaml"
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    said = [line.lstrip("# ") for line in lines if line.startswith("# ") and not line.startswith("# @")]
    return re.sub(r": scripts/\S+\.py\.?$", ".", said[0]) if said else "What training costs."


def reports(results: Path) -> Iterator[Found]:
    """Those of every study that has one, GPU by GPU."""
    folders = [path.name for path in results.glob("*") if path.is_dir()]
    order = {name: place for place, name in enumerate(ORDER)}
    for study in sorted(folders, key=lambda name: (order.get(name, len(order)), name)):
        for gpu, rows in by_gpu(results / study).items():
            try:
                report = report_of(study, rows)
            except Exception as error:
                error.add_note(f"in the report of results/{study}/{gpu}.jsonl")
                raise
            if report:
                yield Found(study, gpu, rows, report)


def same_picture(text: str, path: Path) -> bool:
    """Whether the file shows the rows that `text` does: another version of matplotlib draws other bytes."""
    if not path.is_file():
        return False
    there = path.read_text(encoding="utf-8")
    drawn = re.search(r"rows [0-9a-f]{16}", text)
    return drawn[0] in there if drawn else text == there


def written(results: Path, redraw: bool = False) -> dict[Path, str]:
    """The pictures that are not those of their rows (redraw: all), and the pages."""
    with undrawn():
        found = list(reports(results))
    files: dict[Path, str] = {}
    for one in found:
        old = [path for path, text in one.paths(results).items() if redraw or not same_picture(text, path)]
        if old:
            drawn = replace(one, report=report_of(one.study, one.rows)).paths(results)
            files |= {path: drawn[path] for path in old}
    for study in dict.fromkeys(one.study for one in found):
        files[results / study / "README.md"] = page(results, [one for one in found if one.study == study])
    return files | {results / "README.md": index(results, found)}


def index(results: Path, found: list[Found]) -> str:
    parts = [HEAD.format(takes=Measurement((), sum(each.gpu_s for each in measurements().values())).takes)]
    if said := lost(results):
        parts += [said]
    if found:
        parts += [studies(found)]
    if rest := others(results, {one.study for one in found}):
        parts += ["## Other measurements", rest]
    return "\n\n".join(parts) + "\n"


def studies(found: list[Found]) -> str:
    lines = [["study", "question", "found", "GPU", "date", "the usual run takes"]]
    for one in found:
        date = max(row["machine"]["date"] for row in one.rows)
        link = f"[{one.study}]({one.study}/README.md)"
        takes = measurement(one.study).takes
        lines.append([link, one.report.question, finding(one.report), gpus(one.rows), date, takes])
    return markdown(lines)


def finding(report: Report) -> str:
    """What a study found, in a sentence: its own, or else the first of its first note, if short."""
    first = re.split(r"(?<=\.) (?=[A-Z])", report.notes[0])[0] if report.notes else ""
    return report.found or (first if len(first) <= SHORT else "")


def page(results: Path, found: list[Found]) -> str:
    """Of one study."""
    first = found[0].report
    parts = [f"# {found[0].study}", f"**{first.question}**", f"```\n{first.command}\n```"]
    for one in found:
        parts.append(f"{machine(one.rows)}. Rows: [{one.gpu}.jsonl]({one.gpu}.jsonl).")
        names = [path.name for path in one.paths(results)] or drawn_elsewhere(one.study, one.gpu, one.rows)
        parts += [f"![{one.study}, {name.removesuffix('.svg')}]({name})" for name in names]
        if one.report.notes:
            parts.append("\n".join(f"- {note}" for note in one.report.notes))
        tables = [f"*{table.title}*\n\n{markdown(table.lines, '---:')}" for table in one.report.tables]
        parts += tables[:OPEN]
        if more := tables[OPEN:]:  # a page that can be read through; all are a click away
            parts += [f"<details>\n<summary>{len(more)} more tables</summary>", *more, "</details>"]
    return "\n\n".join(parts) + "\n"


def gpus(rows: list[Row]) -> str:
    return ", ".join(dict.fromkeys(row["machine"]["gpu"] or "CPU" for row in rows))


def machine(rows: list[Row]) -> str:
    """GPU, versions that took part, dates and commits."""
    from scripts.measure.report.summary import machine as versions

    dates = sorted({row["machine"]["date"] for row in rows})
    commits = dict.fromkeys(str(row["machine"].get("commit"))[:7] for row in rows)
    days = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    return f"{versions(rows)}; {days}, commit {', '.join(commits)}"


def lost(results: Path) -> str:
    """Which commits of the rows cannot be checked out, and which studies have such rows."""
    seen: dict[str, dict[str, None]] = {}
    for path in sorted(results.glob("*/*.jsonl")):
        for commit in {str(row["machine"].get("commit"))[:7] for row in read(path).values()} & LOST.keys():
            seen.setdefault(commit, {})[path.parent.name] = None
    words = [f"{c} (in {', '.join(of)}{'; ' * bool(LOST[c])}{LOST[c]})" for c, of in sorted(seen.items())]
    sentence = "These commits of rows are not in the history, so the measured code cannot be checked out: "
    return textwrap.fill(sentence + ", ".join(words) + ".", 110) if words else ""


def others(results: Path, told: set[str]) -> str:
    """Rows of which there is no report."""
    lines = [["study", "rows", "GPU", "date", "command"]]
    for folder in sorted(path for path in results.glob("*") if path.is_dir() and path.name not in told):
        for gpu, rows in by_gpu(folder).items():
            newest = max(rows, key=lambda row: row["machine"]["date"])["machine"]
            link = f"[{len(rows)}]({folder.name}/{gpu}.jsonl)"
            command = f"`{newest.get('command', '')}`"
            lines.append([folder.name, link, gpus(rows), newest["date"], command])
    return markdown(lines) if len(lines) > 1 else ""
