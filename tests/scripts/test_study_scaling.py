"""The study of several devices: its points, its meter inside train.py, and what its rows say."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
from torch.autograd import DeviceType

from model.training.profiling import Launch
from scripts.measure import sweep_points
from scripts.measure.instruments import scaling_meter
from scripts.measure.report import scaling_report
from scripts.measure.rows import key_of
from scripts.measure.studies import scaling
from tests.scripts.studies import row_of


def points(*given: str, cuda: bool = True, devices: int = 8) -> list[dict[str, Any]]:
    return scaling.points(scaling.arguments(list(given)), cuda, devices)


def test_points_are_those_of_the_machine_and_keep_the_tokens_of_a_device() -> None:
    found = points()
    assert len({key_of(point) for point in found}) == len(found) == 2 * (4 + 3 + 3) + 3 * 4
    for point in found:
        per_device = point["tokens_per_step"] // point["devices"]
        if point["trainer"] in ("ddp", "fsdp2"):
            assert per_device == 65536 and point["tokens_per_step"] % (1024 * point["micro_batch"]) == 0
        elif point["trainer"] == "context_parallel":
            assert point["tokens_per_step"] == point["seq_len"] >= 2**18
    assert {point["devices"] for point in points(devices=2)} == {1, 2}
    alone = points("--gpus", "1", "2", "4", "8", devices=1)  # with the tokens of several, for their losses
    assert {point["devices"] for point in alone} == {1}
    assert [point["tokens_per_step"] for point in alone][:4] == [65536 * n for n in (1, 2, 4, 8)]
    only = points("--gpus", "8", "--model", "gpt2", "--trainer", "ddp")
    assert [(point["trainer"], point["devices"]) for point in only] == [("default", 1), ("ddp", 8)]


@pytest.mark.parametrize("cuda", [True, False])
def test_a_point_is_what_train_py_takes(cuda: bool) -> None:
    for point in points(cuda=cuda):
        cfg, chosen = sweep_points.composed(scaling.words(point, 90.0))
        assert chosen["trainer"] == point["trainer"] and cfg.trainer.devices == point["devices"]
        assert cfg.data.batch_size == point["micro_batch"] and cfg.tokens_per_step == point["tokens_per_step"]
        assert cfg.callbacks.meter._target_ == scaling.METER and cfg.model.n_layer >= 4
        assert cfg.trainer.max_steps == 30 + scaling_meter.PROFILED


def test_communication_alone_is_what_nothing_else_covers() -> None:
    launches = [Launch("gemm", 0, 50), Launch("ncclDevKernel_AllReduce", 30, 40), Launch("gemm", 60, 20)]
    launches += [Launch("ncclDevKernel_AllGather", 85, 10), Launch("ncclDevKernel_AllGather", 90, 10)]
    found = scaling_meter.communication(launches, 1, 110.0)
    assert found["communication_ms"] == pytest.approx((40 + 15) / 1e3)
    assert found["exposed_ms"] == pytest.approx((10 + 15) / 1e3)
    assert found["communication_share"] == pytest.approx(25 / 110)
    assert found["collectives"] == {"ncclDevKernel_AllReduce": 1, "ncclDevKernel_AllGather": 2}


def test_annotations_on_a_gpu_hide_no_communication() -> None:
    span = SimpleNamespace(start=0, elapsed_us=lambda: 10)

    def event(name: str, annotation: bool = False, kind: DeviceType = DeviceType.CUDA) -> SimpleNamespace:
        return SimpleNamespace(name=name, device_type=kind, is_user_annotation=annotation, time_range=span)

    events = [event("ncclDevKernel_AllReduce"), event("Optimizer.step", True), event("nccl:all_reduce")]
    events += [event("gemm"), event("aten::mm", kind=DeviceType.CPU)]
    assert [one.name for one in scaling_meter.launches_of(events, True)] == [
        "ncclDevKernel_AllReduce",
        "gemm",
    ]
    on_a_cpu = [event(name, kind=DeviceType.CPU) for name in ("aten::mm", "gloo:all_reduce", "c10d::x")]
    assert [one.name for one in scaling_meter.launches_of(on_a_cpu, False)] == ["aten::mm", "gloo:all_reduce"]


@pytest.mark.parametrize(
    ("said", "status", "reason"),
    [
        ("started\nerror: rank 1 was lost: OutOfMemoryError: CUDA out of memory.\n", "oom", "rank 1"),
        ("error: trainer.devices=9: too many\nend of it\n", "error", "error: trainer.devices=9"),
        ("", "error", "exit code 1"),
    ],
)  # fmt: skip
def test_a_run_that_fails_is_a_row(said: str, status: str, reason: str) -> None:
    found = scaling.failed(said, 1)
    assert found["status"] == status and reason in found["reason"]


@pytest.mark.parametrize("fails", [False, True])
def test_one_gpu_is_each_of_them_side_by_side(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its speed is their mean. Several take all that there are, and on a CPU nothing is chosen."""
    one, two = points("--model", "gpt2", "--trainer", "ddp", "--gpus", "1", "2", devices=2)[::2]
    places: list[dict[str, str]] = []

    def started(asked: list[str], place: dict[str, str]) -> Any:
        places.append(place)
        return contextlib.nullcontext((place, None))

    def ended(place: dict[str, str], *_: Any) -> dict[str, Any]:
        if fails and place["CUDA_VISIBLE_DEVICES"] == "3":
            return {"status": "oom", "reason": "full"}
        ms = {"0": 100.0, "3": 125.0}.get(place.get("CUDA_VISIBLE_DEVICES"), 110.0)
        tokens_per_s = 1e3 * one["tokens_per_step"] / ms
        return MEASURED | {
            "ms_median": ms,
            "ms_p10": ms,
            "ms_p90": ms,
            "tokens_per_s": tokens_per_s,
            "mfu": 1.0,
        }

    monkeypatch.setattr(scaling, "started", started)
    monkeypatch.setattr(scaling, "ended", ended)
    options = scaling.arguments([])
    found = scaling.measured(one, options, ["0", "3"])
    assert places == [{"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "3"}]
    if fails:
        assert found == {"status": "oom", "reason": "full"}
        return
    assert found["ms_by_device"] == [100.0, 125.0] and found["ms_median"] == pytest.approx(1000 / 9)
    assert found["tokens_per_s"] == pytest.approx(one["tokens_per_step"] * 9)
    assert scaling.measured(two, options, ["0", "3"])["ms_median"] == 110.0
    scaling.measured(one, options, [])
    assert places[2:] == [{"CUDA_VISIBLE_DEVICES": "0,3"}, {"OMP_NUM_THREADS": "1"}]


def test_a_run_that_takes_too_long_ends() -> None:
    (point,) = points("--gpus", "1", "--trainer", "ddp", cuda=False)
    found = scaling.measured(point, scaling.arguments(["--timeout-s", "1"]), gpus=[])
    assert found["status"] == "error" and found["timeout_s"] == 1


@pytest.mark.long
@pytest.mark.parametrize("trainer", scaling.TRAINERS)
def test_two_processes_take_the_steps_of_one(trainer: str) -> None:
    """And stop alike where the time allows fewer steps."""
    options = scaling.arguments(["--gpus", "2", "--trainer", trainer, "--seq-len", "64", "--steps", "9"])
    found = [
        row_of(point, scaling.measured(point, options, [])) for point in scaling.points(options, False, 2)
    ]
    if trainer == "context_parallel":
        alone = scaling.arguments(["--gpus", "1", "--trainer", trainer, "--seq-len", "64", "--steps", "9"])
        found += [row_of(p, scaling.measured(p, alone, [])) for p in scaling.points(alone, False, 1)]
    (group,) = scaling_report.grouped(found).values()
    one, two = sorted(group, key=lambda r: r.devices)
    assert scaling_report.difference(two, group) < 1e-4 and len(set(two.losses)) == 9
    assert 0 < two.communication_share < 1 and 0 < two.exposed_ms <= two.communication_ms
    assert one.communication_ms == 0 and not one.collectives and "gloo:all_reduce" in two.collectives
    if trainer != "ddp":
        return
    options.limit_s = 0.0
    short = scaling.measured({key: two[key] for key in found[0]["point"]}, options, [])
    assert (short["steps"], short["warm_up"], short["n"], short["profiled_steps"]) == (3, 1, 2, 1)
    unprofiled = scaling.measured({key: two[key] for key in found[0]["point"]}, options, [], profiled=False)
    assert unprofiled["steps"] == 3 and "communication_ms" not in unprofiled


MEASURED = {"status": "ok", "reason": None, "communication_ms": 1.0, "communication_share": 0.1}
MEASURED |= {"tokens_per_s": 1.0, "peak_mib": 1000.0, "steps": 30, "losses": [1.0]}


def test_rounds_take_the_points_in_turn_and_give_the_median_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """One device with the tokens of two has its losses from one run."""
    one, for_losses, two = points("--model", "gpt2", "--trainer", "ddp", "--gpus", "1", "2", devices=2)
    times = iter([100.0, 208.0, 110.0, 104.0, 108.0, 90.0, 99.0])  # one, for_losses, two, one, two, ...
    seen = []

    def measured(point: dict[str, Any], options: Any, gpus: list[str], profiled: bool) -> dict[str, Any]:
        seen.append(point)
        ms = next(times)
        result = MEASURED | {"ms_median": ms, "tokens_per_s": 1e3 * point["tokens_per_step"] / ms}
        return {key: x for key, x in result.items() if profiled or not key.startswith("communication")}

    monkeypatch.setattr(scaling, "measured", measured)
    options = scaling.arguments(["--rounds", "3"])
    found = scaling.in_turn([one, for_losses, two], options, ["0", "1"])
    assert seen == [one, for_losses, two, one, two, one, two]
    assert [(r["ms_median"], r["ms_by_run"]) for r in found] == [
        (100.0, [100.0, 104.0, 90.0]),
        (208.0, [208.0]),
        (108.0, [110.0, 108.0, 99.0]),
    ]
    assert all(r["communication_ms"] == 1.0 for r in found)  # of the first round
    rows = [row_of(*each) for each in zip((one, for_losses, two), found, strict=True)]
    group = scaling_report.records(rows)
    ratio = 100.0 / 110.0  # of 0.909, 0.963 and 0.909, of equal tokens a device
    assert scaling_report.relative(group[2], group) == pytest.approx(ratio)
    assert scaling_report.relative(group[1], group) == pytest.approx(200 / 208)


def test_a_point_that_fails_in_one_round_is_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = iter([MEASURED, {"status": "oom", "reason": "full"}, MEASURED])
    monkeypatch.setattr(scaling, "measured", lambda *of, profiled: next(outcomes))
    point = points()[0]
    found = scaling.in_turn([point], scaling.arguments(["--rounds", "5"]), ["0"])
    assert found == [{"status": "oom", "reason": "full"}]


def test_what_rows_say() -> None:
    rows = []
    for point in points(devices=4):
        n, speed = point["devices"], {"ddp": 0.97, "fsdp2": 0.9, "context_parallel": 0.8, "default": 1.0}
        result = {"status": "ok", "reason": None, "tokens_per_s": 1e5 * n * speed[point["trainer"]]}
        result |= {"ms_median": 10.0, "peak_mib": 2048.0 * n, "steps": 30, "losses": [10.9, 10.8 + 1e-4 * n]}
        result |= {"communication_ms": 2.0, "communication_share": 0.05 * (n > 1)}
        if point["model"] == "gpt2_xl" and point["trainer"] == "ddp" and n == 4:
            result = {"status": "oom", "reason": "CUDA out of memory"}
        rows.append(row_of(point, result))
    report = scaling.report(rows)
    assert report.found.startswith(
        "On 4 GPUs, relative to perfect scaling: gpt2, DDP, T = 1k 0.97x; gpt2, FSDP2"
    )
    assert report.found.count("; ") == 5 and report.found.endswith("T = 1024k 0.80x.")
    assert report.notes[0].startswith("gpt2, DDP, T = 1k: 388,000 tokens/s on 4 GPUs, 0.970x of perfect")
    assert "differs from that of one device with the same tokens by at most 3.0e-04" in report.notes[-2]
    assert report.notes[-1] == "gpt2_xl, DDP, T = 1k on 4: oom: CUDA out of memory"
    small = report.tables[0].lines
    assert small[-1] == [
        "FSDP2",
        "4",
        "262,144",
        "360,000",
        "0.900",
        "10.0",
        "8.0",
        "2.0",
        "5.0%",
        "30",
        "3.0e-04",
    ]
    assert small[1][:5] == ["one device", "1", "65,536", "100,000", "1.000"] and small[1][7:] == [
        "",
        "",
        "30",
        "",
    ]
    assert ["DDP", "4", "262,144", "oom", *[""] * 7] in report.tables[1].lines
    ElementTree.fromstring(report.pictures[""])
    assert "out of memory at 4" in report.pictures[""]
    several = scaling.report([row for row in rows if row["point"]["devices"] > 1])
    assert "perfect scaling from 1" in report.notes[0] and "perfect scaling from 2" in several.notes[0]
