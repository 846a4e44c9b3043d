"""What keys of the config and of scripts were called, and the defaults that they had: for command lines,
checkpoints and rows of measurements that are older than a change.

Who renames a key of conf/ adds a line to RENAMED; who changes the default of one that stays, to DEFAULTS. A
new key needs nothing: with its default, everything is as before it came.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import Any

# As it was called -> as it is called: "optim.learning_rate": "optim.lr", say.
RENAMED: dict[str, str] = {"segments": "document_ids"}  # a key of compare.py, a feature of which_kernel.py
# (3, "optim.lr", 6e-4, 1e-3): rows of schemas before 3 that do not name the key had 6e-4, now it is 1e-3
DEFAULTS: list[tuple[int, str, Any, Any]] = []


def key(old: str, source: str = "") -> str:
    """The dotted key as it is called now, by its own entry or that of what it lies in; with the `source` that
    has it named, a notice on stderr tells its user of the new name."""
    parts = old.split(".")
    for n in range(len(parts), 0, -1):
        if (head := ".".join(parts[:n])) in RENAMED:
            new = ".".join((RENAMED[head], *parts[n:]))
            if source and os.environ.get("LOCAL_RANK", "0") == "0":
                print(f"note: {source} has {old}, which is called {new} now.", file=sys.stderr)
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
    """Plain nested values under the keys of today; where both names are there, the one of today counts."""
    if not RENAMED:
        return nested
    result: dict[str, Any] = {}
    for name, value in sorted(_leaves(nested), key=lambda leaf: key(leaf[0]) == leaf[0]):
        *path, last = key(name, source).split(".")
        node = result
        for part in path:
            node = node.setdefault(part, {})
        node[last] = value
    return result


def _leaves(value: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, inner in value.items():
        deeper = isinstance(inner, dict) and inner
        found += _leaves(inner, f"{prefix}{name}.") if deeper else [(f"{prefix}{name}", inner)]
    return found
