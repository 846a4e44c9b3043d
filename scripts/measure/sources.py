"""Which of our files a measurement runs: rows of other sources than today's are stale.

A point's implementation is the module that its yaml names, and all that this imports, wherever in a file; a
string that is the name of a module of ours or of a file of ops/csrc counts as an import. So does an option
of the yaml that is neither its class's default nor said by the name. What trains or generates runs the model
too. The instruments are left out: measuring the same code in another way is no reason to do it again. Nor is
a change of comments, docstrings or layout, which runs as before.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import io
import re
import subprocess
import tarfile
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from scripts.measure.machine import ROOT

OURS = ("attention", "conf", "data", "model", "ops", "scripts")
BASELINES = "scripts.measure.instruments.textbook"  # of names that conf/attention does not have
TRAINING = ("model.gpt", "model.training.lit_gpt", "model.training.schedules", "data.datamodule")
GENERATION = ("model.gpt", "model.generation.generate")
# What nothing of these imports, by what a point says: a field, and of `settings` a key.
BESIDE = {
    ("optimizer", "muon"): ("model.training.muon",),
    ("optim", "muon"): ("model.training.muon",),
    ("dtype", "fp8"): ("model.training.fp8",),
    ("study", "serve"): ("model.generation.engine", "model.generation.serve"),
    ("study", "long_range"): ("model.classifier", "data.classification"),
    ("task", "listops"): ("data.listops",),
    ("task", "matching"): ("data.matching",),
    ("task", "pathfinder"): ("data.pathfinder",),
}


def code(point: dict[str, Any], root: Path = ROOT) -> str:
    """A digest of the files that run at a point, by their places and what they say to a compiler."""
    roots: tuple[str, ...] = ()
    if "model" in point:
        roots = TRAINING if point.get("pass") == "train" else GENERATION
    said = (point.get("settings") or {}) | point
    roots += tuple(module for (key, value), of in BESIDE.items() if said.get(key) == value for module in of)
    return _digest(point.get("implementation", ""), roots, root)


@functools.cache
def _digest(implementation: str, roots: tuple[str, ...], root: Path) -> str:
    digest = hashlib.sha256("".join(options(implementation, root)).encode())
    for path in closure(modules(implementation, root) + roots, root):
        digest.update(
            f"{path.relative_to(root).as_posix()}\0".encode()
            + _meant(path.read_text(encoding="utf-8"), path.suffix == ".py")
        )
    return digest.hexdigest()[:12]


def is_of_today(row: dict[str, Any]) -> bool:
    """Whether a row's sources are those of today: by its digest, or, of a row from before there were digests,
    by the sources of the commit that it names."""
    then, point = row["machine"], row["point"]
    made = then.get("code") or ((tree := _tree(then.get("commit") or "")) and code(point, Path(tree.name)))
    return made == code(point)


@functools.cache
def _tree(commit: str) -> tempfile.TemporaryDirectory[str] | None:
    """The files of a commit; None where there is no such one, as of sources that were not committed."""
    if not re.fullmatch(r"[0-9a-f]{7,40}", commit):
        return None
    asked = subprocess.run(["git", "-C", str(ROOT), "archive", commit], capture_output=True)
    if asked.returncode:
        return None
    folder = tempfile.TemporaryDirectory()
    with tarfile.open(fileobj=io.BytesIO(asked.stdout)) as archive:
        archive.extractall(folder.name, filter="data")
    return folder


@functools.cache
def _meant(text: str, python: bool) -> bytes:
    """A digest of a source without comments, docstrings and layout."""
    if not python:
        bare = re.sub(r"//[^\n]*|/\*.*?\*/", " ", text, flags=re.DOTALL)
        return hashlib.sha256(" ".join(bare.split()).encode()).digest()
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
            and ast.get_docstring(node) is not None
        ):
            del node.body[0]
    return hashlib.sha256(ast.dump(tree).encode()).digest()


def modules(implementation: str, root: Path = ROOT) -> tuple[str, ...]:
    """The modules of an implementation, or of all that it chooses among."""
    targets = [
        re.search(r"^_target_: (\S+)\.\w+$", text, re.M) for text in _yamls(implementation, root).values()
    ]
    return tuple(dict.fromkeys(target[1] for target in targets if target)) or (BASELINES,)


def options(implementation: str, root: Path = ROOT) -> list[str]:
    """What the yamls of `modules` set otherwise than the class does itself, but for what the name of the yaml
    says, as cuda_fa1's `stage: fa1`."""
    import yaml

    found = []
    for name, text in _yamls(implementation, root).items():
        given = yaml.safe_load(text)
        module, _, kind = given.pop("_target_").rpartition(".")
        usual: dict[str, Any] = {}
        for file in _files(module, root):
            usual |= _defaults(file.read_text(encoding="utf-8"), kind)
        found += [
            f"{name}.{key}={value!r}\0"
            for key, value in given.items()
            if key != "name" and usual.get(key, ...) != value and not name.endswith(str(value))
        ]
    return found


