"""results/README.md: the index; every study's page and pictures beside its rows, and all as one HTML page."""

from __future__ import annotations

import itertools
import json
import re
import statistics
import sys
from types import SimpleNamespace

import pytest
from matplotlib.colors import to_hex

from scripts.measure.report import html_report, interactive, results_page, results_tables
from scripts.measure.report.colours import OF_NAME, SPARE, colour_of
from scripts.measure.report.figures import (
    MARKS,
    Line,
    canvas,
    carried,
    merged,
    panel,
    panels_of,
    svg,
    undrawn,
)
from scripts.measure.studies import Report, Table
from scripts.plot import COLOURS
from tests.running import ROOT


def row(n, ms, study="probe", gpu="NVIDIA H200"):
    machine = {"gpu": gpu, "date": "2026-11-21", "torch": "2.11", "triton": "3.6.0", "commit": "abc"}
    point = {"study": study, "implementation": "naive", "pass": "forward", "seq_len": n}
    machine["command"] = "python probe.py"
    return {
        "key": f"{gpu} {n}",
        "point": point,
        "result": {"status": "ok", "ms_median": ms},
        "machine": machine,
    }


def report(rows):
    points = {r["point"]["seq_len"]: r["result"]["ms_median"] for r in rows}
    figure, axes = canvas(rows, "Probe", 1)
    panel(axes[0, 0], [Line("naive", points, 0)], "time", "T", "ms")
    lines = [["T", "ms|p50"], *([str(n), f"{ms:g}"] for n, ms in points.items()), ["x"]]
    pictures = {"": svg(figure, rows), "more": "<svg>more</svg>"}
    return Report(
        "How slow?", "python scripts/study.py probe", [Table("Times, ms", lines)], pictures, ["So."]
    )


@pytest.fixture
def results(tmp_path, monkeypatch):
    """A study with a module, and one without a report."""
    module = tmp_path / "scripts" / "measure" / "studies" / "probe.py"
    module.parent.mkdir(parents=True)
    module.touch()
    monkeypatch.setattr(results_page, "ROOT", tmp_path)
    monkeypatch.setitem(sys.modules, "scripts.measure.studies.probe", SimpleNamespace(report=report, GPU_S=5))
    for one in (row(1024, 1.5), row(2048, 6), row(64, 1, "plain"), row(64, 1, gpu=None)):
        folder = tmp_path / "results" / one["point"]["study"]
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / ("h200.jsonl" if one["machine"]["gpu"] else "cpu.jsonl"), "a") as file:
            file.write(json.dumps(one) + "\n")
    return tmp_path / "results"


def test_commits_that_are_not_in_the_history_are_named(results, monkeypatch):
    assert results_page.lost(results) == ""
    monkeypatch.setattr(results_page, "LOST", {"abc": "which was lost", "def": ""})
    said = results_page.lost(results)
    assert " ".join(said.split()).endswith("checked out: abc (in plain, probe; which was lost).")
    assert said in results_page.written(results)[results / "README.md"]


def test_the_pages_have_all_of_a_report(results):
    files = results_page.written(results)
    index, text = (files[folder / "README.md"] for folder in (results, results / "probe"))
    assert "| [probe](probe/README.md) | How slow? | So. | NVIDIA H200 | 2026-11-21 |" in index
    other = "| plain | [1](plain/h200.jsonl) | NVIDIA H200 | 2026-11-21 | `python probe.py` |"
    assert other in index.split("## Other measurements")[1]
    assert text.startswith("# probe\n\n**How slow?**\n\n```\npython scripts/study.py probe\n```")
    assert "torch 2.11, triton 3.6.0; 2026-11-21, commit abc. Rows: [h200.jsonl](h200.jsonl)." in text
    assert "![probe, h200](h200.svg)" in text and "(h200_more.svg)" in text
    assert "*Times, ms*\n\n| T | ms\\|p50 |\n|---|---:|\n| 1024 | 1.5 |\n| 2048 | 6 |\n| x |  |" in text
    assert "- So." in text and "cpu" not in text


