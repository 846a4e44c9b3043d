"""The cache alone: what it holds, where it writes, and that it never moves."""

import pytest
import torch

from attention.naive import NaiveAttention
from model.kv_cache import KVCache


def make(batch: int = 3, capacity: int = 8) -> KVCache:
    return KVCache(2, batch, kv_heads=2, capacity=capacity, head_dim=4, attention=NaiveAttention())


def kv(batch: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(batch, 2, tokens, 4), torch.randn(batch, 2, tokens, 4)


def test_size_is_that_of_the_kv_heads():
    cache = make()
    assert cache.k[0].shape == (3, 2, 8, 4) and cache.capacity == 8
    assert cache.nbytes == 2 * 2 * 3 * 2 * 8 * 4 * 4  # K and V, layers, rows, heads, tokens, width, bytes


def test_prefill_then_every_row_at_its_own_place():
    cache = make()
    where = [t.data_ptr() for t in (*cache.k, *cache.v)]
    cache.prefill(torch.tensor([2, 5, 1]))
    assert cache.positions is None and cache.kv_lengths is None
    k, v = kv(3, 5)
    for layer in range(2):
        seen = cache.update(layer, k, v)
        assert seen[0] is k and seen[1] is v
    cache.advance()
    assert cache.positions.tolist() == [[2], [5], [1]] and cache.kv_lengths.tolist() == [3, 6, 2]
    assert cache.kv_lengths.dtype == torch.int32

    new_k, new_v = kv(3, 1)
    for layer in range(2):
        keys, values = cache.update(layer, new_k, new_v)
        assert keys is cache.k[layer] and values is cache.v[layer]
        for row, at in enumerate((2, 5, 1)):
            assert torch.equal(keys[row, :, at], new_k[row, :, 0])
            assert torch.equal(values[row, :, at], new_v[row, :, 0])
            assert torch.equal(keys[row, :, :at], k[row, :, :at])
    cache.advance()
    assert cache.lengths.tolist() == [3, 6, 2]
    assert where == [t.data_ptr() for t in (*cache.k, *cache.v)]


def test_some_rows_anew_leave_the_others():
    cache = make()
    cache.prefill(torch.tensor([4, 4, 4]))
    cache.update(0, *kv(3, 4))
    cache.advance()
    before = cache.k[0].clone()
    cache.prefill(torch.tensor([3, 2]), rows=torch.tensor([2, 0]))
    k, v = kv(2, 3)
    cache.update(0, k, v)
    cache.advance()
    assert cache.lengths.tolist() == [2, 4, 3]
    assert torch.equal(cache.k[0][1], before[1])
    assert torch.equal(cache.k[0][2, :, :3], k[0]) and torch.equal(cache.k[0][0, :, :3], k[1])


def test_too_many_tokens_are_caught():
    cache = make()
    with pytest.raises(AssertionError, match="announce"):
        cache.update(0, *kv(3, 2))
    cache.prefill(torch.tensor([9, 9, 9]))
    with pytest.raises(AssertionError, match="do not fit"):
        cache.update(0, *kv(3, 9))
