"""Long-range classification, standard against tiled attention: as accurate, and how much faster? (claim 7)

    python scripts/study.py long_range
    python scripts/study.py long_range --tasks listops --attention standard flash2 --seeds 5 --steps 3000
    python scripts/study.py long_range --tasks pathfinder --layers 4 --heads 8 --width 128 --cap 250

Two tasks in the manner of Long Range Arena, made offline: `listops`, its nested lists of 500 to 2,000 tokens
(data/listops.py), 10 classes; `matching`, whether two excerpts of Python's standard library, byte by byte,
are from the same file (data/matching.py). A third, `pathfinder`, pictures of 32 x 32 pixels with curves that
join two dots or do not (data/pathfinder.py), takes long to learn: it is measured where it is named, and so
are larger models (--layers, --heads, --width). With --cap, each run trains for so many seconds, not counting
its first steps, whatever it has learned by then: its rows are "capped", and stand by themselves.

The classifier is the GPT's blocks without the causal mask (model/classifier.py), trained in bf16, every
example seen once; all implementations get the same data in the same order and the same initial weights, seed
by seed. ListOps' loss stays on a plateau until attention has
found the outermost operator among all tokens. When it leaves goes by the examples seen, so its steps have 64
of them; its model has QK-norm (Henry et al. 2020), with which it leaves sooner; and the learning rate stays
at its peak until the last 30% of the steps: a seed that leaves late has what an early one had.

On a GPU: ListOps at T = 2,048, 131,072 tokens a step, and matching at T = 1,024, 65,536 tokens a step, with 2
layers, 128 wide, three seeds, 2,000 test examples; and steps of 65,536 tokens, 4 layers, 256 wide, timed at
T = 1k, 2k and 4k, eager and with compiled blocks: about 9 minutes of an H200. Without one: 2 layers, 64 wide,
T = 128, two seeds: about 4 minutes of two cores.

Rows of results/long_range/<gpu or cpu>.jsonl. Point: `measured` ("accuracy", "capped" or "speed"),
implementation (`standard` is softmax(Q K^T) V in eager PyTorch, in the precision of its inputs), task,
seq_len, model, layers, heads, width, seed, steps, micro_batch (examples), tokens_per_step, lr, dtype,
compile, and of an accuracy test_examples, qk_norm and schedule (of the learning rate; without the field: a
cosine), of a capped run cap_s, train_examples and position. Of all: ms_median, ms_p10, ms_p90 of a training
step, tokens_per_s, loss (first; last: mean of the last 50 steps; curve: means of ten parts), kernels,
kernels_ok, error_ratio of the attention at this shape, peak_mib; of an accuracy also accuracy, val_loss,
majority (always saying the most frequent class), first_token (answering by the first token alone),
test_examples, mean_length, data (a digest); of a capped run steps_done and examples_seen.
"""

from __future__ import annotations

import argparse
from typing import Any

from conf.values import UserError
from scripts.measure.rows import choices, positive
from scripts.measure.runner import Run, parser, run_study
from scripts.measure.studies import Point, Report, Row

STUDY, SEED = "long_range", 1337
GPU_S, ESTIMATED = 540, True
# By device: what is asked for where the command line says nothing. `tasks` is (T, steps, examples of a step)
# of each.
USUAL: dict[str, dict[str, Any]] = {
    "cuda": {
        "shapes": {
            "accuracy": {"layers": 2, "heads": 2, "width": 128},
            "speed": {"layers": 4, "heads": 4, "width": 256},
        },
        "tasks": {
            "listops": (2048, 1200, 64),
            "matching": (1024, 800, 32),
            "pathfinder": (1025, 4000, 64),
        },
        "lengths": [1024, 2048, 4096],
        "attention": ["standard", "sdpa", "triton", "cuda"],
        "seeds": 3,
        "test": 2000,
        "timed_tokens": 65536,
        "timed_steps": 30,
        "said": "about 9 minutes of an H200",
    },
    "cpu": {
        "shapes": {key: {"layers": 2, "heads": 2, "width": 64} for key in ("accuracy", "speed")},
        "tasks": {"listops": (128, 200, 32), "matching": (128, 200, 16), "pathfinder": (401, 200, 16)},
        "lengths": [128, 256, 512],
        "attention": ["standard", "sdpa", "tiled"],
        "seeds": 2,
        "test": 500,
        "timed_tokens": 4096,
        "timed_steps": 15,
        "said": "about 4 minutes of two cores",
    },
}
SCHEDULE = "warm-up 5%, constant, decay over the last 30%"  # long_range_runs.fit; no matter to speeds
SEQUENCES = {"listops": 1, "matching": 2, "pathfinder": 1}
CAPPED_STEPS = 10**6  # more than any run comes to: its end is that of its time
TASKS = ("listops", "matching")  # where the command line names none
COMPILED_ON = ("cuda",)  # where speed is measured with compiled blocks, too


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    made = parser(__doc__, STUDY)
    add, names = made.add_argument, ["standard", *choices("attention")]
    add("--tasks", nargs="+", choices=list(SEQUENCES), default=list(TASKS))
    add("--attention", nargs="+", choices=names, metavar="NAME", help="(default: standard sdpa triton cuda)")
    add("--seeds", type=positive, help="runs of each (default: 3)")
    add("--steps", type=positive, help="of each run (default: listops 1200, matching 800)")
    add("--cap", type=positive, metavar="S", help="seconds that each run trains, instead of steps")
    add("--examples", type=positive, help="to train on with --cap, again and again (default: 160000)")
    add("--batch", type=positive, help="examples of a step (default: listops 64, matching 32)")
    add("--lengths", type=positive, nargs="*", help="T at which steps are timed (default: 1024 2048 4096)")
    add("--test", type=positive, help="examples (default: 2000)")
    add("--lr", type=float, default=1e-3, help="peak learning rate (default: 1e-3)")
    add("--position", choices=("learned", "rope"), help="encoding, with --cap (default: learned)")
    for size in ("layers", "heads", "width"):
        add(f"--{size}", type=positive, help="of the model whose accuracy is measured (default: 2, 2, 128)")
    return made.parse_args(given)


