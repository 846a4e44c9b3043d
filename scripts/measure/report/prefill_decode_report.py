"""What the rows of studies/prefill_decode.py say: tables; prefill_decode_plot.py draws, and
templates/prefill_decode.md.j2 has the words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from scripts.measure.report.pages import page
from scripts.measure.report.tables import Record, distinct, fmt, listed, records, where
from scripts.measure.rows import trusted
from scripts.measure.studies import Report, Row, Table

UNITS = {"QK^T", "softmax", "QKV projection"}
BERT = "bert_large"  # 8 rows of 512 tokens without a mask: the shape of claim 14's figures
SATURATED = 0.9  # of the most that a model reaches at any length
Parts = dict[str, dict[str, Any]]


def parts_of(row: Row) -> Parts:
    """The parts with figures to trust."""
    return {
        name: part for name, part in row["result"]["parts"].items() if "ms_median" in part and trusted(part)
    }


def setting(row: Row) -> str:
    """ "prefill 1 x 512", "decode 64 on 1,024"."""
    p = row["point"]
    if p["pass"] == "prefill":
        return f"prefill {p['batch']} x {p['seq_len']:,}"
    return f"decode {p['batch']} on {p['kv_len']:,}"


def intensity(work: dict[str, Any]) -> float:
    """FLOPs a byte."""
    return work["flops"] / work["bytes"]


def share(result: dict[str, Any], ceilings: dict[str, float]) -> tuple[float, float]:
    """Of the compute and of the bandwidth measured in the same process."""
    return result["tflops"] / ceilings["tflops"], result["gb_per_s"] / ceilings["gb_per_s"]


def balance(ceilings: dict[str, float]) -> float:
    """The ridge point: FLOPs per byte at which compute and bandwidth limit alike."""
    return 1e3 * ceilings["tflops"] / ceilings["gb_per_s"]


def peak(row: Row) -> float | None:
    """TFLOP/s of the datasheet in bf16, where the GPU is known."""
    from model.costs.flops import peak_bf16_flops

    flops = peak_bf16_flops(row["machine"]["gpu"] or "")
    return None if flops is None else flops / 1e12


def utilisation(parts: Parts) -> dict[str, tuple[float, float]]:
    """(ms, TFLOP/s) of a layer's products with weights, of its standard attention and of each fused one.
    Attention's FLOPs are those of the fused: half where a mask hides half."""
    found = {}
    fused = {name: part for name, part in parts.items() if part["kind"] == "fused"}
    groups = {"weights": [part for part in parts.values() if part["kind"] == "weights"]}
    standard = [part for part in parts.values() if part["kind"] == "standard"]
    for name, group in groups.items():
        ms = sum(part["ms_median"] for part in group)
        found[name] = ms, sum(part["flops"] for part in group) / ms / 1e9
    if len(standard) == 3 and fused:
        ms = sum(part["ms_median"] for part in standard)
        found["standard"] = ms, next(iter(fused.values()))["flops"] / ms / 1e9
    return found | {name: (part["ms_median"], part["tflops"]) for name, part in fused.items()}


def layer_share(parts: Parts, which: str) -> tuple[float, float]:
    """Shares of FLOPs and of time that matrix products have in a layer with `which` attention: "standard" or
    the name of a fused one's part (its FLOPs are products): a layer has one. Raises KeyError for others."""
    if which not in {"standard", *(n for n, p in parts.items() if p["kind"] == "fused")}:
        raise KeyError(f"{which}: neither standard nor a fused part of this layer")
    attention = ("standard", "fused")
    one = {n: p for n, p in parts.items() if p["kind"] not in attention or which in (n, p["kind"])}
    flops, ms = ({n: p["times"] * p[key] for n, p in one.items()} for key in ("flops", "ms_median"))
    products = [n for n, p in one.items() if p["kind"] != "pointwise" and n != "softmax"]
    return tuple(sum(each[n] for n in products) / sum(each.values()) for each in (flops, ms))


def report(rows: list[Row], pictures: Callable[[list[Record], list[Record]], dict[str, str]]) -> Report:
    """`pictures`: of the rows of whole models, and of those of layers."""
    every = records(rows)
    trusted_ = where(every, trusted=True)
    whole = [r for r in trusted_ if r.implementation != "parts"]
    layers = where(trusted_, implementation="parts")
    alone = where(whole, passed="decode", batch=1)  # decoding without a batch
    at_512 = {r.model: share(r, r.ceilings)[0] for r in where(whole, passed="prefill", seq_len=512)}
    return page(
        "prefill_decode",
        tables(whole, layers),
        pictures(whole, layers),
        at_512=at_512,
        reached={model: saturation(whole, model) for model in distinct(whole, "model")},
        saturated=SATURATED,
        alone=[(r.model, *share(r, r.ceilings), intensity(r)) for r in alone],
        encoders=[units(r) for r in where(layers, model=BERT) if UNITS <= parts_of(r).keys()],
        bad=[(r.model, setting(r), r) for r in every if not r.trusted],
        bad_parts=[
            (name, r.model, setting(r), part)
            for r in layers
            for name, part in r.parts.items()
            if name not in parts_of(r)
        ],
    )


