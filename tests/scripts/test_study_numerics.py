"""The study numerics: known answers by hand, overflow where the format says, kernels other than asked for."""

from __future__ import annotations

import sys

import pytest
import torch

from scripts.measure.claims import FAILS, HOLDS, IN_PART, NotMeasured
from scripts.measure.claims import exactness as claims
from scripts.measure.instruments.asked import ASKS, Ask, run
from scripts.measure.instruments.exactness import Measurement, Setting, rounding, small
from scripts.measure.instruments.stability import compared, errors, exact
from scripts.measure.instruments.textbook import FORMULAS, Formula
from scripts.measure.report import numerics_report
from scripts.measure.rows import read
from scripts.measure.studies import numerics
from tests.grid import build
from tests.scripts.studies import results, run_of

CONTESTANTS = ["naive", "tiled", "sdpa", "sdpa_cudnn"]


pytestmark = pytest.mark.usefixtures("on_a_cpu")


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """The command on tiny tensors, without the one that compiles: its file of rows."""
    out = tmp_path_factory.mktemp("numerics") / "cpu.jsonl"
    patch = pytest.MonkeyPatch()
    patch.setattr(torch.cuda, "is_available", lambda: False)
    patch.setattr("scripts.measure.instruments.asked.ASKS", [ask for ask in ASKS if ask.call != "compiled"])
    patch.setattr("scripts.measure.report.printed.show", lambda report, out: None)
    arguments = ["--attention", *CONTESTANTS, "--tokens", "24", "--out", str(out)]
    patch.setattr(sys, "argv", ["numerics.py", *arguments])
    numerics.main()
    patch.undo()
    return out


def rows_of(measured, part, **wanted):
    return [
        row
        for row in read(measured).values()
        if row["point"]["part"] == part and all(row["point"][key] == value for key, value in wanted.items())
    ]


def test_known_answers_are_the_sources(measured):
    found = rows_of(measured, "known", implementation="tiled", dtype="float64")
    assert {row["point"]["features"] for row in found} == {"apart", "two keys to a tile"}
    for row in found:
        got, expected = row["result"]["got"], row["result"]["expected"]
        assert round(expected["sum"], 2) == 1.19 and round(expected["out"], 6) == 20.492649
        assert got == pytest.approx(expected, abs=1e-14)
    (sdpa,) = rows_of(measured, "known", implementation="sdpa", dtype="float32")
    assert sdpa["result"]["got"]["sum"] is None  # it gives no lse
    (refused,) = rows_of(measured, "known", implementation="sdpa_cudnn")
    assert refused["result"]["status"] == "unsupported" and "no cpu" in refused["result"]["reason"]


def test_kernels_are_compiled_beside_what_needs_none(monkeypatch, tmp_path):
    """The order of things on a GPU, by points alone."""
    order, names = [], ["triton", "cuda_fa2", "cuda_naive", "sdpa", "tiled"]
    dtypes = ("float16", "float32", "float64")

    def points(options, device):
        setting = Setting(device, 2, 8, 512, {})
        passes = {"float16": ("both", "forward"), "float32": ("forward",), "float64": ("forward",)}
        for name in names:
            for dtype in dtypes if name not in ("triton", "cuda_fa2", "cuda_naive") else dtypes[:2]:
                for passed in passes[dtype] if name != "cuda_naive" else ("forward",):
                    point = setting.point("stability", name, passed, dtype)
                    yield Measurement(point, lambda name=name: order.append(name) or {"status": "ok"})

    monkeypatch.setattr(numerics, "measurements", lambda *given: list(points(*given)))
    monkeypatch.setattr(numerics, "compile_ahead", lambda tasks: order.append(tasks))
    numerics.measure(numerics.arguments([]), run_of(tmp_path / "gpu.jsonl", device="cuda"))
    (tasks,) = (each for each in order if isinstance(each, list))
    ran = [each for each in order if isinstance(each, str)]
    assert set(ran[:8]) == {"sdpa", "tiled"} and set(ran[8:]) == {"triton", "cuda_fa2", "cuda_naive"}
    assert order.index(tasks) < order.index("triton")
    said = [(name, [(shape.dtype, shape.tokens, passed) for shape, passed in calls]) for name, calls in tasks]
    assert said == [
        ("triton", [("fp16", 512, "both")]),
        ("cuda_fa2", [("fp16", 512, "both")]),
        ("triton", [("fp32", 512, "forward")]),
        ("cuda_fa2", [("fp32", 512, "forward")]),
        ("cuda_naive", [("fp16", 512, "forward")]),
        ("cuda_naive", [("fp32", 512, "forward")]),
    ]