def settled(options: argparse.Namespace, device: str) -> argparse.Namespace:
    """With what the device usually does where the command line says nothing."""
    for key in ("attention", "seeds", "lengths", "test"):
        if getattr(options, key) is None:
            setattr(options, key, USUAL[device][key])
    if options.cap:
        options.steps, options.examples = CAPPED_STEPS, options.examples or 160_000
    elif options.examples or options.position:
        raise UserError("--examples and --position go with --cap: without, they are those of all other rows.")
    if (options.steps or 2) < 2:
        raise UserError("--steps 1: a step's time is that between the ends of two, so it takes 2.")
    return options


def points(options: argparse.Namespace, device: str) -> list[Point]:
    """The speeds first, as they take the least; then a seed of everything before the second of any."""
    usual, shape = USUAL[device], ("layers", "heads", "width")
    found: list[Point] = []
    for length in options.lengths:
        for compiled in (False, True)[: 1 + (device in COMPILED_ON)]:
            for name in options.attention:
                more = {"seed": SEED, "steps": usual["timed_steps"], "compile": compiled}
                found.append(point_of("speed", "matching", name, length, options.lr, device, more))
    for seed in range(SEED, SEED + options.seeds):
        for task in options.tasks:
            length, steps, _ = usual["tasks"][task]
            for name in options.attention:
                more = {"seed": seed, "steps": options.steps or steps, "compile": False}
                more |= {"test_examples": options.test, "schedule": SCHEDULE, "qk_norm": task == "listops"}
                more |= {key: size for key in shape if (size := getattr(options, key)) is not None}
                more |= {"micro_batch": options.batch} if options.batch else {}
                if options.cap:
                    more |= {"cap_s": options.cap, "train_examples": options.examples, "qk_norm": True}
                    more |= {"position": options.position} if options.position else {}
                measured = "capped" if options.cap else "accuracy"
                found.append(point_of(measured, task, name, length, options.lr, device, more))
    return found


def point_of(
    measured: str, task: str, name: str, length: int, lr: float, device: str, more: dict[str, Any]
) -> Point:
    usual = USUAL[device]
    shape = usual["shapes"]["speed" if measured == "speed" else "accuracy"] | {
        key: more[key] for key in ("layers", "heads", "width") if key in more
    }
    batch = max(1, usual["timed_tokens"] // (length * SEQUENCES[task]))
    if measured != "speed":
        batch = more.get("micro_batch", usual["tasks"][task][2])
    return {
        "study": STUDY,
        "measured": measured,
        "implementation": name,
        "pass": "train",
        "task": task,
        "seq_len": length,
        "model": f"{shape['layers']} layers of {shape['width']}, {shape['heads']} heads",
        **shape,
        "micro_batch": batch,
        "tokens_per_step": batch * length * SEQUENCES[task],
        "lr": lr,
        "dtype": "bfloat16" if device == "cuda" else "float32",
        **more,
    }


def said(point: Point, result: dict[str, Any]) -> str:
    """A row in a line."""
    head = f"{point['task']} T={point['seq_len']:,} {point['implementation']}"
    head += " compiled" if point["compile"] else ""
    if point["measured"] != "speed":
        head += f" seed {point['seed']}"
    if result["status"] != "ok":
        return f"{head}: {result['status']}, {result['reason']}"
    speed = f"{result['ms_median']:.1f} ms a step, {result['tokens_per_s']:,.0f} tokens/s"
    if point["measured"] == "speed":
        return f"{head}: {speed}"
    return f"{head}: accuracy {result['accuracy']:.3f} (majority {result['majority']:.3f}), {speed}"


def measure(options: argparse.Namespace, run: Run) -> None:
    import torch

    from model.training import runtime
    from scripts.measure.instruments import long_range_runs

    options = settled(options, run.device)
    asked = points(options, run.device)
    models = ", ".join(dict.fromkeys(point["model"] for point in asked))
    left = run.left(asked, f"{models}; all of it is {USUAL[run.device]['said']}")
    runtime.quiet()
    if run.device == "cpu":
        torch.set_num_threads(1)  # tensors this small are faster so
    run.each(left, lambda p: long_range_runs.measure(p, options.test, torch.device(run.device)), said)


def report(rows: list[Row]) -> Report:
    from scripts.measure.report import long_range_plot, long_range_report

    return long_range_report.report(rows, long_range_plot.picture)


def main(given: list[str] | None = None) -> None:
    run_study(STUDY, arguments(given), measure, report)
