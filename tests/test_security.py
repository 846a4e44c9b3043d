"""A checkpoint from somebody else: nothing of it runs, is resolved or looked up; it is refused in one line.

Watched is what an attack would have to pass: Hydra's look-up of a `_target_`, OmegaConf's interpolations, the
system. It may be asked what an honest checkpoint asks it, and nothing else.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from conf import saved
from conf.resume import recompose, refuse_changes
from conf.saved import admit
from conf.trained import load_model
from model.training.checkpoint import read_checkpoint, read_header, write_checkpoint
from tests.attacks import ATTACKS, CALL, CHOICE, FILE, STRINGS, Content, drop, nodes, put, targets, watched
from tests.running import train_here


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which run `a` has been trained."""
    folder = tmp_path_factory.mktemp("run")
    assert train_here(folder, "name=a", "trainer.max_steps=3").code == 0
    (folder / "evil.yaml").write_text("_target_: os.mkdir\npath: owned\nname: evil\n")
    return folder


@pytest.fixture(scope="module")
def honest(run: Path) -> Content:
    return read_checkpoint(run / "runs/a/checkpoints/step-00000003.ckpt")


@pytest.fixture(scope="module", autouse=True)
def composed_once() -> Iterator[None]:
    """Thousands of configs have a few sets of choices among them."""
    known: dict[tuple[str, ...], Any] = {}

    def again(overrides: list[str]) -> Any:
        known[key] = known.get(key := tuple(overrides)) or COMPOSED(overrides)
        return copy.deepcopy(known[key])

    with mock.patch("conf.saved.composed", again), mock.patch("conf.resume.composed", again):
        yield


@pytest.fixture(scope="module")
def usual(run: Path) -> set[str]:
    """What an honest checkpoint has looked up and resolved."""
    with watched() as seen:
        COMPOSED(["attention=naive"])  # Hydra resolves what is its own
        take(run / "runs/a/checkpoints/step-00000003.ckpt")
        load_model(str(run / "runs/a/checkpoints/step-00000003.ckpt"), [])
    return seen


@pytest.fixture(scope="module")
def generating(run: Path) -> Any:
    """The config that an honest checkpoint generates by."""
    return load_model(str(run / "runs/a/checkpoints/step-00000003.ckpt"), [])[2]


COMPOSED = saved.composed


def take(path: Path) -> None:
    """What train.py and the scripts read of a checkpoint before anything of it is used."""
    header, _ = read_header(path)
    admitted = admit(header, [])
    cfg, choices = recompose(admitted, [])
    refuse_changes(admitted, choices, cfg)
    OmegaConf.to_container(cfg, resolve=True)


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_is_refused_in_one_line(
    attack: str, honest: Content, usual: set[str], generating: Any, tmp_path: Path
) -> None:
    change, words = ATTACKS[attack]
    content = copy.deepcopy({key: value for key, value in honest.items() if key != "optimizer_states"})
    content["optimizer_states"] = []
    change(content)
    write_checkpoint(content, tmp_path / "evil.ckpt")
    reads: list[Callable[[Path], Any]] = [take, lambda path: load_model(str(path), [])]
    if words in (FILE, CHOICE) and attention_of(content) == attention_of(honest):
        with watched() as seen:  # nothing but attention is read to generate
            assert reads.pop()(tmp_path / "evil.ckpt")[2] == generating
        assert seen <= usual
    for read in reads:
        with watched() as seen, pytest.raises(ValueError, match=words) as caught:
            read(tmp_path / "evil.ckpt")
        assert str(caught.value).isprintable() and len(str(caught.value)) < 600
        assert seen <= usual


def attention_of(content: Content) -> list[Any]:
    return [content["tilegpt"][part].get("attention") for part in ("choices", "config")]


def test_entries_beside_a_checkpoint_s_own_are_passed_over(
    honest: Content, usual: set[str], run: Path
) -> None:
    """Lightning's callbacks add some, and read them again; nothing else does."""
    added = {
        "hyper_parameters": {"_class_path": "os.mkdir", "path": "owned"},
        "hparams_name": "kwargs",
        "averaging_state": {"n_averaged": torch.tensor(1)},
        "MixedPrecision": {"scale": 1.0},
    }
    write_checkpoint({**honest, **added}, run / "more.ckpt")
    assert read_checkpoint(run / "more.ckpt").keys() == honest.keys() | added.keys()
    with watched() as seen:
        take(run / "more.ckpt")
    assert seen <= usual
    result = train_here(run, "ckpt=more.ckpt", "name=more", "trainer.max_steps=4", tiny=False)
    assert (result.code, result.err) == (0, "") and not (run / "owned").exists()
    saved = read_checkpoint(run / "runs/more/checkpoints/step-00000004.ckpt")
    assert saved.keys() == honest.keys()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ATTACKS["an interpolation under a new key"],
        ATTACKS["another override as a choice"],
        ATTACKS["a path to a yaml to decode with"],
        (drop("state_dict/net.lm_head.weight"), "its weights lack net.lm_head.weight, which"),
        (
            put("optimizer_states/0/param_groups/0/maximize", True),
            "optim.maximize is another than the checkpoint's",
        ),
    ],
)
def test_train_says_it_in_one_line(
    change: Callable[[Content], None], words: str, honest: Content, run: Path
) -> None:
    content = copy.deepcopy(honest)
    change(content)
    write_checkpoint(content, run / "evil.ckpt")
    before = sorted(run.rglob("*"))
    result = train_here(run, "ckpt=evil.ckpt", "trainer.max_steps=4", tiny=False)
    assert result.code == 1 and words in result.err
    assert result.err.startswith("error: ") and result.err.count("\n") == 1
    assert sorted(run.rglob("*")) == before


