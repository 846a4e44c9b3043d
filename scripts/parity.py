"""Does training with an implementation give the same loss as training with the reference?

    python scripts/parity.py                                          # every implementation that runs here
    python scripts/parity.py --attention tiled sdpa
    python scripts/parity.py data=text data.path=book.txt model.n_layer=2 --steps 100

For each seed, a reference run (attention=naive) and a run of every candidate use the same initial weights
and the same data in the same order. They run train.py's training step, in bf16 on a GPU that supports it.
The mean losses over the last quarter of the steps are compared, paired by seed. A candidate passes if the
mean difference is at most 0.01 and at most two standard errors, and if, where it supports fp32, its first 20
losses in fp32 agree with the reference within a relative difference of 1e-4.

The standard error is that of the reference's mean loss over the seeds, which says how much another choice of
seeds would change it. It is not that of the paired differences: two correct implementations differ only by
rounding, and by chance four such differences can be so close together that almost no difference would be
allowed (14% of correct candidates are more than two such errors apart: Student's t, 3 degrees of freedom).
The rows contain it as paired_standard_error.

Rows go to results/parity/<gpu>.jsonl. Exit code 1 when a candidate fails.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__" and not __package__:  # python scripts/<command>.py: see there
    import _checkout  # noqa: F401

from conf.values import UserError
from scripts.measure.machine import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from attention.base import Attention

REFERENCE = "naive"
FIRST = 20  # steps of the fp32 comparison
MOST, MOST_RELATIVE = 0.01, 1e-4
# With normalised q and k the scores have a standard deviation of one from the first step on. Left to itself
# attention is nearly uniform for these steps: on a CPU, a scale off by 5% then moved the first 20 losses by
# 6e-7 of themselves, and moves them by 3e-4 so (by 6e-5 with five steps of warm-up); tiles in place of whole
# rows by 1e-7. At six times the learning rate training is chaotic: rounding alone made a difference of 0.01.
COMMON = ["model=tiny", "model.qk_norm=true", "data.tokenizer.kind=byte"]
COMMON += ["data.batch_size=16", "optim.lr=5e-4", "schedule.warmup_steps=1"]
SMALL = {
    "cuda": ["model.n_embd=256", "model.n_head=4", "seq_len=256"],  # heads of 64, several tiles
    "cpu": ["model.n_embd=64", "model.n_head=2", "seq_len=64"],
}


USED = ("attention", "model", "data", "optim", "schedule", "seq_len", "grad_clip")  # of the config


@dataclass(frozen=True)
class Verdict:
    """Losses are in nats per token, over the last quarter of the steps and all seeds."""

    loss: float
    reference_loss: float
    difference: float
    standard_error: float
    paired_standard_error: float
    first_relative: float | None  # largest relative difference of the first losses in fp32; None: not run
    parity: bool


def verdict(
    reference: list[list[float]],
    candidate: list[list[float]],
    first: tuple[list[list[float]], list[list[float]]] | None,
) -> Verdict:
    """Compare losses, by seed and step; `first`: those of the reference and the candidate in fp32."""
    import numpy as np

    last = max(1, len(reference[0]) // 4)
    expected, got = (np.array(runs)[:, -last:].mean(axis=1) for runs in (reference, candidate))  # by seed
    difference = float((got - expected).mean())
    error, paired = (float(x.std(ddof=1)) / len(x) ** 0.5 for x in (expected, got - expected))
    relative = None
    if first is not None:
        exact, own = map(np.array, first)
        relative = float((abs(own - exact) / exact).max())
    good = abs(difference) <= min(2 * error, MOST) and (relative is None or relative <= MOST_RELATIVE)
    return Verdict(float(got.mean()), float(expected.mean()), difference, error, paired, relative, good)


class Study:
    """What all runs share: the model's shape, the data of each seed, optimiser and schedule."""

    def __init__(self, overrides: list[str], device: torch.device, seeds: list[int], steps: int):
        from hydra.utils import instantiate

        from conf.compose import composed, one_length
        from conf.saved import parse
        from model.gpt import GPTConfig
        from model.training.checks import called

        for key in (override.key_or_group for override in parse(overrides)):
            if key.partition(".")[0] not in USED or key == "data.seed":
                raise UserError(
                    f"{key}: the study decides it (--seeds, --steps, --cpu), or does not use it. It has "
                    f"{', '.join(USED)}."
                )
        self.device, self.seeds, self.steps = device, seeds, steps
        small = [*COMMON, *SMALL[device.type]]
        self.cfg = composed([*small, *overrides])
        self.settings = other_settings(small, overrides)
        # cosine's end, for the fp32 runs too, which have fewer steps
        if self.cfg.schedule.get("decay_steps", ...) is None:
            self.cfg.schedule.decay_steps = steps
        one_length(self.cfg)
        self.data = {}
        for seed in seeds:
            self.cfg.seed = seed
            self.data[seed] = instantiate(self.cfg.data)
            self.data[seed].prepare_data()
            self.data[seed].setup()
        sizes = {"vocab_size": self.data[seeds[0]].vocab_size, "seq_len": self.cfg.seq_len}
        self.config = called("model", GPTConfig, **sizes, **self.cfg.model)
        if self.config.attn_dropout:
            raise UserError("model.attn_dropout: masks differ between implementations; leave it at 0.")

    def reasons(self, attention: Attention, dtype: torch.dtype) -> list[str]:
        """Why it cannot train here."""
        from model.calls import attention_call

        data = self.data[self.seeds[0]]
        facts = {"device": self.device, "dtype": dtype, "document_ids": data.document_mask}
        call = attention_call(
            self.config, "training", batch=data.batch_size, tokens=self.config.seq_len, **facts
        )
        return attention.unsupported_reasons(call)

    def train(self, attention: Attention, precision: str, steps: int) -> list[list[float]]:
        """The loss of each step, by seed."""
        return [self._losses(attention, seed, precision, steps) for seed in self.seeds]

    def _losses(self, attention: Attention, seed: int, precision: str, steps: int) -> list[float]:
        import lightning
        import torch
        from hydra.utils import instantiate

        from model.gpt import GPT
        from model.training import runtime
        from model.training.lit_gpt import LitGPT

        torch.manual_seed(seed)  # the initial weights
        optimizer, schedule = instantiate(self.cfg.optim), instantiate(self.cfg.schedule)
        lit = LitGPT(
            GPT(self.config, attention), optimizer, schedule, seed=seed, grad_clip=self.cfg.grad_clip
        )
        losses: list[float] = []
        lit.listeners.append(lambda step, scalars: losses.append(scalars["train/loss"]))
        trainer = lightning.Trainer(
            accelerator=self.device.type,
            devices=1,
            precision=precision,
            max_steps=steps,
            limit_val_batches=0,
            logger=False,
            **runtime.TRAINER,
        )
        data = self.data[seed]
        data.load_state_dict(data.state_dict() | {"consumed": 0})
        trainer.fit(lit, datamodule=data)
        if lit.fault:
            raise ArithmeticError(lit.fault.split(". ")[0])
        return losses

    def point(self, name: str, precision: str) -> dict[str, Any]:
        from scripts.measure.rows import not_usual

        config = self.config
        return {
            "study": "parity", "implementation": name, "pass": "train", "dtype": precision,
            "heads": config.n_head, "kv_heads": config.kv_heads, "head_dim": config.head_size,
            "seq_len": config.seq_len, "micro_batch": self.cfg.data.batch_size, "steps": self.steps,
            "model": not_usual(vars(config)), "seeds": self.seeds,
            **({"settings": self.settings} if self.settings else {}),
        }  # fmt: skip


