"""The errors of fp8 attention: what rounding and the Hadamard transform do, and the order of the schemes."""

from __future__ import annotations

import torch

from scripts.measure.studies import fp8_error
from scripts.measure.studies.fp8_error import (
    arguments,
    attention,
    hadamard,
    inputs,
    measured,
    points,
    rounded,
)


def test_the_transform_is_orthogonal_and_spreads_an_outlier() -> None:
    turn = hadamard(64)
    torch.testing.assert_close(turn @ turn.T, torch.eye(64))
    outlier = torch.zeros(64)
    outlier[3] = 8.0
    assert (outlier @ turn).abs().max() == 1.0


def test_scores_are_those_without_it() -> None:
    q, k, v = inputs(points(arguments(["--tokens", "64", "--head-dim", "32"]))[0], 0, "cpu")
    turn = hadamard(32).double()
    torch.testing.assert_close((q @ turn) @ (k @ turn).mT, q @ k.mT)
    assert v.shape == (fp8_error.HEADS, 64, 32)


def test_a_block_has_the_scale_of_its_own() -> None:
    x = torch.full((1, 256, 4), 1 / 3)
    x[:, :128] = 1e-3  # of a tensor's scale, 448 / (1 / 3), one that e4m3 rounds coarsely
    of_tensor, of_blocks = (
        (rounded(x, blocks) - x).abs().amax((0, 2)) / x[0, :, 0] for blocks in (False, True)
    )
    assert (
        of_blocks.max() <= 2**-4
        and of_tensor[:128].max() > 0
        and of_blocks[128:].max() == of_tensor[128:].max()
    )


def test_each_scheme_is_more_exact_than_the_one_before() -> None:
    options = arguments(["--tokens", "256", "--head-dim", "64", "--draws", "2"])
    error = {point["implementation"]: measured(point, "cpu")["rmse"] for point in points(options)}
    assert error["fp16"] < error["bf16"] < error["hadamard_blocks"] < error["tensor"]
    assert error["int8_scores"] < 0.75 * error["scaled_p"] and error["scaled_p"] < error["hadamard_blocks"]
    assert error["hadamard"] < 0.8 * error["tensor"] and error["fp16"] < 1e-3


def test_without_rounding_it_is_attention() -> None:
    x = inputs(points(arguments(["--tokens", "128", "--head-dim", "32"]))[0], 3, "cpu") / 8
    q, k, v = x
    exact = torch.softmax(q @ k.mT / 32**0.5, -1) @ v
    torch.testing.assert_close(attention("fp16", x).double(), exact, atol=1e-3, rtol=1e-2)
