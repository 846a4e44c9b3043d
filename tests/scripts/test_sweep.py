"""Studies of training points: a sweep survives kills, failures are rows, the picture is drawn."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from scripts import (
    bench_train,
    html_report,
    report,
    sweep,
    sweep_points,
    sweep_report,
    training_meter,
    training_point,
)
from scripts.kernels import Kernel
from scripts.rows import key_of, machine, read
from tests.running import ROOT

TINY = ["experiment=seqlen_scaling_tiny", "data=synthetic", "data.corpus.vocab_size=64", "model.n_embd=32"]
TINY += ["data.corpus.n_tokens=4096", "model.n_layer=1", "tokens_per_step=128", "sweep.steps=3"]
GRID = ["sweep.grid.attention=[naive,sdpa]", "sweep.grid.seq_len=[16,32]"]


def study(*overrides: str, tiny: list[str] = TINY) -> sweep_points.Study:
    return sweep_points.study_of([*tiny, *overrides])


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def started(out: Path) -> subprocess.Popen:
    grid = ["sweep.grid.attention=[naive,tiled,sdpa]", "sweep.grid.seq_len=[16]"]
    command = [sys.executable, str(ROOT / "scripts" / "sweep.py"), *TINY, *grid, f"--out={out}"]
    return subprocess.Popen(
        command,
        cwd=out.parent,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes under /proc")
def test_a_killed_sweep_goes_on_where_it_stopped(tmp_path: Path) -> None:
    out = tmp_path / "cpu.jsonl"
    first = started(out)
    for line in first.stdout:
        if line.startswith("[1/3]"):
            break
    deadline = time.monotonic() + 20
    while not (points := children(first.pid)) and time.monotonic() < deadline:
        time.sleep(0.01)
    first.kill()
    first.communicate()
    assert first.returncode == -signal.SIGKILL and len(points) == 1
    while alive(points[0]):  # a point does not outlive its sweep
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert len(out.read_text().splitlines()) == 1

    said = started(out)
    text, _ = said.communicate(timeout=100)
    assert said.returncode == 0, text
    assert len(re.findall(r"\(kept\)$", text, flags=re.MULTILINE)) == 1 and "points/min, about" in text
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["result"]["status"] for line in lines] == ["ok"] * 3
    assert [line["point"]["implementation"] for line in lines] == ["naive", "tiled", "sdpa"]
    assert len({line["key"] for line in lines}) == 3 and len({line["run_id"] for line in lines}) == 2
    for line in lines:
        result, point = line["result"], line["point"]
        assert point["micro_batch"] == 128 // point["seq_len"] and point["tokens_per_step"] == 128
        assert result["tokens_per_s"] == pytest.approx(128e3 / result["ms_median"])
        assert result["ms_p10"] <= result["ms_median"] <= result["ms_p90"] and result["n"] == 3
        assert result["peak_mib"] > 0 and "resident" in result["peak_of"] and result["mfu"] is None
        assert result["kernels"] and result["kernels_ok"], result["verdict"]
        assert result["memory_split_error"] <= 0.03 and result["memory_split"]["parameters"] > 0
        assert 3.9 < result["loss"]["first"] < 4.5  # the logarithm of 64, and a little
    picture = (tmp_path / "cpu.svg").read_text()
    ElementTree.fromstring(picture)
    assert sweep_report.is_drawn(list(read(out).values()), tmp_path / "cpu.svg")


def fake_result(**more: object) -> dict[str, object]:
    result = {"status": "ok", "reason": None, "ms_median": 10.0, "tokens_per_s": 1000.0, "peak_mib": 50.0}
    result |= {"kernels_ok": True, "learns": True, "peak_of": "allocated on the GPU", "mfu": None}
    return result | more


@pytest.fixture
def point_results(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands of points, which are not run: naive is out of memory above micro-batches of 2, flash2
    breaks, tiled takes too long for 32 tokens."""
    ran: list[list[str]] = []

    def measured(command: list[str], timeout_s: float) -> dict[str, object]:
        ran.append(command)
        values = dict(word.split("=", 1) for word in command if "=" in word)
        if values["attention"] == "naive" and int(values["data.batch_size"]) > 2:
            return {"status": "oom", "reason": "CUDA out of memory"}
        if values["attention"] == "flash2":
            return {"status": "error", "reason": "RuntimeError: broken"}
        if values["attention"] == "tiled" and int(values["seq_len"]) >= 32:
            return {"status": "error", "reason": f"took longer than {timeout_s} s", "timeout_s": timeout_s}
        return fake_result()

    monkeypatch.setattr(sweep, "measured", measured)
    monkeypatch.setattr(sweep_points, "code", lambda: "sources")  # whoever edits them meanwhile
    return ran


