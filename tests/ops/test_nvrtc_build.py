"""Compiling for GPUs that need not be here, what is kept of it, and what is said where it fails."""

from __future__ import annotations

import importlib.util
import logging
import warnings
from pathlib import Path
from typing import Any

import pytest

from ops import nvrtc, nvrtc_build
from tests.ops.conftest import HEADER, SOURCE


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The labels of what is compiled from here on."""
    labels, compile_one = [], nvrtc_build._compile
    monkeypatch.setattr(
        nvrtc_build, "_compile", lambda label, *rest: labels.append(label) or compile_one(label, *rest)
    )
    return labels


def build(source: Path, arch: str = "sm_80", **defines: int | str) -> nvrtc.Cubin:
    return nvrtc.build(source, {"FACTOR": 2} | defines, arch)


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90a"])
def test_compiles_for_gpus_that_are_not_here(
    source: Path, arch: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "ops"):
        cubin = build(source, arch)
    assert cubin.code.startswith(b"\x7fELF") and cubin.seconds > 0
    assert cubin.label == f"tiny.cu {arch} FACTOR=2"
    fill, reverse = cubin.kernels["tilegpt_fill"], cubin.kernels["tilegpt_reverse"]
    assert 4 <= fill.registers <= 32 and (fill.spilled_bytes, fill.shared_bytes) == (0, 0)
    assert (reverse.spilled_bytes, reverse.shared_bytes) == (0, 512)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2 and all(arch in line and "registers, 0 bytes spilled" in line for line in lines)


def test_spills_are_seen(source: Path) -> None:
    """Forty sums that are all alive in the 32 registers that 2,048 threads leave each."""
    source.write_text(
        'extern "C" __global__ void __launch_bounds__(1024, 2) tilegpt_wide(float *x) {\n'
        "    float s[40];\n"
        "    for (int i = 0; i < 40; i++) s[i] = x[i];\n"
        "    for (int j = 0; j < x[99]; j++)\n"
        "        for (int i = 0; i < 40; i++) s[i] = s[i] * s[(i + 7) % 40] + x[j];\n"
        "    for (int i = 0; i < 40; i++) x[i] = s[i];\n"
        "}\n"
    )
    used = build(source).kernels["tilegpt_wide"]
    assert used.registers == 32 and used.spilled_bytes > 0


def test_what_is_on_disk_is_not_compiled_again(source: Path, compiled: list[str]) -> None:
    first = build(source, WIDTH=1)
    assert build(source, WIDTH=1) == first
    assert nvrtc.build(source, {"WIDTH": 1, "FACTOR": 2}, "sm_80").code == first.code  # in any order
    assert compiled == ["tiny.cu sm_80 FACTOR=2 WIDTH=1"]


def test_all_that_matters_is_in_the_key(
    source: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (source.parent / "inner.cuh").write_text("")
    (source.parent / "tiny.cuh").write_text(f'{HEADER}#include "inner.cuh"\n')

    def changes(*arguments: Any, **defines: Any) -> int:
        before = len(compiled)
        build(source, *arguments, **defines)
        return len(compiled) - before

    assert changes() == 1
    assert changes("sm_89") == 1 and changes(FACTOR=3) == 1 and changes(OTHER=1) == 1
    (source.parent / "inner.cuh").write_text("// a header that a header includes\n")
    assert changes() == 1
    source.write_text(SOURCE.replace("128", "64"))
    assert changes() == 1
    monkeypatch.setattr(nvrtc_build, "_OPTIONS", (*nvrtc_build._OPTIONS, "--use_fast_math"))
    assert changes() == 1
    folder, _ = nvrtc_build._toolkit()
    monkeypatch.setattr(nvrtc_build, "_toolkit", lambda: (folder, "another cuda_bf16.h"))
    assert changes() == 1
    monkeypatch.setattr(nvrtc_build, "compiler_version", lambda: (99, 9))
    assert changes() == 1 and changes() == 0


def test_16_bit_types_are_found(source: Path) -> None:
    source.write_text(
        "#include <cuda_bf16.h>\n#include <cuda_fp16.h>\n"
        'extern "C" __global__ void tilegpt_narrow(__nv_bfloat16 *x, __half *y) {'
        "*x = (__nv_bfloat16)(float)*y; }"
    )
    assert set(build(source).kernels) == {"tilegpt_narrow"}


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[: len(content) // 2],
        lambda content: content[:20],
        lambda content: b"",
        lambda content: content[:-5] + bytes([content[-5] ^ 1]) + content[-4:],
        lambda content: bytes([content[0] ^ 1]) + content[1:],
    ],
    ids=["truncated", "no payload", "empty", "a bit of the payload", "a bit of the checksum"],
)
def test_a_damaged_file_is_built_again(source: Path, folder: Path, compiled: list[str], damage: Any) -> None:
    first = build(source)
    (path,) = folder.iterdir()
    content = path.read_bytes()
    path.write_bytes(damage(content))
    assert build(source).code == first.code and len(compiled) == 2
    assert build(source).code == first.code and len(compiled) == 2  # and kept


def test_without_a_folder_it_compiles_in_memory_and_says_so_once(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()  # permissions would not stop root
    monkeypatch.setenv("TILEGPT_CACHE", str(tmp_path / "file" / "cubin"))
    with pytest.warns(RuntimeWarning, match="takes no file .*Set TILEGPT_CACHE"):
        first = build(source)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert build(source).code == first.code


def test_the_command_lists_and_clears(source: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build(source)
    build(source, "sm_90a")
    nvrtc.main(["--list"])
    said = capsys.readouterr().out
    assert "tiny.cu sm_80 FACTOR=2" in said and "tiny.cu sm_90a FACTOR=2" in said and "2 cubins" in said
    (folder / "notes.txt").touch()  # not ours
    (folder / f"{64 * 'b'}.cubin").write_bytes(b"junk")
    nvrtc.main(["--list"])
    assert "damaged: will be built again" in capsys.readouterr().out
    (folder / f"{64 * 'c'}.cubin").mkdir()  # permissions would not stop root
    nvrtc.main(["--list"])
    assert "cannot be read: Is a directory" in capsys.readouterr().out
    (folder / f"{64 * 'c'}.cubin").rmdir()
    nvrtc.main(["--clear"])
    assert "removed 3 cubins" in capsys.readouterr().out and [p.name for p in folder.iterdir()] == [
        "notes.txt"
    ]
    with pytest.raises(SystemExit):
        nvrtc.main([])


def test_a_syntax_error_is_shown(source: Path, folder: Path) -> None:
    source.write_text(SOURCE.replace("p.value * FACTOR", "p.value * * FACTOR +"))
    with pytest.raises(nvrtc.CudaError) as error:
        build(source, HEAD_DIM=64)
    said = str(error.value)
    assert "tiny.cu sm_80 FACTOR=2 HEAD_DIM=64 does not compile" in said and "tiny.cu(7): error" in said
    assert not folder.exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('#include "nowhere.cuh"\n', 'cannot open source file "nowhere.cuh"'),
        ("", "sm_12 .*does not compile"),
    ],
)
def test_other_errors_are_shown(source: Path, text: str, said: str) -> None:
    source.write_text(text + SOURCE)
    with pytest.raises(nvrtc.CudaError, match=said):
        build(source, "sm_80" if text else "sm_12")


def test_missing_headers_say_what_to_install(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc_build, "_toolkit", lambda: (None, ""))
    build(source)  # does without
    source.write_text("#include <cuda_fp16.h>\n" + SOURCE)
    with pytest.raises(nvrtc.CudaError, match=r'"cuda_fp16.h"(.|\n)*pip install -e'):
        build(source)


def test_a_missing_source_is_named() -> None:
    with pytest.raises(nvrtc.CudaError, match=r"fa9\.cu is not there"):
        nvrtc.build("fa9.cu", {}, "sm_80")


def test_without_bindings_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, source: Path) -> None:
    nvrtc_build.compiler_version.cache_clear()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        nvrtc.CudaError, match=r"cuda-bindings is not installed: .*pip install -e '\.\[cuda\]'"
    ):
        build(source)
    assert "cuda-bindings" in nvrtc.missing()


def test_architectures(monkeypatch: pytest.MonkeyPatch, source: Path) -> None:
    """Hopper's own instructions; a GPU newer than the compiler takes what is made for its generation."""
    named = {arch: nvrtc.arch_of(arch) for arch in ((7, 5), (8, 6), (9, 0), (12, 0), (12, 9))}
    assert named == {
        (7, 5): "sm_75", (8, 6): "sm_86", (9, 0): "sm_90a", (12, 0): "sm_120", (12, 9): "sm_121"
    }  # fmt: skip
    for unknown in ((7, 0), (99, 0)):
        with pytest.raises(nvrtc.CudaError, match=r"not for sm_.*install another version"):
            nvrtc.arch_of(unknown)