def test_without_a_finding_the_first_sentence_stands_if_short():
    def said(*notes, found=""):
        return results_page.finding(Report("", "", [], notes=list(notes), found=found))

    assert said("It is 1.5x. And more.", "Other.") == "It is 1.5x."
    assert said("It is 1.5x.", found="It is 2x.") == "It is 2x."
    assert said("x" * (results_page.SHORT + 1)) == said() == ""


@pytest.mark.long
def test_every_committed_study_says_what_it_found_in_figures():
    with undrawn():
        reports = {one.study: one.report for one in results_page.reports(ROOT / "results")}
    said = {study: results_page.finding(report) for study, report in reports.items()}
    assert [study for study, words in said.items() if not re.search(r"\d", words)] == []
    assert [study for study, words in said.items() if len(words) > results_page.SHORT] == []
    rows = (ROOT / "results/shakespeare_char/h200.jsonl").read_text(encoding="utf-8").splitlines()
    losses: dict[int, list[float]] = {}
    for row in map(json.loads, rows):
        losses.setdefault(row["point"]["seed"], []).append(row["result"]["best_val_loss"])
    mean = statistics.mean(map(statistics.mean, losses.values()))
    assert said["shakespeare_char"].startswith(f"Best validation loss {mean:.4f} in the mean of 3 seeds")


def test_pictures_are_drawn_where_they_do_not_show_their_rows(results):
    files = results_page.written(results)
    assert {path.name for path in files} == {"h200.svg", "h200_more.svg", "README.md"}
    for path, text in files.items():
        path.write_text(text.replace("matplotlib", "another version of it"))
    pages = [results / "probe" / "README.md", results / "README.md"]
    assert list(results_page.written(results)) == pages
    again = results_page.written(results, redraw=True)  # after a change of what draws
    assert again == files
    with open(results / "probe" / "h200.jsonl", "a") as file:
        file.write(json.dumps(row(4096, 24)) + "\n")
    assert {path.name for path in results_page.written(results)} == {"h200.svg", "README.md"}


def test_a_report_that_fails_is_named(results, monkeypatch):
    monkeypatch.setitem(
        sys.modules, "scripts.measure.studies.probe", SimpleNamespace(report=lambda rows: rows["x"])
    )
    with pytest.raises(TypeError) as caught:
        results_page.written(results)
    assert caught.value.__notes__ == ["in the report of results/probe/h200.jsonl"]


def test_one_html_page_shows_the_reports_and_other_rows(results, monkeypatch):
    monkeypatch.setattr(interactive, "find_spec", lambda name: None)  # without the extra
    text = html_report.page(results)
    assert "<h2>probe</h2>" in text and "<p>So.</p>\n<pre>python scripts/study.py probe</pre>" in text
    assert text.count("data:image/svg+xml;base64,") == 2 and "<li>So." in text
    assert "<caption>Times, ms</caption>" in text and "<td>1024<td>1.5" in text
    assert "<td>Online softmax is exact.<td>" in text and "<td>not tested here<td>no rows of roofline" in text
    assert "<h2>plain</h2>" in text and "<summary>h200.jsonl</summary>" in text


def test_a_picture_carries_what_its_panels_show():
    figure, axes = canvas([row(1, 1)], "Probe", 1)
    panel(axes[0, 0], [Line("naive", {1024: 5, 2048: 6}, ends="out of memory at 4k")], "so", "T", "ms")
    (shown,) = carried(text := svg(figure, [row(1, 1)]))
    assert (shown["title"], shown["x"], shown["y"], shown["log"]) == ("so", "T", "ms", [True, True])
    assert shown["lines"] == [["naive", OF_NAME["naive"], "-", "out of memory at 4k", [[1024, 5], [2048, 6]]]]
    assert carried("rows 0") == carried(text.replace("dc:source", "dc:other")) == []


def test_the_html_page_is_drawn_by_bokeh_where_that_is_installed(results, monkeypatch):
    pytest.importorskip("bokeh")
    text = html_report.page(results)
    assert text.count("<img alt=") == 1  # the picture that carries no panels
    assert text.count('<div id="') >= 1 and "Bokeh" in text and "naive" in text
    assert "https://cdn.bokeh.org" not in text  # all of it is inside
    monkeypatch.setattr(interactive, "find_spec", lambda name: None)
    assert html_report.page(results).count("<img alt=") == 2


