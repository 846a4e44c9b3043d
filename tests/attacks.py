"""Changes to the content of a checkpoint, and what they would do, for the tests of what is refused."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

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
