"""Triton's interpreter (TRITON_INTERPRET=1, set before triton is imported): kernels on CPU tensors, for tests."""

from __future__ import annotations

import functools
import os

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


@functools.cache
def mend_bf16_dot() -> None:
    """The interpreter keeps bf16 as raw 16-bit integers, and its dot multiplies those without an error."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    plain = interpreter.InterpreterBuilder.create_dot

    def widen(x: interpreter.TensorHandle) -> interpreter.TensorHandle:
        if x.dtype.scalar != tl.bfloat16:
            return x
        # bf16 is the upper half of fp32
        wide = (x.data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        return interpreter.TensorHandle(wide, tl.float32)

    def create_dot(self, a, b, d, *how):
        return plain(self, widen(a), widen(b), d, *how)

    interpreter.InterpreterBuilder.create_dot = create_dot
