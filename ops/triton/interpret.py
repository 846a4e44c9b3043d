"""Triton's interpreter (TRITON_INTERPRET=1, set before triton is imported): kernels on CPU tensors, for
tests."""

from __future__ import annotations

import functools
import os

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


@functools.cache
def mend() -> None:
    """The interpreter keeps bf16 as raw 16-bit integers, and its dot multiplies those without an error
    message. That of triton 3.6 has an array of one element for a number, which numpy 2.4 no longer takes."""
    import numpy as np
    import triton
    import triton.language as tl
    from triton.runtime import interpreter

    def exact(x: interpreter.TensorHandle) -> np.ndarray:
        data = x.data
        if x.dtype.scalar == tl.bfloat16:  # the upper half of fp32
            data = (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        # In fp64: the order of a product's sum is the machine's, no kernel's. Contiguous: else numpy loops by
        # itself.
        return np.ascontiguousarray(data, dtype=np.float64)

    def create_dot(self, a, b, d, *how):
        product = np.matmul(exact(a), exact(b)).astype(d.data.dtype)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    interpreter.InterpreterBuilder.create_dot = create_dot

    patch = interpreter._patch_lang_tensor

    def patch_with_index(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    if triton.__version__.startswith("3.6."):
        interpreter._patch_lang_tensor = patch_with_index
