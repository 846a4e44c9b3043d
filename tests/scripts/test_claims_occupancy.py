"""Claims 19, 29 and 31 to 37: what is compared, from rows as a GPU would give them; and the least factors of
results/hopper."""

from __future__ import annotations

import json

import pytest

from scripts.measure.claims import FAILS, HOLDS, IN_PART, UNTESTED, NotMeasured, answered
from scripts.measure.claims.block_sparse import in_proportion
from scripts.measure.claims.intensity import prefill_and_decode
from scripts.measure.claims.occupancy import not_products, payload, registers, row_of_scores
from scripts.measure.claims.peak import of_the_peak
from scripts.measure.report.pages import blocks
from scripts.measure.report.prefill_decode_report import layer_share
from tests.scripts.studies import results, row_of
from tests.scripts.test_claims import moved, usage
from tests.scripts.test_claims import results as made
from tests.scripts.test_claims_generation import results as study_results

PEAK = 989e12  # of an H200 in dense bf16


def call(name, ms=1.0, run_id="r", passed="forward", **point):
    usual = {"study": "attention", "heads": 16, "kv_heads": 16, "batch": 1, "head_dim": 128, "causal": True}
    usual |= {"seq_len": 16384, "kv_len": 16384, "features": "", "dtype": "bfloat16"}
    point = usual | {"implementation": name, "pass": passed} | point
    return row_of(point, {"status": "ok", "ms_median": ms, "tflops": 500 / ms}, run_id)


def sparse_rows(forward=0.25, backward=0.2, **sparse):
    """local:17 keeps 0.247 of the blocks under the diagonal at 16,384 tokens."""
    rows = [call("triton", 1.0), call("triton", 3.0, passed="backward")]
    rows += [call("triton", forward, features="sparsity=local:17", **sparse)]
    return [*rows, call("triton", 3 * backward, passed="backward", features="sparsity=local:17", **sparse)]


@pytest.mark.parametrize(
    ("forward", "backward", "verdict", "figure"),
    [
        (0.25, 0.26, IN_PART, "99% to 99% of the gain in proportion forward, 95% to 95% backward"),
        (0.25, 0.49, IN_PART, "99% to 99% of the gain in proportion forward, 50% to 50% backward"),
        (0.25, 0.50, FAILS, "99% to 99% of the gain in proportion forward, 49% to 49% backward"),
    ],
)
def test_block_sparse_time_is_judged_and_accuracy_is_not(tmp_path, forward, backward, verdict, figure):
    found = in_proportion(results(tmp_path, attention=sparse_rows(forward, backward)))
    assert (found.verdict, found.figure) == (verdict, f"{figure}; accuracy not tested")
    assert "local:17 0.247, 4.05x" in found.why and "forward, D = 128, local:17 4.00x to 4.00x" in found.why
    assert "no block-sparse model was trained on it" in found.why
    assert found.command.endswith("bench_attention.py --sparsity dense local:17 --causal`")


@pytest.mark.parametrize("other", [{"run_id": "later"}, {"dtype": "float32"}, {"head_dim": 64}])
def test_block_sparse_rows_have_a_dense_one_alike_of_their_run(tmp_path, other):
    with pytest.raises(NotMeasured, match=r"of attention with pass forward, features sparsity"):
        in_proportion(results(tmp_path, attention=sparse_rows(**other)))


def of_peak(fa2, fa3, *more):
    """Forwards at these shares of 600 TFLOP/s and of the datasheet's peak, N = 1,024 on."""
    ceiling = {"study": "roofline", "implementation": "ceiling", "pass": "tensor_mma"}
    rows = [
        call(name, 500e12 / (share * peak), seq_len=1024 << i)
        for name, shares, peak in (("cuda_fa2", fa2, 600e12), ("cuda_fa3", fa3, PEAK))
        for i, share in enumerate(shares)
    ]
    return {"roofline": [row_of(ceiling, {"status": "ok", "value": 600.0})], "attention": [*rows, *more]}


def test_the_share_of_the_peak_is_that_of_all_shapes_that_are_alike(tmp_path):
    grouped = call("cuda_fa3", 0.1, kv_heads=4, seq_len=2048)  # far beyond the peak
    window = call("cuda_fa3", 0.1, features="window=1024", seq_len=2048)
    found = of_the_peak(results(tmp_path, **of_peak((0.4, 0.6), (0.55, 0.75, 0.65), grouped, window)))
    assert found.figure == "mma.sync 40% to 60%, wgmma 55% to 75%" and found.verdict == IN_PART
    assert "of the 989 that the datasheet has for dense bf16, as the rate of wgmma by itself" in found.why
    assert "D = 128 55% (N = 1,024, causal) to 75% (N = 2,048, causal)" in found.why
    assert "Of 5 shapes 3 are within 50 to 70%, 1 below and 1 above it" in found.why
    (tmp_path / "low").mkdir()
    assert of_the_peak(results(tmp_path / "low", **of_peak((0.4, 0.49), (0.6,)))).verdict == FAILS


