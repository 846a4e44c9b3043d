"""What the rows of scaling say: tokens/s beside perfect scaling, memory, communication, losses."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import groupby

from scripts.measure.report.figures import Line, canvas, panel, svg, thousands
from scripts.measure.report.pages import page
from scripts.measure.report.tables import Record, fmt, listed, records
from scripts.measure.studies import Report, Row, Table

LABELS = {"default": "one device", "ddp": "DDP", "fsdp2": "FSDP2", "context_parallel": "context parallel"}
HEAD = (
    "|devices|tokens a step|tokens/s|of perfect scaling|ms a step|peak GiB a device|communication, ms a step"
)
HEAD += "|alone, of the step|steps|largest difference of a loss"


def ok(found: Sequence[Record]) -> list[Record]:
    return [r for r in found if r.status == "ok"]


def start(r: Record, group: Sequence[Record]) -> Record:
    """What perfect scaling starts from: the row of the fewest devices, and of those of one device that of the
    fewest tokens a step."""
    mine = [other for other in ok(group) if other.trainer in ("default", r.trainer)]
    return min(mine, key=lambda other: (other.devices, other.tokens_per_step))


def relative(r: Record, group: Sequence[Record]) -> float:
    """tokens/s a device, of those of the start; of runs in turn the median."""
    base = start(r, group)
    mine, theirs = r.get("ms_by_run", []), base.get("ms_by_run", [])
    if len(mine) != len(theirs) or not mine:
        return (r.tokens_per_s / r.devices) / (base.tokens_per_s / base.devices)
    tokens = (r.tokens_per_step / r.devices) / (base.tokens_per_step / base.devices)
    return statistics.median(tokens * a / b for a, b in zip(theirs, mine, strict=True))


def difference(r: Record, group: Sequence[Record]) -> float | None:
    """The largest of a step's loss from that of one device with as many tokens a step, over the steps that
    both took."""
    same = [other for other in ok(group) if other.devices == 1 and other.tokens_per_step == r.tokens_per_step]
    if r.devices == 1 or not same:
        return None
    return max(abs(a - b) for a, b in zip(r.losses, same[-1].losses, strict=False))


def grouped(rows: list[Row]) -> dict[tuple[str, int], list[Record]]:
    """By model and T, in order of trainers, devices and tokens."""

    def of(r: Record) -> tuple[str, int]:
        return r.model, r.seq_len

    names = list(LABELS)
    order = sorted(
        records(rows), key=lambda r: (*of(r), names.index(r.trainer), r.devices, r.tokens_per_step)
    )
    found = {key: list(mine) for key, mine in groupby(order, of)}
    return dict(sorted(found.items(), key=lambda item: item[0][1]))


def table(key: tuple[str, int], group: list[Record]) -> Table:
    def line(r: Record) -> list[str]:
        cells = [LABELS[r.trainer], f"{r.devices}", f"{r.tokens_per_step:,}"]
        if r.status != "ok":
            return [*cells, r.status]
        cells += [f"{r.tokens_per_s:,.0f}", f"{relative(r, group):.3f}", f"{r.ms_median:,.1f}"]
        talk = [f"{r.communication_ms:,.1f}", f"{r.communication_share:.1%}"] if r.devices > 1 else ["", ""]
        return [*cells, f"{r.peak_mib / 1024:,.1f}", *talk, f"{r.steps}", fmt(difference(r, group), ".1e")]

    checkpointed = ", checkpointing" if group[0].get("checkpointing") else ""
    return listed(f"{key[0]}, T = {key[1]:,}, {group[0].dtype}{checkpointed}", HEAD, group, line)


def report(rows: list[Row]) -> Report:
    groups = grouped(rows)
    spread = [(r, group) for group in groups.values() for r in ok(group) if r.devices > 1]
    most = max((r.devices for r, _ in spread), default=0)
    differences = [found for found in (difference(r, group) for r, group in spread) if found is not None]
    return page(
        "scaling",
        [table(key, group) for key, group in groups.items()],
        {"": picture(rows, groups)},
        most=most,
        device="GPUs" if rows[0]["machine"]["gpu"] else "CPU processes",
        largest=[
            (name(r), relative(r, group), start(r, group), r) for r, group in spread if r.devices == most
        ],
        difference=max(differences, default=None),
        failed=[(name(r), r) for group in groups.values() for r in group if r.status != "ok"],
    )


def name(r: Record) -> str:
    return f"{r.model}, {LABELS[r.trainer]}, T = {thousands(r.seq_len)}"


def picture(rows: list[Row], groups: dict[tuple[str, int], list[Record]]) -> str:
    """Devices -> tokens/s relative to perfect scaling, a line for each model, trainer and T."""
    figure, axes = canvas(rows, "Training on several devices", 2)
    kinds = {"DDP and FSDP2": ("ddp", "fsdp2"), "context parallelism": ("context_parallel",)}
    for at, (title, trainers) in zip(axes[0], kinds.items(), strict=True):
        lines = []
        for group in groups.values():
            for trainer in trainers:
                mine = [r for r in group if r.trainer == trainer]
                if done := ok(mine):
                    base = start(done[0], group)
                    points = {float(r.devices): relative(r, group) for r in (base, *done)}
                    out = min((r.devices for r in mine if r.status == "oom"), default=math.inf)
                    ends = f"out of memory at {out}" if out > max(points) and out < math.inf else ""
                    lines.append(Line(name(done[0]), dict(sorted(points.items())), len(lines), ends))
        panel(at, lines, title, "devices", "tokens/s relative to perfect scaling", log_y=False, bottom=0)
        at.set_ylim(top=max(1.05, at.get_ylim()[1]))  # the points of one device whole
    return svg(figure, rows)
