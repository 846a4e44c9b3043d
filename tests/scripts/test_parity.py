"""Training parity: the verdict's arithmetic, and runs in which a fault shows and rounding does not."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from attention.base import UnsupportedAttention
from attention.naive import NaiveAttention
from scripts.parity import COMMON, SMALL, Study, compare, main, other_settings, table, verdict
from tests.running import write_book

TINY = ["data=text", "data.path=book.txt", "data.data_dir=prepared", "data.batch_size=4", "model.n_layer=2"]
TINY += ["seq_len=32", "model.n_embd=32", "optim.lr=3e-3"]


def test_the_verdict_is_by_seed_and_over_the_last_quarter() -> None:
    reference = [[9.0] * 6 + [3.0, 3.2], [9.0] * 6 + [3.5, 3.3]]  # means 3.1 and 3.4
    candidate = [[8.0] * 6 + [3.0, 3.212], [9.0] * 6 + [3.5, 3.304]]  # + 0.006 and + 0.002
    found = verdict(reference, candidate, None)
    assert found.reference_loss == pytest.approx(3.25) and found.difference == pytest.approx(0.004)
    assert found.standard_error == pytest.approx(0.15)  # 0.3 / sqrt(2) / sqrt(2)
    assert found.paired_standard_error == pytest.approx(0.002)
    assert found.parity and found.first_relative is None


def test_each_bound_is_one() -> None:
    reference = [[3.0] * 4, [3.4] * 4]

    def shifted(by: float, runs: list[list[float]] = reference) -> list[list[float]]:
        return [[loss + by for loss in losses] for losses in runs]

    assert verdict(reference, shifted(0.0099), None).parity
    assert not verdict(reference, shifted(-0.0101), None).parity
    close = [[3.0] * 4, [3.001] * 4]  # 2 s.e. = 0.001
    assert verdict(close, shifted(0.0009, close), None).parity
    assert not verdict(close, shifted(0.0011, close), None).parity
    exact = [[3.0, 3.0], [3.0, 3.0]]
    for last, parity in ((3.0002, True), (3.0004, False)):
        found = verdict(reference, reference, (exact, [[3.0, 3.0], [3.0, last]]))
        assert found.parity is parity and found.first_relative == pytest.approx((last - 3) / 3)
    assert not verdict(reference, [[float("nan")] * 4, [3.4] * 4], None).parity


class Odd(NaiveAttention):
    """Naive with a fault, or one that cannot train."""

    def __init__(self, fault: str):
        super().__init__("odd")
        self.fault = fault

    def attend(self, q, k, v, options, seed):
        if self.fault == "scale":
            options = options._replace(scale=1.05 * options.scale)
        if self.fault == "future":  # one key too many
            options = options._replace(causal=False, window=(-1, 1))
        if self.fault == "detached":
            k = k.detach()
        if self.fault == "breaks":
            raise RuntimeError("no kernel image")
        return super().attend(q, k, v, options, seed)

    def unsupported_reasons(self, call):
        return ["no rows of 32"] if self.fault == "unsupported" else super().unsupported_reasons(call)


@pytest.fixture
def folder(tmp_path: Path):
    write_book(tmp_path)
    with contextlib.chdir(tmp_path):
        yield tmp_path


@pytest.mark.long
def test_rounding_passes_and_faults_do_not(folder: Path) -> None:
    from attention.tiled import TiledAttention

    study = Study(TINY, torch.device("cpu"), [1, 2], 40)
    faults = ("scale", "future", "detached", "unsupported", "breaks")
    attentions = {"tiled": TiledAttention(8, 8)} | {fault: Odd(fault) for fault in faults}
    results = dict(compare(study, attentions, NaiveAttention(), "32-true"))
    tiled = results["tiled"]
    assert tiled["parity"] and abs(tiled["difference"]) < 1e-3 and tiled["first_relative"] < 1e-5
    assert tiled["losses"][0][0] != tiled["losses"][1][0]  # another seed, other weights and data
    assert tiled["losses"][0][-1] < tiled["losses"][0][0] - 1  # it learns
    for fault in ("scale", "future", "detached"):
        assert not results[fault]["parity"], results[fault]
    assert results["unsupported"] == {"status": "unsupported", "reason": "no rows of 32"}
    assert results["breaks"]["status"] == "error" and "no kernel image" in results["breaks"]["reason"]
    _, same = next(compare(study, {"naive": NaiveAttention()}, NaiveAttention(), "32-true"))
    assert (
        same["difference"] == 0.0 and same["first_relative"] == 0.0
    )  # a run does not depend on those before
    assert table(results).row_count == 5


@pytest.mark.long
def test_mixed_precision_has_its_own_fp32_runs(folder: Path) -> None:
    study = Study(TINY, torch.device("cpu"), [1, 2], 24)
    with mock.patch.object(Study, "train", autospec=True, side_effect=Study.train) as train:
        _, result = next(compare(study, {"scale": Odd("scale")}, NaiveAttention(), "bf16-mixed"))
    assert [call.args[2:] for call in train.call_args_list] == 2 * [("bf16-mixed", 24), ("32-true", 20)]
    assert result["first_relative"] > 1e-4 and not result["parity"]


def run(*arguments: str) -> int:
    with mock.patch.object(sys, "argv", ["parity.py", "--cpu", *arguments]):
        try:
            main()
        except SystemExit as stop:
            return stop.code
    return 0


def test_the_command(folder: Path, capsys) -> None:
    short = [*TINY, "--steps", "8", "--seeds", "1", "2", "--out", "rows.jsonl"]
    assert run(*short, "--attention", "tiled", "sdpa_cudnn") == 0
    out = capsys.readouterr().out
    assert "losses over the last 2 of 8 steps, mean of 2 seeds, 32-true" in out and "the reference" in out
    rows = [json.loads(line) for line in Path("rows.jsonl").read_text().splitlines()]
    assert [row["result"]["status"] for row in rows] == ["ok", "unsupported"]
    assert (
        rows[0]["point"] | {"study": "parity", "implementation": "tiled", "seeds": [1, 2]} == rows[0]["point"]
    )
    with mock.patch("conf.compose.build_attention", lambda cfg, name: Odd("future")):
        assert run(*short, "--attention", "tiled") == 0  # against itself
    with mock.patch(
        "conf.compose.build_attention", lambda cfg, name: Odd("future" if name == "tiled" else "")
    ):
        assert run(*short, "optim.lr=1e-2", "--attention", "tiled") == 1
    assert run(*short, "model.attn_dropout=0.1") == 1 and "attn_dropout" in capsys.readouterr().err
    assert run("--seeds", "1") == 2 and run("--seeds", "1", "2", "1") == 2


@pytest.mark.parametrize("schedule", ["constant", "wsd"])
def test_a_schedule_without_a_step_at_which_it_ends(schedule: str, folder: Path) -> None:
    study = Study([*TINY, f"schedule={schedule}"], torch.device("cpu"), [1], 8)
    assert study.cfg.schedule._target_.rpartition(".")[2].startswith(
        {"wsd": "warmup"}.get(schedule, schedule)
    )
    assert "decay_steps" not in study.cfg.schedule


def test_the_usual_schedule_ends_with_the_study(folder: Path) -> None:
    for overrides, steps in (([], 8), (["schedule.decay_steps=5"], 5)):
        study = Study([*TINY, *overrides], torch.device("cpu"), [1], 8)
        assert study.cfg.schedule.decay_steps == steps


@pytest.mark.parametrize(
    "override",
    ["precision=fp8", "tokens_per_step=999", "checkpointing=true", "seed=7", "data.seed=7", "trainer=ddp"],
)
def test_what_the_study_decides_or_does_not_use_is_refused(override: str, folder: Path, capsys) -> None:
    assert run(*TINY, override, "--steps", "4", "--seeds", "1", "2", "--out", "r.jsonl") == 1
    key = override.partition("=")[0]
    assert f"error: {key}: the study decides it" in capsys.readouterr().err and not Path("r.jsonl").exists()


def test_an_implementation_that_cannot_be_built_is_a_row(folder: Path) -> None:
    def build(cfg, name):
        if name == "tiled":
            raise UnsupportedAttention("tiled", ["not installed"])
        return NaiveAttention()

    with mock.patch("conf.compose.build_attention", build):
        assert (
            run(*TINY, "--steps", "4", "--seeds", "1", "2", "--out", "r.jsonl", "--attention", "tiled") == 0
        )
    row = json.loads(Path("r.jsonl").read_text())
    assert row["result"]["status"] == "unsupported" and "not installed" in row["result"]["reason"]


@pytest.mark.parametrize(
    ("overrides", "settings"),
    [
        ([], {}),
        (["optim.lr=5e-4", "model.n_layer=2", "seq_len=32", "data.batch_size=4"], {}),  # the usual, and said
        (["optim.lr=1e-3"], {"optim.lr": 1e-3}),
        (["optim=muon"], {"optim": "muon"}),
        (["schedule=constant", "grad_clip=0.5"], {"schedule": "constant", "grad_clip": 0.5}),
        (
            ["data=text", "data.path=a/book.txt", "data.data_dir=prepared"],
            {"data": "text", "data.path": "book.txt"},
        ),
    ],
)
def test_a_point_says_what_is_not_usual(overrides: list[str], settings: dict) -> None:
    """Or its row would take the place of the usual one."""
    assert other_settings([*COMMON, *SMALL["cpu"]], overrides) == settings


@pytest.mark.gpu
def test_on_a_gpu_rounding_in_bf16_passes(folder: Path) -> None:
    from attention.sdpa import SDPAAttention

    sizes = ["data=text", "data.path=book.txt", "data.data_dir=prepared", "seq_len=128"]
    study = Study(sizes, torch.device("cuda"), [1, 2], 40)
    attentions = {"sdpa": SDPAAttention(), "future": Odd("future")}
    results = dict(compare(study, attentions, NaiveAttention(), "bf16-mixed"))
    assert results["sdpa"]["parity"] and results["sdpa"]["first_relative"] < 1e-4, results
    assert results["sdpa"]["difference"] != 0.0 and not results["future"]["parity"], results
