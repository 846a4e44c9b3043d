"""The study of predicted memory: its points, a small run on the CPU, and what it says of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hydra.errors import HydraException

from scripts.measure.studies import memory_estimate
from scripts.memory import composed


@pytest.mark.parametrize("config", [*memory_estimate.CONFIGS, *memory_estimate.CPU_CONFIGS])
def test_configurations_are_such_as_train_takes(config: str) -> None:
    try:
        cfg = composed(config.split())
    except HydraException as error:
        pytest.fail(str(error))
    point = memory_estimate.point(config)
    assert (point["seq_len"], point["micro_batch"]) == (cfg.seq_len, cfg.data.batch_size)
    assert point["implementation"] == cfg.attention.name


@pytest.mark.long
def test_a_small_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "cpu.jsonl"
    config = memory_estimate.CPU_CONFIGS[0] + " model.n_layer=2"
    monkeypatch.setattr("sys.argv", ["memory_estimate.py", "--config", config, "--out", str(out)])

    def here(config: str) -> dict:  # not in a process of its own
        return memory_estimate.child({"config": config}, print)

    monkeypatch.setattr(memory_estimate, "measured", here)
    memory_estimate.main()
    (row,) = map(json.loads, out.read_text().splitlines())
    result = row["result"]
    assert result["status"] == "ok", result
    assert abs(memory_estimate.off(row)) <= 0.10
    assert result["disagreement"] <= 0.03
    assert "1 of 1 peaks are within 10% of the prediction" in capsys.readouterr().out
    memory_estimate.main()  # has its row
    assert len(out.read_text().splitlines()) == 1


def test_a_configuration_has_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(memory_estimate, "once", lambda *given: asked.append(given) or {"status": "ok"})
    assert memory_estimate.measured("model=tiny") == {"status": "ok"}
    target, request, timeout_s = asked[0]
    assert request == {"config": "model=tiny"} and timeout_s == memory_estimate.TIMEOUT_S
    assert target == "scripts.measure.studies.memory_estimate:child"


def test_what_is_off_is_said() -> None:
    kinds = dict.fromkeys(memory_estimate.KINDS, 10.0)
    result = {"status": "ok", "predicted_mib": {"peak": 90.0, **kinds}, "disagreement": 0.01}
    rows = [
        {"point": {"config": "a"}, "result": result | {"memory_split": {"peak": peak, **kinds}}}
        for peak in (100.0, 60.0)
    ]
    rows.append({"point": {"config": "b"}, "result": {"status": "oom", "reason": "no memory"}})
    report = memory_estimate.report(rows)
    assert report.notes[0].startswith("1 of 2 peaks are within 10%")
    assert "deviation is 50.0%" in report.notes[0] and "within 1.00%" in report.notes[0]
    assert report.notes[1] == "b: oom: no memory"
    assert [line[3] for line in report.tables[0].lines] == ["off", "-10.0%", "+50.0%"]


def test_what_a_configuration_lacks_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr("sys.argv", ["memory_estimate.py", "--config", "model=tiny seq_len=64"])
    with pytest.raises(SystemExit):
        memory_estimate.main()
    assert "needs attention, data.batch_size as well" in capsys.readouterr().err
