"""A saved run as a config again: its saved values on what conf/ composes, command-line overrides on top, and
what would make another run of it refused."""

from __future__ import annotations

import re
from typing import Any

from omegaconf import DictConfig, OmegaConf

from conf import renames
from conf.compose import CONF, as_text, composed, no_key, shown
from conf.saved import HYDRAS, Choices, SavedRun, as_overrides, parse, plain, spelled_out
from conf.values import UserError
from model.config import GPTConfig

# Keys of model and data that a run may change as it goes on: neither shapes nor the order of the data
# depend on them.
FREE = {f"model.{key}" for key in GPTConfig.FREE} | {"finetune.dropout"}
FREE |= {
    f"data.{key}" for key in ("data_dir", "batch_size", "eval_batch_size", "max_val_tokens", "document_mask")
}
FREE |= {f"data.{key}" for key in ("path", "pattern", "tokenizer.path")}  # the content itself is compared
FREE |= {f"data.{key}" for key in ("num_workers", "pin_memory", "prepare_workers", "verify")}


def _missing(cfg: DictConfig, full: str) -> str:
    """What is said of a key that is not there: of the first of its parts that is not, as of a new run."""
    node, key, rest = cfg, *full.partition(".")[::2]
    while rest and isinstance(node, DictConfig) and key.rpartition(".")[2] in node:
        node, (part, _, rest) = OmegaConf.select(cfg, key), rest.partition(".")
        key = f"{key}.{part}"
    return no_key(key, node if isinstance(node, DictConfig) else ())


def recompose(saved: SavedRun, overrides: list[str]) -> tuple[DictConfig, Choices]:
    """The config and choices of a saved run with command-line overrides on top.

    All is composed by its saved names and given its saved values. Of a group named on the command line, what
    the new file says otherwise than the old one counts, and what both say alike keeps its saved value."""
    parsed = parse(overrides)
    groups = {p.key_or_group for p in parsed if (CONF / p.key_or_group).is_dir()}
    if recipes := [p.input_line for p in parsed if p.key_or_group == "experiment" and not p.is_delete()]:
        raise UserError(
            f"{recipes[0]} cannot go with ckpt=: an experiment is a whole recipe, for a new run. Name the "
            "keys that are to change (trainer.max_steps=4000)."
        )
    named = {group: choice for group, choice in saved.choices.items() if group != "experiment"}
    kept = as_overrides({group: choice for group, choice in named.items() if group not in groups})
    chosen = [o for o, p in zip(overrides, parsed, strict=True) if p.key_or_group in groups - {"experiment"}]
    cfg = composed([*kept, *chosen])
    # a file that is gone since leaves nothing to compare with: then the new one counts as it is
    gone = groups - named.keys()
    before = plain(composed(as_overrides(named))) if groups - gone else {}
    after, config = plain(cfg), dict(saved.config)
    for group in groups & config.keys():
        new = after.get(group) or {}
        config[group] = new if group in gone else _explicit(before[group], config[group], new)
    OmegaConf.set_struct(cfg, False)
    cfg = OmegaConf.merge(
        cfg, {key: value for key, value in config.items() if key in cfg or key not in groups}
    )
    for p in (p for p in parsed if p.key_or_group not in groups):
        there = OmegaConf.select(cfg, p.key_or_group, default=...) is not ...
        if p.is_delete():
            if there:
                raise UserError(
                    f"{p.input_line}: a saved run keeps its keys; start a new one to leave a key out."
                )
            continue  # a key that conf/ lacks, and that is not taken from the file
        if not p.is_add() and not there:
            raise UserError(_missing(cfg, p.key_or_group))
        node = OmegaConf.select(cfg, p.key_or_group) if there else None
        OmegaConf.update(cfg, p.key_or_group, spelled_out(p.key_or_group, p.value(), node), merge=True)
    OmegaConf.set_struct(cfg, True)
    return cfg, {**saved.choices, **{p.key_or_group: p.value() for p in parsed if p.key_or_group in groups}}


