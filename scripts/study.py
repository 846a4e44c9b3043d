"""Run a study: measure the points that have no row yet, print tables, draw plots.

    python scripts/study.py numerics --part known
    python scripts/study.py numerics --help       what it measures, and its options
    python scripts/study.py all                   all measurements of results/, one after another: all points
                                                  without a row of the present sources on this machine

Rows go to results/<study>/<gpu>.jsonl. The studies, each a module of scripts/measure/studies/:

"""

from __future__ import annotations

import importlib
import pkgutil
import shlex
import subprocess
import sys
import time
from types import ModuleType

if __name__ == "__main__" and not __package__:  # python scripts/<command>.py: see there
    import _checkout  # noqa: F401

from scripts.measure import measurements, studies


def main() -> None:
    names = sorted(module.name for module in pkgutil.iter_modules(studies.__path__))
    script, *words = sys.argv
    if not words or words[0] in ("-h", "--help"):
        print(f"usage: {script} STUDY [OPTION ...]\n\n{__doc__.strip()}\n")
        for name in names:
            what = " ".join(module_of(name).__doc__.split("\n\n")[0].split())
            print(f"{name:22}{what} ({measurements.measurement(name).takes})")
        return
    if words[0] == "all":
        if words[1:]:
            raise SystemExit(
                f"all {' '.join(words[1:])}: all takes no options; leave them out, or name a study."
            )
        return every()
    if words[0] not in names:
        raise SystemExit(f"{words[0]} is no study: choose of {', '.join(['all', *names])}.")
    sys.argv = [f"{script} {words[0]}", *words[1:]]
    module_of(words[0]).main()


def every() -> None:
    """Run all measurements. Raises SystemExit, at the end, for those that failed."""
    from scripts.measure.machine import ROOT
    from scripts.measure.runner import rows_path

    failed = []
    for name, each in measurements.measurements().items():
        for command in each.commands:
            words = shlex.split(command.replace("<gpu>", rows_path(name).stem))
            print(f"{name}, {each.takes}: {shlex.join(words)}", flush=True)
            start = time.monotonic()
            code = subprocess.run([sys.executable, *words[1:]], cwd=ROOT).returncode
            print(f"{name}: {'failed after ' * bool(code)}{time.monotonic() - start:,.0f} s", flush=True)
            failed += [shlex.join(words)] if code else []
    if failed:
        raise SystemExit("\n".join(["these failed:", *failed]))


def module_of(name: str) -> ModuleType:
    return importlib.import_module(f"{studies.__name__}.{name}")


if __name__ == "__main__":
    main()
