"""The attention benchmark on a CPU: its rows, what it does with failures, and what it dares to compare."""

import argparse
import json
import sys

import pytest
import torch

from attention import registry
from attention.naive import NaiveAttention
from ops.options import AttentionOptions
from scripts import bench_attention
from scripts.measure import rows, sources
from scripts.measure.instruments.bench_points import Shape, points
from scripts.measure.instruments.contestants import Field
from scripts.measure.instruments.side_by_side import Bench
from scripts.measure.instruments.timing import Clock, Contestant, Probe, probe, sleeps, spread
from scripts.measure.machine import machine
from scripts.measure.report.attention_report import cell, panels, ratio
from scripts.measure.rows import read
from scripts.measure.runner import failure

SHAPE = Shape(1, 2, 1, 32, 16, True, "fp32")
DECODE = Shape(2, 4, 2, 64, 16, True, "fp32", decode=True, kv_lengths=True)


pytestmark = pytest.mark.usefixtures("on_a_cpu")


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """Runs the command on tiny shapes: the rows by implementation and pass."""
    out = tmp_path / "rows.jsonl"
    tiny = ["--heads", "2", "--batch", "1", "--head-dim", "16", "--seq-len", "32", "--causal"]

    def bench(*arguments):
        argv = ["bench_attention.py", *tiny, "--budget", "0.002", "--out", str(out), *arguments]
        monkeypatch.setattr(sys, "argv", argv)
        bench_attention.main()
        found = read(out).values()
        return {(row["point"]["implementation"], row["point"]["pass"]): row for row in found}

    monkeypatch.setenv("TILEGPT_COMMIT", "abc1234")
    machine.cache_clear()
    yield bench
    machine.cache_clear()


def test_rows_hold_what_was_measured(bench, capsys):
    found = bench("--attention", "naive", "sdpa", "sdpa_cudnn", "--pass", "forward", "backward", "decode")
    assert len(found) == 9
    row = found["naive", "backward"]
    assert row["point"] == {
        "study": "attention", "implementation": "naive", "pass": "backward", "batch": 1, "heads": 2,
        "kv_heads": 2, "seq_len": 32, "kv_len": 32, "head_dim": 16, "causal": True, "features": "",
        "dtype": "float32",
    }  # fmt: skip
    result = row["result"]
    assert result["status"] == "ok" and 0 < result["ms_p10"] <= result["ms_median"] <= result["ms_p90"]
    # 2.5 x 4 B H T T D / 2
    assert result["tflops"] == pytest.approx(2.5 * 4 * 2 * 32 * 32 * 16 / 2 / result["ms_median"] / 1e9)
    assert set(result["error_ratios"]) == {"out", "lse", "dq", "dk", "dv"}
    assert 0 < result["error_ratio"] == max(result["error_ratios"].values()) <= 1
    assert result["kernels_ok"] and "aten::bmm" in result["kernels"] and result["n"] >= 1
    assert "dq" not in found["naive", "forward"]["result"]["error_ratios"]

    assert found["sdpa_cudnn", "forward"]["result"] == {
        "status": "unsupported", "reason": "SDPA's cudnn kernel has no cpu: it runs on cuda"
    }  # fmt: skip
    decode = found["sdpa", "decode"]
    assert (decode["point"]["seq_len"], decode["point"]["kv_len"]) == (1, 32)
    gb_per_s = 2 * 2 * 32 * 16 * 4 / decode["result"]["ms_median"] / 1e6
    assert decode["result"]["gb_per_s"] == pytest.approx(gb_per_s)
    assert decode["result"]["copy_fraction"] == pytest.approx(gb_per_s / decode["result"]["copy_gb_per_s"])

    printed = capsys.readouterr().out
    assert "3 points of up to 3 contestants" in printed and "[2/2, " in printed
    assert "sdpa_cudnn: unsupported: SDPA's cudnn" in printed


