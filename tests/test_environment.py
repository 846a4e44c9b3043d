"""What `make` does to environments: a torch with CUDA keeps its compilers, an environment of yours is used as
it is, and a mistaken PYTHON= is named for what it is."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.compilers import PROJECT
from tests.running import ROOT

EXTRAS = PROJECT["optional-dependencies"]
# Requires-Dist of the newest torch that we allow, as PyPI has it for Linux
# (torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl.metadata), and of the toolkit that it names; beside
# each the version that pip took on 2026-11-22.
TORCH = "2.13.0"
CUDA = {
    "cuda-toolkit[cudart,nvrtc]==13.0.3": "13.0.3.0",
    "cuda-bindings<14,>=13.0.3": "13.5.0",
    "nvidia-cudnn-cu13==9.20.0.48": "9.20.0.48",
    "nvidia-cusparselt-cu13==0.8.1": "0.8.1",
    "nvidia-nccl-cu13==2.29.7": "2.29.7",
    "nvidia-nvshmem-cu13==3.4.5": "3.4.5",
    "triton==3.7.1": "3.7.1",
}
TOOLKIT = {"nvidia-cuda-nvrtc==13.0.88.*": "13.0.88", "nvidia-cuda-runtime==13.0.96.*": "13.0.96"}


@pytest.fixture(scope="module")
def cuda_torch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The python of an environment with that torch and what it names, to pip, and all else of this one."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "here.pth").write_text(sysconfig.get_path("purelib"))

    def install(name: str, version: str, requires: dict[str, str]) -> None:
        info = site / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        lines = [f"Requires-Dist: {line}" for line in requires]
        extras = [f"Provides-Extra: {extra}" for extra in ("cudart", "nvrtc")]
        head = ["Metadata-Version: 2.4", f"Name: {name}", f"Version: {version}"]
        (info / "METADATA").write_text("\n".join([*head, *extras, *lines, ""]))
        (info / "RECORD").touch()

    install("torch", TORCH, CUDA)
    for line, version in (CUDA | TOOLKIT).items():
        name = Requirement(line).name
        install(name, version, TOOLKIT if name == "cuda-toolkit" else {})
    return folder / "bin" / "python"


def would_install(python: Path, *requirements: str) -> list[str]:
    """What pip would, with no index to take anything from."""
    command = [python, "-m", "pip", "install", "--dry-run", "--no-index", "--quiet", "--report", "-"]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PIP_")}
    environment["PIP_CONFIG_FILE"] = os.devnull
    result = subprocess.run([*command, *requirements], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return [item["metadata"]["name"] for item in json.loads(result.stdout)["install"]]


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="the recorded metadata is of Linux")
def test_the_test_tools_change_nothing_of_a_torch_with_cuda(cuda_torch: Path) -> None:
    (allowed,) = (line for line in PROJECT["dependencies"] if line.startswith("torch"))
    assert Requirement(allowed).specifier.contains(TORCH) and "<2.14" in allowed
    extras = (line for extra in ("dev", "triton", "cuda") for line in EXTRAS[extra])
    assert would_install(cuda_torch, *PROJECT["dependencies"], *extras) == []
    missing = [cuda_torch, "-m", "tests.compilers"]
    assert subprocess.run(missing, cwd=ROOT, capture_output=True, text=True, check=True).stdout == "\n"
    with pytest.raises(AssertionError, match=r"triton==3\.6\.0"):  # so it would be seen
        would_install(cuda_torch, *PROJECT["dependencies"], *EXTRAS["compilers"])


def test_a_torch_without_compilers_gets_those_that_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests import compilers

    if not compilers.PINS:
        pytest.skip("the budgets are of Linux on x86-64")
    versions = {"triton": None, "cuda-bindings": "13.5.0", "nvidia-cuda-nvrtc": None}
    monkeypatch.setattr(compilers, "_version", lambda name: versions.get(name, "1.0"))
    monkeypatch.setattr(
        compilers.metadata, "requires", lambda name: ["filelock", 'optree; extra == "optree"']
    )
    assert compilers.missing() == ["triton==3.6.0", "nvidia-cuda-nvrtc==13.0.*"]
    assert compilers.pinned("triton").args == (True,)
    versions["triton"] = "3.7.1"
    assert (
        "triton 3.7.1 is installed; the budgets are of triton==3.6.0"
        in compilers.pinned("triton").kwargs["reason"]
    )
    versions["triton"] = "3.6.0"
    assert compilers.pinned("triton").args == (False,)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of what make reads, with an environment in it."""
    for name in ("Makefile", "pyproject.toml", "tests/compilers.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    for name in (".venv/pyvenv.cfg", "notes/x.txt", "data/prepared/a", "mine/bin/python"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    return tmp_path


def make(folder: Path, *arguments: str, path: Path | None = None) -> subprocess.CompletedProcess:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS"))}
    environment["PATH"] = f"{path or folder}:{os.environ['PATH']}"
    return subprocess.run(["make", *arguments], cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("target", ["train", "test", "test-long", "test-gpu", "test-slow", "lint"])
def test_an_environment_of_yours_is_used_as_it_is(project: Path, target: str) -> None:
    result = make(project, "-n", target, "VENV=", f"PY={sys.executable}")
    assert result.returncode == 0, result.stderr
    assert sys.executable in result.stdout and "pip" not in result.stdout and "touch" not in result.stdout
    assert f"{sys.executable} " in make(project, "-n", target, "VENV=", f"PYTHON={sys.executable}").stdout


def test_clean_removes_environments_alone(project: Path) -> None:
    for wrong in ("", "notes", "mine", ".", "/"):
        assert make(project, "clean", f"VENV={wrong}").returncode == 0
        assert {path.name for path in project.iterdir()} >= {".venv", "notes", "mine", "data", "Makefile"}
    assert not (project / "data" / "prepared").exists()
    assert make(project, "clean").returncode == 0 and not (project / ".venv").exists()


def test_python_is_named_for_what_it_is(project: Path) -> None:
    for name, said in (("python3.99", None), ("python3.10", "Python 3.10.4")):
        if said:
            script = f'#!/bin/sh\n[ "$1" = --version ] && echo {said} && exit 0\nexit 1\n'
            (project / name).write_text(script)
            (project / name).chmod(0o755)
        result = make(project, "train", f"PYTHON={name}", "VENV=new")
        assert result.returncode == 2 and not (project / "new").exists()
        wanted = f"{name} is {said}" if said else f"there is no {name} here: make train PYTHON="
        assert wanted in result.stdout and ("older" in result.stdout) is False, result.stdout


def test_an_installation_has_every_package_with_its_files() -> None:
    """`pip install .`, not editable: commands, configs, sources of kernels, templates of reports."""
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = [Path(name) for name in names.split() if "/" in name]
    ours = {path.parent for path in paths if path.suffix == ".py" and path.parts[0] != "tests"}
    assert {str(folder).replace("/", ".") for folder in ours} == set(table["packages"])
    shipped = {
        path
        for package, patterns in table["package-data"].items()
        for pattern in patterns
        for path in (ROOT / package.replace(".", "/")).glob(pattern)
    }
    needed = [
        path for path in paths if path.suffix in {".yaml", ".cu", ".cuh", ".j2"} and "tests" not in path.parts
    ]
    assert not [path for path in needed if path.parts[0][0] != "." and ROOT / path not in shipped]
    assert table["py-modules"] == ["train"]
