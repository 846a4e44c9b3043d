"""Claims about attention by itself, answered from rows as a GPU would give them."""

from __future__ import annotations

import pytest

from scripts.measure.claims import FAILS, HOLDS, IN_PART, NotMeasured, memory
from scripts.measure.claims import attention as claims
from tests.scripts import studies
from tests.scripts.attention_rows import memory_rows, speed_rows


@pytest.fixture
def results(tmp_path):
    def results(memory=(), speed=()):
        return studies.results(tmp_path, attention_memory=memory, attention_speed=speed)

    return results


def test_claims_are_answered_from_rows(results):
    found = results(memory_rows(), speed_rows())
    first = memory.scores_and_statistics(found)
    assert (first.figure, first.verdict) == ("64 GiB against 8.0 MiB", HOLDS) and "256x and 16x" in first.why
    assert memory.twenty_times_less(found).figure == "32.8x at N = 4k"
    assert claims.alone(found).verdict == HOLDS and "12.9x at N = 2,048" in claims.alone(found).why
    eleven = memory.one_head(found)
    assert eleven.verdict == FAILS and "528 MiB at 8,192" in eleven.figure  # twice what is claimed
    assert claims.tiles_in_pytorch(found).figure == "11x as fast, 94% less memory"
    assert claims.skipped_tiles(found).figure == "2.00x at N = 16k"
    assert claims.short_sequences(found).figure == "it wins up to N = 256"
    last = claims.scores_over_memory(found)
    assert (
        last.figure == "one trip 1.0 ms, four 4.1 ms, measured 15.5 ms a layer" and last.gpu == "NVIDIA H200"
    )


def test_the_leanest_is_compared_at_the_same_length(results):
    """Also where longer ones were measured: what is said of N = 4,096 is of no other."""
    rows = memory_rows()
    before = memory.twenty_times_less(results(rows)).why
    longer = [
        row | {"point": row["point"] | {"seq_len": 8192}, "key": f"{row['key']} twice as long"}
        for row in rows
        if row["point"]["seq_len"] == 4096 and row["point"]["pass"] == "both" and row["point"]["batch"] == 16
    ]
    for row in longer:
        row["result"] = row["result"] | {"peak_mib": 10 * row["result"].get("peak_mib", 0)}
    after = memory.twenty_times_less(results([*rows, *longer])).why
    assert " at N = 8,192" in after and after.rpartition(". ")[2] == before.rpartition(". ")[2]


def test_trips_of_a_mask_are_said(results):
    """They are not the scores', of whose traffic the claim is."""
    rows = speed_rows()
    masked = claims.scores_over_memory(results((), rows)).why
    assert "Standard attention, with a causal mask that it has to add in trips of its own, takes" in masked
    full = [row | {"point": row["point"] | {"causal": False}} for row in rows]
    plain = claims.scores_over_memory(results((), full)).why
    assert "Standard attention takes" in plain and "mask" not in plain


def test_what_has_no_mask_comes_first_and_the_mask_is_taken_apart(results):
    rows = speed_rows()
    found = results((), rows)
    f, said = claims.alone.query(found), claims.alone(found)
    assert said.figure.startswith(f"{f.full:.1f}x (forward) without a mask; causal {f.forward:.1f}x / ")
    assert f.full * f.mask * f.skipping == pytest.approx(f.forward) and f.full < f.forward
    assert f"together these turn {f.full:.1f}x into {f.forward:.1f}x." in said.why
    masked = claims.alone(results((), [row for row in rows if row["point"]["causal"]]))
    assert masked.figure.startswith("causal ") and "without" not in masked.why


def test_claims_without_rows_are_not_answered(results):
    found = results(memory_rows(["triton"]), speed_rows(["triton"]))
    for claim in (memory.scores_and_statistics, memory.twenty_times_less, claims.alone, memory.one_head,
                  claims.tiles_in_pytorch, claims.short_sequences, claims.scores_over_memory):  # fmt: skip
        with pytest.raises(NotMeasured):
            claim(found)


def test_a_claim_can_fail(results):
    rows = speed_rows()
    for row in rows:  # standard attention as fast as anything
        if row["point"]["implementation"] == "standard" and row["result"]["status"] == "ok":
            row["result"]["ms_median"] = 1e-3
    found = results(memory_rows(), rows)
    assert claims.alone(found).verdict == FAILS
    assert claims.tiles_in_pytorch(found).verdict == IN_PART  # it still saves memory
    assert claims.scores_over_memory(found).verdict == FAILS


@pytest.mark.parametrize(
    ("us", "clock", "verdict"), [(30, 30, HOLDS), (100, 30, IN_PART), (100, 100, FAILS), (300, 300, FAILS)]
)
def test_standard_attention_wins_by_both_one_or_none(results, us, clock, verdict):
    """Fused calls take 40 us on the device and by the clock, and one of them 200; naive attention `us` and
    `clock`. That it beats the slow one is said, and decides nothing."""
    rows = speed_rows(["standard", "triton", "sdpa_cudnn"])
    for row in rows:
        name, result = row["point"]["implementation"], row["result"]
        if "stream_us" in result:
            result["stream_us"] = {"standard": clock, "triton": 200}.get(name, 40)
            result["ms_median"] = {"standard": us, "triton": 200}.get(name, 40) / 1e3
    found = claims.short_sequences(results((), rows))
    assert found.verdict == verdict
    assert ("triton (256)" in found.why) == (us < 200)