@pytest.mark.long
def test_what_this_commit_measured_is_kept(bench, capsys, monkeypatch):
    first = bench("--attention", "naive", "--pass", "forward")
    again = bench("--attention", "naive", "--pass", "forward")
    assert again == first and "0 points of up to 1 contestants, 1 kept" in capsys.readouterr().out
    # times of two runs do not compare: with a new contestant, all run again
    both = bench("--attention", "naive", "tiled", "--pass", "forward")
    ms = first["naive", "forward"]["result"]["ms_median"]
    assert len(both) == 2 and both["naive", "forward"]["result"]["ms_median"] != ms
    capsys.readouterr()
    fresh = bench("--attention", "naive", "--pass", "forward", "--fresh")
    assert "1 points of up to 1 contestants. Rows in" in capsys.readouterr().out and len(fresh) == 2
    monkeypatch.setattr(sources, "code", lambda point: "of other sources")
    bench("--attention", "naive", "--pass", "forward")
    assert "1 points of up to 1 contestants. Rows in" in capsys.readouterr().out


class Failing(NaiveAttention):
    """Fails from its n-th call on."""

    def __init__(self, error, after=0):
        super().__init__("failing")
        self.error, self.left = error, after

    def attend(self, *call):
        self.left -= 1
        if self.left < 0:
            raise self.error
        return super().attend(*call)


@pytest.mark.parametrize("after", [0, 6])  # in the probe, among the others
@pytest.mark.parametrize(
    ("error", "status"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore"), "oom"),
        (TypeError("no such launch"), "error"),
    ],
)
def test_a_failure_is_a_row_and_the_others_go_on(tmp_path, error, status, after):
    out = tmp_path / "rows.jsonl"
    attentions = {"failing": Failing(error, after), "naive": NaiveAttention()}
    Bench(attentions, "cpu", 0.002, out).measure(SHAPE, {"forward": ["failing", "naive"]})
    found = {row["point"]["implementation"]: row["result"] for row in read(out).values()}
    assert found["failing"]["status"] == status and "ms_median" not in found["failing"]
    assert (
        str(error).splitlines()[0] in found["failing"]["reason"] and "more" not in found["failing"]["reason"]
    )
    assert found["naive"]["status"] == "ok" and found["naive"]["ms_median"] > 0


def test_an_interrupted_point_leaves_no_half_row(tmp_path):
    out = tmp_path / "rows.jsonl"
    attentions = {"naive": NaiveAttention(), "failing": Failing(KeyboardInterrupt())}
    with pytest.raises(KeyboardInterrupt):
        Bench(attentions, "cpu", 0.002, out).measure(SHAPE, {"forward": ["naive", "failing"]})
    assert not read(out)


def test_a_wrong_implementation_shows_in_its_error(tmp_path):
    class Wrong(NaiveAttention):
        def attend(self, *call):
            out, lse = super().attend(*call)
            return 1.01 * out, lse

    out = tmp_path / "rows.jsonl"
    attentions = {"naive": Wrong(), "sdpa": NaiveAttention("sdpa")}
    Bench(attentions, "cpu", 0.002, out).measure(DECODE, {"decode": ["naive", "sdpa"]})
    wrong, right = read(out).values()
    assert wrong["result"]["error_ratio"] > 10 and wrong["point"]["features"] == "kv_lengths"
    assert right["result"]["error_ratio"] <= 1
    (panel,) = panels([wrong, right]).values()
    assert ratio("naive", panel, 64) is None and cell("naive", panel, 64).endswith("!")


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("documents", [None, 4, 6])
@pytest.mark.parametrize("window", [None, 3, 100])
def test_flops_count_what_is_seen(causal, window, documents):
    shape = Shape(2, 4, 2, 16, 8, causal, "bf16", window=window, documents=documents)
    from attention.naive import attention_scores

    options = shape.options("cpu")
    if (ids := options.get("document_ids")) is not None:
        options["document_ids"] = ids[:1], ids[:1]
    scores = attention_scores(torch.zeros(1, 1, 16, 8), torch.zeros(1, 1, 16, 8), AttentionOptions(**options))
    seen = int((scores == 0).sum())
    if window is None and causal:  # by convention half the square, without the diagonal's own half
        seen -= 16 // 2
    assert shape.flops("forward") == 4 * 2 * 4 * 8 * seen
    assert shape.flops("both") == 3.5 * shape.flops("forward")