def test_a_wrong_rescaling_shows_in_the_known_answers(monkeypatch):
    from attention import tiled

    def forgets(m, total, acc, scores, values, weight=None):  # by the tile's maximum in place of the running
        m_new = scores.amax(dim=-1, keepdim=True)
        p = (scores - m_new).exp()
        return m_new, total + p.sum(dim=-1, keepdim=True), acc + p @ values

    setting = Setting("cpu", 1, 1, 3, {})
    right = small(setting, tiled.TiledAttention(2, 2), "float64", 3)
    monkeypatch.setattr(tiled, "online_softmax_step", forgets)
    wrong = small(setting, tiled.TiledAttention(2, 2), "float64", 3)
    assert right["got"] == pytest.approx(right["expected"], abs=1e-12)
    assert abs(wrong["got"]["out"] - wrong["expected"]["out"]) > 0.1


def test_tiles_differ_by_rounding_alone(measured):
    found = rows_of(measured, "tiles", implementation="tiled", dtype="float64")
    assert len(found) == 6 and [128, 1] in [row["point"]["tile"] for row in found]
    assert all(0 < row["result"]["epsilons"] < 4 for row in found)
    setting = Setting("cpu", 1, 1, 8, {})
    off = rounding(setting, "float32", lambda q, k, v, causal: 1.01 * build("naive")(q, k, v, causal=causal))
    assert off["epsilons"] > 1e4


def test_formulas_overflow_where_their_format_does():
    setting = Setting("cpu", 1, 1, 32, {})
    first = {}
    for name in FORMULAS:
        for magnitude in (1, 4, 16, 64):
            reference = exact(setting, "float16", magnitude)
            result = errors(
                setting, Formula(name), "forward", "float16", magnitude, lambda *_, r=reference: r
            )
            if result["nan"]:
                first[name] = result
                break
    # exp(s) of 16 bits, the product of 16 bits, exp(s) of fp32
    assert first["formula_no_max"]["largest_score"] > 11.1
    assert first["formula_torch"]["largest_product"] > 65504 and first["formula_torch"]["inf"] == 0
    assert first["formula_no_max_fp32"]["largest_score"] > 88.7
    assert "formula_scale_first" not in first
    assert first["formula_no_max"]["largest_score"] < first["formula_no_max_fp32"]["largest_score"]


def test_what_is_not_finite_is_a_share_and_no_error():
    got = torch.tensor([1.0, torch.nan, torch.inf, 2.5])
    found = compared([got[:2], got[2:]], [torch.ones(2), torch.ones(2)], "")
    assert found == {"max_error": 1.5, "nan": 0.25, "inf": 0.25}
    assert compared([got[1:2]], [torch.ones(1)], "_x")["max_error_x"] is None


def test_implementations_survive(measured):
    found = rows_of(measured, "stability", implementation="tiled", dtype="float16")
    assert [row["point"]["magnitude"] for row in found] == [1, 2, 4, 16, 64, 256]
    assert all(row["result"]["nan"] == row["result"]["nan_gradients"] == 0 for row in found)
    assert not rows_of(measured, "stability", implementation="sdpa_cudnn")


def test_asked_for_flash_and_silently_run_as_products(measured):
    found = {
        (row["point"]["implementation"], row["point"]["features"]): row["result"]
        for row in rows_of(measured, "asked")
    }
    asked = found["sdpa_kernel([FLASH_ATTENTION, MATH])", "dropout"]
    assert asked["as_asked"] is False and asked["said"] == [] and "aten::bmm" in asked["kernels"]
    assert found["sdpa_kernel([FLASH_ATTENTION, MATH])", ""]["as_asked"] is True
    assert found["sdpa_kernel(FLASH_ATTENTION)", "dropout"]["status"] == "unsupported"
    assert found["SDPA", "transposed"]["as_asked"] is None
    assert found["naive", ""]["as_asked"] and found["softmax(Q K^T) V", ""]["as_asked"]
    setting = Setting("cpu", 1, 1, 16, {})
    assert run(Ask("formula", "sdpa_flash", call="formula"), setting, "float32")["as_asked"] is False