def run(out: Path, *arguments: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["sweep.py", *TINY, f"--out={out}", *arguments])
    sweep.main()


def test_what_fails_is_a_row_and_the_sweep_goes_on(tmp_path, point_results, monkeypatch, capsys):
    out = tmp_path / "cpu.jsonl"
    grid = ("sweep.grid.attention=[naive,flash2,tiled,sdpa]", "sweep.grid.seq_len=[16,32,64]")
    run(out, *grid, monkeypatch=monkeypatch)
    got = {
        (p["implementation"], p["seq_len"], p["micro_batch"]): row["result"]["status"]
        for row in read(out).values()
        for p in [row["point"]]
    }
    assert got == {
        ("naive", 16, 8): "oom", ("naive", 16, 4): "oom", ("naive", 16, 2): "ok",
        ("naive", 32, 4): "oom", ("naive", 32, 2): "ok", ("naive", 64, 2): "ok",
        ("flash2", 16, 8): "error", ("flash2", 32, 4): "error", ("flash2", 64, 2): "error",
        ("tiled", 16, 8): "ok", ("tiled", 32, 4): "error", ("tiled", 64, 2): "error",
        ("sdpa", 16, 8): "ok", ("sdpa", 32, 4): "ok", ("sdpa", 64, 2): "ok",
    }  # fmt: skip
    assert sum("attention=tiled" in command for command in point_results) == 2  # 64 was not tried
    table = capsys.readouterr().out
    assert re.search(r"naive +│ 1,000 \(2\) │ 1,000 \(2\) │ +1,000 │", table), table
    assert re.search(r"tiled +│ +1,000 │ +timeout │ +timeout │", table), table
    assert "flash2: error: RuntimeError: broken" in table and "not tried: a context of 32 tokens" in table

    point_results.clear()  # again: errors are tried once more, the rest stands
    run(out, *grid, monkeypatch=monkeypatch)
    assert all("attention=flash2" in command for command in point_results) and len(point_results) == 3
    run(out, *grid, "--fresh", monkeypatch=monkeypatch)
    assert len(point_results) == 3 + 14


def test_rows_of_other_sources_and_machines_are_measured_again():
    row = {"machine": machine() | {"date": "1999-01-01", "commit": "old"}, "result": fake_result(code="abc")}
    assert sweep_points.is_current(row, machine(), "abc") and not sweep_points.is_current(
        row, machine(), "abd"
    )
    other = row | {"machine": row["machine"] | {"torch": "1.0"}}
    assert not sweep_points.is_current(other, machine(), "abc")
    broken = row | {"result": row["result"] | {"status": "error"}}
    assert not sweep_points.is_current(broken, machine(), "abc")
    late = row | {"result": broken["result"] | {"timeout_s": 5}}
    assert sweep_points.is_current(late, machine(), "abc")


def test_the_digest_of_sources_changes_with_them(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "gpt.py").write_text("a")
    before = sweep_points.code(tmp_path)
    (tmp_path / "README.md").write_text("b")
    assert sweep_points.code(tmp_path) == before
    (tmp_path / "model" / "gpt.py").write_text("c")
    assert sweep_points.code(tmp_path) != before != sweep_points.code()