def test_decode_reads_keys_and_values_once():
    assert DECODE.kv_bytes == 2 * 2 * 2 * 64 * 16 * 4
    assert DECODE.flops("decode") == 4 * 2 * 4 * 64 * 16
    assert DECODE.options("cpu")["kv_lengths"].tolist() == [64, 64]
    q, k, v, _ = DECODE.tensors("cpu")
    assert q.shape == (2, 4, 1, 16) and k.shape == v.shape == (2, 2, 64, 16)


def usual(**given):
    names = ("seq_len", "head_dim", "batch", "heads", "kv_heads", "causal", "window", "sparsity", "dtype")
    names += ("relative_bias", "documents")
    options = dict.fromkeys(names) | {"short": False, "kv_lengths": False, "passes": ["forward"]}
    return argparse.Namespace(**options | given)


def test_the_usual_shapes_are_those_of_the_papers():
    shapes = [shape for shape, _ in points(usual(), cuda=True)]
    assert len(shapes) == len(set(shapes)) == 3 * 2 * 6
    assert {s.batch * s.tokens for s in shapes} == {16384} and {s.heads * s.head_dim for s in shapes} == {
        2048
    }
    assert {s.head_dim for s in shapes} == {64, 128, 256} and max(s.tokens for s in shapes) == 16384
    assert min(s.tokens for s, _ in points(usual(short=True), cuda=True)) == 32

    decode = [shape for shape, _ in points(usual(passes=["decode"], kv_lengths=True), cuda=True)]
    assert {(s.heads, s.kv_heads, s.head_dim, s.tq) for s in decode} == {(32, 8, 128, 1)}
    assert {s.batch for s in decode} == {1, 16} and max(s.tokens for s in decode) == 131072
    assert all(s.kv_lengths for s in decode)


def test_contestants_take_turns():
    order = []
    contestants = [Contestant(name, lambda _, name=name: order.append(name)) for name in "abc"]
    clock = Clock(budget_s=0.03)
    times = clock.alternate(contestants, [Probe(1.0, 1.0, None)] * 3)
    # three rounds to warm up, thirty that count; each has all, in an order of its own
    assert [len(ms) for ms in times] == [30] * 3 and len(order) == 3 * 33
    rounds = ["".join(order[at : at + 3]) for at in range(0, len(order), 3)]
    assert {"".join(sorted(each)) for each in rounds} == {"abc"} and len(set(rounds)) == 6
    assert [clock.rounds([ms]) for ms in (100.0, 2.0, 0.0)] == [1, 15, 200]


def test_the_device_sleeps_until_the_host_has_issued():
    assert sleeps([100.0, 1000.0]) == [3_000_000] * 2  # one and a half times the slower one's, at 2 GHz
    assert sleeps([100.0, 1000.0, 3000.0, 1e6]) == [3_000_000, 3_000_000, 9_000_000, 20_000_000]
    assert sleeps([5000.0]) == [15_000_000]


def test_probe_warms_up_and_prepares_every_call():
    prepared, ran = iter(range(9)), []
    assert probe(Contestant("x", ran.append, prepare=lambda: next(prepared), calls=2)).ms > 0
    assert ran == [0, 1, 2]
    assert spread([3.0, 1.0, 2.0]) == {"ms_median": 2.0, "ms_p10": 1.0, "ms_p90": 3.0, "n": 3}
    assert failure(RuntimeError("DefaultCPUAllocator: can't allocate memory")) == {
        "status": "oom", "reason": "DefaultCPUAllocator: can't allocate memory"
    }  # fmt: skip


