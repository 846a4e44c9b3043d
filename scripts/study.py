"""Run a study: measure what has no row yet, print its tables, draw its pictures.

    python scripts/study.py numerics --part known
    python scripts/study.py numerics --help       what it measures, and its options

Rows go to results/<study>/<gpu>.jsonl. The studies, each a module of scripts/measure/studies/:

"""

from __future__ import annotations

import importlib
import pkgutil
import sys

if not __package__:  # python scripts/<command>.py: see there
    import _checkout  # noqa: F401

from scripts.measure import studies


def main() -> None:
    names = sorted(module.name for module in pkgutil.iter_modules(studies.__path__))
    modules = {name: importlib.import_module(f"{studies.__name__}.{name}") for name in names}
    script, *words = sys.argv
    if not words or words[0] in ("-h", "--help"):
        said = {name: " ".join(module.__doc__.split("\n\n")[0].split()) for name, module in modules.items()}
        print(f"usage: {script} STUDY [OPTION ...]\n\n{__doc__.strip()}\n")
        print("\n".join(f"{name:22}{text}" for name, text in said.items()))
        return
    if words[0] not in modules:
        raise SystemExit(f"{words[0]} is no study: choose of {', '.join(names)}.")
    sys.argv = [f"{script} {words[0]}", *words[1:]]
    modules[words[0]].main()


if __name__ == "__main__":
    main()
