"""Tables, picture and page of a study."""

from __future__ import annotations

import re
import sys

import pytest

from scripts import report
from scripts.measure.report import sweep_report
from scripts.measure.rows import read, with_baselines
from scripts.measure.studies import Row
from tests.scripts.studies import fake_result, results, row_of


def fake_rows() -> list[dict[str, object]]:
    """An H200 on which naive needs a smaller micro-batch at 2k and never fits at 4k."""
    rows = []
    for name in ("naive", "sdpa"):
        for tokens, batch in ((1024, 64), (2048, 32), (2048, 16), (4096, 16), (4096, 1)):
            if name == "sdpa" and (tokens, batch) in ((2048, 16), (4096, 1)):
                continue
            fields = {"study": "seqlen_scaling", "implementation": name, "pass": "train", "model": "gpt2"}
            fields |= {
                "seq_len": tokens,
                "micro_batch": batch,
                "tokens_per_step": 65536,
                "dtype": "bf16-mixed",
            }
            fields |= {"features": "", "checkpointing": False, "settings": {}}
            gone = name == "naive" and (tokens, batch) not in ((1024, 64), (2048, 16))
            result = (
                {"status": "oom", "reason": "out"}
                if gone
                else fake_result(tokens_per_s=1e9 / tokens, mfu=0.4)
            )
            rows.append(row_of(fields, result))
    return rows


def test_the_picture_marks_where_memory_ends():
    picture = sweep_report.picture(fake_rows())
    texts = re.findall(r"<!-- (.*?) -->", picture)
    assert texts.count("naive (out of memory at 4k)") == 2 and texts.count("sdpa") == 2
    assert "gpt2, 65,536 tokens a step, bf16-mixed" in texts
    title = "What a longer context costs in training, by attention: NVIDIA H200, 2026-11-21"
    assert title in texts and {"1k", "2k", "4k"} <= set(texts)
    assert {"tokens/s", "peak memory, GiB"} <= set(texts)
    assert "allocated on the GPU; hollow: a smaller micro-batch, as that is what fits" in texts
    assert sweep_report.picture(fake_rows()) == picture  # the same figures, the same file
    assert sweep_report.picture(fake_rows(), "png").startswith(b"\x89PNG")


def test_the_picture_says_what_was_too_slow():
    rows = [row for row in fake_rows() if row["point"]["implementation"] == "sdpa"]
    for row in rows[1:]:
        row["result"] = {"status": "error", "reason": "timeout", "timeout_s": 120}
    smaller = {**rows[0], "point": rows[0]["point"] | {"micro_batch": 1}, "result": rows[1]["result"]}
    # at 1k a smaller micro-batch was too slow, and the larger one is not
    assert sweep_report.picture([smaller, *rows]).count("<!-- sdpa (too slow at 2k) -->") == 2
    assert sweep_report.doubts(rows) == ["sdpa at T = 2,048; 4,096: error: timeout"]


def test_the_title_says_what_is_compared():
    short = [row for row in fake_rows() if row["point"]["seq_len"] == 1024]
    assert sweep_report.heading(short) == "How fast the same model trains with each attention, T = 1,024"
    peers = [row | {"point": row["point"] | {"implementation": f"transformers {way}"}} for row in short[:1]
             for way in ("eager", "SDPA")]  # fmt: skip
    assert sweep_report.heading(short + peers).endswith("each attention, T = 1,024, beside transformers")
    nano = fake_rows()[0]
    nano = nano | {"point": nano["point"] | {"implementation": "nanoGPT"}}
    assert sweep_report.heading([*fake_rows(), nano]).endswith("in training, by attention, beside nanoGPT")


def test_the_table_says_what_did_not_fit():
    speed, memory = sweep_report.tables(fake_rows())
    assert speed.title == "gpt2, 65,536 tokens a step, bf16-mixed: tokens/s, MFU"
    assert memory.title.endswith("peak MiB") and speed.lines[:2] == [
        ["T", "1,024", "2,048", "4,096"],
        ["naive", "976,562, 40%", "488,281, 40% (16)", "oom"],
    ]
    doubtful = [row | {"result": row["result"] | {"learns": False}} for row in fake_rows()[5:6]]
    assert sweep_report.tables(doubtful)[0].lines[1][1].endswith(" !")


def test_the_report_draws_studies_and_one_page_has_it_all(tmp_path, monkeypatch, capsys):
    results(tmp_path / "results", seqlen_scaling=fake_rows())
    command = ["report.py", "studies", f"--root={tmp_path}"]
    monkeypatch.setattr(sys, "argv", [*command, "--check"])
    with pytest.raises(SystemExit):
        report.main()
    page = tmp_path / "report.html"
    monkeypatch.setattr(sys, "argv", [*command, f"--html={page}"])
    report.main()
    assert "h200.svg written" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", [*command, "--check"])
    report.main()
    text = page.read_text()
    assert "data:image/svg+xml;base64," in text and "<td>488,281, 40% (16)" in text
    assert set(re.findall(r'(?:src|href)="(.*?)[:"]', text)) == {"data"}  # nothing from outside


def test_rows_are_compared_with_the_nanogpt_measured_beside_them(tmp_path):
    """Also after nanoGPT was measured again, by another commit, on a machine that may be another."""
    rows = []
    ours = [row for row in fake_rows() if row["point"]["implementation"] == "sdpa"]
    for commit, name, speed in (
        ("one", "nanoGPT", 100.0), ("one", "sdpa", 110.0), ("two", "nanoGPT", 200.0), ("two", "naive", 100.0)
    ):  # fmt: skip
        for one in ours:
            point, result = one["point"] | {"implementation": name}, one["result"] | {"tokens_per_s": speed}
            rows.append(row_of(point, result, commit, commit=commit))
    out = results(tmp_path, seqlen_scaling=rows).folder / "seqlen_scaling" / "h200.jsonl"
    assert len(read(out)) == 3 * len(ours)
    speed, _ = sweep_report.tables(with_baselines(out))
    assert {line[0]: set(line[1:]) for line in speed.lines[1:]} == {
        "nanoGPT": {"200, 40%"}, "sdpa": {"110, 40%, 1.10x"}, "naive": {"100, 40%, 0.50x"}
    }  # fmt: skip


def test_other_settings_have_a_table_of_their_own():
    rows = [row for row in fake_rows() if row["point"]["implementation"] == "sdpa"]
    shared = {"optim.lr": 1e-3}
    adamw, muon = (
        [{**row, "point": row["point"] | {"settings": shared | more}} for row in rows]
        for more in ({}, {"optim": "muon"})
    )
    title = "gpt2, 65,536 tokens a step, bf16-mixed"
    assert list(sweep_report.panels(adamw)) == [title]
    assert sweep_report.panels([*adamw, *muon]) == {title: adamw, f"{title}, optim=muon": muon}


@pytest.mark.parametrize(("day", "nearest"), [("02", "one"), ("08", "two")])
def test_without_a_nanogpt_of_their_commit_rows_are_beside_the_nearest_in_time(
    day: str, nearest: str
) -> None:
    def row(name: str, day: str, commit: str) -> Row:
        point = {"implementation": name, "seq_len": 1024}
        machine = {"date": f"2026-11-{day}", "commit": commit}
        return {"point": point, "result": {"status": "ok"}, "machine": machine}

    peers = [row("nanoGPT", "01", "one"), row("nanoGPT", "09", "two")]
    found = sweep_report.beside(ours := row("sdpa", day, "three"), [*peers, ours])
    assert found is not None and found["machine"]["commit"] == nearest
