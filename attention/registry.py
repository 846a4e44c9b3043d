"""The implementations that there are: the files of conf/attention, and nothing else lists them."""

from __future__ import annotations

import functools
import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conf.values import UserError

if TYPE_CHECKING:  # who asks for names alone, for --help, does not wait for torch
    from attention.base import Attention, AttentionCall, Declaration

FOLDER = Path(__file__).resolve().parents[1] / "conf" / "attention"


def names() -> list[str]:
    """What attention=... can be, by name."""
    return list(_files())


@functools.cache  # report.py asks 12,000 times
def _files() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in FOLDER.glob("*.yaml")))


def implementations() -> list[str]:
    """All but those that only choose among the others."""
    return [name for name in names() if declaration(name).dispatches_to != "implementations"]


def build(name: str, **options: Any) -> Attention:
    """The implementation of conf/attention/<name>.yaml, with `options` in the place of the file's.

    Raises:
        UserError: there is no such file.
    """
    target, own = _entry(name)
    module, _, cls = target.rpartition(".")
    return getattr(importlib.import_module(module), cls)(**own | options)


@functools.cache
def shared_instance(name: str) -> Attention:
    """The one instance of each name that is asked what it declares and supports."""
    return build(name)


def declaration(name: str) -> Declaration:
    """An implementation's declaration; an empty one for an unknown name, as rows of results may have."""
    from attention.base import Declaration

    return shared_instance(name).declaration if name in names() else Declaration()


def supporting(call: AttentionCall) -> list[str]:
    """The implementations that can run `call` here."""
    return [name for name in implementations() if not shared_instance(name).unsupported_reasons(call)]


def _entry(name: str) -> tuple[str, dict[str, Any]]:
    """The class of a file, and its options."""
    import yaml

    path = FOLDER / f"{name}.yaml"
    if name not in names():
        raise UserError(f"There is no attention={name}. Choose one of {', '.join(names())}.")
    options = yaml.safe_load(path.read_text(encoding="utf-8"))
    return options.pop("_target_"), options
