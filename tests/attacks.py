"""Changes to the content of a checkpoint, and what they would do, for the tests of what is refused."""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from omegaconf.base import Container

Content = dict[Any, Any]
CALL = "{_target_: os.mkdir, path: owned}"
CREATE = "${oc.create:" + CALL + "}"
STRINGS = (
    CREATE, "${oc.env:HOME}", "${oc.decode:'{_target_: os.mkdir}'}", "${hydra:runtime.cwd}", "${seed}",
    "${.x}", "\\${seed}", "a ${oc.env:PATH} b", "${oc.select:trainer}", "${oc.dict.keys:data}", "${${seed}}",
    "${", "???",
)  # fmt: skip


def put(path: str, value: Any) -> Callable[[Content], None]:
    """Sets what is at a path of keys."""

    def change(content: Content) -> None:
        *above, last = (int(part) if part.isdecimal() else part for part in path.split("/"))
        for part in above:
            content = content[part]
        content[last] = value

    return change


def drop(path: str) -> Callable[[Content], None]:
    def change(content: Content) -> None:
        *above, last = (int(part) if part.isdecimal() else part for part in path.split("/"))
        for part in above:
            content = content[part]
        del content[last]

    return change


def config(path: str, value: Any) -> Callable[[Content], None]:
    return put(f"tilegpt/config/{path}", value)


def choice(group: str, value: Any) -> Callable[[Content], None]:
    return lambda content: content["tilegpt"]["choices"].update({group: value})


def nested(depth: int) -> Any:
    value: Any = "x"
    for _ in range(depth):
        value = {"a": value}
    return value


def endless() -> Any:
    value: list[Any] = []
    value += [value] * 10
    return value


@contextlib.contextmanager
def watched() -> Iterator[set[str]]:
    """What is looked up, resolved and run meanwhile."""
    import hydra._internal.instantiate._instantiate2 as instantiate

    seen: set[str] = set()

    def watch(owner: Any, name: str, what: str | int) -> Any:
        function = getattr(owner, name)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            value = args[what] if isinstance(what, int) else kwargs[what]
            seen.add(f"{name} {value._value() if hasattr(value, '_value') else value}")
            return function(*args, **kwargs)

        return mock.patch.object(owner, name, call)

    with (
        watch(instantiate, "_locate", 0),
        watch(Container, "_resolve_interpolation_from_parse_tree", "value"),
        watch(Container, "_evaluate_custom_resolver", "inter_type"),
        watch(os, "system", 0),
    ):
        yield seen


def nodes(tree: Any) -> Iterator[dict]:
    if isinstance(tree, dict):
        yield tree
        for inner in list(tree.values()):
            yield from nodes(inner)


def targets(tree: Any, key: str = "") -> set[tuple[str, str]]:
    """Where there are objects to be made, and of what."""
    found = set()
    for name, inner in tree.items() if isinstance(tree, dict) else ():
        full = f"{key}.{name}"
        found |= {(full, str(inner))} if str(name).startswith("_") else targets(inner, full)
    return found


