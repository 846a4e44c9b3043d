"""The study of kinds of KV caches: what is held, what is read, what the rows say."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from scripts.measure.claims import HOLDS, Results, answered
from scripts.measure.rows import append, read
from scripts.measure.studies import kv_cache_kinds as study


@pytest.mark.parametrize("kind", study.KINDS)
@pytest.mark.parametrize("block", [None, 16])
def test_all_caches_hold_the_same_tokens(kind: str, block: int | None) -> None:
    k, v = torch.randn(2, 2, 8, 64, 128, generator=torch.Generator().manual_seed(0))
    view = study.view_of(k, v, kind, block)
    allowed = {"auto": 0, "fp8": 0.05, "int8": 0.02, "int4": 0.2}[kind]  # of a number's size
    for x, got in zip((k, v), view.tensors(), strict=True):
        assert (got - x).norm() <= allowed * x.norm()
    assert (view.k.table is None) == (block is None)


def test_attention_is_timed_over_each() -> None:
    point = {"implementation": "naive", "dtype": "float32", "batch": 2, "kv_len": 32}
    of = [
        point | {"cache": kind, "block": block}
        for kind, block in (("auto", None), ("int8", 16), ("int4", None))
    ]
    found = study.attention(of, "cpu")
    assert all(each["error_ratio"] == 0 and each["ms_median"] > 0 for each in found)
    numbers = 2 * 8 * 128  # of keys and values of a token; scales have 2 bytes
    assert [each["bytes_per_token"] for each in found] == [4 * numbers, numbers + 32, numbers / 2 + 64]


def test_the_loss_is_that_of_the_kind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.md").write_text("abcdefgh " * 400)
    monkeypatch.setattr(study, "ROOT", tmp_path)
    net, text = study.trained(3, "cpu")
    losses = [study.loss(net, text[:150], kind)["nats"] for kind in ("auto", "int4")]
    assert losses[0] != losses[1] and abs(losses[1] / losses[0] - 1) < 0.05 and losses[0] < 5.6  # < log(256)


def test_what_rows_say(tmp_path: Path) -> None:
    out = tmp_path / "kv_cache_kinds" / "h200.jsonl"
    for point in study.points(study.arguments([]), cuda=True):
        worth = {"auto": 1, "fp8": 2, "int8": 2, "int4": 4}[point["cache"]]
        of = {
            "attention": {"ms_median": 0.4 / worth, "gb_per_s": 4000.0, "bytes_per_token": 4096 / worth},
            "generate": {"tokens_per_s": 100.0 * worth},
            "loss": {"nats": 2.0 if worth < 4 else 2.01},
        }
        append(out, point, {"status": "ok"} | of[point["pass"]])
    attention, generate, loss = study.report(list(read(out).values())).tables
    assert len(attention.lines) == 1 + 48 and len(generate.lines) == 1 + 16
    assert attention.lines[1] == ["1", "8,192", "auto", "dense", "4,096", "0.400", "4,000", "1.00"]
    assert attention.lines[-1][-1] == "4.00" and generate.lines[4] == ["1", "512", "int4", "400", "4.00"]
    assert loss.lines[4] == ["int4", "2.0100", "+0.50%"]
    out.write_text(out.read_text().replace('"gpu": null', '"gpu": "NVIDIA H200"'))
    answer = answered(Results(tmp_path))[38]
    assert (
        answer.verdict == HOLDS and answer.figure == "0.50 and 0.25 of the bytes, 2.00x and 4.00x the speed"
    )
    assert "32,768 tokens of 16 rows" in answer.why and "by 0.50% at most" in answer.why
