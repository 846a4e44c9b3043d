"""What a command does with a mistake of its user, and with being interrupted."""

from __future__ import annotations

import atexit
import functools
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hydra.errors import (
    HydraException,
    InstantiationException,
    MissingConfigException,
    OverrideParseException,
)
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)

from conf.compose import no_choice, no_key
from conf.values import UserError, is_first

PATIENCE = 10.0  # seconds that a process leaves the first one to say what is wrong


def user_errors(main: Callable[..., Any]) -> Callable[..., Any]:
    """A user's mistake ends as one message and exit code 1, also where a command has started several
    processes; HYDRA_FULL_ERROR=1 shows the stack."""

    @functools.wraps(main)
    def wrapped(*args: Any) -> Any:
        try:
            result = main(*args)
            sys.stdout.flush()
            return result
        except BrokenPipeError:  # whoever read the output has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise SystemExit(128 + signal.SIGPIPE) from None
        except Exception as error:
            if os.environ.get("HYDRA_FULL_ERROR") or not _is_mistake(error):
                raise
            if is_first() or _is_alone_with_it():
                who = "error" if is_first() else f"error of process {os.environ['LOCAL_RANK']}"
                said = " ".join((f"{who}: {_message(error)}", *getattr(error, "__notes__", ())))
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
                if is_first():
                    print("; ".join(("interrupted", *getattr(stop, "__notes__", ()))), file=sys.stderr)
                raise SystemExit(128 + (signal.SIGINT if interrupted else signal.SIGTERM)) from None
            raise

    return wrapped


def _is_alone_with_it() -> bool:
    """Whether the first process has not made this mistake too, which it would say. As torchrun ends all
    processes when one has ended, the others give the first the time to say it, and are ended with it; srun
    does not end them, so that nothing can be told there."""
    if "LOCAL_RANK" not in os.environ:
        return False
    parent = os.getppid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(PATIENCE)
    return os.getppid() == parent


def key_values(arguments: Sequence[str], keys: Mapping[str, str | None]) -> dict[str, str | None]:
    """key=value words; `keys`: those that there are, with their defaults, "" where one has to be given."""
    given: dict[str, str | None] = dict(keys)
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if key not in keys:
            raise UserError(no_key(key, keys, "This command"))
        if not equals or not value:
            raise UserError(f"{key} has no value: write {key}=...")
        given[key] = None if value == "null" else value
    if missing := [key for key, value in given.items() if value == ""]:
        raise UserError(f"{missing[0]}=... has to be given.")
    return given


def _is_mistake(error: BaseException) -> bool:
    """Whether the user can mend it: a UserError, what the operating system refused, and what Hydra and
    Lightning find in the config."""
    if isinstance(error, (UserError, OSError, HydraException, OmegaConfBaseException)):
        return True
    lightning = sys.modules.get("lightning.fabric.utilities.exceptions")  # there if it raised the error
    if lightning and isinstance(error, lightning.MisconfigurationException):
        return True
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    package = frame.f_globals["__name__"].partition(".")[0]
    return isinstance(error, ValueError) and package == "hydra"  # group=null among a sweep's values, say


def _message(error: BaseException) -> str:
    cause = error.__cause__
    if isinstance(error, InstantiationException) and isinstance(
        cause, (TypeError, ValueError, OSError, RuntimeError)
    ):
        return str(cause)  # what a constructor said, without Hydra's wrapping
    if str(error).startswith("Error locating target") and cause:  # a file that Python cannot import, say
        root = cause.__cause__ or cause
        where = str(error).partition(", set env var")[0]
        return f"{where}: {type(root).__name__}: {root}. HYDRA_FULL_ERROR=1 shows the stack."
    if isinstance(error, MissingMandatoryValue):
        return f"{error.full_key} has to be given: {error.full_key}=..., as in data=text data.path=book.txt."
    if isinstance(cause, ConfigKeyError | ConfigAttributeError) and cause.full_key:
        return no_key(cause.full_key, cause.parent_node or ())
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


def leave() -> None:
    """End a command that has succeeded, by its threads and exit handlers. That Python then takes every object
    apart, for 1.5 s where a model was compiled, is left out, unless somebody looks on."""
    if sys.flags.interactive or sys.gettrace() or sys.getprofile():
        return
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