def other_settings(usual: list[str], overrides: list[str]) -> dict[str, Any]:
    """What overrides change of optimiser, schedule, data and grad_clip, without folders; the point says the
    rest by itself."""
    from omegaconf import OmegaConf

    from scripts.measure.sweep_points import composed, settings

    cfg, chosen = composed([*usual, *overrides])
    mine, before = settings(cfg, chosen), settings(*composed(usual))
    found = {
        key: mine[key] if key in mine else OmegaConf.select(cfg, key)  # as conf/ has it
        for key in mine | before
        if key.partition(".")[0] in ("optim", "schedule", "data", "grad_clip")
        and mine.get(key, ...) != before.get(key, ...)
    }
    found.pop("data.data_dir", None)
    return found | ({"data.path": Path(path).name} if (path := found.get("data.path")) else {})


def compare(
    study: Study, attentions: dict[str, Attention], reference: Attention, precision: str
) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, a row's result) of each, as it finishes."""
    import torch

    from model.training.runtime import compute_dtype

    mixed, first = precision != "32-true", min(FIRST, study.steps)
    runs = study.train(reference, precision, study.steps)
    exact = study.train(reference, "32-true", first) if mixed else [losses[:first] for losses in runs]
    for name, attention in attentions.items():
        if reasons := study.reasons(attention, compute_dtype(precision)):
            yield name, {"status": "unsupported", "reason": "; ".join(reasons)}
            continue
        try:
            got = study.train(attention, precision, study.steps)
            fp32 = None
            if not mixed:
                fp32 = [losses[:first] for losses in got]
            elif not study.reasons(attention, torch.float32):
                fp32 = study.train(attention, "32-true", first)
        except Exception as error:  # one that breaks is a row; the others go on
            yield name, {"status": "error", "reason": f"{type(error).__name__}: {error}", "parity": False}
            continue
        found = verdict(runs, got, None if fp32 is None else (exact, fp32))
        yield name, {"status": "ok", "reason": None, **asdict(found), "losses": got}