def stage(name, seq_len=8192, tile=None, tflops=100.0, counters=None, dtype="float32", **used):
    used = {"registers": 255, "threads": 128, "shared_bytes": 114688, "spilled_bytes": 0} | used
    used = {"blocks_per_sm": 2, "occupancy_percent": 12.5} | used
    point = {"study": "roofline", "implementation": name, "pass": "forward", "seq_len": seq_len}
    point |= {"dtype": dtype} | ({"tile": tile} if tile else {})
    counters = {"occupancy_percent": used["occupancy_percent"]} | (counters or {})
    result = {"status": "ok", "tflops": tflops, "usage": {"f": used}, "counters": counters}
    return row_of(point, result)


def tile(bc, blocks, tflops, **used):
    size = {"br": 128, "bc": bc, "warps": 8, "blocks": blocks}
    return stage("cuda_fa2", 4096, size, tflops, dtype="bfloat16", threads=256, **used)


def test_every_pair_of_resident_blocks_is_told(tmp_path):
    two = {"occupancy_percent": 25.0, "registers": 128}
    rows = [tile(32, 1, 250, registers=157), tile(32, 2, 260, spilled_bytes=24, **two)]
    rows += [tile(64, 1, 300, registers=178), tile(64, 2, 240, spilled_bytes=1200, **two)]
    rows += [tile(128, 1, 300), tile(128, 2, 320)]  # the same occupancy whatever was asked
    found = registers(results(tmp_path, roofline=[stage("cuda_tiled"), *rows]))
    assert "Whether more occupancy is faster is not decided" in found.why
    assert (
        "128 x 32 with 8 warps 1.04x (25.0% of the warps for 12.5%, 128 registers a thread for 157"
        in found.why
    )
    assert "128 x 64 with 8 warps 0.80x" in found.why and "1,200 bytes spilled for 0)" in found.why
    assert "128 x 128" not in found.why and "`cuda_tiled` (FMA units, fp32) has 255 registers" in found.why
    (tmp_path / "none").mkdir()
    found = registers(results(tmp_path / "none", roofline=[stage("cuda_tiled")]))
    assert found.verdict == IN_PART and "more occupancy" not in found.why


def test_threads_and_registers_limit_the_row_wise_stage_before_its_row(tmp_path):
    alike = {"registers": 32, "threads": 256}
    rows = [
        stage("cuda_rowwise", 512, blocks_per_sm=8, occupancy_percent=99, **alike),
        stage("cuda_rowwise", 8192, blocks_per_sm=6, occupancy_percent=75, **alike),
    ]
    found = row_of_scores(results(tmp_path, roofline=rows))
    assert "threads of a multiprocessor (8 blocks) and its registers (8 blocks)" in found.why


def test_the_tiled_stage_is_named_with_its_units(tmp_path):
    rows = [stage(name) for name in ("cuda_tiled", "cuda_fa1", "cuda_fa2")]
    assert "cuda_tiled (FMA units) 112 KiB, 2,341x" in payload(results(tmp_path, roofline=rows)).why


def asked_for_two_blocks(rows):
    """The same tiles, which the compiler gives the same resident blocks whatever is asked."""
    found = json.loads(json.dumps(rows))
    for row in found:
        row["point"]["tile"]["blocks"] = 2
        row["key"] = json.dumps(row["point"], sort_keys=True)
        row["result"]["tflops"] *= 0.99
    return found


