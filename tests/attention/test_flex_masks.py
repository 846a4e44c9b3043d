"""FlexAttention's tile lists against the masks of the specification, and what a compiler is handed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from attention import flex
from attention.flex_masks import TILE, Limits, RecentResults, tile_lists, unmasked_lists
from attention.geometry import FAR
from attention.naive import attention_scores
from ops.options import AttentionOptions
from tests.attention.test_flex import arguments_of, forget, graphs, lift_refusal, run
from tests.grid import Case, build

pytestmark = pytest.mark.sampled(4)

CPU = torch.device("cpu")
gradients_on_cpu = lift_refusal  # a fixture


def _dense(num: Tensor, indices: Tensor) -> Tensor:
    """Lists of tiles as a matrix of booleans (1 or B, rows, columns)."""
    first = torch.arange(indices.shape[-1]) < num[..., None]
    return torch.zeros_like(indices).scatter(-1, indices.long(), first.int()).bool()[:, 0]


BLOCKS = torch.tensor([[1, 0, 1, 0, 1], [0, 0, 0, 0, 0], [0, 1, 1, 0, 0]]).bool()[None, None]  # 300 x 513
DOCUMENTS = torch.tensor([[0] * 150 + [1] * 200 + [2] * 163, [5] * 513], dtype=torch.int32)


@pytest.mark.parametrize(
    ("tq", "tk", "band", "options"),
    [
        (1, 1, (-1, 0), {}),
        (256, 256, (-1, 0), {}),
        (300, 513, (-1, 0), {}),
        (513, 300, (-1, 0), {}),
        (300, 513, (-1, -1), {}),
        (513, 513, (130, 0), {}),
        (300, 513, (100, 60), {}),
        (300, 513, (-1, 0), {"kv_lengths": torch.tensor([513, 200], dtype=torch.int32)}),
        (1, 513, (40, 0), {"kv_lengths": torch.tensor([0, 129], dtype=torch.int32)}),
        (513, 513, (-1, 0), {"document_ids": (DOCUMENTS, DOCUMENTS)}),
        (300, 513, (-1, -1), {"document_ids": (DOCUMENTS[:, 213:], DOCUMENTS)}),
        (300, 513, (-1, -1), {"block_mask": BLOCKS}),
        (300, 513, (130, 0), {"block_mask": BLOCKS, "document_ids": (DOCUMENTS[:, 213:], DOCUMENTS)}),
    ],
)
def test_tile_lists_are_what_the_mask_says(tq: int, tk: int, band: tuple[int, int], options: dict) -> None:
    left, right = (FAR if side < 0 else side for side in band)
    kv_lengths, document_ids = options.get("kv_lengths"), options.get("document_ids")
    limits = Limits(tq, tk if kv_lengths is None else kv_lengths, left, right)
    lists = tile_lists(tq, tk, limits, document_ids, CPU, block_mask=options.get("block_mask"))
    partial, full, partial_by_key, full_by_key = (_dense(*lists[n : n + 2]) for n in (0, 2, 4, 6))
    q, k = torch.zeros(2, 1, tq, 1), torch.zeros(2, 1, tk, 1)
    scores = attention_scores(
        q, k, AttentionOptions(causal=False, window=band, **options)
    )  # a causal band has right = 0
    rows, columns = partial.shape[1:]
    seen = torch.zeros(2, rows * TILE, columns * TILE, dtype=torch.bool)
    seen[:, :tq, :tk] = scores[:, 0] == 0
    tiles = seen.view(2, rows, TILE, columns, TILE)
    some, all_of_it = tiles.any(4).any(2), tiles.all(4).all(2)
    assert torch.equal(full.expand_as(some), all_of_it)
    assert torch.equal(partial.expand_as(some), some & ~all_of_it)
    assert torch.equal(partial_by_key, partial.transpose(1, 2))
    assert torch.equal(full_by_key, full.transpose(1, 2))
    # The same from data as from numbers.
    again = tile_lists(tq, tk, limits.tensors(2, CPU), document_ids, CPU, 1, options.get("block_mask"))
    assert all(torch.equal(a.expand_as(b), b) for a, b in zip(lists, again, strict=True))


@pytest.mark.parametrize(("tq", "tk", "tiles"), [(1, 1, 1), (1, 128, 1), (1, 300, 3), (300, 513, 1)])
def test_tile_lists_without_a_mask(tq: int, tk: int, tiles: int) -> None:
    lists = unmasked_lists(tq, tk, CPU)
    by_query, by_key = _dense(*lists[:2]), _dense(*lists[4:6])
    assert by_query[0].tolist() == [[True] * tiles + [False] * (tq == 1)]
    assert torch.equal(by_key, by_query.transpose(1, 2))
    assert lists[2:4] == lists[6:] == (None, None)
    assert all(t.is_contiguous() and t.dtype == torch.int32 for t in lists if t is not None)


def test_ids_out_of_order_never_lose_a_tile() -> None:
    ids = torch.randint(0, 3, (2, 700), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    lists = tile_lists(700, 700, Limits(700, 700, FAR, FAR), (ids, ids), CPU)
    assert _dense(*lists[:2])[:, :6, :6].all() and not _dense(*lists[2:4]).any()


def test_layers_share_what_was_made() -> None:
    recent, lengths = RecentResults(size=2), torch.tensor([3, 4], dtype=torch.int32)
    first = recent.get(("a",), [lengths], object)
    assert recent.get(("a",), [lengths], object) is first
    assert recent.get(("b",), [lengths], object) is not first
    lengths += 1  # the next step
    second = recent.get(("a",), [lengths], object)
    assert second is not first
    # Another tensor at the same address is another tensor.
    key = next(key for key, (_, made) in recent._made.items() if made is second)
    recent._made[key] = ([lambda: None], second)
    assert recent.get(("a",), [lengths], object) is not second
    for n in range(5):
        recent.get((n,), [], object)
    assert len(recent._made) == 2


def _handed(case: Case) -> tuple[dict[str, list[str]], tuple, int]:
    """What a compiler is handed: the operations of score_mod and mask_mod, flex_attention's arguments, and
    how many symbolic sizes there are. Nothing is computed.
    """
    captured = []

    def capture(graph: torch.fx.GraphModule, inputs: list) -> Callable:
        captured.append(graph)
        return lambda *tensors: (tensors[0],)

    _, arguments = arguments_of(case, torch.bfloat16)
    with torch.no_grad():
        run(arguments, backend=capture)
    (graph,) = captured
    (call,) = (node for node in graph.graph.nodes if node.target is torch.ops.higher_order.flex_attention)
    mods = {
        name.split("_")[0]: [node.target.__name__ for node in mod.graph.nodes if node.op == "call_function"]
        for name, mod in graph.named_children()
    }
    return mods, call.args, sum(node.type is torch.SymInt for node in graph.graph.nodes)


WHOLE = {"batch": 1, "head_dim": 16}


@pytest.mark.parametrize(
    ("case", "score", "mask"),
    [
        (Case("causal", 512, 512, **WHOLE), [], ["ge"]),
        (Case("causal", 512, 640, **WHOLE, kv_heads=2), [], ["add", "ge"]),
        (Case("window", 512, 512, **WHOLE, features=frozenset({"window"})), [], ["ge", "add", "ge", "and_"]),
        (
            Case("softcap", 512, 512, **WHOLE, features=frozenset({"softcap"})),
            ["truediv", "tanh", "mul"],
            ["ge"],
        ),
    ],
    ids=lambda x: x.id if isinstance(x, Case) else "",
)
def test_whole_tiles_get_a_kernel_of_constants(
    case: Case, score: list[str], mask: list[str], gradients_on_cpu: None
) -> None:
    """As written by hand: no more in the masks and scores than was asked, no data, no symbol."""
    forget()
    for tq, tk in ((20, 30), (40, 90)):  # leave nothing dynamic
        run(arguments_of(Case("before", tq, tk, **WHOLE))[1])
    mods, (_, _, _, _, block_mask, _, _, *captured), symbols = _handed(case)
    assert mods == {"score": score, "mask": mask}
    assert captured == [(), ()] and symbols == 0
    assert block_mask[:2] == (case.tq, case.tk) and block_mask[-3:-1] == (TILE, TILE)


@pytest.mark.parametrize(("tq", "tk"), [(512, 640), (1, 1024), (1, 300), (70, 130)])
def test_no_mask_where_every_query_sees_every_key(tq: int, tk: int, gradients_on_cpu: None) -> None:
    forget()
    features = frozenset({"noncausal"}) if tq > 1 else frozenset()
    mods, (_, _, _, _, block_mask, *_, scores, masks), _ = _handed(
        Case("full", tq, tk, 16, features=features)
    )
    assert mods["mask"] in ([], ["new_ones"]) and not mods["score"] and scores == masks == ()
    assert block_mask[4] is None and block_mask[-2] == (TILE if tq == 1 else FAR)
    assert (len(flex._STATIC) == 1) == (tk >= 512)


def test_a_repeated_call_makes_nothing(monkeypatch: pytest.MonkeyPatch, gradients_on_cpu: None) -> None:
    forget()
    _, arguments = arguments_of(Case("again", 512, 512, **WHOLE))
    first = run(arguments)
    for name in ("_lists", "_compile", "_guard_key"):
        monkeypatch.setattr(flex, name, None)
    assert torch.equal(run(arguments), first) and graphs() == 1


def test_so_many_kernels_of_constants_and_no_more(
    monkeypatch: pytest.MonkeyPatch, gradients_on_cpu: None
) -> None:
    """Then the dynamic one; other strides are another kernel."""
    forget()
    monkeypatch.setattr(flex, "MAX_STATIC", 2)
    for n, tk, static in ((1, 512, 1), (2, 640, 2), (3, 768, 2), (3, 896, 2), (3, 1024, 2), (3, 640, 2)):
        inputs, arguments = arguments_of(Case("many", 512, tk, **WHOLE))
        torch.testing.assert_close(run(arguments), build("naive")(inputs.q, inputs.k, inputs.v))
        assert (graphs(), len(flex._STATIC)) == (n, static)
    monkeypatch.setattr(flex, "MAX_STATIC", 3)
    _, (q, k, v, *rest) = arguments_of(Case("many", 512, 512, **WHOLE))
    v = v.detach().repeat(1, 1, 2, 1)[:, :, :512].requires_grad_()
    run((q, k, v, *rest))
    assert len(flex._STATIC) == 3