def test_rows_are_read_by_key_and_a_cut_line_is_left_out(tmp_path, monkeypatch):
    path = tmp_path / "rows.jsonl"
    for ms in (1, 2):
        rows.append(path, {"a": 1}, {"ms_median": ms})
    with open(path, "a") as file:
        file.write('{"key": "x", "point"')
    rows.append(path, {"a": 2}, {"ms_median": 3})
    assert [row["result"]["ms_median"] for row in read(path).values()] == [2, 3]
    path.write_text(json.dumps({"point": {"a": {}}}) + "\n")
    with pytest.raises(ValueError, match=r"line 1: that is no row"):
        read(path)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--attention foo", "'foo'"),
        ("--pass sideways", "'sideways'"),
        ("--heads 6 --kv-heads 4", "--heads 6 is no multiple of --kv-heads 4"),
        ("--kv-lengths", "--kv-lengths is for --pass decode alone"),
        ("--causal --full", "not allowed with"),
        ("--seq-len 0", "0 is no whole number"),
        ("--sparsity bogus", "bogus is neither dense nor PATTERN or PATTERN:BLOCKS of local, dilated"),
        ("--sparsity local:x", "local:x is neither"),
        ("--sparsity dense local:0", "local:0 is neither"),
        ("--sparsity local:", "local: is neither"),
        ("--budget nan", "nan is no number of seconds above 0"),
        ("--budget 0", "0 is no number of seconds"),
        ("--budget -1", "-1 is no number of seconds"),
        ("--budget inf", "inf is no number of seconds"),
        ("--pass decode --documents 8", "--documents: --pass decode has none of it"),
        ("--pass forward decode --sparsity local", "--sparsity: --pass decode has none of it"),
        ("--pass decode --full", "--full: --pass decode has none of it"),
    ],
)
def test_a_wrong_argument_is_named(arguments, words, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench_attention.py", *arguments.split()])
    with pytest.raises(SystemExit) as stop:
        bench_attention.arguments()
    assert stop.value.code == 2 and words in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize("passed", ["forward", "backward", "both", "decode"])
def test_on_a_gpu(bench, passed):
    arguments = ("--attention", "naive", "sdpa_flash", "--pass", passed, "--head-dim", "64")
    found = bench(*arguments, "--seq-len", "256")
    for name in ("naive", "sdpa_flash"):
        result = found[name, passed]["result"]
        assert result["status"] == "ok" and result["kernels_ok"] and result["error_ratio"] <= 1, result
        assert result["peak_mib"] > 0 and ("CUDA graph" in result["timer"]) is (passed == "decode")
        assert 0 < result["ms_median"] < 10


def test_a_relative_bias_is_learned_in_the_backward():
    asked = usual(seq_len=[64], head_dim=[16], batch=[1], heads=2, causal=True, relative_bias=8)
    ((shape, _),) = points(asked, cuda=False)
    assert shape.point("tiled", "both")["features"] == "relative_bias=8"
    attention = registry.build("tiled")
    contestant = Field(shape, "cpu").contestant("tiled", attention, "both")
    *_, gradient = contestant.run(contestant.prepare())
    assert gradient.shape == (2, 17) and gradient.any(1).all()


def test_sparse_shapes_count_what_is_kept():
    dense, sparse = (
        next(points(usual(seq_len=[1024], head_dim=[64], causal=True, sparsity=[name]), True))[0]
        for name in ("dense", "local:2")
    )
    assert not dense.sparsity and "block_mask" not in dense.options("cpu")
    assert sparse.point("triton", "forward")["features"] == "sparsity=local:2"
    assert sparse.seen == 8 * 128 * 129 // 2 + 7 * 128**2  # 8 tiles a side: half of those on the diagonal
    assert sparse.options("cpu")["block_mask"].shape == (1, 1, 8, 8)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("documents", [None, 256, 100])
@pytest.mark.parametrize("sparsity", ["local:2", "butterfly:1"])
def test_pairs_of_sparse_shapes_are_counted_one_by_one(causal, window, documents, sparsity):
    tokens = 600  # the last tile is short
    shape = Shape(1, 1, 1, tokens, 16, causal, "bf16", window=window, documents=documents, sparsity=sparsity)
    q, k = torch.arange(tokens)[:, None], torch.arange(tokens)
    seen = shape.kept[q // 128, k // 128]
    seen &= (k <= q) if causal else torch.tensor(True)
    seen &= (q - k <= window) if window is not None else torch.tensor(True)
    seen &= (q // documents == k // documents) if documents else torch.tensor(True)
    assert shape.seen == int(seen.sum()) > 0
