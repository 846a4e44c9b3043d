"""GPT-2 124M trained on real text, ours beside nanoGPT, and BERT-large's shape with the masked-language
objective on the same text.

    python scripts/study.py real_text --nanogpt ~/nanoGPT/model.py
    python scripts/study.py real_text --models gpt2 --cap 600 --steps 2000

The text is the Python sources that this interpreter has installed (--text: one of your own), each content
once, with whole packages held out (instruments/long_documents.py); BPE with a model's own number of tokens is
trained on it. Both GPT-2s, ours by train.py's own step and nanoGPT's model with the step of its train.py,
start from the same weights and see the same batches at the same learning rates. Nothing is compiled, and all
runs share the device, so that their times say nothing. They end with their steps or when --cap seconds have
passed since the start of the command, preparation included: about 5 minutes of an H200. Without one: tiny
models for a few steps.

Rows, one per run. Point: model ("gpt2", "bert_large"), implementation, seq_len, micro_batch, tokens_per_step,
steps, cap_s, seed, text (a digest), settings. Result: losses (of every step, nats per token), held_out (step,
loss and of masked tokens accuracy, before, while and after training, on documents of held-out packages),
ended_by ("steps" or "time"), steps_done, wall_s, corpus, training, evaluated.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from scripts.measure.machine import ROOT
from scripts.measure.runner import Run, parsed_with_overrides, parser, run_study
from scripts.measure.studies import Point, Report, Row

STUDY, SEED = "real_text", 1337
GPU_S = 278
CHILD = "scripts.measure.instruments.text_runs:child"
EVALUATION_S = 15  # that the last evaluation may take, and the start of a row
LEAST_BYTES = 4096  # of a document
# Of the config, by model: GPT-2 as nanoGPT has it, with a vocabulary that neither pads, and BERT-large.
WORDS = {
    "gpt2": ["experiment=gpt2_124m", "data=text", "data.tokenizer.vocab_size=50304", "data.batch_size=16"],
    "bert_large": ["experiment=bert_large", "data.batch_size=16", "optim.lr=3e-4"],
}
WORDS["gpt2"] += ["tokens_per_step=32768", "schedule.warmup_steps=60"]
WORDS["bert_large"] += ["tokens_per_step=16384", "schedule.warmup_steps=60"]
TINY = ["model.n_layer=2", "model.n_head=2", "model.n_embd=64", "data.tokenizer.vocab_size=320", "seq_len=64"]
TINY += ["data.batch_size=4", "tokens_per_step=512", "optim.lr=3e-3", "schedule.warmup_steps=5"]
USUAL: dict[str, dict[str, Any]] = {
    "cuda": {
        "steps": {"gpt2": 400, "bert_large": 200},
        "cap": 295,
        "bytes": 150_000_000,
        "small": [],
        "attention": "triton",
    },
    "cpu": {
        "steps": {"gpt2": 30, "bert_large": 30},
        "cap": 120,
        "bytes": 2_000_000,
        "small": TINY,
        "attention": "sdpa",
    },
}


def arguments() -> argparse.Namespace:
    from scripts.measure.rows import choices, positive

    made = parser(__doc__, STUDY)
    add = made.add_argument
    add("overrides", nargs="*", metavar="key=value", help="of the config of every run")
    add("--nanogpt", type=Path, metavar="MODEL.PY", help="nanoGPT's model, trained beside ours")
    add("--models", nargs="+", choices=list(WORDS), default=list(WORDS))
    add("--attention", choices=choices("attention"), metavar="NAME", help="of our models (default: triton)")
    add("--steps", type=positive, help="of each run (default: gpt2 400, bert_large 200)")
    add("--cap", type=positive, metavar="S", help="seconds of the whole command (default: 295)")
    add_text(made)
    return parsed_with_overrides(made)


def add_text(made: argparse.ArgumentParser) -> None:
    """The flags of `gathered`."""
    from scripts.measure.rows import positive

    add = made.add_argument
    add("--bytes", type=positive, help="of text to train on, at most (default: 150 million)")
    add("--text", help="a file, folder or glob of your own instead of Python sources")
    add("--pattern", default="**/*.txt", help="which files of that folder (default: **/*.txt)")
    add("--work", type=Path, default=ROOT, help="where data/prepared/ is (default: the checkout)")


def settle(options: argparse.Namespace, usual: dict[str, Any], *keys: str) -> None:
    """Flags that were not given are as usual."""
    for key in keys:
        setattr(options, key, getattr(options, key) or usual[key])


def point_of(words: list[str], model: str, name: str, device: str, study: str = STUDY) -> Point:
    """With nothing in it of where the text lies."""
    from scripts.measure.sweep_points import composed, fields, settings

    cfg, chosen = composed(words)
    said = settings(cfg, chosen)
    said = {key: value for key, value in said.items() if key not in ("data.path", "data.data_dir")}
    return fields(study, cfg, model, device) | {"settings": said, "implementation": name}


def gathered(options: argparse.Namespace) -> tuple[Path, dict[str, Any]]:
    """The folder of the documents, and what is known of them."""
    import hashlib

    from scripts.measure.instruments.long_documents import gather, installed, own

    wanted = repr((options.text, options.pattern, LEAST_BYTES, options.bytes))
    name = f"documents-{hashlib.sha256(wanted.encode()).hexdigest()[:12]}"
    folder = options.work.resolve() / "data" / "prepared" / name
    files = own(options.text, options.pattern) if options.text else installed()
    return folder, gather(files, folder, LEAST_BYTES, options.bytes)


def measure(options: argparse.Namespace, run: Run) -> None:
    from contextlib import ExitStack

    from scripts.measure.worker import Worker

    until, usual = time.time(), USUAL[run.device]
    settle(options, usual, "cap", "bytes", "attention")
    until += options.cap - EVALUATION_S
    print(f"{STUDY}: {options.cap} s for all of it; the text comes first", flush=True)
    folder, corpus = gathered(options)
    print(f"{corpus['training']['files']:,} files, {corpus['training']['bytes']:,} bytes", flush=True)
    words, points = {}, []
    for model in options.models:
        mine = [*WORDS[model], *usual["small"], f"attention={options.attention}", "compile=false"]
        steps = options.steps or usual["steps"][model]
        mine += [f"seed={SEED}", f"trainer.max_steps={steps}", *options.overrides]
        mine += [f"data.path={folder / 'training'}", "data.val_fraction=0.001"]
        mine += [f"data.data_dir={folder.parent}"]
        names = [
            f"tilegpt attention={options.attention}",
            *["nanoGPT"] * bool(model == "gpt2" and options.nanogpt),
        ]
        for name in names:
            point = point_of(mine, model, name, run.device) | text_of(corpus)
            points.append(point | {"steps": steps, "cap_s": options.cap})
            words[model, name] = mine
    left = [point for point in run.left(points) if run.claim(point)]
    with ExitStack() as stack:
        workers = []
        for point in left:
            key = point["model"], point["implementation"]
            worker = stack.enter_context(Worker(CHILD, options.cap + EVALUATION_S, len(left) - 1))
            nanogpt = str(options.nanogpt.absolute()) if key[1] == "nanoGPT" else None
            asked = {"words": words[key], "until": until, "nanogpt": nanogpt}
            worker.start(asked | {"held_out": str(folder / "held_out")})
            workers.append((point, worker))
        for point, worker in workers:
            result = worker.result()
            result |= {"corpus": corpus} if result["status"] == "ok" else {}
            run.add(point, result, said(point, result))


def text_of(corpus: dict[str, Any]) -> dict[str, str]:
    import hashlib

    parts = " ".join(corpus[part]["sha256"] for part in ("training", "held_out"))
    return {"text": hashlib.sha256(parts.encode()).hexdigest()[:12]}


def said(point: Point, result: dict[str, Any]) -> str:
    """A row in a line."""
    head = f"{point['model']} {point['implementation']}"
    if result["status"] != "ok":
        return f"{head}: {result['status']}, {result['reason']}"
    last = result["held_out"][-1]
    accuracy = f", accuracy {last['accuracy']:.3f}" if "accuracy" in last else ""
    ended = f"{result['steps_done']} steps, ended by {result['ended_by']}"
    return f"{head}: {last['loss']:.4f} nats per held-out token{accuracy}, {ended}"


def report(rows: list[Row]) -> Report:
    from scripts.measure.report import real_text_report

    return real_text_report.report(rows)


def main() -> None:
    run_study(STUDY, arguments(), measure, report)