def test_an_experiment_says_what_it_is_for():
    assert results_page._purpose("seqlen_scaling") == (
        "What the context costs: GPT-2 124M, 65,536 tokens a step, T = 1k to 64k, every attention."
    )
    assert results_page._purpose("of my own") == "What training costs."


def test_a_picture_is_not_drawn_to_see_whether_it_is_current():
    rows = [row(1024, 1.5), row(2048, 6)]
    drawn = report(rows).pictures[""]
    with undrawn():
        said = report(rows).pictures[""]
    assert re.fullmatch(r"rows [0-9a-f]{16}", said) and said in drawn and drawn.startswith("<?xml")
    assert report(rows).pictures[""] == drawn


def test_lines_that_lie_on_each_other_share_a_name():
    lines = [
        Line("a", {1: 1.0, 2: 2.0}, 0),
        Line("b", {1: 1.02, 2: 1.98}, 1),
        Line("ends", {1: 1.0, 2: 2.0}, 2, "out of memory at 4"),
        Line("short", {1: 1.0}, 3),
        Line("apart", {1: 1.0, 2: 2.2}, 4),
    ]
    found = merged(lines)
    assert [line.name for line in found] == ["a, b", "ends", "short", "apart"]
    assert found[0].points == lines[0].points and found[0].place == 0
    assert [line.name for line in merged(lines, 0.2)] == ["a, b, apart", "ends", "short"]
    alike = [Line(name, {1: 1.0}, 0) for name in "abcd"]
    assert merged(alike)[0].name == "a, b, c,\nd"


def test_a_leader_crosses_no_name():
    """Each ends at the left edge of its name, whatever the order and the crowding of the ends."""
    from matplotlib.text import Text

    figure, axes = canvas([row(1, 1)], "Probe", 1)
    ends = {"far": 600, "near, out of memory": 40, "nearer": 39, "nearest": 38, "low": 1}
    panel(
        axes[0, 0],
        [Line(n, {1: y, 2: y}, i) for i, (n, y) in enumerate(ends.items())],
        "",
        "",
        "",
        log_y=False,
    )
    figure.canvas.draw()
    names = axes[0, 0].texts
    boxes = [Text.get_window_extent(name) for name in names]  # without its leader
    assert sorted(name.get_text() for name in names) == sorted(ends)
    assert len({round(box.x0) for box in boxes}) == 1
    for name in names:
        path = name.arrow_patch.get_path().transformed(name.arrow_patch.get_transform())
        assert max(x for x, _ in path.vertices) <= min(box.x0 for box in boxes) + 1
    tops = sorted((box.y0, box.y1) for box in boxes)
    assert all(above[0] >= below[1] - 1 for below, above in itertools.pairwise(tops))  # nor names


def test_leaders_are_grey_and_dotted_and_data_are_not():
    _, axes = canvas([row(1, 1)], "Probe", 1)
    lines = [Line("triton, cache", {1: 1}), Line("naive", {1: 5, 8: 6}, ends="out of memory at 16")]
    panel(axes[0, 0], lines, "", "T", "ms")
    leaders = {to_hex(name.arrow_patch.get_edgecolor()) for name in axes[0, 0].texts}
    drawn = {to_hex(line.get_color()) for line in axes[0, 0].lines}
    assert leaders == {"#a6a6a6"} and drawn == {OF_NAME["triton"].lower(), OF_NAME["naive"].lower()}
    assert {str(name.arrow_patch.get_linestyle()) for name in axes[0, 0].texts} == {"(0, (1, 3))"}
    assert {line.get_linestyle() for line in axes[0, 0].lines if len(line.get_xdata()) > 1} == {"-"}
    marks = [line.get_marker() for line in axes[0, 0].lines if line.get_marker() not in ("None", "o")]
    assert marks == [MARKS["out of memory"]]