def test_a_point_that_dies_or_hangs_is_an_error():
    died = sweep.measured([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"], 60)
    assert died == {"status": "error", "reason": "the point's process was killed by signal 9"}
    left = sweep.measured([sys.executable, "-c", "import sys; sys.exit('no such thing')"], 60)
    assert left["reason"] == "the point's process was ended with exit code 1: no such thing"
    hung = sweep.measured([sys.executable, "-c", "import time; time.sleep(60)"], 0.2)
    assert hung["status"] == "error" and hung["timeout_s"] == 0.2


def points_of(study: sweep_points.Study, device: str = "cpu") -> list[sweep_points.Point]:
    return [sweep_points.point_of(study, assigned, device) for assigned in sweep_points.assignments(study)]


def test_the_grid():
    found = points_of(study(*GRID, "optim.lr=2e-3", "+sweep.grid.model.n_head=[2,4]"))
    named = [(p.fields["implementation"], p.fields["seq_len"], p.fields["heads"]) for p in found]
    assert named == [
        (name, tokens, heads) for name in ("naive", "sdpa") for tokens in (16, 32) for heads in (2, 4)
    ]
    assert "optim.lr=2e-3" in found[0].overrides and "data.batch_size=8" in found[0].overrides
    assert len({key_of(p.fields) for p in found}) == 8
    assert found[0].fields["model"] == "tiny model.n_embd=32 model.n_layer=1 model.n_head=2"
    slower = points_of(study(*GRID, "optim.lr=1e-3", "sweep.seconds=9"))[0]
    assert key_of(slower.fields) != key_of(points_of(study(*GRID, "optim.lr=2e-3"))[0].fields)
    assert key_of(slower.fields) == key_of(points_of(study(*GRID, "optim.lr=1e-3"))[0].fields)


def test_on_a_gpu_precision_and_compilation_are_on():
    fields = points_of(study(*GRID, "checkpointing=true", "model.window=8"), "cuda")[0].fields
    assert (fields["dtype"], fields["compile"], fields["checkpointing"]) == ("bf16-mixed", True, True)
    assert fields["features"] == "window=8"


def test_the_study_of_a_gpu():
    large = study(tiny=["experiment=seqlen_scaling"])
    found = points_of(
        sweep_points.study_of(["experiment=seqlen_scaling", "sweep.grid.attention=[naive]"]), "cuda"
    )
    sizes = [(p.fields["seq_len"], p.fields["micro_batch"], p.fields["tokens_per_step"]) for p in found]
    assert sizes == [(1024 << i, 64 >> i, 65536) for i in range(7)]
    names = large.grid["attention"]
    assert {"naive", "tiled", "triton", "cuda_fa2", "sdpa", "flash4"} <= set(names) and "auto" not in names


def test_smaller_micro_batches_are_the_powers_of_two_below():
    one = study(*GRID, "tokens_per_step=96")
    assigned = {"attention": "naive", "seq_len": 16}
    asked = sweep_points.point_of(one, assigned, "cpu")
    assert asked.fields["micro_batch"] == 6
    found = list(sweep_points.smaller(one, assigned, "cpu", asked))
    assert [p.fields["micro_batch"] for p in found] == [4, 2, 1]
    assert not list(sweep_points.smaller(one, assigned, "cpu", found[-1]))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["experiment=quickstart"], ["experiment=quickstart", "seqlen_scaling_tiny"]),
        ([*TINY, "attention=naive"], ["attention=naive", "sweep.grid.attention=[...]"]),
        ([*TINY, "data.batch_size=3"], ["data.batch_size=3", "sweep.micro_tokens"]),
        ([*TINY, "sweep.grid.seq_len=[48]"], ["sweep.micro_tokens=128", "seq_len=48"]),
        ([*TINY, "sweep.grid.attention=[]"], ["sweep.grid.attention", "--nanogpt"]),
        ([*TINY, "--nanogpt=nowhere.py"], ["--nanogpt nowhere.py", "no such file"]),
        ([*TINY, "sweep.grid.attention=[foo]"], ["foo"]),
        ([*TINY, "--shard=4/4"], ["4/4", "0 <= i < n"]),
    ],
    ids=str,
)
def test_mistakes_are_named(arguments, words, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", ["sweep.py", *arguments, f"--out={tmp_path / 'x.jsonl'}"])
    with pytest.raises(SystemExit) as stop:
        sweep.main()
    err = capsys.readouterr().err
    assert stop.value.code in (1, 2) and all(word in err for word in words), err
    assert not (tmp_path / "x.jsonl").exists()


def test_shards_take_every_point_once(tmp_path, point_results, monkeypatch):
    grid = ("sweep.grid.attention=[sdpa,tiled]", "sweep.grid.seq_len=[4,8,16]")
    for i in range(4):
        run(tmp_path / "cpu.jsonl", *grid, f"--shard={i}/4", monkeypatch=monkeypatch)
    assert len(point_results) == len(read(tmp_path / "cpu.jsonl")) == 6


def test_printed_commands_run_as_they_are(tmp_path, point_results, monkeypatch, capsys):
    out = tmp_path / "a folder" / "cpu.jsonl"
    run(out, *GRID, "+sweep.grid.model.n_head=[2]", "--print-commands", monkeypatch=monkeypatch)
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 4 and not point_results
    for command in printed:
        words = shlex.split(command)
        assert words[:2] == ["python", "scripts/sweep.py"]
        monkeypatch.setattr(sys, "argv", words[1:])
        sweep.main()
    keys = {key_of(p.fields) for p in points_of(study(*GRID, "+sweep.grid.model.n_head=[2]"))}
    assert read(out).keys() == keys | {row["key"] for row in read(out).values() if is_smaller(row)}


def is_smaller(row: dict[str, dict[str, int]]) -> bool:
    return row["point"]["micro_batch"] < 128 // row["point"]["seq_len"]


def test_nanogpt_runs_beside(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sweep_points, "code", lambda: "sources")
    model = tmp_path / "model.py"
    model.write_text("")
    ran = []
    monkeypatch.setattr(
        sweep, "measured", lambda command, _: ran.append(command) or fake_result(tokens_per_s=500.0)
    )
    arguments = ("sweep.grid.attention=[sdpa]", "sweep.grid.seq_len=[16]", f"--nanogpt={model}")
    run(tmp_path / "cpu.jsonl", *arguments, monkeypatch=monkeypatch)
    assert [f"--nanogpt={model}" in command for command in ran] == [True, False]
    names = [row["point"]["implementation"] for row in read(tmp_path / "cpu.jsonl").values()]
    assert names == ["nanoGPT", "sdpa"] and "500, 1.00x" in capsys.readouterr().out
    run(tmp_path / "cpu.jsonl", *arguments, "--print-commands", monkeypatch=monkeypatch)
    first, second = capsys.readouterr().out.splitlines()
    assert "sweep.grid.attention=[]" in first and "--nanogpt" in first and "--nanogpt" not in second
    monkeypatch.setattr(sys, "argv", shlex.split(first)[1:])
    ran.clear()
    sweep.main()
    assert not ran  # it is there already


def test_nanogpt_is_measured_in_the_process_of_the_point(monkeypatch):
    printed = {
        "ms": [90.0, 80.0, 10.0, 11.0, 12.0],
        "peak_mib": 5.0,
        "kernel_names": ["flash", "gemm", "flash"],
    }
    seen = "import sys\nassert sys.argv[1:] == ['m.py', '64', '1024', '60']\n"
    script = f"{seen}print('RESULT', {json.dumps(printed)!r})"
    monkeypatch.setattr(bench_train, "NANOGPT", script)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA H200")
    cfg, _ = sweep_points.composed(["experiment=seqlen_scaling", "data.batch_size=64"])
    result = training_point.nanogpt(Path("m.py"), cfg)
    assert (result["ms_median"], result["n"], result["kernels"]) == (11.0, 3, {"flash": 2, "gemm": 1})
    assert result["tokens_per_s"] == pytest.approx(65536e3 / 11) and "ms" not in result
    flops = 6 * (50304 * 768 + 12 * 12 * 768**2 + 25 * 768) + 12 * 12 * 768 * 1024  # 6 N + 12 L C T
    assert result["mfu"] == pytest.approx(flops * result["tokens_per_s"] / 989e12)
    cfg.data.batch_size = 32
    with pytest.raises(ValueError, match="a step in one micro-batch"):
        training_point.nanogpt(Path("m.py"), cfg)


def result_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, *arguments: str
) -> dict[str, object]:
    """What a training point prints, run in this process."""
    short = ("--warm-up=1", "--steps=3", "--seconds=0")
    monkeypatch.setattr(sys, "argv", ["training_point.py", *TINY, "seq_len=16", *short, *arguments])
    training_point.main()
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith("RESULT ")
    return json.loads(line.removeprefix("RESULT "))


