"""What a study's grid comes to."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from conf.values import UserError
from model.costs.gpus import GPUS
from scripts.measure import sweep_points
from scripts.measure.rows import key_of
from scripts.measure.sweep_company import Room, _needs
from scripts.measure.sweep_points import Task
from tests.scripts.studies import GRID, points_of, study


def test_the_grid():
    found = points_of(study(*GRID, "optim.lr=2e-3", "+sweep.grid.model.n_head=[2,4]"))
    named = [(p.fields["implementation"], p.fields["seq_len"], p.fields["heads"]) for p in found]
    assert named == [
        (name, tokens, heads) for name in ("naive", "sdpa") for tokens in (16, 32) for heads in (2, 4)
    ]
    assert "optim.lr=2e-3" in found[0].overrides and "data.batch_size=8" in found[0].overrides
    assert len({key_of(p.fields) for p in found}) == 8
    assert found[0].fields["model"] == "tiny model.n_embd=32 model.n_layer=1 model.n_head=2"
    slower = points_of(study(*GRID, "optim.lr=1e-3", "sweep.seconds=9"))[0]
    assert key_of(slower.fields) != key_of(points_of(study(*GRID, "optim.lr=2e-3"))[0].fields)
    assert key_of(slower.fields) == key_of(points_of(study(*GRID, "optim.lr=1e-3"))[0].fields)


def test_on_a_gpu_precision_and_compilation_are_on():
    fields = points_of(study(*GRID, "checkpointing=true", "model.window=8"), "cuda")[0].fields
    assert (fields["dtype"], fields["compile"], fields["checkpointing"]) == ("bf16-mixed", True, True)
    assert fields["features"] == "window=8"


def test_the_study_of_a_gpu():
    large = study(tiny=["experiment=seqlen_scaling"])
    found = points_of(
        sweep_points.study_of(["experiment=seqlen_scaling", "sweep.grid.attention=[naive]"]), "cuda"
    )
    sizes = [(p.fields["seq_len"], p.fields["micro_batch"], p.fields["tokens_per_step"]) for p in found]
    assert sizes == [(1024 << i, 64 >> i, 65536) for i in range(7)]
    names = large.grid["attention"]
    assert {"naive", "tiled", "triton", "cuda_fa2", "sdpa", "flash4"} <= set(names) and "auto" not in names


def test_standard_attention_is_a_value_of_the_grid(monkeypatch):
    from conf.compose import build_attention
    from model.costs import memory_loss

    one = sweep_points.study_of(["experiment=encoder_short", "sweep.grid.attention=[standard,triton]"])
    found = points_of(one, "cuda")[:2]
    assert [p.fields["implementation"] for p in found] == ["standard", "triton"]
    attention = build_attention(found[0].cfg)
    q = torch.randn(1, 2, 8, 4)
    same = torch.softmax(q @ q.mT / 2, dim=-1) @ q
    assert attention.name == "standard" and torch.allclose(attention(q, q, q, causal=False), same, atol=1e-6)
    room = Room(GPUS["h200"], 8)
    assert room.needs(found[0]) > 1.5 * room.needs(found[1])  # its scores are there
    # What it took on an H200, when the loss had passes in fp32.
    monkeypatch.setattr(memory_loss, "fused_loss", lambda run: False)
    needed = _needs.__wrapped__(found[0], GPUS["h200"])
    assert needed == pytest.approx(43_885 * 2**20, rel=0.05)


def test_smaller_micro_batches_are_the_powers_of_two_below():
    one = study(*GRID, "tokens_per_step=96")
    asked = sweep_points.point_of(one, Task({"attention": "naive", "seq_len": 16}), "cpu")
    assert asked.fields["micro_batch"] == 6
    found = list(sweep_points.smaller(one, asked, "cpu"))
    assert [p.fields["micro_batch"] for p in found] == [4, 2, 1]
    assert not list(sweep_points.smaller(one, found[-1], "cpu"))


def test_peers_are_at_every_length_as_their_users_run_them(tmp_path):
    model = tmp_path / "model.py"
    model.write_text("")
    one = replace(study(*GRID, "+sweep.grid.compile=[false,true]"), peers=(f"nanogpt={model}",))
    asked = [sweep_points.point_of(one, task, "cuda") for task in sweep_points.tasks(one)]
    said = [(p.fields["implementation"], p.fields["seq_len"], p.fields["compile"]) for p in asked]
    assert said[:2] == [("nanoGPT", 16, True), ("nanoGPT", 32, True)] and len(said) == 2 + 8
    assert [p.peer for p in asked] == [f"nanogpt={model}"] * 2 + [""] * 8
    uncompiled = replace(one, peers=("transformers_eager",))
    first = sweep_points.point_of(uncompiled, sweep_points.tasks(uncompiled)[0], "cuda")
    assert (first.fields["implementation"], first.fields["compile"]) == ("transformers eager", False)


def test_as_many_are_set_up_together_as_have_room():
    """GPT-2 124M, 65,536 tokens in a micro-batch: some 29 GiB each of an H200's 130, naive far more."""
    grid = ("sweep.grid.attention=[sdpa_flash,triton,flex,sdpa_cudnn,sdpa]", "sweep.grid.seq_len=[1024]")
    points = points_of(sweep_points.study_of(["experiment=seqlen_scaling", *grid]), "cuda")
    room = Room(GPUS["h200"], 8)
    assert 25 < room.needs(points[0]) / 2**30 < 33 and not room.is_hopeless(points[0])
    assert [len(group) for group in room.groups(points)] == [4, 1]
    assert [len(group) for group in Room(GPUS["h200"], 2).groups(points)] == [2, 2, 1]
    assert [len(group) for group in Room(None, 3).groups(points)] == [3, 2]
    grid = ("sweep.grid.attention=[naive,triton]", "sweep.grid.seq_len=[16384]")
    naive, triton = points_of(sweep_points.study_of(["experiment=seqlen_scaling", *grid]), "cuda")
    assert room.is_hopeless(naive) and [len(group) for group in room.groups([triton, naive])] == [1, 1]
    peer = replace(naive, task=Task({"seq_len": 16384}, "transformers_sdpa"))
    assert room.needs(triton) < room.needs(peer) < room.needs(naive)


@pytest.mark.parametrize(
    "wrong, needs",
    [
        ("sweep.steps=0", "sweep.steps=0: it needs to be a whole number, at least 1"),
        ("sweep.warm_up=-1", "a whole number, at least 0"),
        ("sweep.micro_tokens=0", "a whole number, at least 1, or null for data.batch_size rows"),
        ("sweep.seconds=null", "a number, at least 0"),
        ("sweep.timeout_s=0", "a number above 0"),
    ],
)
def test_what_no_point_can_be_measured_with_is_refused(wrong, needs):
    with pytest.raises(UserError, match=needs):
        study(*GRID, wrong)
