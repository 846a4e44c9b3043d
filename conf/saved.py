"""The config of a checkpoint: how it is written, and what is taken of one that is read.

From a file come plain values under keys that conf/ itself has for these choices, and names of files that
conf/ has. What conf/ composes for the choices is the schema; whatever else the file holds is refused, unless
the command line gives it again. So no `_target_`, interpolation, override or path of a file reaches Hydra.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from omegaconf import DictConfig, OmegaConf

from conf import renames
from conf.compose import CONF, composed, entries, no_choice
from conf.values import UserError
from model.config import GPTConfig
from model.training.untrusted import is_plain, printable

HYDRAS = ("_target_", "_partial_", "_convert_")  # what code runs is for conf/ and the command line to say
# Names that are looked up outside of this program: from a file they are taken only as conf/ has them.
FIXED = {"attention.name"} | {f"data.corpus.{key}" for key in ("name", "dataset", "config", "revision")}
Choices = dict[str, str | None]  # group -> the name of a file in it


@dataclass(frozen=True)
class SavedRun:
    """What `admit` took: choices of files that exist, and plain values under keys of conf/. `there`: what the
    file has at dotted keys that are not taken, as the command line gives them again: to compare with it."""

    choices: Choices
    config: dict[str, Any]
    there: dict[str, Any] = field(default_factory=dict)


def as_overrides(choices: Choices) -> list[str]:
    return [f"~{group}" if name is None else f"{group}={name}" for group, name in choices.items()]


def parse(overrides: list[str]) -> list[Any]:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    return OverridesParser.create().parse_overrides(overrides)


def plain(cfg: DictConfig) -> dict[str, Any]:
    """The config as plain values, interpolations kept, without what Hydra makes objects by."""
    return _plain(OmegaConf.to_container(cfg, resolve=False))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items() if k not in HYDRAS}
    return [_plain(v) for v in value] if isinstance(value, list) else value


def portable(cfg: DictConfig, choices: Choices) -> dict[str, Any]:
    """The config as it goes into a checkpoint: `plain`, with what the command line interpolated resolved.
    What Hydra makes objects by stays where conf/ has another: for `admit` to ask for, never to be used."""
    value, resolved = (OmegaConf.to_container(cfg, resolve=resolve) for resolve in (False, True))
    return _resolved(value, resolved, OmegaConf.to_container(_composed_by(choices)))


def _resolved(value: Any, resolved: Any, own: Any) -> Any:
    if isinstance(value, dict):
        # a node that conf/ lacks is asked for as a whole
        drop = [k for k in HYDRAS if not isinstance(own, dict) or own.get(k) == value.get(k)]
        own = own if isinstance(own, dict) else {}
        return {k: _resolved(v, resolved[k], own.get(k)) for k, v in value.items() if k not in drop}
    return _plain(value if value == own else resolved)


def _composed_by(choices: Choices) -> DictConfig:
    """What conf/ has for these choices, keys that the experiment adds among them."""
    recipe = choices.get("experiment")
    others = as_overrides({group: name for group, name in choices.items() if group != "experiment"})
    return composed([*([f"experiment={recipe}"] if recipe else []), *others])


def admit(saved: dict[str, Any], overrides: list[str], lenient: bool = False) -> SavedRun:
    """The choices and the config of a checkpoint's header, held to what conf/ has; UserError, of one line,
    for what conf/ does not have and the command-line overrides do not give again.

    lenient: for those who read nothing but attention: all else is passed over, as are plain values under
    keys that conf/ lacks there."""
    now = {"config": renames.config(saved["config"], "the checkpoint's config")}
    now["model"] = renames.config({"model": saved["model"]})["model"]
    saved = {**saved, **now}
    if lenient:
        own = {
            part: {k: v for k, v in saved[part].items() if k == "attention"} for part in ("choices", "config")
        }
        saved = {**saved, **own}
    given = {p.key_or_group for p in parse(overrides)}
    choices = _choices(saved["choices"], given)
    odd: dict[str, tuple[str, bool]] = {}
    config = _taken(saved["config"], plain(_composed_by(choices)), "", odd)
    built = {} if lenient else vars(GPTConfig(**saved["model"]))  # which its weights have been held to
    for key, value in {"seq_len": config.get("seq_len"), **(config.get("model") or {})}.items():
        if built.get(key, value) != value:
            odd[key if key == "seq_len" else f"model.{key}"] = ("other than its weights have it", False)
    named = given - choices.keys()  # to choose a group anew is not to give its keys, other than its code
    there: dict[str, Any] = {}
    for key, (why, added) in odd.items():
        words = given if key.endswith(HYDRAS) else named
        if any(k in _with_parents(key) or k.startswith(f"{key}.") for k in words) or (lenient and added):
            value = _at(saved["config"], key)
            if not added and _is_value(value) and all(map(str.isidentifier, key.split("."))):
                there[key] = value
            continue
        again = (
            f"+{printable(key)}=..., or ~{printable(key)} to go on without"
            if added
            else f"{printable(key)}=..."
        )
        raise UserError(
            f"The checkpoint's config has {printable(key)} {why}: that is not accepted from a file. If you "
            f"set it, give it again: {again}"
        )
    return SavedRun(choices, config, there)


def _at(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = config.get(part) if type(config) is dict else None
    return config


def spelled_out(key: str, value: Any, own: Any) -> Any:
    """`value`, or for data.tokenizer=char, a kind alone, the keys that conf/ has there."""
    if key != "data.tokenizer" or type(value) is not str or not isinstance(own, dict | DictConfig):
        return value
    from data.tokenizers import DEFAULTS

    return {"kind": value} | {name: usual for options in DEFAULTS.values() for name, usual in options.items()}


def _with_parents(key: str) -> list[str]:
    parts = key.split(".")
    return [".".join(parts[:n]) for n in range(1, len(parts) + 1)]


def _choices(choices: Any, given: set[str]) -> Choices:
    """Those of `choices` that conf/ has; of another one, that group has to be given anew."""
    groups = {path.name for path in CONF.iterdir() if any(path.glob("*.yaml"))}
    taken: Choices = {"callbacks": None, "logger": None}  # that are not there were left out by ~callbacks
    for group, name in choices.items():
        if group not in groups:
            raise UserError(f"The checkpoint's choices have {printable(group)}, which is no group of conf/.")
        if name is None or (type(name) is str and name in entries(group)):
            taken[group] = name
        elif group not in given:
            hint = " To go on without: ~experiment" if group == "experiment" else ""
            raise UserError(
                f"The checkpoint's choice: {no_choice(group, printable(name), entries(group))}{hint}"
            )
        else:
            taken.pop(group, None)
    return taken


def _taken(value: Any, own: Any, key: str, odd: dict[str, tuple[str, bool]]) -> Any:
    """`value` as far as it has the keys and kinds of `own`; the rest goes into `odd`: its key, why, and
    whether it is plain but for a key that conf/ lacks."""
    if not isinstance(own, dict) or (value is None and key):
        return _leaf(value, own, key, odd)
    value = spelled_out(key, value, own)
    if type(value) is not dict:
        odd[key] = (f"as a {type(value).__name__} where conf/ has keys", False)
        return ...
    taken = {}
    for name, inner in value.items():
        full = f"{key}.{name if type(name) is str else printable(name)}".removeprefix(".")
        if type(name) is not str or name not in own:
            why = "other than conf/ has it" if name in HYDRAS else "beside the keys of conf/"
            odd[full] = (why, _is_key(name) and _harmless(inner))
        elif (found := _taken(inner, own[name], full, odd)) is not ...:
            taken[name] = found
    return taken


def _leaf(value: Any, own: Any, key: str, odd: dict[str, tuple[str, bool]]) -> Any:
    if type(value) is str and value == own:  # an interpolation of conf/ itself, too
        return own
    if not all(map(_is_value, value if type(value) is list else [value])):
        text = (
            "an interpolation or ???" if type(value) is str else f"a {type(value).__name__} of no plain value"
        )
        odd[key] = (f"as {text}", False)
    elif type(value) is str and not value.isprintable() and not key.endswith(".prompt"):
        odd[key] = ("with characters that do not print", False)
    elif key in FIXED or (key == "attention.decode" and value not in [None, *entries("attention")]):
        odd[key] = ("other than conf/ has it", False)
    else:
        return value
    return ...


def _is_value(value: Any) -> bool:
    """A scalar that means itself: no interpolation, no missing value, nothing endless."""
    if type(value) is str:
        return "${" not in value and value != "???"
    return is_plain(value) and (type(value) is not float or math.isfinite(value))


def _harmless(value: Any, depth: int = 4) -> bool:
    """Whether it could have been typed as plain overrides."""
    if type(value) is dict and depth:
        return all(_is_key(name) and _harmless(inner, depth - 1) for name, inner in value.items())
    return all(map(_is_value, value if type(value) is list else [value]))


def _is_key(name: Any) -> bool:
    return type(name) is str and name.isidentifier() and not name.startswith("_")