def test_a_point_that_accumulates(monkeypatch, capsys):
    result = result_of(monkeypatch, capsys, "attention=tiled", "data.batch_size=2")
    assert result["status"] == "ok" and result["n"] == 3 and result["warm_up"] == 1
    assert result["tokens_per_s"] == pytest.approx(
        128e3 / result["ms_median"]
    )  # four micro-batches of 2 x 16


@pytest.mark.parametrize(
    ("overrides", "status", "words"),
    [
        (("attention=sdpa_cudnn", "data.batch_size=8"), "unsupported", "cpu"),
        (("attention=naive", "data.batch_size=3"), "error", "tokens_per_step=128"),
        (("attention=naive", "optim.lr=nan"), "error", "optim.lr"),
        (("attention=naive", "trainer.devices=2"), "error", "one device"),
        (("attention=naive", "model.nlayer=2"), "error", "nlayer"),
    ],
)
def test_a_point_that_cannot(monkeypatch, capsys, overrides, status, words):
    result = result_of(monkeypatch, capsys, *overrides)
    assert result["status"] == status and words in result["reason"]


def test_a_point_without_memory(monkeypatch, capsys):
    def build(*_):
        raise RuntimeError(
            "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
        )

    monkeypatch.setattr(training_point, "build", build)
    result = result_of(monkeypatch, capsys, "attention=naive", "data.batch_size=8")
    assert result["status"] == "oom" and "can't allocate memory" in result["reason"]