def test_an_implementation_has_a_colour_of_its_own():
    """No two the same, nor one of those for anything else."""
    every = [*OF_NAME.values(), *SPARE, *COLOURS]
    assert len({colour.upper() for colour in every}) == len(every)
    assert colour_of("triton, compiled") == OF_NAME["triton"] and colour_of("new") in SPARE


def test_lines_of_one_x_are_bars():
    _, axes = canvas([row(1, 1)], "Probe", 1)
    lines = [Line("naive", {4096: 2.0}), Line("triton", {4096: 8.0}, style="--")]
    panel(axes[0, 0], lines, "DRAM", "N, tokens", "GB")
    assert not axes[0, 0].lines and axes[0, 0].get_title() == "DRAM; N = 4k"
    assert [(bar.get_width(), bar.get_hatch()) for bar in axes[0, 0].patches] == [(2.0, ""), (8.0, "///")]
    assert [text.get_text().strip() for text in axes[0, 0].texts] == ["2", "8"]


def test_three_panels_stand_in_two_lines():
    figure, axes = panels_of([row(1024, 1.5)], "Times", 3)
    assert len(axes) == 3 and len(figure.axes) == 3 and figure.get_size_inches()[0] < 14
    assert len(panels_of([row(1024, 1.5)], "Times", 1)[1]) == 1


def test_tables_of_what_is_no_study():
    def made(study, **result):
        one = row(1024, 2.0, study)
        one["point"] |= {"model": "gpt2", "tokens_per_step": 65536, "dtype": "bf16-mixed", "steps": 200}
        one["point"] |= {"seeds": [1, 2], "implementation": result.pop("name", "naive"), "batch": 1}
        one["result"] |= result
        return one

    speed = {"mfu": 0.5, "ms_p10": 1.9, "ms_p90": 2.1, "peak_mib": 10.0}
    rows = [made("gpt2_124m", name="nanoGPT", tokens_per_s=1000.0, **speed)]
    rows += [made("gpt2_124m", name="ours", tokens_per_s=1100.0, **speed), made("gpt2_124m", status="oom")]
    report = results_tables.training(rows)
    assert report.found == "T = 1,024: 1,100 tokens/s, 1.100x nanoGPT's (ours)."
    (table,) = report.tables
    assert table.title == "gpt2, T = 1,024, 65,536 tokens per step, bf16-mixed, compiled"
    assert table.lines[1:] == [
        ["ours", "1,100", "1.100x", "50.0%", "2.0 (1.9 to 2.1)", "10", "2026-11-21"],
        ["nanoGPT", "1,000", "1.000x", "50.0%", "2.0 (1.9 to 2.1)", "10", "2026-11-21"],
        ["naive", "oom", "", "", "", "", ""],
    ]
    longer, slower = (
        made("gpt2_124m", name="ours", tokens_per_s=500.0, **speed),
        made("gpt2_124m", name="nanoGPT", tokens_per_s=400.0, **speed),
    )
    for one in (longer, slower):  # of another commit, with its own nanoGPT
        one["machine"] = one["machine"] | {"commit": "later"}
    again = results_tables.training([rows[0], longer, slower]).tables[0].lines
    assert [line[:3] for line in again[1:]] == [
        ["nanoGPT", "1,000", "1.000x"], ["ours", "500", "1.250x"], ["nanoGPT", "400", "1.000x"]
    ]  # fmt: skip
    losses = {"loss": 2.5, "reference_loss": 2.4, "difference": 1e-5, "standard_error": 1e-3}
    rows = [made("parity", parity=True, **losses), made("parity", parity=False, **losses)]
    rows[0]["point"]["model"], rows[1]["point"]["model"] = {}, {"position": "t5", "sparsity": None}
    found = results_tables.parity(rows)
    assert found.tables[0].title == "The last 50 of 200 steps, 2 seeds, bf16-mixed"
    assert found.tables[0].lines[1] == ["naive", "2.5000", "2.4000", "+1.0e-05", "1.0e-03", "yes"]
    assert found.tables[0].lines[2][0] == "naive, position=t5"
    assert found.notes[0].startswith("1 of 2 reach the loss")
