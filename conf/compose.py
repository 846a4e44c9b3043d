"""From a command line to a config, and a mistake in it to one message; shared by train.py and the scripts."""

from __future__ import annotations

import difflib
import functools
import os
import signal
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from hydra.errors import (
    HydraException,
    InstantiationException,
    MissingConfigException,
    OverrideParseException,
)
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)

CONF = Path(__file__).parent


def user_errors(main: Callable[..., Any]) -> Callable[..., Any]:
    """A user's mistake ends as one message and exit code 1; HYDRA_FULL_ERROR=1 shows the stack."""

    @functools.wraps(main)
    def wrapped(*args: Any) -> Any:
        try:
            result = main(*args)
            sys.stdout.flush()
            return result
        except BrokenPipeError:  # whoever read the output has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise SystemExit(128 + signal.SIGPIPE) from None
        except _mistakes() as error:
            if os.environ.get("HYDRA_FULL_ERROR"):
                raise
            if os.environ.get("LOCAL_RANK", "0") == "0":
                said = " ".join((f"error: {_message(error)}", *getattr(error, "__notes__", ())))
                # a value out of a file does not steer the terminal
                said = "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in said)
                print(said, file=sys.stderr)
            raise SystemExit(1) from None
        except KeyboardInterrupt:
            raise SystemExit(130) from None
        except SystemExit as stop:
            # Lightning ends the first with a silent exit code 1 and the second, before training, with 0
            interrupted = isinstance(stop.__context__, KeyboardInterrupt)
            if interrupted or type(stop).__name__ == "SIGTERMException":
                print("; ".join(("interrupted", *getattr(stop, "__notes__", ()))), file=sys.stderr)
                raise SystemExit(128 + (signal.SIGINT if interrupted else signal.SIGTERM)) from None
            raise

    return wrapped


def _mistakes() -> tuple[type[BaseException], ...]:
    """What a user can mend; asked when something was raised, by when Lightning is there if it raised it."""
    lightning = sys.modules.get("lightning.fabric.utilities.exceptions")
    found = (ValueError, OSError, HydraException, OmegaConfBaseException)
    return (*found, lightning.MisconfigurationException) if lightning else found


def _message(error: BaseException) -> str:
    cause = error.__cause__
    if isinstance(error, InstantiationException) and isinstance(cause, (TypeError, *_mistakes())):
        return str(cause)  # what a constructor said, without Hydra's wrapping
    if isinstance(error, MissingMandatoryValue):
        return f"{error.full_key} has to be given: {error.full_key}=..., as in data=text data.path=book.txt."
    if isinstance(cause, ConfigKeyError | ConfigAttributeError) and cause.full_key:
        return no_key(cause.full_key, list(cause.parent_node or ()))
    if isinstance(error, MissingConfigException) and error.options:
        return no_choice(*error.missing_cfg_file.rsplit("/", 1), error.options)
    if isinstance(error, OverrideParseException):
        key, equals, value = error.override.partition("=")
        if not equals:
            return f"{key} has no value: write {key}=..."
        value = value if not {"'", '"'} & set(value) else "my book (1).txt"
        return (
            f"{error.override} is not understood ({str(error).splitlines()[0]}). A value with special "
            f"""characters takes quotes within quotes: '{key}="{value}"'."""
        )
    if isinstance(error, OSError) and error.filename and not isinstance(error, FileNotFoundError):
        return (
            f"{error.filename}: {error.strerror}. runs_dir=... puts runs into another folder, "
            "data.data_dir=... prepared corpora."
        )
    if str(error).startswith("Config group override must be"):
        return "Among the values of a sweep no group can be null: ~callbacks leaves it out of all jobs."
    return str(error)


def without_nulls(arguments: Iterable[str]) -> list[str]:
    """A command line with group=null, callbacks=null say, as Hydra has it: ~group."""
    groups = {f"{path.name}=null": f"~{path.name}" for path in CONF.iterdir() if path.is_dir()}
    return [groups.get(argument, argument) for argument in arguments]


def swept(arguments: Iterable[str], overrides: list[str]) -> list[str]:
    """Of the overrides of a sweep's job those that set it apart: with several values on the command line."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    given = OverridesParser.create().parse_overrides(
        [word for word in arguments if "=" in word and word[0] != "-"]
    )
    keys = {override.key_or_group for override in given if override.is_sweep_override()}
    return [override for override in overrides if override.lstrip("+~").split("=")[0] in keys]


def no_key(full: str, known: Iterable[str]) -> str:
    """A mistyped key, with those that its node has: Hydra's own message advises to add it."""
    node, _, key = full.rpartition(".")
    known = sorted(name for name in map(str, known) if name != "hydra" and not name.startswith("_"))
    return (
        f"There is no key {full}{_meant(key, known)} {node or 'The config'} has {', '.join(known) or 'none'}."
    )


def no_choice(group: str, choice: str, known: Iterable[str]) -> str:
    """A mistyped choice of a group, with those that there are: Hydra's own message takes thirty lines."""
    known = sorted(known)
    return f"There is no {group}={choice}{_meant(choice, known)} Choose one of {', '.join(known)}."


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


def initialize() -> Any:
    from hydra import initialize_config_dir

    return initialize_config_dir(str(CONF), version_base="1.3")


def build_attention(cfg: DictConfig, name: str | None = None) -> Any:
    """The `Attention` that the config chooses, or another one by its name in conf/attention."""
    from hydra.utils import instantiate

    node, known = cfg.attention, entries("attention")
    file = CONF / "attention" / f"{node.name}.yaml"
    for key, usual in (OmegaConf.load(file) if node.name in known else {}).items():
        if type(usual) is int and type(node.get(key, usual)) is not int:
            value = "null" if node[key] is None else node[key]
            raise ValueError(f"attention.{key}={value}: it needs to be a whole number.")
    if name is not None and name != node.name:
        if str(name) not in known:
            raise ValueError(no_choice("attention", name, known))
        node = OmegaConf.load(CONF / "attention" / f"{name}.yaml")
    return instantiate({key: value for key, value in node.items() if key != "decode"})
