"""Claims 8, 9 and 10: generations of kernels, answered from rows as a GPU would give them."""

from __future__ import annotations

import json

from scripts.measure import claims
from scripts.measure.claims import FAILS, HOLDS, IN_PART, UNTESTED
from tests.scripts.test_claims import ceiling, ladder, results, row


def attention(name, ms, tflops, head_dim=128, **more):
    alike = {"passed": "forward", "causal": False, "dtype": "bfloat16", "seq_len": 1024, "features": ""}
    result = {"ms_median": ms, "tflops": tflops}
    alike |= {"batch": 2, "heads": 16, "kv_heads": 16}
    return row("attention", implementation=name, head_dim=head_dim, **alike | more, result=result)


def speed(name, ms, tflops, **point):
    result = {"ms_median": ms, "tflops": tflops}
    return row("attention_speed", implementation=name, dtype="bfloat16", **point, result=result)


def test_second_generation_over_first(tmp_path):
    """Their factor, 9x over eager and half of mma.sync's rate for all of it."""
    rows = [
        ceiling("tensor_mma", 640),
        *ladder(),
        attention("naive", 10.0, 40),
        attention("cuda_fa2", 1.0, 352),
    ]
    found = claims.answered(results(tmp_path / "a", *rows))[8]
    figure = "fa2 10.0x fa1, 10x eager without a mask, 55% of mma.sync's rate"
    assert (found.verdict, found.figure) == (HOLDS, figure)
    assert "55% of what its instructions, mma.sync, reach on this GPU (640 TFLOP/s)" in found.why
    assert "at N = 1,024 (batch 2, 16 heads, D = 128, without a mask), reaches 352 TFLOP/s" in found.why
    assert "36% of the datasheet's peak, which takes wgmma" in found.why
    rows[-1] = attention("cuda_fa2", 1.0, 300)
    assert claims.answered(results(tmp_path / "b", *rows))[8].verdict == IN_PART
    rows = [rows[0], *ladder(first=0.9), *rows[-2:]]
    assert claims.answered(results(tmp_path / "c", *rows))[8].verdict == FAILS
    # the papers' shape, once it is measured
    alike = {"passed": "forward", "batch": 8, "heads": 16, "head_dim": 128, "causal": False, "features": ""}
    rows += [
        speed(name, ms, 400 / ms, **alike, seq_len=2048)
        for name, ms in (("cuda_fa1", 2.0), ("cuda_fa2", 1.0), ("standard", 8.0))
    ]
    found = claims.answered(results(tmp_path / "d", *rows))[8]
    figure = "fa2 2.0x fa1, 8x eager without a mask, 47% of mma.sync's rate"
    assert (found.verdict, found.figure) == (IN_PART, figure)
    assert "N = 2,048 (batch 8, 16 heads" in found.why and "block for each of 128 heads" in found.why
    # long sequences, which their factor over eager is of, with and without a mask
    alike |= {"batch": 1, "heads": 32, "head_dim": 64, "seq_len": 16384}
    rows += [
        speed(name, ms, 1, **alike | {"causal": causal})
        for name, causal, ms in (
            ("cuda_fa2", False, 1.0),
            ("standard", False, 8.0),
            ("cuda_fa2", True, 0.5),
            ("standard", True, 12.0),
        )
    ]
    found = claims.answered(results(tmp_path / "e", *rows))[8]
    assert found.figure == figure  # what is alike but for the tiles, whatever the mask adds
    assert "8x as fast without a mask and 24x as fast with a causal mask" in found.why
    assert "at N = 16,384 (batch 1, 32 heads, D = 64), fa2 is 8x" in found.why and "MFU" not in found.why
    trained = {"tilegpt_fa2_forward": 1}
    rows.append(
        row(
            "speedup_end_to_end", implementation="cuda", model="gpt2_medium", compile=True, seq_len=1024,
            result={"kernels": trained, "mfu": 0.47},
        )
    )  # fmt: skip
    found = results(tmp_path / "f", *rows)
    assert "trains with fa2 at 47% MFU" in claims.answered(found)[8].why
    used = claims.CLAIMS[8].query(found).rows
    assert {one["point"]["study"] for one in used} == {each["point"]["study"] for each in rows} - {
        "cuda_ladder"
    }
    assert max(one["result"].get("tflops", 0) for one in used) == 400


def test_third_generation_is_never_more_than_in_part_without_fp8(tmp_path):
    rows = [attention("flash2", 2.5, 300), attention("flash4", 1, 742)]
    found = claims.answered(results(tmp_path / "a", *rows))[9]
    figure = "FlashAttention-4 over 2, N >= 1k: 2.50x (one shape) at D = 128; 75% of the peak"
    assert (found.verdict, found.figure) == (IN_PART, figure)
    assert "FlashAttention-4, in the place of 3" in found.why and "At shorter N" not in found.why
    assert "In fp8 `cuda_fp8` has no rows of its speed yet; [30]" in found.why
    for rate, verdict in ((1199.0, IN_PART), (1201.0, HOLDS)):
        found = claims.answered(results(tmp_path / str(rate), *rows, attention("cuda_fp8", 1, rate)))[9]
        assert found.verdict == verdict and f"`cuda_fp8` reaches {rate:,.0f} TFLOP/s" in found.why
    assert claims.answered(results(tmp_path / "c", rows[0]))[9].verdict == UNTESTED


