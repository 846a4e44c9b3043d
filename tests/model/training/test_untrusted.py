"""What a checkpoint would restore fits the run, or is refused in one line before Lightning has it."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from conf.values import UserError
from model.training.checkpoint import read_checkpoint
from model.training.untrusted import require_run
from tests.attacks import Content, drop, put
from tests.running import train_here


def weight(value: Any) -> Callable[[Content], None]:
    return put("state_dict/net.transformer.wpe.weight", value)


def optimizer(path: str, value: Any) -> Callable[[Content], None]:
    return put(f"optimizer_states/0/{path}", value)


# What Lightning would hand to the model, the optimiser, its loops, the data and the callbacks.
RESTORED: dict[str, tuple[Callable[[Content], None], str]] = {
    "an attribute for a method": (put("loops/fit_loop/epoch_progress/reset", 5), "epoch_progress has reset"),
    "a state for the loader": (put("loops/fit_loop/state_dict/combined_loader", []), "has combined_loader"),
    "loops of another kind": (put("loops/fit_loop", []), "loops.fit_loop is a list"),
    "a progress in words": (put("loops/fit_loop/epoch_progress/total/ready", "1"), "ready is a str"),
    "no loops": (drop("loops/fit_loop"), "loops lacks fit_loop"),
    "a missing weight": (drop("state_dict/net.lm_head.weight"), "its weights lack net.lm_head.weight, which"),
    "a weight too many": (put("state_dict/net.x", torch.ones(1)), r"its weights have net\.x, not as"),
    "a weight of another shape": (
        weight(torch.ones(8, 32)),
        r"wpe\.weight has the shape \(8, 32\), and \(16, 32\) is needed",
    ),
    "a weight of integers": (weight(torch.ones(16, 32).int()), "no tensor of"),
    "a weight that is a word": (weight("x"), "no tensor of floating"),
    "a moment of another shape": (optimizer("state/0/exp_avg", torch.ones(())), "exp_avg of parameter 0"),
    "a missing moment": (drop("optimizer_states/0/state/0/exp_avg"), "state.0 lacks exp_avg"),
    "a moment of its own": (optimizer("state/0/hook", torch.ones(1)), "state.0 has hook"),
    "no moments": (optimizer("state", {}), "does not have the state of"),
    "another parameter's moments": (optimizer("param_groups/0/params", [0]), "is not one of"),
    "groups that are none": (optimizer("param_groups", [1]), "no list of groups"),
    "a setting that is none": (optimizer("param_groups/0/lr", torch.ones(2)), "more than plain"),
    "two optimisers": (put("optimizer_states", [{}, {}]), "state of 2 optimisers"),
    "a result in words": (put("callbacks/Checkpoints/best", "low"), "Checkpoints.best is a str"),
    "a path as a step": (put("callbacks/Checkpoints/best_step", "../../x"), "Checkpoints.best_step is a str"),
    "an attribute of a callback": (put("callbacks/Checkpoints/folder", "/"), "Checkpoints has folder"),
    "a callback in words": (put("callbacks/Checkpoints", "x"), "Checkpoints is a str"),
    "samples before the first": (put("TokenDataModule/consumed", -1), "consumed is -1"),
    "samples in words": (put("TokenDataModule/consumed", "1"), "consumed is a str"),
    "no samples": (drop("TokenDataModule/consumed"), "TokenDataModule lacks consumed"),
    "an attribute of the data": (put("TokenDataModule/corpus", "x"), "TokenDataModule has corpus"),
}  # fmt: skip


@pytest.fixture(scope="module")
def restoring(tmp_path_factory: pytest.TempPathFactory) -> tuple[Content, Any]:
    """A checkpoint, and the model that it is about to be restored into, a trainer around it."""
    from model.training.lit_gpt import LitGPT

    found = []

    def stop(self: LitGPT, checkpoint: Content) -> None:
        found.append(self)
        raise UserError("far enough")

    run = tmp_path_factory.mktemp("run")
    assert train_here(run, "name=a", "trainer.max_steps=3").code == 0
    with mock.patch.object(LitGPT, "on_load_checkpoint", stop):
        assert "far enough" in train_here(run, "ckpt=a", "trainer.max_steps=4", tiny=False).err
    return read_checkpoint(run / "runs/a/checkpoints/step-00000003.ckpt"), found[0]


@pytest.mark.parametrize("attack", RESTORED)
def test_what_does_not_fit_the_run_is_refused(attack: str, restoring: tuple[Content, Any]) -> None:
    (change, words), (honest, lit) = RESTORED[attack], restoring
    content = copy.deepcopy(honest)
    require_run(content, lit)
    change(content)
    with pytest.raises(ValueError, match=words) as caught:
        require_run(content, lit)
    assert str(caught.value).isprintable()


def test_attributes_of_a_dictionary_are_left_behind(restoring: tuple[Content, Any], tmp_path: Path) -> None:
    """`values` of an OrderedDict in a file can be a number."""
    content = {**restoring[0], "state_dict": OrderedDict(restoring[0]["state_dict"])}
    vars(content["state_dict"]).update(values=5, keys=5, _metadata=5)
    torch.save(content, tmp_path / "evil.ckpt")
    assert vars(torch.load(tmp_path / "evil.ckpt", weights_only=True)["state_dict"])["values"] == 5
    assert vars(read_checkpoint(tmp_path / "evil.ckpt")["state_dict"]) == {}


def test_what_libraries_allow_beside_tensors_is_not_made(tmp_path: Path) -> None:
    """torch.distributed allows its DTensor and DeviceMesh, whose making talks to a network."""
    from torch.distributed.tensor import Replicate

    torch.save({"tilegpt": Replicate()}, tmp_path / "evil.ckpt")
    assert torch.load(tmp_path / "evil.ckpt", weights_only=True)["tilegpt"] == Replicate()
    with pytest.raises(ValueError, match="could run code: refused"):
        read_checkpoint(tmp_path / "evil.ckpt")
    assert torch.load(tmp_path / "evil.ckpt", weights_only=True)["tilegpt"] == Replicate()
