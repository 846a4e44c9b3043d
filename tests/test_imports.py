"""Imports run one way, and heavy ones happen where they are used."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("ops", "attention", "model", "data", "scripts", "conf", "train", "tests")
# What a file of a package may import of ours. Two may more: the way from a run's config to the thing itself.
ALLOWED = {
    "ops": {"ops"},
    "attention": {"attention", "ops"},
    "model": {"model", "attention.base"},
    "data": {"data"},
    "conf": {"conf", "model", "data"},
    "train": {"conf", "model", "data", "attention", "ops"},
    "scripts": {"scripts", "conf", "model", "data", "attention", "ops"},
}
THIRD_PARTY_OF_OPS = {"torch", "triton", "cuda", "numpy"}
HYDRA = {"hydra", "omegaconf"}
FILES = sorted(
    path.relative_to(ROOT)
    for part in ("ops", "attention", "model", "data", "scripts", "conf", "train.py")
    for path in ([ROOT / part] if part.endswith(".py") else (ROOT / part).rglob("*.py"))
)


def imports(source: str) -> set[str]:
    """Every module that is imported anywhere in `source`, `from a import b` as a and a.b."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in line {node.lineno}"
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def within(module: str, allowed: set[str]) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in allowed)


def wrong(package: str, source: str) -> set[str]:
    ours = {module for module in imports(source) if module.split(".")[0] in PACKAGES}
    bad = {module for module in ours if not within(module, ALLOWED[package])}
    # `from attention import base` is the module that is allowed under another spelling
    bad -= {module for module in ours if any(name.startswith(f"{module}.") for name in ALLOWED[package])}
    if package == "ops":
        outside = (
            {module.split(".")[0] for module in imports(source)} - set(sys.stdlib_module_names) - {"ops"}
        )
        bad |= outside - THIRD_PARTY_OF_OPS - set(PACKAGES)
    if package not in ("train", "scripts", "conf"):
        bad |= {module for module in imports(source) if module.split(".")[0] in HYDRA}
    return bad


@pytest.mark.parametrize("path", FILES, ids=str)
def test_imports_run_one_way(path: Path) -> None:
    assert wrong(path.parts[0].removesuffix(".py"), (ROOT / path).read_text(encoding="utf-8")) == set()


@pytest.mark.parametrize(
    ("package", "line", "bad"),
    [
        ("ops", "import attention.base", {"attention.base"}),
        ("ops", "import lightning", {"lightning"}),
        ("attention", "from model.gpt import GPT", {"model.gpt", "model.gpt.GPT"}),
        ("model", "from attention import naive", {"attention.naive"}),
        ("model", "from attention.base import Attention", set()),
        ("model", "def f():\n    import hydra.utils", {"hydra.utils"}),
        ("data", "import model", {"model"}),
        ("data", "from data.tokens import TokenFile", set()),
        ("train", "import scripts.generate", {"scripts.generate"}),
        ("scripts", "import scripts.common, train", {"train"}),
        ("model", "from tests import running", {"tests", "tests.running"}),
    ],
)  # fmt: skip
def test_the_check_finds(package: str, line: str, bad: set[str]) -> None:
    assert wrong(package, line) == bad


def test_the_files_are_found() -> None:
    assert {"train.py", "conf/compose.py", "model/gpt.py", "ops/dropout.py"} <= {str(path) for path in FILES}


def test_no_module_is_named_like_a_library_it_wraps() -> None:
    assert not (ROOT / "attention" / "triton.py").exists() and not (ROOT / "data" / "datasets.py").exists()


def test_the_command_line_answers_before_anything_heavy_is_imported() -> None:
    code = "import sys, train; print(*sorted({m.split('.')[0] for m in sys.modules}))"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    heavy = {"torch", "lightning", "datasets", "wandb", "triton", "tokenizers", "numpy", "matplotlib"}
    assert not heavy & set(result.stdout.split())