def test_tiles_trade_where_neither_end_is_best(tmp_path):
    def tile(br, bc, occupancy, tflops, trips, spilled=0, warps=4):
        found = moved("cuda_fa2", 4096, 1, 1, {"br": br, "bc": bc, "warps": warps}, tflops=tflops)
        found["result"]["usage"] = usage(spilled, occupancy, 1024 * (br + bc))
        found["result"]["counters"]["shared_bytes"] = 1e9 * trips
        return found

    rows = [tile(128, 128, 6, 300, 5), tile(128, 64, 12, 400, 6), tile(64, 32, 25, 250, 11)]
    rows.append(tile(256, 32, 50, 80, 1, spilled=2580))  # its time is the spill's
    found = answered(made(tmp_path / "a", *rows))[29]
    assert (found.verdict, found.figure) == (HOLDS, "128 x 64 is best, 1.60x the worst of as many warps")
    assert found.command == "`python scripts/roofline.py --tiles`"
    assert "fastest is 128 x 64 (192 KiB, 12% of the threads), the slowest 64 x 32 (96 KiB" in found.why
    assert "Of 3 tiles of fa2 with 4 warps that spill no registers (1 of all do" in found.why
    eight = [tile(128, 64, 12, 200, 8, warps=8), tile(256, 64, 12, 390, 4, warps=8)]  # slower by their warps
    beside = answered(made(tmp_path / "e", *rows, *eight))[29]
    assert (
        beside.figure == found.figure and "With 8 warps 256 x 64 is 1.95x as fast as 128 x 64." in beside.why
    )
    assert "where 128 x 64 is 1.33x as fast as 128 x 128, and the one with fewer where" in found.why
    leanest_best = [*rows[1:3], tile(64, 64, 12, 350, 10), tile(64, 128, 6, 300, 9)]
    found = answered(made(tmp_path / "b", *leanest_best))[29]
    assert found.verdict == IN_PART and "moves 6.0 GB and reaches 100% of the fastest" in found.why
    twice = answered(made(tmp_path / "f", *leanest_best, *asked_for_two_blocks(leanest_best)))[29]
    assert twice.why == found.why and "Of 4 tiles" in found.why
    found = answered(made(tmp_path / "g", *rows[::2]))[29]  # fewer bytes are always faster
    assert found.verdict == FAILS
    cheap = [tile(128, 64, 12, 400, 6), tile(64, 32, 25, 250, 5)]  # most threads and fewest trips: no trade
    assert answered(made(tmp_path / "d", *cheap))[29].verdict == FAILS
    assert answered(made(tmp_path / "c", moved("cuda_fa2", 1, 1, 1)))[29].verdict == UNTESTED


PARTS = {
    "up": {"kind": "weights", "times": 1, "flops": 90, "ms_median": 4.0},
    "norm": {"kind": "pointwise", "times": 2, "flops": 1, "ms_median": 0.5},
    "QK^T": {"kind": "standard", "times": 1, "flops": 4, "ms_median": 1.0},
    "softmax": {"kind": "standard", "times": 1, "flops": 2, "ms_median": 3.0},
    "PV": {"kind": "standard", "times": 1, "flops": 2, "ms_median": 1.0},
    "attention, triton": {"kind": "fused", "times": 1, "flops": 8, "ms_median": 2.0},
    "attention, sdpa_cudnn": {"kind": "fused", "times": 1, "flops": 8, "ms_median": 5.0},
}


def test_a_layer_has_one_attention():
    assert layer_share(PARTS, "standard") == (96 / 100, 6 / 10)
    assert layer_share(PARTS, "attention, triton") == (98 / 100, 6 / 7)
    assert layer_share(PARTS, "attention, sdpa_cudnn") == (98 / 100, 9 / 10)
    for which in ("fused", "weights", "up", "attention, flash4"):
        with pytest.raises(KeyError, match=which):
            layer_share(PARTS, which)


def test_each_fused_attention_stands_by_itself(tmp_path):
    def layers(rows):
        for row in rows:
            if row["point"]["implementation"] == "parts":
                row["result"]["parts"] = {name: {"status": "ok"} | part for name, part in PARTS.items()}

    found = not_products(study_results(tmp_path, "prefill_decode", layers))
    assert found.figure.startswith("40% of the time, 4.00% of the FLOPs")
    assert "no product takes 14% (triton) or 10% (sdpa_cudnn)" in found.why


def test_the_small_model_beside_the_large_is_among_the_rows(tmp_path):
    found = study_results(tmp_path, "prefill_decode")
    figures = prefill_and_decode.query(found)
    assert {row["point"]["model"] for row in figures.rows} == {"gpt2", "13b"}
    assert (
        f"of the {figures.cublas:.0f} TFLOP/s of cuBLAS' product of 8,192 x 8,192"
        in prefill_and_decode(found).why
    )


def test_at_least_is_never_rounded_up():
    gains, others = (
        {"forward": [0.9576, 1.1], "backward": [0.8998]},
        {"forward": [0.90], "backward": [0.7952]},
    )
    means = {"forward": 1.026, "backward": 0.8998}
    assert blocks("hopper", gains=gains, means=means, others=others)[-1] == (
        "found: Of the best library's speed: forward 1.03x (mean of 2 shapes), at least 0.95x; "
        "backward 0.90x, at least 0.89x; other shapes and masks at least 0.90x / 0.79x."
    )
