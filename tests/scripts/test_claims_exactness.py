"""Claims 20, 22 and 25: verdicts and sentences from made-up rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from scripts.measure.claims import FAILS, HOLDS, IN_PART, UNTESTED, answered
from tests.scripts.test_claims import results, row

Rows = list[dict[str, Any]]


def asked(
    which: str, ran: str, wants: str = "sdpa_flash", right: bool = True, **point: Any
) -> dict[str, Any]:
    point = {"dtype": "float16", "head_dim": 64, "features": ""} | point
    result = {"ran": [ran], "as_asked": right}
    return row("numerics", implementation=which, part="asked", wants=wants, result=result, **point)


@pytest.mark.parametrize(("wrong", "verdict"), [(0, FAILS), (1, IN_PART), (2, HOLDS)])
def test_asking_is_judged_by_calls_that_name_one_backend(wrong: int, verdict: str, tmp_path: Path) -> None:
    """Of four; preferences, all of which are passed over here, decide nothing."""
    backends = ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH")
    rows = [asked(f"sdpa_kernel({each})", "x", right=i >= wrong) for i, each in enumerate(backends)]
    rows += [asked(each, "cuDNN", right=False) for each in ("sdpa_kernel([A, B])", "enable_flash_sdp(True)")]
    rows.append(asked("sdpa_kernel(FLASH_ATTENTION)", "", dtype="float32"))
    rows[-1]["result"] = {"status": "unsupported", "reason": "No available kernel."}
    answer = answered(results(tmp_path, *rows))[20]
    assert answer.verdict == verdict
    counted = f"{wrong} of 4 calls that force one backend, 2 of 2 that prefer one"
    assert answer.figure == f"another kernel ran for {counted}"
    assert f"ran it in {4 - wrong} of 4 cases, and 1 more were refused" in answer.why
    assert (
        "2 of 2 were passed over without a word (sdpa_kernel([A, B]) (fp16, D = 64) ran cuDNN" in answer.why
    )


def stability(name: str, nan_from: int | None) -> Rows:
    alike = {"passed": "both", "part": "stability", "dtype": "float16"}
    return [
        row(
            "numerics",
            implementation=name,
            magnitude=factor,
            **alike,
            result={"largest_score": 22.0 * factor, "nan": float(bad), "inf": 0.0, "max_error": factor / 100},
        )
        for factor in (1, 4, 64)
        for bad in [nan_from is not None and factor >= nan_from]
    ]


def test_what_overflows_in_fp32_is_said(tmp_path: Path) -> None:
    rows = [*stability("formula_torch", 64), *stability("naive", None), *stability("triton", None)]
    answer = answered(results(tmp_path / "a", *rows))[25]
    assert answer.verdict == HOLDS and answer.figure.startswith("1 of 1 formulas in 16 bits overflow")
    assert "is up to 0.64, that of implementations which write no scores up to 0.64" in answer.why
    assert answer.why.endswith("is as stable: scores and exp(s) overflow in 16 bits.")
    answer = answered(results(tmp_path / "b", *rows, *stability("formula_no_max_fp32", 4)))[25]
    assert answer.figure == "1 of 1 formulas in 16 bits overflow, 2 implementations do not"
    assert answer.why.endswith("and exp(s) of the bare score in fp32 as well (formula_no_max_fp32).")
    assert answered(results(tmp_path / "c", *stability("naive", None)))[25].verdict == UNTESTED
    rows += stability("formula_scale_first", None)  # one that never breaks
    assert answered(results(tmp_path / "d", *rows))[25].verdict == IN_PART


def backward(name: str, ms: float, n: int, keeps: bool, gb: float | None = None) -> dict[str, Any]:
    alike = {"passed": "backward", "batch": 4, "heads": 16, "kv_heads": 16, "head_dim": 64, "causal": True}
    counters = gb and {"backward": {"dram_read_bytes": gb * 1e9, "dram_write_bytes": 0}}
    result = {"ms_median": ms, "keeps": keeps, "kept_mib": 1, "counters": counters}
    point = {"implementation": name, "dtype": "bfloat16", "seq_len": n, "kv_len": n}
    return row("backward_recompute", **alike, **point, result=result)


def test_bytes_are_those_that_were_counted_and_say_where(tmp_path: Path) -> None:
    rows = [
        backward("standard_compiled", 4.0, 4096, True, 16),
        backward("sdpa_cudnn", 1.0, 4096, False, 0.5),
        backward("standard_compiled", 2.0, 1024, True),
        backward("sdpa_cudnn", 1.0, 1024, False),
    ]
    answer = answered(results(tmp_path / "a", *rows))[22]
    assert answer.verdict == IN_PART and answer.figure.startswith("2.0 to 4.0x")
    assert "for four, 32 times fewer bytes of DRAM by ncu, at N = 4,096, D = 64 alone." in answer.why
    one_counted = [
        backward("standard_compiled", 4.0, 4096, True, 16),
        backward("sdpa_cudnn", 1.0, 4096, False),
    ]
    answer = answered(results(tmp_path / "b", *one_counted))[22]
    assert "for four, bytes not counted." in answer.why  # never what is counted over what is modelled
    both = [
        *rows[:2],
        backward("standard_compiled", 2.0, 1024, True, 8),
        backward("sdpa_cudnn", 1, 1024, False, 1),
    ]
    answer = answered(results(tmp_path / "c", *both))[22]
    assert "for four, 8 to 32 times fewer bytes of DRAM by ncu." in answer.why