def test_fused_kernels_are_seen_beside_other_products():
    product = [Kernel("nvjet_sm90_tst", 9, 1.0)]
    flash = Kernel("pytorch_flash::flash_fwd_kernel", 1, 1.0)
    assert training_meter.of_step("sdpa_flash", [*product, flash], None).ok
    assert not training_meter.of_step("sdpa_flash", product, None).ok
    assert training_meter.of_step("naive", product, None).ok
    assert not training_meter.of_step("naive", [*product, flash], None).ok


def fake_rows() -> list[dict[str, object]]:
    """An H200 on which naive needs a smaller micro-batch at 2k and never fits at 4k."""
    rows, gpu = [], machine() | {"gpu": "NVIDIA H200", "date": "2026-11-21"}
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
            fields |= {"features": "", "checkpointing": False, "config": "0" * 12}
            gone = name == "naive" and (tokens, batch) not in ((1024, 64), (2048, 16))
            result = (
                {"status": "oom", "reason": "out"}
                if gone
                else fake_result(tokens_per_s=1e9 / tokens, mfu=0.4)
            )
            rows.append(
                {"key": key_of(fields), "run_id": "r", "point": fields, "result": result, "machine": gpu}
            )
    return rows


def test_the_picture_marks_where_memory_ends():
    picture = sweep_report.picture(fake_rows())
    texts = re.findall(r"<!-- (.*?) -->", picture)
    assert texts.count("naive (out of memory at 2k)") == 2 and texts.count("sdpa") == 2
    assert "seqlen_scaling: NVIDIA H200, 2026-11-21" in texts and {"1k", "2k", "4k"} <= set(texts)
    assert "peak memory, GiB (allocated on the GPU)" in texts
    assert sweep_report.picture(fake_rows()) == picture  # the same figures, the same file
    assert sweep_report.picture(fake_rows(), "png").startswith(b"\x89PNG")


def test_the_table_says_what_did_not_fit():
    (speed, cells), (memory, _) = sweep_report.grids(fake_rows())
    assert speed == "gpt2, 65,536 tokens a step, bf16-mixed: tokens/s, MFU" and memory.endswith("peak MiB")
    assert cells[:2] == [
        ["T", "1,024", "2,048", "4,096"],
        ["naive", "976,562, 40%", "488,281, 40% (16)", "oom"],
    ]
    doubtful = [row | {"result": row["result"] | {"learns": False}} for row in fake_rows()[5:6]]
    assert sweep_report.grids(doubtful)[0][1][1][1].endswith(" !")


def test_the_report_draws_studies_and_one_page_has_it_all(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "results" / "seqlen_scaling"
    folder.mkdir(parents=True)
    (folder / "h200.jsonl").write_text("".join(json.dumps(row) + "\n" for row in fake_rows()))
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
    assert "<h2>parity</h2>" in html_report.page(ROOT / "results")


def test_wandb_gets_a_run_for_each_point(tmp_path, point_results, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.chdir(tmp_path)
    grid = ("sweep.grid.attention=[sdpa]", "sweep.grid.seq_len=[16,32]", "--wandb=tilegpt-test")
    run(tmp_path / "cpu.jsonl", *grid, monkeypatch=monkeypatch)
    runs = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert [name.rpartition("-")[0] for name in runs] == [
        "seqlen_scaling_tiny-picture", "seqlen_scaling_tiny-sdpa-16", "seqlen_scaling_tiny-sdpa-32"
    ]  # fmt: skip
    assert len(list((tmp_path / "runs").glob("*/wandb/offline-run-*/*.wandb"))) == 3
    pictures = list((tmp_path / "runs").glob("*/wandb/offline-run-*/files/media/images/*.png"))
    assert len(pictures) == 1 and pictures[0].read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("script", ["sweep", "training_point"])
def test_help_imports_nothing_heavy(script):
    watch = (
        "import runpy, sys\n"
        f"sys.argv = ['{script}.py', '--help']\n"
        f"try: runpy.run_path({str(ROOT / 'scripts' / script) + '.py'!r}, run_name='__main__')\n"
        "except SystemExit as stop: assert not stop.code\n"
        "assert not {'torch', 'lightning', 'hydra', 'matplotlib'} & sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", watch], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "key=value" in done.stdout
