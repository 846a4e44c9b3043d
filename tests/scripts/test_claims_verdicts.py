"""Each claim's thresholds: figures on both sides of every one, so that no verdict is unable to fail; and its
sentences."""

from __future__ import annotations

import pytest

from scripts.measure.claims import FAILS, HOLDS, IN_PART, UNTESTED, Claim, Figures, all_claims


def entry(**changes):
    given = {"number": 99, "claim": "Fast.", "theirs": "2x", "figure": "{factor:.1f}x", "why": "Because."}
    given |= {"holds": lambda f: f.factor >= 2, "partly": lambda f: f.factor > 1, "query": None}
    given |= {"differ": ("implementation",)}
    return Claim(**given | changes)


@pytest.mark.parametrize(
    ("extra", "why"), [(3.0, "It is 2x with two rows. And 3.0x without."), (None, "It is 2x with two rows.")]
)
def test_a_paragraph_without_its_figures_is_left_out(extra, why):
    text = """
        It is {factor}x
        with {rows_said[1]} rows.

        And {extra:.1f}x without.
        """
    figures = Figures([], factor=2, extra=extra, rows_said=("one", "two"))
    assert entry(why=text, query=lambda results: figures)(None).why == why


ONE_MORE = 1e-6  # beyond a threshold
LAYER = {"softmax": 0.013, "softmax_bandwidth": 0.32, "qkv": 0.612, "qk": 0.5, "flops": 0.9981, "time": 0.61}
STEPS = {"shortest": 512, "longest": 2048, "busy": 0.5, "idle": 0.1, "prefill": 2, "decode": 1}
STEPS |= {"compute": 0.5}
QUANTISED = {"int8": 0.525, "int4": 0.275, "loss": 0.01, "attention": 1.01, "longest": 1.01}
QUANTISED |= {"one_run": True, "needed": True}
# Figures of each claim and its verdict: the claimed ones, a little less, and what shows the opposite.
VERDICTS = {
    1: [
        ({"most": 32, "kept": 8, "standard": 256, "tiled": 16}, HOLDS),
        ({"most": 32, "kept": 8, "standard": 256, "tiled": 256}, IN_PART),
        ({"most": 31.9, "kept": 8, "standard": 256, "tiled": 16}, FAILS),
        ({"most": 32, "kept": 9, "standard": 256, "tiled": 16}, FAILS),
    ],
    2: [({"whole": 20.3}, HOLDS), ({"whole": 20.2}, IN_PART), ({"whole": 1}, FAILS)],
    3: [
        ({"forward": 7.6, "both": 8, "full": None}, HOLDS),
        ({"forward": 7.6, "both": 8, "full": 7.5}, IN_PART),
        ({"forward": 7.6, "both": 3, "full": 8}, IN_PART),
        ({"forward": 7.6, "both": 2.9, "full": 8}, FAILS),
    ],
    4: [
        ({"gpt2": 3.5, "gpt2_medium": 3.0, "same": True}, HOLDS),
        ({"gpt2": 3.5, "gpt2_medium": 3.0, "same": False}, IN_PART),
        ({"gpt2": 3.4, "gpt2_medium": 3.0, "same": True}, IN_PART),
        ({"gpt2": 3.5, "gpt2_medium": 1, "same": True}, FAILS),
    ],
    5: [
        ({"parameters": 124e6, "better": True, "cost": 1.33}, HOLDS),
        ({"parameters": 124e6, "better": True, "cost": 1.34}, IN_PART),
        ({"parameters": 124e6, "better": False, "cost": 1}, FAILS),
        ({"parameters": 123e6, "better": True, "cost": 1}, UNTESTED),
    ],
    6: [
        ({"low": 1.15, "high": 1.2}, HOLDS),
        ({"low": 1.149, "high": 1.2}, IN_PART),
        ({"low": 1.001, "high": 1.149}, IN_PART),
        ({"low": 1, "high": 1.149}, FAILS),
        ({"low": 1, "high": 1.15}, UNTESTED),
    ],
    7: [
        (arena := {"mean": 2.4, "least": 1.1, "alike": True, "differs": False, "all_learned": True}, HOLDS),
        (arena | {"all_learned": False}, IN_PART),
        (arena | {"alike": False}, IN_PART),
        (arena | {"mean": 2.3}, IN_PART),
        (arena | {"alike": False, "differs": True}, FAILS),
        (arena | {"mean": 2.3, "least": 1}, FAILS),
    ],
    8: [
        ({"factor": 1.86, "of_mma": 0.5, "least_over": 9}, HOLDS),
        ({"factor": 1.85, "of_mma": 0.5, "least_over": 9}, IN_PART),
        ({"factor": 1.86, "of_mma": 0.49, "least_over": 9}, IN_PART),
        ({"factor": 1.86, "of_mma": 0.5, "least_over": 8.9}, IN_PART),
        ({"factor": 1, "of_mma": 0.5, "least_over": 9}, FAILS),
    ],
    9: [
        (hopper := {"least": 2, "most": 2, "used": 0.75, "fp8": True}, HOLDS),
        (hopper | {"fp8": False}, IN_PART),
        (hopper | {"used": 0.74}, IN_PART),
        (hopper | {"least": 1.9}, IN_PART),
        (hopper | {"least": 1.9, "most": 1.9}, FAILS),
        (hopper | {"least": 1}, FAILS),
    ],
    10: [
        ({"slowest_step": 2, "least": 3, "most": 7}, HOLDS),
        ({"slowest_step": 1.9, "least": 3, "most": 7}, IN_PART),
        ({"slowest_step": 2, "least": 3, "most": 7.1}, IN_PART),
        ({"slowest_step": 2, "least": 2.9, "most": 7}, FAILS),
    ],
    11: [
        ({"right": 3, "fits": False}, HOLDS),
        ({"right": 3, "fits": True}, IN_PART),
        ({"right": 1, "fits": False}, IN_PART),
        ({"right": 0, "fits": False}, FAILS),
    ],
    12: [
        ({"faster": 2, "saved": 0.48}, HOLDS),
        ({"faster": 1.9, "saved": 0.48}, IN_PART),
        ({"faster": 2, "saved": 0.47}, IN_PART),
        ({"faster": 1.9, "saved": 0.47}, FAILS),
    ],
    13: [
        ({"naive": 2.3 - ONE_MORE, "tiled": 1.7 + ONE_MORE, "sized": 5, "lengths": 5, "most": 20}, HOLDS),
        ({"naive": 2, "tiled": 1.69, "sized": 5, "lengths": 5, "most": 20}, IN_PART),
        ({"naive": 2, "tiled": 2, "sized": 4, "lengths": 5, "most": 21}, IN_PART),
        ({"naive": 2, "tiled": 2, "sized": 0, "lengths": 5, "most": 9}, FAILS),
        ({"naive": 1, "tiled": 1, "sized": 1, "lengths": 5, "most": 20}, FAILS),
    ],
    14: [
        (LAYER, HOLDS),
        (LAYER | {"qkv": 0.61}, IN_PART),
        (LAYER | {"qk": 0.49}, IN_PART),
        (LAYER | {"flops": 0.998}, IN_PART),
        (LAYER | {"time": 0.62}, IN_PART),
        (LAYER | {"softmax": 0.014}, FAILS),
        (LAYER | {"softmax_bandwidth": 0.31}, FAILS),
    ],
    15: [
        (grid := {"computed": 10, "every": 16, "rising": True, "gain": 1.75}, HOLDS),
        (grid | {"gain": 1.74}, IN_PART),
        (grid | {"rising": False}, IN_PART),
        (grid | {"computed": 16}, IN_PART),
        (grid | {"gain": 1}, FAILS),
    ],
    16: [
        ({"wins_by": [True, True]}, HOLDS),
        ({"wins_by": [True, False]}, IN_PART),
        ({"wins_by": [False, False]}, FAILS),
    ],
    17: [
        (saved := {"without": 5050, "within": 100, "linear": True, "five_times": True, "saved": 5}, HOLDS),
        (saved | {"linear": False}, IN_PART),
        (saved | {"five_times": False}, IN_PART),
        (saved | {"within": 200}, FAILS),
        (saved | {"five_times": False, "saved": 1}, FAILS),
    ],
    18: [
        ({"off": 0.01, "shrinks": True, "eight": 10.5}, HOLDS),
        ({"off": 0.02, "shrinks": True, "eight": 10.5}, IN_PART),
        ({"off": 0.01, "shrinks": False, "eight": 9.9}, IN_PART),
        ({"off": 0.02, "shrinks": False, "eight": 9.9}, FAILS),
    ],
    19: [
        (STEPS, HOLDS),
        (STEPS | {"shortest": 1024}, IN_PART),
        (STEPS | {"compute": 0.49}, IN_PART),  # as fast as it gets, and bound by something else
        (STEPS | {"busy": 0.49}, IN_PART),
        (STEPS | {"idle": 0.11}, IN_PART),
        (STEPS | {"decode": 2}, IN_PART),
        (STEPS | {"longest": 512, "busy": 0.4, "decode": 3}, FAILS),
    ],
    20: [
        ({"wrong": 3, "forced": 6}, HOLDS),
        ({"wrong": 2, "forced": 6}, IN_PART),
        ({"wrong": 1, "forced": 6}, IN_PART),
        ({"wrong": 0, "forced": 6, "ignored": 9}, FAILS),
        ({"wrong": 0, "forced": 0, "ignored": 9}, FAILS),
    ],
    21: [
        ({"tiles_right": True, "off": set()}, HOLDS),
        ({"tiles_right": True, "off": {"triton"}}, IN_PART),
        ({"tiles_right": False, "off": set()}, IN_PART),
        ({"tiles_right": False, "off": {"triton"}}, FAILS),
    ],
    22: [
        (again := {"least": 1.1, "most": 2, "fewest_bytes": 1.1, "alike": True}, HOLDS),
        (again | {"fewest_bytes": 1}, IN_PART),
        (again | {"least": 1}, IN_PART),
        (again | {"alike": False}, IN_PART),
        (again | {"least": 0.5, "most": 1}, FAILS),
    ],
    23: [
        ({"least": 0.9, "most": 1.1, "over_either": 1.03}, HOLDS),
        ({"least": 0.89, "most": 1.1, "over_either": 1.03}, IN_PART),
        ({"least": 0.9, "most": 1.11, "over_either": 1.03}, IN_PART),
        ({"least": 0.5, "most": 0.89, "over_either": 1.03}, IN_PART),
        ({"least": 0.5, "most": 0.89, "over_either": 1.02}, FAILS),
        ({"least": 0.49, "most": 0.95, "over_either": 1.03}, FAILS),
    ],
    24: [
        ({"once": 2, "floor": 8, "measured": 2}, HOLDS),
        ({"once": 1.9, "floor": 7.6, "measured": 8}, IN_PART),
        ({"once": 0.4, "floor": 1.6, "measured": 8}, FAILS),
        ({"once": 2, "floor": 8, "measured": 1.9}, FAILS),
    ],
    25: [
        (breaks := {"overflow": 4, "narrow": 4, "narrow_overflow": 4, "fused_break": False}, HOLDS),
        (breaks | {"narrow_overflow": 3}, IN_PART),
        (breaks | {"narrow": 0, "narrow_overflow": 0}, IN_PART),
        (breaks | {"fused_break": True}, FAILS),
        (breaks | {"overflow": 0, "narrow_overflow": 0}, FAILS),
    ],
    26: [
        ({"fma": 16, "exp2": 250}, HOLDS),
        ({"fma": 15.9, "exp2": 250}, IN_PART),
        ({"fma": 16, "exp2": 249}, IN_PART),
        ({"fma": 7.9, "exp2": 250}, FAILS),
        ({"fma": 16, "exp2": 124}, FAILS),
    ],
    27: [({"right": 4}, HOLDS), ({"right": 2}, IN_PART), ({"right": 1}, FAILS)],
    28: [
        ({"products": 0.7, "standard": 0.35, "fused": 0.75}, HOLDS),
        ({"products": 0.69, "standard": 0.35, "fused": 0.75}, IN_PART),
        ({"products": 0.7, "standard": 0.36, "fused": 0.75}, IN_PART),
        ({"products": 0.7, "standard": 0.35, "fused": 0.74}, IN_PART),
        ({"products": 0.7, "standard": 0.35, "fused": 0.35}, FAILS),
    ],
    29: [
        ({"by_threads": 1.1, "by_trips": 1.1, "inside": True}, HOLDS),
        ({"by_threads": 1.1, "by_trips": 1.1, "inside": False}, IN_PART),
        ({"by_threads": 1.09, "by_trips": 2, "inside": True}, FAILS),
        ({"by_threads": 2, "by_trips": 1.09, "inside": True}, FAILS),
    ],
    30: [
        ({"factor": 2.75, "interval": 0.125}, HOLDS),
        ({"factor": 2.7, "interval": 0.125}, IN_PART),
        ({"factor": 2.5, "interval": 0.125}, IN_PART),
        ({"factor": 2.45, "interval": 0.125}, FAILS),
    ],
    31: [
        ({"least": 0.9, "most": 1.1, "like_accuracy": True}, HOLDS),
        ({"least": 0.9, "most": 1.1, "like_accuracy": False}, IN_PART),
        ({"least": 0.89, "most": 1.1, "like_accuracy": True}, IN_PART),
        ({"least": 0.9, "most": 1.11, "like_accuracy": True}, IN_PART),
        ({"least": 0.5, "most": 1.0, "like_accuracy": True}, IN_PART),
        ({"least": 0.49, "most": 1.0, "like_accuracy": True}, FAILS),
    ],
    32: [
        ({"time": 0.4, "flops": 0.002}, HOLDS),
        ({"time": 0.4, "flops": 0.0021}, IN_PART),
        ({"time": 0.39, "flops": 0.002}, IN_PART),
        ({"time": 0.24, "flops": 0.002}, FAILS),
    ],
    33: [
        ({"blocks": {512: 8, 8192: 7}, "most": 8, "counted": {512: 100, 8192: 89}}, HOLDS),
        ({"blocks": {512: 8, 8192: 7}, "most": 8, "counted": {512: 100, 8192: 91}}, IN_PART),
        ({"blocks": {8192: 8, 16384: 4}, "most": 8, "counted": {8192: 99, 16384: 50}}, IN_PART),
        ({"blocks": {512: 8, 8192: 8}, "most": 8, "counted": {512: 100, 8192: 89}}, FAILS),
    ],
    34: [
        ({"by_registers": 2, "by_shared": 3, "occupancy": 18.75}, HOLDS),
        ({"by_registers": 2, "by_shared": 2, "occupancy": 12.5}, IN_PART),
        ({"by_registers": 3, "by_shared": 2, "occupancy": 12.5}, FAILS),
        ({"by_registers": 2, "by_shared": 3, "occupancy": 25.0}, FAILS),
    ],
    35: [
        ({"compiled": 3, "eager": 4, "at_2048": 3}, HOLDS),
        ({"compiled": 2.9, "eager": 3, "at_2048": 3}, IN_PART),
        ({"compiled": 3, "eager": 3, "at_2048": 2.9}, IN_PART),
        ({"compiled": 1, "eager": 2.9, "at_2048": 3}, FAILS),
    ],
    36: [
        ({"least": 2048, "fp32": 2048}, HOLDS),
        ({"least": 2047, "fp32": 2048}, IN_PART),
        ({"least": 999, "fp32": 2047}, FAILS),
    ],
    37: [
        ({"mma": (0.5, 0.7), "wgmma": (0.5, 0.7)}, HOLDS),
        ({"mma": (0.49, 0.7), "wgmma": (0.5, 0.7)}, IN_PART),
        ({"mma": (0.5, 0.7), "wgmma": (0.49, 0.7)}, IN_PART),
        ({"mma": (0.5, 0.71), "wgmma": (0.5, 0.7)}, IN_PART),
        ({"mma": (0.5, 0.7), "wgmma": (0.5, 0.71)}, IN_PART),
        ({"mma": (0.3, 0.49), "wgmma": (0.5, 0.7)}, FAILS),
        ({"mma": (0.5, 0.7), "wgmma": (0.3, 0.49)}, FAILS),
    ],
    38: [
        (QUANTISED, HOLDS),
        (QUANTISED | {"attention": 1.0}, IN_PART),
        (QUANTISED | {"longest": 1.0}, IN_PART),
        (QUANTISED | {"one_run": False}, IN_PART),
        (QUANTISED | {"needed": False}, IN_PART),
        (QUANTISED | {"needed": None}, IN_PART),
        (QUANTISED | {"loss": 0.011}, IN_PART),
        (QUANTISED | {"int8": 0.526}, FAILS),
        (QUANTISED | {"int4": 0.276}, FAILS),
    ],
    39: [
        ({"off": 0.05, "off_dram": 0.05, "off_longest": 0.05}, HOLDS),
        ({"off": 0.06, "off_dram": 0.05, "off_longest": 0.05}, IN_PART),
        ({"off": 0.05, "off_dram": 0.06, "off_longest": 0.05}, IN_PART),
        ({"off": 0.05, "off_dram": 0.06, "off_longest": 0.06}, FAILS),
    ],
}  # fmt: skip


@pytest.mark.parametrize("number", VERDICTS)
def test_a_verdict_follows_from_figures_on_both_sides_of_each_threshold(number):
    each = {claim.number: claim for claim in all_claims()}[number]
    for figures, verdict in VERDICTS[number]:
        assert each.verdict(Figures([], **figures)) == verdict, figures


def test_every_claim_can_hold_and_fail():
    assert list(VERDICTS) == [claim.number for claim in all_claims()]
    assert all({HOLDS, IN_PART, FAILS} <= {verdict for _, verdict in cases} for cases in VERDICTS.values())


def test_the_registry_has_every_claim_of_the_sources():
    assert [claim.number for claim in all_claims()] == list(range(1, 40))
