"""Heavy imports happen where they are used, and ops needs torch alone. That imports run one way, without
circles, is for import-linter (pyproject.toml)."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pretrained import make_folder

ROOT = Path(__file__).resolve().parents[1]
THIRD_PARTY = {"ops": {"torch", "cuda"}, "ops/triton": {"torch", "triton", "numpy"}}
# What is imported inside a function, and nowhere as a module is loaded: these are heavy, or may not be there.
LAZY = {"triton", "ops.triton", "cuda", "flash_attn", "flash_attn_interface", "transformers"}
LIGHT = "ops.triton.interpret"  # reads one variable of the environment
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


def strangers(package: str, source: str) -> set[str]:
    """Third parties that ops has no need of."""
    if package not in THIRD_PARTY:
        return set()
    tops = {module.split(".")[0] for module in imports(source)}
    return tops - set(sys.stdlib_module_names) - THIRD_PARTY[package] - {"ops", "conf"}


@pytest.mark.parametrize("path", FILES, ids=str)
def test_imports_of_others(path: Path) -> None:
    source = (ROOT / path).read_text(encoding="utf-8")
    assert strangers(package_of(path), source) == set()
    assert eager(package_of(path), source) == set()


@pytest.mark.parametrize(
    ("package", "line", "found"),
    [
        ("ops", "import lightning", {"lightning"}),
        ("ops", "import triton", {"triton"}),
        ("ops/triton", "import triton.language as tl", set()),
        ("model", "import lightning", set()),
    ],
)
def test_strangers_are_found(package: str, line: str, found: set[str]) -> None:
    assert strangers(package, line) == found


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


def test_train_imports_no_script() -> None:
    """(To import-linter a single file is no package.)"""
    found = imports((ROOT / "train.py").read_text(encoding="utf-8"))
    assert not {module.split(".")[0] for module in found} & {"scripts", "tests"}


def test_circles_are_found(tmp_path: Path) -> None:
    """Between two files, in a function of one; and not between two folders, where no file is met again."""
    pytest.importorskip("importlinter")
    contract = "name = 'c'\ntype = 'circles'"
    (tmp_path / "pyproject.toml").write_text(
        "[tool.importlinter]\nroot_package = 'made'\ncontract_types = ['circles: tests.circles.NoCircles']\n"
        f"[[tool.importlinter.contracts]]\n{contract}\n"
    )
    texts = {"a/one": "import made.b.two", "b/two": "", "b/three": "import made.a.four", "a/four": ""}
    for name, text in texts.items():
        file = tmp_path / "made" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        for folder in (file.parent, file.parent.parent):
            (folder / "__init__.py").touch()
        file.write_text(text + "\n")

    def lint() -> subprocess.CompletedProcess[str]:
        code = "from importlinter.cli import lint_imports_command; lint_imports_command()"
        command = [sys.executable, "-c", code, "--no-cache"]
        paths = os.pathsep.join((str(tmp_path), str(ROOT)))
        return subprocess.run(
            command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True
        )

    assert lint().returncode == 0
    (tmp_path / "made/b/two.py").write_text("def f():\n    import made.a.one\n")
    found = lint()
    assert found.returncode and "made.a.one" in found.stdout and "made.a.four" not in found.stdout


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


@pytest.mark.long
def test_a_model_is_loaded_without_what_trains_and_compiles(tmp_path: Path) -> None:
    """2.4 and 2 of the 5.7 s that generate.py took to begin."""
    make_folder(tmp_path, "llama")
    code = f"""
import sys
from conf.trained import load_model
from model.training.checkpoint import resolve
load_model({str(tmp_path)!r}, [])
print(*({{"lightning", "torch._dynamo"}} & set(sys.modules)))
"""
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert not result.stdout.split()


@pytest.mark.long
def test_of_torchmetrics_training_loads_what_it_uses() -> None:
    """And the rest is there for who asks for it."""
    code = """
import sys, model.training.lit_gpt, torchmetrics, torchmetrics.aggregation
from lightning.pytorch.utilities.types import Metric
print(*({"transformers", "torchmetrics.functional", "matplotlib"} & set(sys.modules)))
metric = torchmetrics.aggregation.MeanMetric()
metric.update(2.0)
print(type(metric.plot()[0]).__name__, "torchmetrics.functional" in sys.modules)
print(issubclass(torchmetrics.MeanMetric, Metric), "torchmetrics.functional" in sys.modules)
"""
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == ["Figure", "False", "True", "True"]