def test_what_the_command_line_adds_has_to_be_given_again(tmp_path: Path, run: Path) -> None:
    (tmp_path / "book.txt").write_bytes((run / "book.txt").read_bytes())
    typed = (
        "+trainer.benchmark=true",
        "data.eval_batch_size=${data.batch_size}",
        "optim.lr=${oc.decode:'1e-3'}",
    )
    assert train_here(tmp_path, "name=a", "trainer.max_steps=2", *typed).code == 0
    header, _ = read_header(tmp_path / "runs/a/checkpoints/step-00000002.ckpt")
    assert header["config"]["optim"]["lr"] == 1e-3 and header["config"]["data"]["eval_batch_size"] == 4
    assert header["config"]["data"]["seq_len"] == "${seq_len}"
    result = train_here(tmp_path, "ckpt=a", "trainer.max_steps=3", tiny=False)
    assert result.code == 1 and result.err.count("\n") == 1
    assert "trainer.benchmark beside the keys of conf/" in result.err
    assert "give it again: +trainer.benchmark=..., or ~trainer.benchmark to go on without" in result.err
    for steps, again in ((3, "+trainer.benchmark=true"), (4, "~trainer.benchmark")):
        result = train_here(tmp_path, "ckpt=a", f"trainer.max_steps={steps}", again, tiny=False)
        assert (result.code, result.err) == (0, "")
        assert load_model(str(tmp_path / "runs/a/checkpoints/best.ckpt"), [])[0].config.n_layer == 2
    header["config"]["optim"]["lr"] = "${oc.env:LR}"  # as it was saved once
    with pytest.raises(ValueError, match=r"optim\.lr as an interpolation .* give it again: optim\.lr=\.\.\."):
        admit(header, ["+trainer.benchmark=true"])
    again = ["+trainer.benchmark=true", "optim.lr=2"]
    assert recompose(admit(header, again), again)[0].optim.lr == 2


# Trees for the config and the choices of a file: keys and values as conf/ has them, and as an attack would.
NAMES = st.one_of(
    st.sampled_from(
        ["_target_", "_args_", "_partial_", "_recursive_", "defaults", "hydra", "evil", "attention"]
    ),
    st.sampled_from(
        ["optim.lr", "+attention.evil", "hydra/launcher", "attention@trainer", "lr", "name", *STRINGS]
    ),
    st.text(max_size=8),
    st.integers(),
)
SCALARS = st.one_of(
    st.sampled_from([*STRINGS, CALL, "os.mkdir", "builtins.eval", "../../evil", "naive,tiled", 2**64]),
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8),
)  # fmt: skip
TREES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(NAMES, inner, max_size=3)),
    max_leaves=8,
)
GROUPS = sorted(path.name for path in saved.CONF.iterdir() if any(path.glob("*.yaml")))
# (where among the nodes that there are, beside or instead of one of its values, what)
PLAIN = st.tuples(
    st.integers(0, 99), st.integers(0, 99), st.integers(-9, 9) | st.booleans() | st.floats(0, 1)
)
CHANGES = st.lists(PLAIN, min_size=1, max_size=3) | st.lists(
    st.tuples(st.integers(0, 99), NAMES | st.integers(0, 99), TREES), min_size=1, max_size=3
)
CHOICES = st.just({}) | st.dictionaries(
    st.sampled_from(GROUPS) | NAMES,
    st.sampled_from(["naive", "default", "gpt2", "wsd", "ddp", "quickstart", "wandb", "text"]) | SCALARS,
    max_size=2,
)


@pytest.mark.parametrize(
    "count", [60, pytest.param(300, marks=pytest.mark.long), pytest.param(10_000, marks=pytest.mark.slow)]
)
def test_generated_configs(count: int, honest: Content, usual: set[str]) -> None:
    """Of whatever tree: it is refused in one line; or else what Hydra would make is what conf/ names for its
    choices, and no text that came with it is an interpolation but conf/'s own."""
    header, taken = honest["tilegpt"], 0

    # the same examples each time where they are few: how many of them are harmless is counted below
    again = {"derandomize": count <= 300, "database": None}

    @settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck), **again)
    @given(CHANGES, CHOICES)
    def try_one(changes: list, choices: dict) -> None:
        nonlocal taken
        config = copy.deepcopy(header["config"])
        for where, name, value in changes:
            node = (found := list(nodes(config)))[where % len(found)]
            if type(name) is int and node:  # one that is there
                name = list(node)[name % len(node)]
            node[name] = value
        evil = {**header, "choices": {**header["choices"], **choices}, "config": config}
        taken += try_reading(evil, lenient=False)
        try_reading(evil, lenient=True)

    def try_reading(evil: Content, lenient: bool) -> bool:
        try:
            admitted = admit(evil, [], lenient)
        except ValueError as error:
            assert str(error).isprintable() and len(str(error)) < 600
            return False
        cfg, chosen = recompose(admitted, [])
        assert set(chosen) <= set(GROUPS)
        names = {group: name for group, name in admitted.choices.items() if group != "experiment"}
        own = saved.composed(saved.as_overrides(names))
        assert targets(OmegaConf.to_container(cfg)) <= targets(OmegaConf.to_container(own))
        OmegaConf.to_container(cfg, resolve=True)
        return True

    with watched() as seen:
        try_one()
    assert taken > count / 20  # plain values under known keys are no attack
    conf = {text for path in saved.CONF.rglob("*.yaml") for text in path.read_text().split() if "${" in text}
    odd = {text for text in seen - usual if not any(text.endswith(own) for own in conf)}
    assert odd == set()