def _yamls(implementation: str, root: Path) -> dict[str, str]:
    """The texts of conf/attention's files of an implementation, or of all that it chooses among."""
    from attention import registry

    folder = root / "conf" / "attention"
    named = folder / f"{implementation}.yaml"
    made = registry.declaration(implementation)
    every = made.dispatches_to == "implementations"  # as auto, which may run any
    files = sorted(folder.glob("*.yaml")) if every else [named] if named.is_file() else []
    return {file.stem: file.read_text(encoding="utf-8") for file in files}


@functools.cache
def _defaults(text: str, kind: str) -> dict[str, Any]:
    """Of the options of a class in this source."""
    found: dict[str, Any] = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef) and node.name == kind:
            made = [each for each in node.body if getattr(each, "name", "") == "__init__"]
            for of in [each.args for each in made if isinstance(each, ast.FunctionDef)]:
                pairs = [
                    *zip(of.args[::-1], of.defaults[::-1], strict=False),
                    *zip(of.kwonlyargs, of.kw_defaults, strict=True),
                ]
                found |= {arg.arg: value.value for arg, value in pairs if isinstance(value, ast.Constant)}
    return found


def closure(modules: Iterable[str], root: Path = ROOT) -> list[Path]:
    """The files of these modules and of all that they import, and the CUDA sources that they name."""
    found: set[Path] = set()
    left = [path for module in modules for path in _files(module, root)]
    while left:
        path = left.pop()
        if path not in found:
            found.add(path)
            left += _python(path, root) if path.suffix == ".py" else _cuda(path)
    return sorted(found)


def _files(module: str, root: Path) -> list[Path]:
    """Of a dotted name; none where it is no module of ours, as what `from a import name` names may be."""
    if module.partition(".")[0] not in OURS:
        return []
    path = root.joinpath(*module.split("."))
    return [file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()]


def _python(path: Path, root: Path) -> list[Path]:
    names, sources = _named(path.read_text(encoding="utf-8"))
    found = [source for name in sources if (source := root / "ops" / "csrc" / name).is_file()]
    return found + [file for name in names for file in _files(name, root)]


@functools.cache
def _named(text: str) -> tuple[list[str], list[str]]:
    """What may be modules, imported or named by a string, and what may be CUDA sources."""
    modules, sources = [], []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 100:
            modules += [node.value] if re.fullmatch(r"\w+(\.\w+)+", node.value) else []
            sources += [node.value] if node.value.endswith(".cu") else []
    return modules, sources


def _cuda(path: Path) -> list[Path]:
    """The headers that it includes: beside it, or in lib/."""
    named = re.findall(r'^#include "(\S+)"', path.read_text(encoding="utf-8"), re.M)
    places = [folder / name for name in named for folder in (path.parent, path.parents[1] / "lib")]
    return [place for place in places if place.is_file()]
