"""From a command line to a config; shared by train.py and the scripts."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from conf import renames
from conf.values import UserError

CONF = Path(__file__).parent
# Keys whose values are names, whatever they look like.
TEXT = ("name", "init_from", "runs_dir", "data.path", "data.pattern", "data.data_dir", "data.tokenizer.path")
TEXT += ("callbacks.samples.prompt", "logger.project", "logger.entity", "logger.group")


def without_nulls(arguments: Iterable[str]) -> list[str]:
    """A command line as Hydra has it: group=null, callbacks=null say, is ~group; keys are those of today."""
    groups = {f"{path.name}=null": f"~{path.name}" for path in CONF.iterdir() if path.is_dir()}
    return renames.typed(groups.get(argument, as_text(argument)) for argument in arguments)


def as_text(argument: str) -> str:
    """name=1e3 and the like within Hydra's quotes, without which it would be name=1000.0; several values of a
    sweep each."""
    key, _, text = argument.partition("=")
    if key.lstrip("+") not in TEXT or not re.fullmatch(r"[\w.+,-]+", text, re.ASCII):
        return argument
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parts = text.split(",")
    for i, part in enumerate(parts):
        value = OverridesParser.create().parse_override(f"{key}={part}").value()
        switch = isinstance(value, bool) and key == "runs_dir"  # a slip, which is refused
        if value is not None and str(value) != part and not switch:
            parts[i] = f'"{part}"'
    return f"{key}={','.join(parts)}"


def swept(arguments: Iterable[str], overrides: list[str]) -> list[str]:
    """Of the overrides of a sweep's job those that set it apart: with several values on the command line."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    given = OverridesParser.create().parse_overrides(
        [word for word in arguments if "=" in word and word[0] != "-"]
    )
    keys = {override.key_or_group for override in given if override.is_sweep_override()}
    return [override for override in overrides if override.lstrip("+~").split("=")[0] in keys]


def no_key(full: str, known: Iterable[str], owner: str = "") -> str:
    """A mistyped key, with those that its node has: Hydra's own message advises to add it. known: that node,
    or names; owner: what has them, where that is no node of the config."""
    node, _, key = full.rpartition(".")
    if node == "trainer":
        from model.training.checks import ELSEWHERE

        if key in ELSEWHERE:
            return f"There is no key {full}: that is decided by {ELSEWHERE[key]}."
    if below := _below(key, known):
        return f"There is no key {full}; did you mean {' or '.join(below)}?"
    known = sorted(name for name in map(str, known) if name != "hydra" and not name.startswith("_"))
    return (
        f"There is no key {full}{_meant(key, known)} "
        f"{owner or node or 'The config'} has {', '.join(known) or 'none'}."
    )


def no_choice(group: str, choice: str, known: Iterable[str]) -> str:
    """A mistyped choice of a group, with those that there are: Hydra's own message takes thirty lines."""
    known = sorted(known)
    return f"There is no {group}={choice}{_meant(choice, known)} Choose one of {', '.join(known)}."


def _below(key: str, node: Iterable[str]) -> list[str]:
    """The keys of that name one level down, as data.batch_size for batch_size."""
    if not isinstance(node, DictConfig):
        return []
    groups = [
        str(name) for name in sorted(node) if name != "hydra" and isinstance(node._get_node(name), DictConfig)
    ]
    return [f"{group}.{key}" for group in groups if key in list(node._get_node(group))]


def _meant(word: str, known: list[str]) -> str:
    near = difflib.get_close_matches(word, known, 1)
    return f"; did you mean {near[0]}?" if near else "."


def entries(group: str) -> set[str]:
    """The names that `group=` can take."""
    folder = CONF / group
    return {path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.yaml")}


def choices_of(hydra_choices: dict[str, Any]) -> dict[str, str | None]:
    """The chosen file of each of our groups, Hydra's own left out."""
    return {group: choice for group, choice in hydra_choices.items() if not group.startswith("hydra")}


def shown(value: Any) -> str:
    """A value as it would be typed, on one line and without what a terminal would obey."""
    import yaml

    text = value if isinstance(value, str) else yaml.safe_dump(value, default_flow_style=True)
    text = text.removesuffix("...\n").strip().replace(", ", ",")
    return text if text.isprintable() else ascii(text)


def one_length(cfg: DictConfig) -> None:
    """UserError where the data has another length than the model: steps are counted in the model's."""
    length = (cfg.get("data") or {}).get("seq_len", cfg.seq_len)
    if length != cfg.seq_len:
        raise UserError(
            f"data.seq_len={shown(length)} beside seq_len={shown(cfg.seq_len)}: both have one length. Set "
            f"seq_len={shown(length)}, and leave data.seq_len out."
        )


def composed(words: Iterable[str], hydra: bool = False) -> DictConfig:
    """The config that train.py has with these words of a command line, within a running Hydra application or
    without; `hydra`: and Hydra's own."""
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    begun = GlobalHydra.instance().is_initialized()
    with nullcontext() if begun else initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("config", overrides=without_nulls(words), return_hydra_config=hydra)


def build_attention(cfg: DictConfig, name: str | None = None) -> Any:
    """The `Attention` that the config chooses, or another one by its name in conf/attention."""
    from hydra.utils import instantiate

    from attention import registry

    node, known = cfg.attention, entries("attention")
    file = CONF / "attention" / f"{node.name}.yaml"
    for key, usual in (OmegaConf.load(file) if node.name in known else {}).items():
        if type(usual) is int and type(node.get(key, usual)) is not int:
            value = "null" if node[key] is None else node[key]
            raise UserError(f"attention.{key}={value}: it needs to be a whole number.")
    if name is not None and name != node.name:
        if str(name) not in known:
            raise UserError(no_choice("attention", name, known))
        return registry.build(name)
    return instantiate({key: value for key, value in node.items() if key != "decode"})
