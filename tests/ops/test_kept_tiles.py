"""The lists of tiles that a block mask keeps (csrc/lib/kept_tiles.cu), against who sees whom, on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from attention.geometry import relative_positions, visible
from model.sparsity import PATTERNS, pattern
from ops import nvrtc
from ops.cuda import plain
from ops.cuda.call import Call
from ops.cuda.kept_tiles import kept_tiles
from ops.options import MASK_BLOCK, AttentionOptions
from tests.ops import cpu
from tests.ops.cpu import documents

pytestmark = [
    pytest.mark.skipif(cpu.GXX is None, reason="no g++, which compiles the kernels for the CPU"),
    pytest.mark.sampled(3),
]
END, MASK_FLAG = -1, 1
LENGTHS = torch.tensor([300, 0, 129], dtype=torch.int32)
OPTIONS = [
    (500, 500, {}),
    (140, 700, {"window": (200, -1)}),
    (700, 300, {"causal": False, "window": (5, 70)}),
    (260, 300, {"kv_lengths": LENGTHS}),
    (260, 300, {"causal": False, "kv_lengths": LENGTHS}),
    (400, 420, {"causal": False, "document_ids": (documents(150, 200, 50), documents(20, 300, 100))}),
]


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> cpu.Compiler:
    return cpu.Compiler(tmp_path_factory.mktemp("csrc"))


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch, compiler: cpu.Compiler) -> None:
    monkeypatch.setattr(nvrtc, "kernel", compiler)
    monkeypatch.setattr(plain, "_kernel", compiler)


def _kept(heads: int, tq: int, tk: int) -> Tensor:
    shape = 1, heads, -(-tq // MASK_BLOCK), -(-tk // MASK_BLOCK)
    return torch.rand(shape, generator=torch.Generator().manual_seed(tq)) < 0.6


def _lists(kept: Tensor) -> list[list[int]]:
    """Of each row of (tiles, entries) what comes before the end."""
    return [row[: row.index(END)] for row in kept.tolist()]


def _expected(seen: Tensor, mask: Tensor, own: int, other: int, transposed: bool) -> list[list[int]]:
    """seen (Tq, Tk), mask (tiles, tiles): of each tile of `own` the tiles of `other` that are kept and of
    which anything is seen, plus MASK_FLAG where not all is; keys that do not exist are not seen."""
    seen = F.pad(seen, (0, -seen.shape[1] % 128))
    seen, mask = (seen.T, mask.T) if transposed else (seen, mask)
    lists = []
    for row in range(0, seen.shape[0], own):
        tiles = [(at, seen[row : row + own, at : at + other]) for at in range(0, seen.shape[1], other)]
        kept = [(at, part) for at, part in tiles if part.any() and mask[row // MASK_BLOCK, at // MASK_BLOCK]]
        lists.append([at + (0 if part.all() else MASK_FLAG) for at, part in kept])
    return lists


@pytest.mark.parametrize(("own", "other", "transposed"), [(128, 64, False), (64, 32, False), (128, 64, True)])
@pytest.mark.parametrize(("tq", "tk", "options"), OPTIONS, ids=[f"{x[:2]}-{'-'.join(x[2])}" for x in OPTIONS])
def test_lists(tq: int, tk: int, options: dict[str, Any], own: int, other: int, transposed: bool) -> None:
    lengths, ids = options.get("kv_lengths"), options.get("document_ids")
    batch = 1 if lengths is None else len(lengths)
    q, k, v, _ = cpu.inputs((tq, tk, 32), (4, 2), batch, dtype=torch.bfloat16)
    mask = _kept(4, tq, tk)
    asked = AttentionOptions(**options, scale=1.0, block_mask=mask)
    call = Call(q, k, v, asked)
    ranges = plain.document_ranges(call, own, transposed=transposed)
    call.params.bind(document_bounds=ranges)
    call.params.n_tiles = -(-(tk if transposed else tq) // own)
    made = kept_tiles(call, own, other, transposed)
    i, j = torch.arange(tq), torch.arange(tk)
    seen = visible(relative_positions(i, j, tq, tk, lengths), j, asked.band, lengths, ids)
    seen = seen.expand(batch, 1, tq, tk)
    for b in range(batch):
        for h in range(4):
            expected = _expected(seen[b, 0], mask[0, h], own, other, transposed)
            for row, (got, wanted) in enumerate(zip(_lists(made[b, h]), expected, strict=True)):
                assert [x // 2 for x in got] == [x // 2 for x in wanted], (b, h, row)
                for x, y in zip(got, wanted, strict=True):
                    # A tile of several documents compares all ids; one where the queries end may be masked.
                    may = ids is not None or (transposed and x + other > tq)
                    assert x == y or (may and x > y), (b, h, row)


def test_all_share_a_list_where_they_may() -> None:
    """One for all heads and batch rows: strides of 0."""
    q, k, v, _ = cpu.inputs((256, 256, 32), (4, 4), 3, dtype=torch.bfloat16)
    shapes = {}
    for name, mask, more in (
        ("all", _kept(1, 256, 256), {}),
        ("heads", _kept(4, 256, 256), {}),
        ("rows", _kept(1, 256, 256), {"kv_lengths": torch.tensor([3, 200, 256], dtype=torch.int32)}),
    ):
        made = kept_tiles(Call(q, k, v, AttentionOptions(scale=1.0, block_mask=mask, **more)), 128, 64)
        assert made.shape == (3, 4, 2, 5)
        shapes[name] = [n for n, stride in enumerate(made.stride()) if stride == 0]
    assert shapes == {"all": [0, 1], "heads": [0], "rows": [1]}


@pytest.mark.parametrize("name", PATTERNS)
def test_a_causal_pattern_visits_its_share(name: str) -> None:
    """As many tiles as the pattern keeps under the diagonal, by rows and by columns."""
    tokens, mask = 4096, pattern(name, 32, 2)
    q, k, v, _ = cpu.inputs((tokens, tokens, 32), dtype=torch.bfloat16)
    call = Call(q, k, v, AttentionOptions(scale=1.0, block_mask=mask[None, None]))
    for transposed in (False, True):
        made = kept_tiles(call, 128, 128, transposed)
        assert sum(map(len, _lists(made[0, 0]))) == mask.tril().sum()


def test_more_tiles_than_threads() -> None:
    q, k, v, _ = cpu.inputs((130, 128 * 300, 8), dtype=torch.bfloat16)
    mask = _kept(1, 130, 128 * 300)
    call = Call(q, k, v, AttentionOptions(scale=1.0, causal=False, block_mask=mask))
    of_rows = _lists(kept_tiles(call, 128, 64)[0, 0])
    for row, found in enumerate(of_rows):
        assert found == [64 * n for n in range(600) if mask[0, 0, row, n // 2]]
