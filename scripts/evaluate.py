"""Measure the perplexity of a trained model on a text:

    python scripts/evaluate.py ckpt=last text=book.txt stride=128
    python scripts/evaluate.py ckpt=Qwen/Qwen3-0.6B text=book.txt context=2048

A window of context= tokens (default: the trained context length) moves over the text by stride= tokens at a
time (default: half the context length). Each token is counted once, in the window where it has the most
preceding context, so a smaller stride is slower and gives a lower perplexity. batch=: windows per batch;
ckpt=, device=, precision= and runs_dir= as for scripts/generate.py; attention=... uses another one.
cache_dtype=fp8, int8 or int4 measures decoding with a KV cache of that dtype, weight_dtype=int8 with weights
of 8 bits. Evaluate on text that was not used for training.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__" and not __package__:  # python scripts/<command>.py: see there
    import _checkout  # noqa: F401

from conf.values import UserError

KEYS = {
    "ckpt": "last", "text": "", "context": None, "stride": None, "batch": "8", "device": "auto",
    "precision": "auto", "runs_dir": None, "cache_dtype": "auto", "weight_dtype": "auto",
}  # fmt: skip


def main(arguments: Sequence[str]) -> None:
    if any(argument in ("-h", "--help") for argument in arguments):
        print(f"scripts/evaluate.py\n\n{__doc__}", end="")
        return
    from conf.command import user_errors

    user_errors(evaluate)(arguments)


def evaluate(arguments: Sequence[str]) -> None:
    from conf.command import key_values
    from conf.trained import load_model, require_causal
    from model.evaluation import score
    from model.generation.weights import quantise_weights
    from model.training.out_of_memory import out_of_memory_told
    from scripts.generate import finite, placement

    overrides = [argument for argument in arguments if argument.split("=")[0].split(".")[0] == "attention"]
    options = key_values([argument for argument in arguments if argument not in overrides], KEYS)
    text = read_text(str(options["text"]))
    context, stride, batch = (whole_number(key, options[key]) for key in ("context", "stride", "batch"))
    device, dtype = placement(str(options["device"]), str(options["precision"]))
    net, tokenizer, _ = load_model(str(options["ckpt"]), overrides, options["runs_dir"])
    require_causal(net, f"ckpt={options['ckpt']}")
    ids = tokenizer.encode(text)
    if len(ids) < 2:
        raise UserError(f"text={options['text']}: it has {len(ids)} tokens; a perplexity needs 2 or more.")
    with out_of_memory_told("give a smaller batch= or context=, or another attention="):
        net = finite(net, f"ckpt={options['ckpt']}", str(options["precision"]), device, dtype).eval()
        quantise_weights(net, str(options["weight_dtype"]))
        found = score(net, ids, stride, batch or 1, str(options["cache_dtype"]), context)
    # the first token is not scored, and nor are its bytes; <s>, before each text of some models, has none
    first = "" if tokenizer.encode("") else tokenizer.decode(ids[:1])
    if not text.startswith(first):  # a token that ends amid a character, of which it may have a byte
        first = first.replace("\ufffd", "?")
    counted = len(text.encode()) - len(first.encode())
    bits = found.nats / math.log(2) / max(1, counted)
    print(
        f"{options['text']}: perplexity {found.perplexity:.4f}, {found.nats / found.tokens:.4f} nats a "
        f"token, {bits:.4f} bits a byte ({found.tokens:,} tokens)"
    )


def read_text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8-sig")  # as training reads text
    except OSError as error:
        raise UserError(f"text={path}: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise UserError(f"text={path} is not UTF-8 text ({error.reason}).") from None


def whole_number(key: str, value: str | None) -> int | None:
    if value is not None and not (value.isdecimal() and 0 < int(value) < 2**31):
        raise UserError(f"{key}={value}: it needs to be a whole number, at least 1.")
    return None if value is None else int(value)


if __name__ == "__main__":
    main(sys.argv[1:])