def _explicit(before: dict[str, Any], saved: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """`after`, with the saved values of the keys on which it agrees with `before`, and those that were added
    to `before`."""
    result = dict(after)
    for key, value in saved.items():
        if all(isinstance(side.get(key), dict) for side in (before, saved, after)):
            result[key] = _explicit(before[key], value, after[key])
        elif (key in before) == (key in after) and before.get(key) == after.get(key):
            result[key] = value
    return result


def split_ckpt(arguments: list[str]) -> tuple[str, list[str]]:
    """A command line with ckpt= as its value, taken as typed or from within Hydra's quotes, and the
    overrides."""
    if flags := [argument for argument in arguments if argument.startswith("-")]:
        raise UserError(f"{' '.join(flags)} cannot go with ckpt=: that continues one run, by its own config.")
    ckpts = [argument.removeprefix("ckpt=") for argument in arguments if argument.startswith("ckpt=")]
    ckpt = re.sub(r"""^(['"])(.*)\1$""", r"\2", ckpts[-1])
    rest = [as_text(argument) for argument in arguments if not argument.startswith("ckpt=")]
    return ckpt, renames.typed(rest)


def refuse_changes(saved: SavedRun, choices: Choices, cfg: DictConfig) -> None:
    """UserError that names every key which would give the weights other shapes, or the run other data, and
    for another optimiser, whose state is another.

    A key that is newer than the checkpoint counts at its default in conf/."""
    was = recompose(saved, [])[0]
    before, after = _leaves(plain(was)) | saved.there, _leaves(plain(cfg)) | _again(saved, cfg)
    changed = [
        f"{key} (there {shown(value)}, asked {shown(after.get(key))})"
        for key, value in before.items()
        if (key in ("seq_len", "seed") or key.startswith(("model.", "data.", "finetune.")))
        and key not in FREE
        and not key.endswith(HYDRAS)  # code is for the command line to say
        and after.get(key) != value
    ]
    there, asked = saved.choices.get("data"), choices.get("data")
    if asked != there:
        changed = [f"data (there {shown(there)}, asked {shown(asked)})"]
    if changed:
        raise UserError(
            f"A saved run cannot resume with another {', '.join(changed)}: it would be another model, or "
            "see other data. Leave that out, or start a new run without ckpt=."
        )
    there, asked = saved.choices.get("optim"), choices.get("optim")
    # another class under the same name may well have the same state
    if None not in (there, asked) and there != asked and was.optim._target_ != cfg.optim._target_:
        raise UserError(
            f"A saved run cannot resume with another optim (there {shown(there)}, asked {shown(asked)}): the "
            "checkpoint has the state of that optimiser. Leave that out, or start a new run, with init_from= "
            "in place of ckpt= to take over the weights."
        )


def changes(saved: SavedRun, overrides: list[str], cfg: DictConfig, choices: Choices, step: int) -> list[str]:
    """What the rest of a run does otherwise than its saved config says, old -> new: choices, keys, and the
    learning rate at this step where another schedule, optim.lr or number of steps moves it."""
    was = recompose(saved, [])[0]
    before = _targets(was) | _leaves(saved.config) | saved.there
    after = _targets(cfg) | _leaves(plain(cfg)) | _again(saved, cfg)
    groups = [group for group, choice in choices.items() if saved.choices.get(group) != choice]
    found = [f"{group}: {shown(saved.choices.get(group))} -> {shown(choices[group])}" for group in groups]
    named = {override.lstrip("+").partition("=")[0] for override in overrides}
    implied = {key for key in before | after if key.partition(".")[0] in groups} - named  # by the choice
    for key in [key for key in before | after if before.get(key) != after.get(key)]:
        if key not in implied | {"name", "runs_dir", "overwrite"}:
            found.append(f"{key}: {shown(before.get(key))} -> {shown(after.get(key))}")
    target = saved.there.get("schedule._target_")  # never called, unless the command line names it
    if target == cfg.schedule._target_:
        was.schedule._target_ = cfg.schedule._target_
    known = target in (None, cfg.schedule._target_)
    rates = [_learning_rate(config, step) for config in (was, cfg)] if found and known else [0, 0]
    if rates[0] != rates[1]:
        found.append(f"learning rate at step {step}: {rates[0]:.4g} as saved -> {rates[1]:.4g}")
    return found


def _targets(cfg: DictConfig) -> dict[str, Any]:
    """By what Hydra makes objects, which `plain` leaves out."""
    leaves = _leaves(OmegaConf.to_container(cfg))
    return {key: value for key, value in leaves.items() if key.endswith(HYDRAS)}


def _again(saved: SavedRun, cfg: DictConfig) -> dict[str, Any]:
    """What the command line gives in place of what was not taken."""
    found = {key: OmegaConf.select(cfg, key) for key in saved.there}
    return {key: OmegaConf.to_container(x) if OmegaConf.is_config(x) else x for key, x in found.items()}


def _learning_rate(cfg: DictConfig, step: int) -> float:
    """Of the update after `step` updates, by the schedule that stretches over trainer.max_steps."""
    from hydra.utils import instantiate

    from model.training.checks import called

    return float(cfg.optim.lr) * called("schedule", instantiate(cfg.schedule), step, cfg.trainer.max_steps)


def _leaves(value: Any, key: str = "") -> dict[str, Any]:
    """Nested dictionaries as one, its keys joined by dots."""
    if not isinstance(value, dict):
        return {key: value}
    return {
        k: v for name, part in value.items() for k, v in _leaves(part, f"{key}.{name}".strip(".")).items()
    }


def own_value(key: str, overrides: list[str]) -> Any:
    """The value of a top-level key that no file decides: the command line's, else conf/config.yaml's."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    given = [override for override in overrides if override.startswith(f"{key}=")]
    if given:
        return OverridesParser.create().parse_override(given[-1]).value()
    return OmegaConf.load(CONF / "config.yaml")[key]