def tables(whole: list[Record], layers: list[Record]) -> list[Table]:
    def of_sheet(r: Record, tflops: float) -> str:
        return fmt((sheet := peak(r)) and tflops / sheet, ".1%", "-")

    def model(r: Record) -> str:
        compute, bandwidth = share(r, r.ceilings)
        line = f"{r.model}|{setting(r)}|{r.ms_median:.3f}|{r.tokens_per_s:,.0f}|{intensity(r):,.1f}|"
        line += f"{r.tflops:.1f}|{compute:.1%}|{of_sheet(r, r.tflops)}|{r.gb_per_s:,.0f}|{bandwidth:.1%}"
        return line

    def kind(found: tuple[Record, str, float, float, float | None]) -> str:
        r, name, ms, tflops, saves = found
        line = (
            f"{r.model}|{setting(r)}|{name}|{1e3 * ms:.1f}|{tflops:.1f}|{tflops / r.ceilings['tflops']:.1%}"
        )
        return f"{line}|{of_sheet(r, tflops)}|{f'{saves / ms:.1f}x' if saves else '-'}"

    kinds = [
        (
            r,
            name,
            ms,
            tflops,
            used["standard"][0] if name.startswith("attention") and "standard" in used else None,
        )
        for r in layers
        for used in [utilisation(parts_of(r))]
        for name, (ms, tflops) in used.items()
    ]
    columns = "model|call|ms|tokens/s|FLOP/byte|TFLOP/s|of a cuBLAS product|of the datasheet|GB/s|of a copy"
    return [
        *(
            listed(
                f"Whole models, {phase} ({what}); bytes: weights and cache only",
                columns,
                where(whole, passed=phase),
                model,
            )
            for phase, what in (("prefill", "into the cache"), ("decode", "one token per row"))
        ),
        listed(
            "Compute used by each kind of work in a layer (attention: unmasked FLOPs only)",
            "model|call|work|us|TFLOP/s|of a cuBLAS product|of the datasheet|standard / this",
            kinds,
            kind,
        ),
        *map(by_part, layers),
    ]


def by_part(r: Record) -> Table:
    def line(named: tuple[str, dict[str, Any]]) -> str:
        name, part = named
        (compute, bandwidth), below = share(part, r.ceilings), intensity(part) < balance(r.ceilings)
        said = f"{part['times']} x {name}" if part["times"] > 1 else name
        said += f"|{part['flops'] / 1e9:.4g}|{part['flops'] / part['elements']:.4g}|{intensity(part):.4g}|"
        said += f"{1e3 * part['ms_median']:.1f}|{compute:.1%}|{bandwidth:.1%}|"
        return said + ("bandwidth" if below else "compute")

    return listed(
        f"A layer of {r.model}, {setting(r)}; ridge point at {balance(r.ceilings):.0f} FLOP/byte",
        "part|GFLOP|FLOP/element|FLOP/byte|us|of compute|of bandwidth|bound by",
        parts_of(r).items(),
        line,
    )


def saturation(whole: list[Row], model: str) -> tuple[int, float, int] | None:
    """(shortest prefill with SATURATED of the model's best rate, that best in TFLOP/s, the longest tried)."""
    rates = {
        row["point"]["seq_len"]: row["result"]["tflops"]
        for row in whole
        if row["point"]["pass"] == "prefill" and row["point"]["model"] == model
    }
    if len(rates) < 2:
        return None
    best = max(rates.values())
    return min(t for t, rate in rates.items() if rate >= SATURATED * best), best, max(rates)


def units(r: Record) -> dict[str, Any]:
    """Claim 14's figures of intensity are FLOPs an element: what reproduces them, and where the time goes."""
    rows, width = r.batch * r.seq_len, r.heads * r.head_dim
    flops, ms = layer_share(parts_of(r), "standard")
    return r | {
        "alone": 2 * rows * width**2 / (2 * rows * width + width**2),  # Q's, K's or V's projection by itself
        "each": {name: part["flops"] / part["elements"] for name, part in parts_of(r).items()},
        "products": flops,
        "time": ms,
    }
