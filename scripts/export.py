"""Export a trained run as a folder that transformers loads without tilegpt:

    python scripts/export.py ckpt=last to=my-model

This writes config.json, generation_config.json, the weights in fp32 as safetensors, the tokenizer, and a
model card with the training results. ckpt= and runs_dir= as for train.py. The folder is created atomically. A
model that no supported architecture of transformers can compute is refused, with the options that it lacks.

    AutoModelForCausalLM.from_pretrained("my-model"), AutoTokenizer.from_pretrained("my-model")
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__" and not __package__:  # python scripts/<command>.py: see there
    import _checkout  # noqa: F401

KEYS = {"ckpt": "last", "to": "", "runs_dir": None}


def main(arguments: Sequence[str]) -> None:
    if any(argument in ("-h", "--help") for argument in arguments):
        print(f"scripts/export.py\n\n{__doc__}", end="")
        return
    from conf.command import user_errors

    user_errors(export_run)(arguments)


def export_run(arguments: Sequence[str]) -> None:
    from conf.command import key_values
    from conf.trained import load_model
    from data.tokenizer_export import special_ids, tokenizer_files
    from data.tokenizer_file import JSONTokenizer
    from model.pretrained.architectures import architecture_of
    from model.pretrained.export import export
    from model.training.checkpoint import resolve
    from model.training.runs import runs_folder

    options = key_values(arguments, KEYS)
    path = resolve(str(options["ckpt"]), runs_folder(options["runs_dir"] or "runs"))
    net, tokenizer, _ = load_model(str(path), ["attention=naive"])
    architecture_of(net.config)  # before the tokenizer, which may take long
    bos, eos = special_ids(tokenizer)
    files = tokenizer_files(tokenizer, net.config.positions)
    files["README.md"] = card(path, net)
    name = export(net, Path(str(options["to"])), files, bos, eos)
    print(f"{options['to']}: {name}, from {path}")
    # transformers 5 puts Qwen's own rules in place of those in tokenizer.json, whatever class this names
    if name == "Qwen2ForCausalLM" and not isinstance(tokenizer, JSONTokenizer):
        print(
            "AutoTokenizer reads every model of this class by Qwen's rules, and so gives other tokens for "
            "some text: load the tokenizer by PreTrainedTokenizerFast.from_pretrained."
        )


def card(path: Path, net: Any) -> str:
    """The model card: what the checkpoint knows of its training."""
    from model.training.checkpoint import read_checkpoint

    checkpoint = read_checkpoint(path, verified=True, mmap=True)
    metadata = checkpoint["tilegpt"]
    config, choices = metadata["config"], metadata["choices"]
    state, best = checkpoint["TokenDataModule"], checkpoint["callbacks"].get("Checkpoints", {})
    started = config.get("init_from")
    rows = {
        "started from": started or "random weights",
        "parameters": f"{sum(p.numel() for p in net.parameters()):,}",
        "data": choices["data"],
        "steps": f"{checkpoint['global_step']:,}",
        "tokens": f"{state['consumed'] * state['seq_len']:,}",
        "context": f"{net.config.seq_len:,}",
        "learning rate, at most": config["optim"].get("lr"),
        "precision": config.get("precision"),
        "attention": choices["attention"],
        "best validation loss": None if best.get("best") is None else f"{best['best']:.4f} (nats a token)",
        "at step": best.get("best_step"),
    }
    lines = [f"| {what} | {value} |" for what, value in rows.items() if value is not None]
    head = "---\nlibrary_name: transformers\npipeline_tag: text-generation\n---\n"
    title = (
        f"# {path.resolve().parent.parent.name}\n\nTrained with tilegpt; loads in transformers as it is.\n"
    )
    return "\n".join([head, title, "| training | |", "|---|---|", *lines, ""])


if __name__ == "__main__":
    main(sys.argv[1:])
