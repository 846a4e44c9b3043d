"""Run a study: measure what has no row yet, print its tables, draw its pictures.

    python scripts/study.py numerics --part known
    python scripts/study.py numerics --help       what it measures, and its options

Rows go to results/<study>/<gpu>.jsonl. The studies, each a module of scripts/measure/studies/:

"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from types import ModuleType

if not __package__:  # python scripts/<command>.py: see there
    import _checkout  # noqa: F401

from scripts.measure import studies


def main() -> None:
    names = sorted(module.name for module in pkgutil.iter_modules(studies.__path__))
    script, *words = sys.argv
    if not words or words[0] in ("-h", "--help"):
        print(f"usage: {script} STUDY [OPTION ...]\n\n{__doc__.strip()}\n")
        for name in names:
            print(f"{name:22}{' '.join(module_of(name).__doc__.split(chr(10) * 2)[0].split())}")
        return
    if words[0] not in names:
        raise SystemExit(f"{words[0]} is no study: choose of {', '.join(names)}.")
    sys.argv = [f"{script} {words[0]}", *words[1:]]
    module_of(words[0]).main()


def module_of(name: str) -> ModuleType:
    return importlib.import_module(f"{studies.__name__}.{name}")


if __name__ == "__main__":
    main()