def test_a_flag_of_transformers_is_what_its_attention_ran(measured, monkeypatch):
    (row,) = rows_of(measured, "asked", implementation="GPT2Model(flash_attention_2)")
    assert row["result"]["status"] == "unsupported" and "FlashAttention2" in row["result"]["reason"]
    setting = Setting("cpu", 1, 2, 16, {})
    monkeypatch.setattr("scripts.measure.instruments.asked.FLAG", "sdpa")
    ran = {
        want: run(Ask("flag", want, call="transformers"), setting, "float32") for want in ("flash2", "sdpa")
    }
    assert [each["as_asked"] for each in ran.values()] == [False, True]
    assert "aten::addmm" in ran["sdpa"]["kernels"]  # products of the model's own, which are not its attention
    monkeypatch.setattr("scripts.measure.instruments.asked.FLAG", "eager")
    assert run(Ask("flag", "sdpa_flash", call="transformers"), setting, "float32")["as_asked"] is False


def test_report_and_claims_from_rows_alone(measured, tmp_path):
    rows = list(read(measured).values())
    report = numerics.report(rows)
    titles = [table.title for table in report.tables]
    assert len(titles) == 7 and titles[0].startswith("Known answers")
    assert all(len(set(map(len, table.lines))) == 1 for table in report.tables)
    assert report.pictures[""].startswith("<?xml") and "NaN from x 2" in report.pictures[""]
    assert any("Online softmax is exact" in note for note in report.notes)
    tiles = [row["result"] for row in rows_of(measured, "tiles")]
    epsilons = [result["epsilons"] for result in tiles if result["status"] == "ok"]
    asked = [row for row in rows_of(measured, "asked") if row["point"]["wants"]]
    ran = [row for row in asked if row["result"]["status"] == "ok" and "(" in row["point"]["implementation"]]
    forced, hinted = (
        [row["result"]["as_asked"] for row in ran if is_so(row["point"]["implementation"])]
        for is_so in (numerics_report.forces, numerics_report.prefers)
    )
    assert report.found == (
        f"Exact up to {max(epsilons):.1f} epsilons of rounding error; another kernel ran for "
        f"{forced.count(False)} of {len(forced)} calls that force one backend and {hinted.count(False)} of "
        f"{len(hinted)} calls that state a preference."
    )
    assert False in hinted
    assert any("silently" in " ".join(line) for line in report.tables[-1].lines)
    assert numerics.report([]).found == ""
    assert numerics.report([]).tables == [] and numerics.report([]).pictures == {}

    results = claimed(tmp_path / "as measured", rows)
    assert claims.exact(results).verdict == HOLDS
    assert claims.asked_and_run(results).verdict == FAILS  # preferences alone were passed over
    assert claims.stable(results).verdict == HOLDS and "naive" in claims.stable(results).why
    for row in rows:
        if row["point"]["implementation"] == "tiled":  # a NaN of its own, and tiles that are no rounding
            row["result"] |= {"nan": 0.5, "epsilons": 100.0}
        if row["point"]["part"] == "asked":
            row["result"]["as_asked"] = False
    results = claimed(tmp_path / "spoilt", rows)
    assert claims.stable(results).verdict == FAILS and claims.asked_and_run(results).verdict == HOLDS
    assert claims.exact(results).verdict == IN_PART
    with pytest.raises(NotMeasured):
        claims.exact(claimed(tmp_path / "nothing", []))


def claimed(folder, rows):
    """Results with these rows, as of a GPU."""
    gpu = [row | {"machine": row["machine"] | {"gpu": "NVIDIA H200"}} for row in rows]
    return results(folder, numerics=gpu)


def test_what_has_a_row_is_left_out(measured, monkeypatch, capsys):
    before = measured.read_text()
    arguments = ["--attention", *CONTESTANTS, "--tokens", "24", "--out", str(measured), "--part", "tiles"]
    monkeypatch.setattr(sys, "argv", ["numerics.py", *arguments])
    numerics.main()
    said = capsys.readouterr().out
    assert "0 points, 25 kept" in said and measured.read_text() == before
    assert "Online softmax is exact except for rounding error: with 6 tile sizes" in said
    assert measured.with_suffix(".svg").read_text().startswith("<?xml")


@pytest.mark.gpu
def test_kernels_on_a_gpu(tmp_path, monkeypatch):
    out = tmp_path / "gpu.jsonl"
    arguments = ["--attention", "naive", "sdpa_flash", "cuda_fa2", "--tokens", "256", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["numerics.py", *arguments])
    numerics.main()
    assert not [row for row in read(out).values() if row["result"]["status"] == "error"]
    for row in rows_of(out, "known", implementation="cuda_fa2", dtype="float16"):
        assert row["result"]["got"]["out"] == pytest.approx(20.492649, abs=0.04)
    fp32 = rows_of(out, "asked", implementation="sdpa_kernel([FLASH_ATTENTION, MATH])", dtype="float32")
    assert [row["result"]["as_asked"] for row in fp32] == [False]
