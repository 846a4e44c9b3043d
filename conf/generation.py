"""The options of conf/generate.yaml as typed: python scripts/generate.py key=value ..."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from conf.values import UserError

CONFIG = Path(__file__).parent / "generate.yaml"
KINDS: dict[str, Any] = {
    **dict.fromkeys(("ckpt", "runs_dir", "prompt", "prompt_file", "device", "precision"), str),
    **dict.fromkeys(("cache", "cache_dtype", "weight_dtype", "speculate"), str),
    **dict.fromkeys(("num_samples", "max_new_tokens", "top_k", "seed"), int),
    **dict.fromkeys(("block", "pool_tokens", "slots", "chunk", "draft_tokens"), int),
    **dict.fromkeys(("temperature", "top_p"), float),
    **dict.fromkeys(("chat", "kv_cache", "compile", "fused", "prefix_caching"), bool),
    "stop": list,
}
NULLABLE = ("runs_dir", "prompt_file", "top_k", "top_p", "seed", "stop", "fused", "pool_tokens", "speculate")
# Least and greatest; those of temperature, top_k and top_p are checked where tokens are drawn.
RANGES = {"num_samples": (1, 2**16), "max_new_tokens": (1, 2**24), "seed": (0, 2**64 - 1)}
RANGES |= dict.fromkeys(("block", "pool_tokens", "slots", "chunk", "draft_tokens"), (1, 2**31 - 1))
PAGED = ("block", "pool_tokens", "slots", "chunk", "prefix_caching")  # keys that only a paged cache reads


def parse(arguments: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """The options of conf/generate.yaml with the command line's, and the overrides left for the run."""
    import yaml

    options, rest, typed = yaml.safe_load(CONFIG.read_text()), [], {}
    for argument in arguments:
        key, _, text = argument.partition("=")
        if key not in KINDS and key.split(".")[0] != "attention":
            raise UserError(no_option(key))
        if (not text and key != "prompt") or argument == "prompt":
            raise UserError(f"{argument} has no value: write {key}=...")
        if key not in KINDS:
            rest.append(argument)
        elif KINDS[key] is list:  # each of several counts
            options[key] = [*options[key], *convert(key, text)]
        else:
            options[key] = convert(key, text)
        typed[key] = argument
    _require_read(options, typed)
    return options, rest


def _require_read(options: dict[str, Any], typed: dict[str, str]) -> None:
    """UserError for keys that nothing would read beside the others; typed: key -> key=value."""
    if options["prompt_file"] is not None and "prompt" in typed:
        raise UserError(
            f"{typed['prompt']} and {typed['prompt_file']}: the prompts are one or the other; leave one out."
        )
    if options["speculate"] is None and "draft_tokens" in typed:
        raise UserError(
            f"{typed['draft_tokens']} is for speculate=ngram or speculate=<a smaller run>; give that too, or "
            "leave draft_tokens out."
        )
    pages = options["cache"] == "paged" or (options["cache"] == "auto" and options["prompt_file"] is not None)
    pages = pages and options["kv_cache"] and options["speculate"] is None
    if not pages and (unread := [key for key in PAGED if key in typed]):
        raise UserError(
            f"{', '.join(typed[key] for key in unread)}: only a paged cache reads that. Give cache=paged "
            f"(without speculate= and kv_cache=false), or leave {' and '.join(unread)} out."
        )


def no_option(key: str) -> str:
    """What is wrong with a word that is none of our keys."""
    name = key.lstrip("-+~").replace("-", "_")
    near = difflib.get_close_matches(name, KINDS, 1)
    meant = f"; did you mean {near[0]}=...?" if near else "."
    return (
        f"generate.py has no key {key}{meant} Keys are {', '.join(KINDS)} (--help explains them), attention "
        "and attention.*; everything else is fixed by what was trained."
    )


def convert(key: str, text: str) -> Any:
    """The value of a key as typed: strings word for word, numbers as in Python (YAML 1.1 takes 1e-1 for a
    word and 010 for 8), all else as YAML."""
    import yaml

    kind = KINDS[key]
    if text == "null" and key != "prompt":
        if key not in NULLABLE:
            raise UserError(f"{key}=null: it needs a value; null is for {', '.join(NULLABLE)}.")
        return [] if kind is list else None
    if kind is str:
        return text
    if kind in (int, float):
        try:
            value = kind(text)
        except ValueError:
            what = "a whole number" if kind is int else "a number"
            raise UserError(f"{key}={text}: it needs {what}.") from None
        least, most = RANGES.get(key, (value, value))
        if value < least or value > most:
            raise UserError(f"{key}={text}: it needs to be from {least} to {most}.")
        return value
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        value = text
    if kind is list:
        if not isinstance(value, list):
            quoted = text[0] in "'\"" and isinstance(value, str)
            value = [value if quoted else text.replace("\\n", "\n").replace("\\t", "\t")]
        if all(isinstance(item, str) and item for item in value):
            return value
        raise UserError(
            f"{key}={text}: it needs text that is not empty, as in stop='a b' or stop='[\"\\n\", \"END\"]'."
        )
    if not isinstance(value, bool):
        raise UserError(f"{key}={text}: it needs true or false.")
    return value
