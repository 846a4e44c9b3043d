"""Which attention overflows in 16 bits, and at what inputs? A part of the study `numerics`.

q and k are scaled up by 1, 2, 4, ...: scores grow with the square. Each result stands beside the formula in
fp64 on the very same inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from attention.base import Attention
from attention.naive import attention_probs
from scripts.accuracy import AT_ONCE, Problem, Result, computed, formula
from scripts.measure.instruments.exactness import HEAD_DIM, Measurement, Setting
from scripts.measure.instruments.textbook import FORMULAS, Formula

MAGNITUDES = (1, 2, 4, 16, 64, 256)
DTYPES = ("float16", "bfloat16")
GRADIENTS = ("dq", "dk", "dv")


def stability(setting: Setting) -> Iterator[Measurement]:
    """Every formula and implementation that has the dtype, forward and, where it has one, backward."""
    reference = lru_cache(maxsize=1)(partial(exact, setting))
    contestants: dict[str, Attention] = {name: Formula(name) for name in FORMULAS} | setting.attentions
    for dtype in DTYPES:
        able = {name: each for name, each in contestants.items() if setting.able(each, dtype)}
        for magnitude in MAGNITUDES:
            for name, attention in able.items():
                passed = setting.passes(attention, dtype)
                point = setting.point("stability", name, passed, dtype, magnitude=magnitude)
                yield Measurement(
                    point, partial(errors, setting, attention, passed, dtype, magnitude, reference)
                )


def exact(setting: Setting, dtype: str, magnitude: float) -> tuple[Result, dict[str, float]]:
    """(out and gradients in fp64, the largest q k and the largest score in it)."""
    q, k, v, dout = setting.tensors(dtype, magnitude)
    wide = formula(Problem(q, k, v, {"causal": True}, dout), torch.float64, attention_probs, AT_ONCE)
    largest = float((q.double() @ k.double().mT).tril().abs().max())
    return wide, {"largest_product": largest, "largest_score": largest * HEAD_DIM**-0.5}


def errors(
    setting: Setting,
    attention: Attention,
    passed: str,
    dtype: str,
    magnitude: float,
    reference: Callable[[str, float], tuple[Result, dict[str, float]]],
) -> dict[str, Any]:
    """Of out, and of the gradients together: the largest error where finite, and the share that is not."""
    q, k, v, dout = setting.tensors(dtype, magnitude)
    got = computed(attention, Problem(q, k, v, {"causal": True}, dout if passed == "both" else None))
    wide, largest = reference(dtype, magnitude)
    result = {"status": "ok"} | largest | compared([got["out"]], [wide["out"]], "")
    if passed == "both":
        result |= compared([got[x] for x in GRADIENTS], [wide[x] for x in GRADIENTS], "_gradients")
    return result


def compared(got: list[Tensor], wide: list[Tensor], of: str) -> dict[str, Any]:
    """`max_error` over what is finite (None for nothing), `nan` and `inf` as shares of all values."""
    together = torch.cat([x.flatten() for x in got]).double()
    apart = (together - torch.cat([x.flatten() for x in wide])).abs()
    finite = together.isfinite()
    return {
        f"max_error{of}": float(apart[finite].max()) if finite.any() else None,
        f"nan{of}": float(together.isnan().double().mean()),
        f"inf{of}": float(together.isinf().double().mean()),
    }
