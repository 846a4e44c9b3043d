"""What keys of the config and of scripts were called, and the defaults that they had: for command lines,
checkpoints and rows of measurements that are older than a change.

Who renames a key of conf/ adds a line to RENAMED; who changes the default of one that stays, to DEFAULTS. A
new key needs nothing: with its default, everything is as before it came.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from conf.values import is_first

# As it was called -> as it is called: "optim.learning_rate": "optim.lr", say.
RENAMED: dict[str, str] = {
    "segments": "document_ids",  # a key of compare.py, a feature of which_kernel.py
    "attention.scores": "attention.qk_dtype",  # of cuda_fp8
}
# (3, "optim.lr", 6e-4, 1e-3): rows of schemas before 3 that do not name the key had 6e-4, now it is 1e-3
DEFAULTS: list[tuple[int, str, Any, Any]] = []


def key(old: str, source: str = "") -> str:
    """The dotted key as it is called now, by its own entry or that of what it lies in; with the `source` that
    has it named, a notice on stderr tells its user of the new name."""
    parts = old.split(".")
    for n in range(len(parts), 0, -1):
        if (head := ".".join(parts[:n])) in RENAMED:
            new = ".".join((RENAMED[head], *parts[n:]))
            if source and is_first():
                print(f"note: {source} has {old}, which is now called {new}.", file=sys.stderr)
            return new
    return old


def override(word: str, source: str = "") -> str:
    """key=value, +key=value, ~key of a command line, or another of its words, with the key of today."""
    name, equals, value = word.partition("=")
    bare = name.lstrip("+~")
    return f"{name[: len(name) - len(bare)]}{key(bare, source)}{equals}{value}"


def typed(arguments: Iterable[str]) -> list[str]:
    """The words of a command line, with the keys of today."""
    return [override(argument, "the command line") for argument in arguments]


def config(nested: dict[str, Any], source: str = "") -> dict[str, Any]:
    """Plain nested values under the keys of today; where both names are there, the one of today counts. All
    else is left as it is, whatever a file has put there."""
    for old in RENAMED:
        *path, last = old.split(".")
        node: Any = nested
        for part in path:
            node = node.get(part) if type(node) is dict else None
        if type(node) is dict and last in node:
            nested = _moved(nested, old, key(old, source))
    return nested


def _moved(nested: dict[str, Any], old: str, new: str) -> dict[str, Any]:
    """A copy in which what was at `old` is at `new`, unless something is there."""
    (*path, last), (*to, name) = old.split("."), new.split(".")
    result = node = dict(nested)
    for part in path:
        node[part] = node = dict(node[part])
    value = node.pop(last)
    node = result
    for part in to:
        node[part] = node = dict(node.get(part, {}))
    node.setdefault(name, value)
    return result
