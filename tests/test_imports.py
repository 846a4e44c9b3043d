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
LEAF = "conf.values"  # the class of a user's mistakes; it imports nothing of ours
ALLOWED = {
    "ops": {"ops"},
    "attention": {"attention", "ops"},
    "model": {"model", "attention.base"},
    "data": {"data"},
    "conf": {"conf", "model", "data"},
    "train": {"conf", "model", "data", "attention", "ops"},
    "scripts": {"scripts", "conf", "model", "data", "attention", "ops"},
}
THIRD_PARTY = {"ops": {"torch", "cuda"}, "ops/triton": {"torch", "triton", "numpy"}}
# What is imported inside a function, and nowhere as a module is loaded: these are heavy, or may not be there.
LAZY = {"triton", "ops.triton", "cuda", "flash_attn", "flash_attn_interface", "transformers"}
LIGHT = "ops.triton.interpret"  # reads one variable of the environment
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


def loaded(source: str) -> set[str]:
    """Those of `imports` that happen when the module is loaded: outside of functions."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            node.body = [ast.Pass()]
    return imports(ast.unparse(tree))


def eager(package: str, source: str) -> set[str]:
    """What of LAZY is loaded too early."""
    if package == "ops/triton":
        return set()
    return {module for module in loaded(source) if within(module, LAZY) and not within(module, {LIGHT})}


def package_of(path: Path) -> str:
    return "ops/triton" if path.parts[:2] == ("ops", "triton") else path.parts[0].removesuffix(".py")


def within(module: str, allowed: set[str]) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in allowed)


def wrong(package: str, source: str) -> set[str]:
    ours = {module for module in imports(source) if module.split(".")[0] in PACKAGES}
    allowed = ALLOWED[package.split("/")[0]] | {LEAF}
    bad = {module for module in ours if not within(module, allowed)}
    # `from attention import base` is the module that is allowed under another spelling
    bad -= {module for module in ours if any(name.startswith(f"{module}.") for name in allowed)}
    if package in ("ops", "ops/triton"):
        tops = {module.split(".")[0] for module in imports(source)} - set(sys.stdlib_module_names)
        bad |= tops - THIRD_PARTY[package] - set(PACKAGES)
    if package not in ("train", "scripts", "conf"):
        bad |= {module for module in imports(source) if module.split(".")[0] in HYDRA}
    return bad


@pytest.mark.parametrize("path", FILES, ids=str)
def test_imports_run_one_way(path: Path) -> None:
    source = (ROOT / path).read_text(encoding="utf-8")
    assert wrong(package_of(path), source) == set()
    assert eager(package_of(path), source) == set()


@pytest.mark.parametrize(
    ("package", "line", "bad"),
    [
        ("ops", "import attention.base", {"attention.base"}),
        ("ops", "import lightning", {"lightning"}),
        ("ops", "import triton", {"triton"}),
        ("ops/triton", "import triton.language as tl", set()),
        ("ops/triton", "import attention.base", {"attention.base"}),
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


@pytest.mark.parametrize(
    ("line", "early"),
    [
        ("from cuda.bindings import nvrtc", {"cuda.bindings", "cuda.bindings.nvrtc"}),
        (
            "from ops.triton.attention import forward",
            {"ops.triton.attention", "ops.triton.attention.forward"},
        ),
        ("class A:\n    import triton", {"triton"}),
        ("def f():\n    from ops.triton.attention import forward", set()),
        ("class A:\n    def f(self):\n        import triton", set()),
        ("from ops.triton.interpret import INTERPRETED", set()),
    ],
)
def test_the_check_finds_what_is_loaded_early(line: str, early: set[str]) -> None:
    assert eager("attention", line) == early


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


def test_kernels_are_imported_by_the_call_that_needs_them() -> None:
    """attention=triton and attention=cuda can be named, built and asked what they do without."""
    code = """
import sys, torch
from attention.base import AttentionCall
from tests.grid import build
call = AttentionCall("training", "cpu", None, torch.float32, 1, 1, 1, 8, 8, 8)
for name in ("triton", "cuda", "cuda_naive"):
    build(name).unsupported_reasons(call)
print(*sorted({m.split('.')[0] for m in sys.modules}))
"""
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    # (torch itself imports the bindings of CUDA where they are.)
    assert "torch" in result.stdout.split() and "triton" not in result.stdout.split()
