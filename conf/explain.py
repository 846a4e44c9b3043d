"""What `python train.py --help` prints: every key with its value and the comment that its yaml has on it."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from conf.compose import CONF, choices_of, composed, shown

HEADER = """\
Train a GPT with a chosen attention.

  python train.py group=choice key=value ...            # all of them optional

  python train.py experiment=shakespeare_char           # a whole recipe
  python train.py attention=tiled model=gpt2 data=text data.path=book.txt
  python train.py ckpt=last trainer.max_steps=4000      # resumes the newest run
  python train.py -m attention=naive,tiled seed=1,2     # a sweep: a run each

A path or a text with spaces, brackets, commas or other special characters takes two pairs of quotes, the
outer ones for the shell, the inner ones for Hydra. If it contains an apostrophe, quote it as in the second
example:

  python train.py data=text 'data.path="my book (1).txt"'
  python train.py data=text "data.path='it\\'s mine.txt'"

Below, each key with its value. A group lists its choices, then the keys of its current one
(conf/<group>/<choice>.yaml): data=text --help shows those of data=text. a | b: one of these; null: unset, the
key says what that means; ???: has to be given. +key=value adds a key that is not there, as
+trainer.detect_anomaly=true; Hydra's own options: --hydra-help.
"""


def explain(overrides: list[str]) -> str:
    """The help for the config that these overrides make, as wide as the terminal."""
    cfg = composed(overrides, hydra=True)
    choices = choices_of(cfg.hydra.runtime.choices)
    config = OmegaConf.to_container(OmegaConf.masked_copy(cfg, [key for key in cfg if key != "hydra"]))
    said = comments(CONF / "config.yaml")
    order = [name.removeprefix("defaults.") for name in said if name.startswith("defaults.")]
    for group, choice in choices.items():
        said |= {f"{group}.{key}": text for key, text in of_choice(group, choice).items()}
    sections = {"": {key: value for key, value in config.items() if key not in choices}}
    sections |= {group: {group: config.get(group, {})} for group in order}
    rows = {group: list(keys(section, "", said)) for group, section in sections.items()}
    left = 4 + max(len(key) for section in rows.values() for key, _ in section)
    columns = min(120, shutil.get_terminal_size((100, 24)).columns)

    def filled(text: str, first: str = "", rest: str = "") -> str:
        return textwrap.fill(
            text or " ", columns, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False
        ).rstrip()

    lines = [part if part.startswith("  ") else filled(part) for part in HEADER.split("\n\n")]
    lines = ["\n\n".join(lines)]
    for group, section in rows.items():
        lines.append("")
        if group:
            title = f"{group}={choices.get(group) or 'null'}"
            names = sorted(path.stem for path in (CONF / group).glob("*.yaml"))
            lines.append(filled(said[f"defaults.{group}"], title.ljust(left), " " * left))
            lines.append(filled(" | ".join(names), "  ", "  "))
        lines += [filled(comment, f"  {key}".ljust(left), " " * left) for key, comment in section]
    return "\n".join(lines)


def keys(values: dict[str, Any], path: str, said: dict[str, str]) -> Iterator[tuple[str, str]]:
    """(key=value as it would be typed, its comment), nested keys joined by dots; Hydra's own left out."""
    for name, value in values.items():
        key = f"{path}.{name}".lstrip(".")
        if name.startswith("_"):
            continue
        if not isinstance(value, dict):
            yield f"{key}={shown(value)}", said.get(key, "")
        elif inner := list(keys(value, key, said)):
            yield from inner
        elif path:  # switched on by being there: callbacks.interrupt
            yield key, said.get(key, "")


def of_choice(group: str, choice: str | None) -> dict[str, str]:
    """The comments of a group's file, after those of the files that it inherits from."""
    file = CONF / group / f"{choice}.yaml"
    if choice is None or group == "experiment":
        return {}
    found: dict[str, str] = {}
    for parent in (yaml.safe_load(file.read_text(encoding="utf-8")) or {}).get("defaults", []):
        if parent.startswith("/"):  # /data_defaults@_here_
            found |= comments(CONF / f"{parent[1:].partition('@')[0]}.yaml")
        elif parent != "_self_":
            found |= of_choice(group, parent)
    return found | comments(file)


def comments(file: Path) -> dict[str, str]:
    """Key, nested ones joined by dots -> the comment on its line, else the lines of it right above."""
    text = file.read_text(encoding="utf-8")
    lines = text.splitlines()

    def walk(node: yaml.Node, path: str) -> Iterator[tuple[str, str]]:
        if isinstance(node, yaml.SequenceNode):
            for item in node.value:
                yield from walk(item, path)
        if not isinstance(node, yaml.MappingNode):
            return
        for key, value in node.value:
            name, number = f"{path}.{key.value}".lstrip("."), key.start_mark.line
            end = value.end_mark if value.end_mark.line == number else key.end_mark
            found = [lines[number][end.column :].lstrip(" :")]
            if not found[0].startswith("#"):
                found = list(
                    takewhile(lambda line: line.startswith("#"), map(str.strip, lines[:number][::-1]))
                )
            yield name, " ".join(part.lstrip("# ") for part in reversed(found))
            yield from walk(value, name)

    return {name: comment for name, comment in walk(yaml.compose(text), "") if comment}
