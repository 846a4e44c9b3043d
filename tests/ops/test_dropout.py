"""The dropout mask: frozen values that Triton and CUDA must meet, a slow reference, and its statistics."""

from __future__ import annotations

import torch

from ops.dropout import GOLDEN, dropout_threshold, fmix32_, keep_tile, row_keys

U32 = 0xFFFFFFFF
# (seed, b, h, i, j): bits. A kernel that meets these has the function right.
GOLDEN_BITS = {
    (0, 0, 0, 0, 0): 0x2720C787,
    (1, 0, 0, 0, 0): 0x6EAFE3F7,
    (1, 0, 0, 0, 1): 0xA7D99E37,
    (4294967296, 0, 0, 1, 0): 0x879140BE,
    (81985529216486895, 3, 5, 1023, 2047): 0xC31B3A7A,
    (9223372036854775806, 7, 31, 65535, 131071): 0x968FC33D,
}


def slow_fmix32(x: int) -> int:
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & U32
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & U32
    return x ^ (x >> 16)


def slow_bits(seed: int, b: int, h: int, i: int, j: int) -> int:
    """The documented function in Python's unbounded integers."""
    key = 0
    for x in (seed & U32, (seed >> 32) & U32, b, h, i):
        key = slow_fmix32(((key ^ x) + GOLDEN) & U32)
    return slow_fmix32((key + GOLDEN * j) & U32)


def bits(seed: int, b: int, h: int, i: int, j: int) -> int:
    key = row_keys(*(torch.tensor(x) for x in (seed, b, h, i)))
    return int(fmix32_((key + GOLDEN * j) & U32))


def test_murmur3_finaliser() -> None:
    assert [int(fmix32_(torch.tensor(x))) for x in (0, 1, U32)] == [0, 0x514E28B7, 0x81F16F39]


def test_golden_values() -> None:
    assert {index: bits(*index) for index in GOLDEN_BITS} == GOLDEN_BITS


def test_equals_the_slow_reference() -> None:
    for seed in (0, 1, 2**63 - 1, 0x0123456789ABCDEF, -5):
        for index in ((0, 0, 0, 0), (1, 2, 3, 4), (7, 31, 65535, 131071)):
            assert bits(seed, *index) == slow_bits(seed, *index)


def test_a_tile_is_a_part_of_the_whole() -> None:
    seed = torch.tensor(99)
    whole = keep_tile(seed, 2, 3, range(40), range(50), 0.3)
    assert torch.equal(keep_tile(seed, 2, 3, range(7, 20), range(31, 50), 0.3), whole[:, :, 7:20, 31:50])


def test_statistics() -> None:
    """The kept share within five standard errors, by row and column too; neighbours are independent."""
    for p in (0.1, 0.5, 0.9):
        keep = keep_tile(torch.tensor(2**40 + 17), 2, 4, range(256), range(256), p).double()
        deviation = (p * (1 - p)) ** 0.5
        for share in (keep.mean(), keep.mean((0, 1, 2)), keep.mean((0, 1, 3)), keep.mean((2, 3))):
            n = keep.numel() // share.numel()
            assert (share - (1 - p)).abs().max() < 5 * deviation / n**0.5
        centred = keep - (1 - p)
        for dim in range(4):  # batch, head, query, key
            size = keep.shape[dim] - 1
            product = centred.narrow(dim, 0, size) * centred.narrow(dim, 1, size)
            assert product.mean().abs() < 5 * deviation**2 / product.numel() ** 0.5


def test_seeds_differ() -> None:
    masks = [keep_tile(torch.tensor(seed), 1, 1, range(64), range(64), 0.5) for seed in (0, 1, 2**32, 2**33)]
    for n, mask in enumerate(masks):
        assert all(0.4 < (mask == other).double().mean() < 0.6 for other in masks[:n])


def test_threshold() -> None:
    assert dropout_threshold(0.5) == 2**31
    assert keep_tile(torch.tensor(5), 1, 1, range(8), range(8), 0.0).all()
