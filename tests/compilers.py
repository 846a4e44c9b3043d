"""The compilers that our budgets for registers and spills are of, by pyproject's extra `compilers`.

`python -m tests.compilers` prints what `make test` has to install of them: nothing beside a torch that pins a
triton, as CUDA builds do, whose compilers are its own; else what the environment lacks, in any version.
"""

from __future__ import annotations

import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
PINS = {
    pin.name: pin
    for pin in map(Requirement, PROJECT["optional-dependencies"]["compilers"])
    if pin.marker.evaluate()
}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def missing() -> list[str]:
    """Requirements to install."""
    if any("triton" in Requirement(line).name for line in metadata.requires("torch") or ()):
        return []
    return [f"{name}{pin.specifier}" for name, pin in PINS.items() if _version(name) is None]


def pinned(name: str) -> pytest.MarkDecorator:
    """Skips, with the reason, where another version is installed than the one that budgets are of."""
    found, pin = _version(name), PINS.get(name)
    fits = found is not None and pin is not None and pin.specifier.contains(found)
    here = "is not installed" if found is None else f"{found} is installed"
    return pytest.mark.skipif(
        not fits, reason=f"{name} {here}; the budgets are of {pin or 'Linux on x86-64'}"
    )


if __name__ == "__main__":
    print(*missing())