FILE, CHOICE, REFUSED = "is not accepted from a file", "The checkpoint's choice", "is refused: "
# Whatever reads the config or the file as a whole refuses these.
ATTACKS: dict[str, tuple[Callable[[Content], None], str]] = {
    # as reported
    "an interpolation under a new key": (config("attention/evil", CREATE), FILE),
    "an override as a choice": (choice("+attention.evil", CALL), CHOICE),
    "another override as a choice": (choice("+callbacks.evil", CALL), CHOICE),
    # objects for Hydra
    **{
        f"{key} of {group}": (config(f"{group}/{key}", value), FILE)
        for group in ("attention", "optim", "data", "trainer", "schedule", "callbacks/metrics")
        for key, value in (("_target_", "os.mkdir"), ("_args_", ["owned"]))
    },
    "a callback": (config("callbacks/evil", {"_target_": "os.mkdir", "path": "owned"}), FILE),
    "an object where a name is": (config("trainer/strategy", {"_target_": "os.mkdir"}), FILE),
    "an object in a list": (config("optim/betas", [0.9, {"_target_": "os.mkdir"}]), FILE),
    "an object in place of a group": (config("attention", [{"_target_": "os.mkdir"}]), FILE),
    "a target in words of its own": (config("attention/_target_\u200b", "os.mkdir"), FILE),
    "a partial": (config("schedule/_partial_", False), FILE),
    "a recursive one": (config("data/_recursive_", True), FILE),
    # OmegaConf and Hydra
    **{f"{text} as a value": (config("model/position", text), FILE) for text in STRINGS},
    **{f"{text} as a key": (config(f"model/{text}", 1), FILE) for text in STRINGS if "/" not in text},
    "an interpolation in a list": (config("optim/betas", [0.9, CREATE]), FILE),
    "conf/'s interpolation elsewhere": (config("model/n_layer", "${seed}"), FILE),
    "a defaults list": (config("defaults", [{"attention": "naive"}]), FILE),
    "a config of Hydra": (config("hydra", {"launcher": {"_target_": "os.mkdir"}}), FILE),
    "a config of itself": (config("_self_", {"attention": "x"}), FILE),
    "a key with dots": (config("attention._target_", "os.mkdir"), FILE),
    "a path to a yaml to decode with": (config("attention/decode", "../../evil"), FILE),
    "a path to a yaml as a name": (config("attention/name", "../../evil"), FILE),
    # choices
    **{
        f"a choice of {name!r}": (choice("attention", name), CHOICE)
        for name in (
            "../../evil", "naive,tiled", "naive +x=1", "[naive]", "${seed}", "glob(*)", "", " naive", "Naive",
            ["naive"], {"naive": 1}, 5, True, "naive\n", "\u043daive", CALL,
        )
    },
    **{
        f"a choice for {group!r}": (choice(group, "naive"), CHOICE)
        for group in (
            "hydra", "hydra/launcher", "hydra/job_logging", "attention@trainer", "+attention", "~data", "",
            "override hydra/launcher", "defaults", "_self_", "../model", "callbacks.samples", "ckpt", CREATE,
        )
    },
    "a recipe from elsewhere": (choice("experiment", "../../../tmp/evil"), CHOICE),
    "choices that are none": (put("tilegpt/choices", ["attention=naive"]), REFUSED),
    "a config that is none": (put("tilegpt/config", CREATE), REFUSED),
    # sizes and kinds
    "nested a hundred times": (config("model/n_layer", nested(100)), REFUSED),
    "nested in itself": (config("model/n_layer", endless()), REFUSED),
    "an integer of 65 bits": (config("seed", 2**64), REFUSED),
    "an infinite number": (config("optim/lr", math.inf), FILE),
    "NaN": (config("model/softcap", math.nan), FILE),
    "NaN as a key": (lambda content: content["tilegpt"]["config"].update({math.nan: 1}), REFUSED),
    "a number as a key": (lambda content: content["tilegpt"]["config"].update({1: 1}), FILE),
    "a tensor": (config("model/n_layer", torch.ones(1)), FILE),
    "bytes": (config("model/n_layer", bytearray(b"x")), REFUSED),
    "a set": (config("model/n_layer", {1}), REFUSED),
    "a dictionary of another kind": (config("model", OrderedDict(n_layer=2)), FILE),
    "what steers a terminal": (config("model/\x1b]0;owned\x07", 1), FILE),
    "more layers than it has": (config("model/n_layer", 2**40), FILE),
    "another context than it has": (config("seq_len", 2**40), FILE),
    "a model of more layers": (put("tilegpt/model/n_layer", 2**40), REFUSED),
    "a model of more width": (put("tilegpt/model/n_embd", 2**40), REFUSED),
    "a model of another position": (put("tilegpt/model/position", "rope"), REFUSED),
    "a model in words": (put("tilegpt/model/n_layer", "2"), REFUSED),
    "a model of its own": (put("tilegpt/model/forward", 1), REFUSED),
    "a model without words": (drop("tilegpt/model/vocab_size"), REFUSED),
    # the file
    "words on two lines": (config("trainer/accelerator", "cpu\nerror: owned"), FILE),
    "a version of its own": (put("pytorch-lightning_version", "2.6.0+++"), REFUSED),
    "another schema": (put("tilegpt/schema", 99), "it has schema 99, and this version of tilegpt reads 1"),
    "no schema": (drop("tilegpt/schema"), REFUSED),
    "a schema in words": (put("tilegpt/schema", "1"), REFUSED),
    "an entry of ours too many": (put("tilegpt/hooks", {}), REFUSED),
    "bytes in an entry of its own": (put("averaging_state", bytearray(b"x")), REFUSED),
    "no weights": (drop("state_dict"), REFUSED),
    "an old Lightning": (put("pytorch-lightning_version", "0.9.0"), REFUSED),
    "no version": (put("pytorch-lightning_version", 2), REFUSED),
    "a step below 0": (put("global_step", -1), REFUSED),
    "a step in words": (put("global_step", "3"), REFUSED),
    "a sparse weight": (put("state_dict/net.lm_head.weight", torch.eye(3).to_sparse()), REFUSED),
    "a weight of one number": (put("state_dict/x", torch.ones(1).expand(10**9)), REFUSED),
}  # fmt: skip
