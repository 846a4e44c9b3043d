"""No function beyond 60 lines, no kernel (Triton, CUDA) beyond 100: what is longer is read by nobody."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MOST, MOST_OF_A_KERNEL = 60, 100
# Those that resist: a line for each of 26 to 63 parameters, 100 at most for the rest; Triton takes no struct.
LONGER = {
    ("attention/base.py", "forward"),  # of the contract, which its docstring tells
    ("ops/triton/forward.py", "_tilegpt_attention_forward"),
    ("ops/triton/decode.py", "_tilegpt_decode_split"),
    ("ops/triton/cached.py", "_tilegpt_attend_cache"),
    ("ops/triton/step_attention.py", "_tilegpt_step_attention"),
    ("ops/triton/backward.py", "_tilegpt_attention_backward_dkdv"),
    ("ops/triton/backward_dq.py", "_tilegpt_attention_backward_dq"),
}

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])+'", re.DOTALL)
_DIRECTIVE = re.compile(r"^[ \t]*#(?:[^\n\\]|\\.|\\\n)*", re.MULTILINE | re.DOTALL)
_HEAD = re.compile(r"\b(?!__launch_bounds__)(\w+)\s*\([^{}]*\)\s*(?:const|noexcept|:[^;{}]*)?\s*$", re.DOTALL)


def of_python(source: str) -> Iterator[tuple[str, int, bool]]:
    """(name, lines, whether it is a kernel) of every function."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            kernel = any("jit" in ast.unparse(each) for each in node.decorator_list)
            yield node.name, node.end_lineno - node.lineno + 1, kernel


def of_cuda(source: str) -> Iterator[tuple[str, int, bool]]:
    """The same of C++ and CUDA, by braces: a function is the outermost block behind a closing parenthesis."""
    blank = "".join
    for pattern in (_COMMENT, _DIRECTIVE):  # gone but for their line ends
        source = pattern.sub(lambda found: blank(c if c == "\n" else " " for c in found[0]), source)
    since, depth, function = 0, 0, None
    for at, c in enumerate(source):
        if c == "{":
            head = _HEAD.search(source, since, at)
            if function is None and head:
                start = since + len(source[since:at]) - len(source[since:at].lstrip())
                function = (depth, head[1], start, "__global__" in source[since:at])
            depth += 1
        elif c == "}":
            depth -= 1
            if function is not None and depth == function[0]:
                _, name, start, kernel = function
                yield name, source.count("\n", start, at) + 1, kernel
                function = None
        if c in "{};":
            since = at + 1
    assert depth == 0, "braces that do not match"


def test_lengths() -> None:
    tracked = subprocess.run(
        ["git", "ls-files", "*.py", "*.cu", "*.cuh", "*.h"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    longer = {}
    for name in tracked.stdout.split():
        functions = of_python if name.endswith(".py") else of_cuda
        for function, lines, kernel in functions((ROOT / name).read_text(encoding="utf-8")):
            if lines > (MOST_OF_A_KERNEL if kernel else MOST):
                longer[name, function] = lines
    assert not {key: lines for key, lines in longer.items() if key not in LONGER}
    assert not LONGER - set(longer), "these are shorter by now"


@pytest.mark.parametrize(
    ("functions", "source", "found"),
    [
        (of_python, "class A:\n    def f(self):\n        x = 1\n        return x", [("f", 3, False)]),
        (of_python, "@triton.jit\ndef f(a,\n      b):\n    pass", [("f", 3, True)]),
        (of_cuda, "struct A {\n  A() : b(0) {}\n};\n", [("A", 1, False)]),
        (of_cuda, "void f() {\n  if (a) {\n  }\n}", [("f", 4, False)]),
        (of_cuda, "// a {\n#define B { \\\n  (\nfloat f(float (&x)[2]) { return '{'; }", [("f", 1, False)]),
        (of_cuda, '__global__ void __launch_bounds__(8, 1)\nk(int a) {\n  asm("{");\n}', [("k", 4, True)]),
    ],
)  # fmt: skip
def test_lengths_are_counted(functions, source: str, found: list[tuple[str, int, bool]]) -> None:
    assert list(functions(source)) == found