def table(results: dict[str, dict[str, Any]]) -> Any:
    """Of losses and differences, for a terminal; the reference first."""
    from rich.table import Table

    out = Table(box=None, pad_edge=False)
    for column in ("attention", "loss", "difference", "2 s.e.", "fp32, first 20", "parity"):
        out.add_column(column, justify="left" if column in ("attention", "parity") else "right")
    measured = {name: result for name, result in results.items() if result["status"] == "ok"}
    for result in list(measured.values())[:1]:
        out.add_row(REFERENCE, f"{result['reference_loss']:.4f}", "", "", "", "the reference")
    for name, result in measured.items():
        relative = result["first_relative"]
        out.add_row(
            name,
            f"{result['loss']:.4f}",
            f"{result['difference']:+.1e}",
            f"{2 * result['standard_error']:.1e}",
            "-" if relative is None else f"{relative:.1e}",
            "yes" if result["parity"] else "[red]NO[/red]",
        )
    return out


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    from scripts.measure.rows import choices, positive, rows_file
    from scripts.measure.runner import parsed_with_overrides

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    names = [name for name in choices("attention") if name not in ("auto", REFERENCE)]
    which = {"choices": names, "default": names, "metavar": "NAME"}
    add("overrides", nargs="*", help="of the config, as for train.py: data=text model.window=64")
    add("--attention", nargs="+", help="candidates, files of conf/attention (default: all)", **which)
    add("--seeds", type=positive, nargs="+", default=[1, 2, 3, 4])
    add("--steps", type=positive, default=200)
    add("--cpu", action="store_true", help="on the CPU, although there is a GPU")
    add("--out", type=rows_file, help="rows go here (default: results/parity/<gpu>.jsonl)")
    options = parsed_with_overrides(parser, argv)
    if len(set(options.seeds)) < max(2, len(options.seeds)):
        parser.error("--seeds: a standard error takes two seeds at least, each once")
    return options


def main() -> None:
    options = arguments()
    from conf.command import user_errors

    if user_errors(run)(options):
        raise SystemExit(1)


def run(options: argparse.Namespace) -> list[str]:
    """The names that failed."""
    import torch
    from rich.console import Console

    from attention.base import UnsupportedAttention
    from conf.compose import build_attention
    from model.training import runtime
    from scripts.measure.rows import append
    from scripts.measure.runner import rows_path

    runtime.quiet()
    device = runtime.device("cpu" if options.cpu else "auto")
    precision = runtime.precision("auto", device)
    if device.type == "cpu":
        torch.set_num_threads(1)  # tensors this small are faster so
    study = Study(options.overrides, device, options.seeds, options.steps)
    out = options.out or (ROOT / "results" / "parity" / "cpu.jsonl" if options.cpu else rows_path("parity"))
    attentions, results = {}, {}
    for name in options.attention:
        try:
            attentions[name] = build_attention(study.cfg, name)
        except UnsupportedAttention as refusal:
            results[name] = {"status": "unsupported", "reason": "; ".join(refusal.reasons)}
            append(out, study.point(name, precision), results[name])
    for name, result in compare(study, attentions, build_attention(study.cfg, REFERENCE), precision):
        results[name] = result
        append(out, study.point(name, precision), result)
        print(f"{name}: {result['status']}", file=sys.stderr, flush=True)
    seeds, last = len(options.seeds), max(1, options.steps // 4)
    print(f"losses over the last {last} of {options.steps} steps, mean of {seeds} seeds, {precision}\n")
    Console().print(table(results))
    for name, result in results.items():
        if result["status"] != "ok":
            print(f"{name}: {result['status']}: {result['reason']}")
    print(f"rows in {out}")
    return [name for name, result in results.items() if result.get("parity") is False]


if __name__ == "__main__":
    main()