def test_third_generation_is_judged_by_every_long_shape(tmp_path):
    """Not by its best: a long shape where it is slower counts, and a short one does not."""
    rows = [attention("flash2", 2.5, 300), attention("flash4", 1, 742)]
    slower = attention("flash4", 1.25, 200, 64), attention("flash2", 1, 250, 64)
    assert claims.answered(results(tmp_path / "a", *rows, *slower))[9].verdict == FAILS
    for one in slower:
        one["point"] |= {"seq_len": 512}
    found = claims.answered(results(tmp_path / "b", *rows, *slower))[9]
    assert found.verdict == IN_PART and "At shorter N it is 0.80x (one shape)." in found.why
    other = [rows[0] | {"run_id": "earlier"}, *rows[1:]]  # times of two runs are not compared
    assert claims.answered(results(tmp_path / "e", *other))[9].verdict == UNTESTED
    nearly = attention("flash4", 1, 600), attention("flash2", 1.9, 300)
    assert claims.answered(results(tmp_path / "c", *nearly))[9].verdict == FAILS
    grouped = [attention(who, ms, 300, kv_heads=4) for who, ms in (("flash2", 9), ("flash4", 1))]
    found = claims.answered(results(tmp_path / "d", *rows, *grouped))[9]
    assert "all 1 shapes without a window that both have" in found.why


def test_our_third_generation_is_paired_by_shape_and_grouped_heads_are_apart(tmp_path):
    rows = [attention("flash2", 2.5, 300), attention("flash4", 1, 742)]
    alike = {"passed": "forward", "head_dim": 64, "heads": 16, "kv_heads": 16, "features": ""}
    ours = [
        row("hopper", implementation=who, **alike | more, result={"ms_median": ms})
        for more, times in (
            ({"seq_len": 1024}, (1.0, 1.5)),
            ({"seq_len": 2048}, (1.0, 2.5)),
            ({"seq_len": 2048, "kv_heads": 4}, (1.0, 3.0)),
            ({"seq_len": 2048, "features": "window=1024"}, (1.0, 9.0)),
            ({"seq_len": 4096}, (1.0,)),
        )
        for who, ms in zip(("cuda_fa3", "sdpa_flash"), times, strict=False)
    ]
    found = results(tmp_path, *rows, *ours)
    said = claims.answered(found)[9].why
    assert "PyTorch's `sdpa_flash`, in one process" in said and "1.50x to 2.50x at D = 64" in said
    assert "3.00x (one shape) with 16 heads, 4 of K and V, D = 64" in said and "9.0" not in said
    assert len(claims.CLAIMS[9].query(found).rows) == len(rows) + 6  # none without a partner
    for each in ours:  # whose points bench_attention.py calls so, wherever they go
        each["point"]["study"] = "attention"
    (tmp_path / "hopper" / "h200.jsonl").write_text("".join(json.dumps(each) + "\n" for each in ours))
    commands = claims.answered(claims.Results(tmp_path))[9].command
    assert "--out results/hopper/<gpu>.jsonl`" in commands and commands.count("bench_attention.py") == 2


def test_every_stage_of_the_ladder_has_to_be_faster(tmp_path):
    assert claims.answered(results(tmp_path / "a", *ladder()))[10].verdict == HOLDS
    found = claims.answered(results(tmp_path / "b", *ladder(slow=2)))[10]
    assert found.verdict == IN_PART and "Not faster at every N, without a mask: rowwise." in found.why
    assert found.figure.startswith("3 of 4 steps are 2x and more; ms: ") and "causal mask" not in found.why
    assert "by the table claimed 1.3x to 1.4x, 1.5x to 2.2x, 3.3x to 4.9x, 1.1x to 1.2x." in found.why
    masked = [each | {"point": each["point"] | {"causal": True}} for each in ladder(slow=1.6)]
    found = claims.answered(results(tmp_path / "f", *ladder(slow=2), *masked))[10]
    assert "With a causal mask, which the table has not, rowwise" in found.why
    assert "is 1.25x to 1.25x naive" in found.why
    assert claims.answered(results(tmp_path / "g", *ladder(slow=1.01)))[10].verdict == IN_PART
    assert '5.0x to 5.0x the three kernels of naive: "3 to 7x" is reproduced' in found.why
    cublas = [each | {"point": each["point"] | {"implementation": "sdpa_math"}} for each in ladder()[:3]]
    found = claims.answered(results(tmp_path / "e", *ladder(tiled=25.0), *cublas))[10]
    assert "it takes 40 / 40 / 40 ms, of which the tiles are 1.6x to 1.6x" in found.why
    assert "cuda_plain" not in found.why
    found = claims.answered(results(tmp_path / "c", *ladder(tiled=5.0)))[10]
    assert found.verdict == IN_PART and '"3 to 7x" is not reproduced' in found.why
    assert claims.answered(results(tmp_path / "d", *ladder(tiled=20.0)))[10].verdict == FAILS
