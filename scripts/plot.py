"""Plot the loss curves of several runs:

    python scripts/plot.py runs/a runs/b --out loss.svg

Thin lines are the training loss (running mean over 2% of the steps); markers are the validation loss. Each
run is labelled at the end of its line.
"""

from __future__ import annotations

import argparse
import csv
import math
from pathlib import Path

# Okabe and Ito's palette: told apart by colour-blind readers and in grey
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


def column(path: Path, name: str) -> tuple[list[int], list[float]]:
    """(steps, values) of a column of metrics.csv, rows without a value left out."""
    try:
        with open(path, newline="", encoding="utf-8") as file:
            rows = [row for row in csv.DictReader(file) if row.get(name)]
        return [int(row["step"]) for row in rows], [float(row[name]) for row in rows]
    except (KeyError, ValueError, csv.Error) as error:
        raise SystemExit(f"{path} cannot be read as a run's metrics: {error}.") from None


def smoothed(values: list[float], width: int) -> list[float]:
    """Mean of the last `width` values."""
    return [sum(values[max(0, i - width + 1) : i + 1]) / min(i + 1, width) for i in range(len(values))]


def name_of(metrics: Path) -> str:
    """What a run is called: its folder, also given as `.` or by its metrics.csv; else the file."""
    return metrics.resolve().parent.name if metrics.name == "metrics.csv" else metrics.stem


def draw(runs: list[Path], out: Path, title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "tilegpt"  # the same figures, the same file
    matplotlib.rcParams["text.parse_math"] = False  # a $ in a title or a run's name is a $
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7.2, 4.2), layout="constrained")
    kinds = figure.canvas.get_supported_filetypes()
    if out.suffix[1:].lower() not in kinds:
        raise SystemExit(f"--out {out}: choose a name that ends in one of .{', .'.join(sorted(kinds))}.")
    for i, run in enumerate(runs):
        path = run / "metrics.csv" if run.is_dir() else run
        if not path.is_file():
            raise SystemExit(f"{run} has no metrics.csv: give folders of runs.")
        colour = COLOURS[i % len(COLOURS)]
        steps, losses = column(path, "train/loss")
        axes.plot(steps, smoothed(losses, max(1, len(losses) // 50)), color=colour, lw=1, alpha=0.6)
        steps, losses = column(path, "val/loss")
        if not losses:
            raise SystemExit(f"{run} has no validation loss yet: leave it out, or train on until it has one.")
        finite = [(step, loss) for step, loss in zip(steps, losses, strict=True) if math.isfinite(loss)]
        if not finite:
            raise SystemExit(f"{run} has no finite validation loss, as it has diverged: leave it out.")
        axes.plot(steps, losses, color=colour, lw=1.5, marker="o", ms=3.5)
        best = min(loss for _, loss in finite)
        label = f"{name_of(path)}\nbest {best:.4f}"
        axes.annotate(
            label,
            finite[-1],
            xytext=(8, 0),
            textcoords="offset points",
            color=colour,
            va="center",
        )
    axes.set(xlabel="step", ylabel="loss, nats per token", title=title)
    axes.text(
        0.99, 0.97, "o validation    - training", transform=axes.transAxes, ha="right", va="top", color="0.35"
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(out, metadata={"Date": None} if out.suffix == ".svg" else None, dpi=150)
    except OSError as error:
        raise SystemExit(f"--out {out} cannot be written: {error.strerror}.") from None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, nargs="+", help="folders of runs, or metrics.csv files")
    parser.add_argument(
        "--out", type=Path, default=Path("loss.svg"), help="svg, png or pdf (default: loss.svg)"
    )
    parser.add_argument("--title", default="", help="above the picture")
    options = parser.parse_args()
    draw(options.runs, options.out, options.title)
    print(options.out)


if __name__ == "__main__":
    main()
