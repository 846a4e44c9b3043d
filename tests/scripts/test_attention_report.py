"""Tables and pictures of results/attention: what is compared, and what is drawn."""

import pytest

from scripts.measure.instruments.bench_points import Shape
from scripts.measure.report.attention_report import cell, doubts, panels, pictures, ratio
from tests.scripts.studies import row_of


def made(name, ms, run="r", tokens=1024, **result):
    point = Shape(1, 2, 2, tokens, 64, True, "bf16").point(name, "forward")
    result = {
        "status": "ok",
        "ms_median": ms,
        "tflops": 1 / ms,
        "error_ratio": 0.5,
        "kernels_ok": True,
    } | result
    return row_of(point, result, run)


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ([made("sdpa", 3.0), made("flash3", 2.0)], 2.0),
        ([made("sdpa", 3.0), made("flash3", 2.0, error_ratio=None)], None),  # the best was not checked
        ([made("sdpa", 3.0), made("flash3", 2.0, kernels_ok=False)], None),
        ([made("sdpa", 3.0), made("flash3", 2.0, run="another")], 3.0),  # a ratio is within one run
        ([made("sdpa", 3.0), made("flash3", 2.0, status="oom")], 3.0),
        ([made("tiled", 3.0)], None),  # not a peer
    ],
)
def test_a_ratio_is_against_the_best_peer_where_both_may_be_trusted(others, expected):
    (panel,) = panels([made("triton", 1.0), *others]).values()
    assert ratio("triton", panel, 1024) == expected
    assert ratio(others[0]["point"]["implementation"], panel, 1024) in (None, pytest.approx(expected))
    (panel,) = panels([made("triton", 1.0, error_ratio=1.5), *others]).values()
    assert ratio("triton", panel, 1024) is None


def test_pictures_have_a_panel_a_table_and_name_what_ran_out_of_memory():
    found = [made("triton", 1.0), made("triton", 2.0, tokens=2048), made("naive", 9.0)]
    found.append(made("naive", 1.0, tokens=2048, status="oom"))
    drawn = pictures(found)
    svg = drawn["forward"]
    assert list(drawn) == ["forward"]
    assert all(f"<!-- {words} -->" in svg for words in ("triton", "naive (out of memory at 2k)", "TFLOP/s"))
    assert "<!-- Attention, forward: NVIDIA H200, 2026-11-21 -->" in svg
    assert "<!-- D 64, causal, 2 heads, batch 1, bfloat16 -->" in svg
    assert pictures(found) == drawn


def test_a_table_shares_the_tokens_in_all_or_the_batch():
    def at(batch, tokens):
        row = made("sdpa", 1.0, tokens=tokens)
        return row | {"point": row["point"] | {"batch": batch}}

    found = panels([at(4, 512), at(2, 1024), at(1, 2048), at(1, 4096)])
    assert [(key[-2], sorted(panel["sdpa"])) for key, panel in found.items()] == [
        ("2,048 tokens", [512, 1024, 2048]),
        ("batch 1", [4096]),
    ]


def test_what_may_not_be_trusted_is_said_once_with_its_passes():
    asked = {"kernels_ok": False, "verdict": "asked for flex, but ran matrix products"}
    found = [made("flex", 1.0, **asked), made("flex", 2.0, tokens=2048, **asked)]
    found += [made("flash2", 1.0, status="unsupported", reason="not installed"), made("sdpa", 1.0)]
    found.append(made("triton", 1.0, error_ratio=1.25))
    assert doubts(found) == {
        "flex: ! asked for flex, but ran matrix products": ["forward"],
        "flash2: unsupported: not installed": ["forward"],
        "triton: ! at 1,024 tokens, D 64: error ratio 1.25, correct up to 1": ["forward"],
    }
    (panel,) = panels([made("naive", 4.0), made("sdpa", 2.0), made("tiled", 1.0, status="oom")]).values()
    assert [cell(name, panel, 1024) for name in panel] == ["0.250 0.50x", "0.500", "oom"]
    assert cell("naive", panel, 2048) == ""
