"""Every yaml of conf/ composes, says what its keys are, and builds."""

from __future__ import annotations

import copy
import inspect
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from attention.naive import NaiveAttention
from conf import renames
from conf.compose import CONF, build_attention, choices_of, without_nulls
from conf.resume import changes, recompose, refuse_changes, split_ckpt
from conf.saved import admit, plain, portable
from model.costs.flops import parameter_count
from model.gpt import GPT, GPTConfig
from model.training.checks import COUNTS, FROM_ZERO, NULLS, PARTS, SWITCHES, check

FILES = sorted(CONF.rglob("*.yaml"))
CHOICES = [path.relative_to(CONF) for path in FILES if path.parent != CONF]
MODELS = sorted(path.stem for path in (CONF / "model").glob("*.yaml"))
ATTENTIONS = sorted(path.stem for path in (CONF / "attention").glob("*.yaml"))


def composed(*overrides: str) -> Any:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("config", overrides=[*overrides], return_hydra_config=True)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("path", CHOICES, ids=str)
def test_composes_and_passes_the_checks(path: Path) -> None:
    extra = ["data.path=book.txt"] if path.stem in ("text", "chat") else []
    cfg = composed(f"{path.parent}={path.stem}", *extra)
    assert choices_of(cfg.hydra.runtime.choices)[str(path.parent)] == path.stem
    ours = OmegaConf.masked_copy(cfg, [key for key in cfg if key != "hydra"])
    check(OmegaConf.to_container(ours, resolve=True), None, {})


def test_the_checks_know_only_keys_that_are_there() -> None:
    """A key that was renamed would be checked no more."""
    schedules = [composed(f"schedule={path.stem}") for path in (CONF / "schedule").glob("*.yaml")]
    for keys in (COUNTS, FROM_ZERO, PARTS, SWITCHES, *NULLS):
        for key in keys.split():
            assert any(OmegaConf.select(cfg, key, default=...) is not ... for cfg in schedules), key


def test_only_the_text_has_to_be_given() -> None:
    def missing(*overrides: str) -> set[str]:
        return {key for key in OmegaConf.missing_keys(composed(*overrides)) if not key.startswith("hydra.")}

    assert missing() == set() and missing("data=text") == {"data.path"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(CONF)))
def test_every_key_is_explained(path: Path) -> None:
    """A comment on the line of a value or right above it, here or in the file that this one overrides."""
    text = path.read_text(encoding="utf-8").split("\nhydra:")[0]
    if path.parent.name in ("experiment", "model") and path.stem != "gpt2":
        assert "#" in "".join(line for line in text.splitlines()[:2] if "@package" not in line)
        return
    inherits = {"data": CONF / "data_defaults.yaml", "trainer": CONF / "trainer" / "default.yaml"}
    parent = inherits.get(path.parent.name)
    known = explained(parent.read_text())[0] if parent else set()
    hydras = {"_target_", "_partial_", "_convert_", "defaults"}
    with_comment, without = explained(text)
    assert without - with_comment - known - hydras == set()


def explained(text: str) -> tuple[set[str], set[str]]:
    """The keys with a comment, and those without; of a block, its first line is meant."""
    found: tuple[set[str], set[str]] = (set(), set())
    for above, line in itertools.pairwise(["", *text.splitlines()]):
        key, colon, value = (part.strip() for part in line.partition(":"))
        if colon and value and not key.startswith(("#", "-")):
            found["#" not in line and not above.strip().startswith("#")].add(key)
        elif colon and not key.startswith(("#", "-")):
            found[0].add(key)
    return found


@pytest.mark.parametrize("name", MODELS)
def test_models_build(name: str) -> None:
    values = OmegaConf.to_container(composed(f"model={name}").model)
    config = GPTConfig(vocab_size=2048, seq_len=256, **values)
    with torch.device("meta"):
        net = GPT(config, NaiveAttention())
    assert sum(p.numel() for p in net.parameters()) == sum(parameter_count(config).values())


def test_model_yaml_has_every_field_with_its_default() -> None:
    """So that model.<key>=... works for all of them, and conf/model/gpt2.yaml is the documentation."""
    given = yaml.safe_load((CONF / "model" / "gpt2.yaml").read_text())
    fields = {name: field.default for name, field in inspect.signature(GPTConfig).parameters.items()}
    assert given == {k: v for k, v in fields.items() if k not in ("vocab_size", "seq_len")}


@pytest.mark.parametrize("name", ATTENTIONS)
def test_attentions_are_registered_under_their_own_name(name: str) -> None:
    assert OmegaConf.load(CONF / "attention" / f"{name}.yaml").name == name
    try:
        attention = build_attention(composed(f"attention={name}"))
    except ImportError as error:
        pytest.skip(f"{name} needs a library: {error}")
    assert attention.name == name and not list(attention.parameters()) and not list(attention.buffers())


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(CONF)))
def test_targets_exist(path: Path) -> None:
    from hydra.utils import get_object

    def targets(value: Any) -> list[str]:
        if not isinstance(value, dict):
            return []
        own = [value["_target_"]] if "_target_" in value else []
        return own + [t for part in value.values() for t in targets(part)]

    for target in targets(yaml.safe_load(path.read_text(encoding="utf-8"))):
        assert callable(get_object(target))


def test_a_saved_config_comes_back_the_same() -> None:
    cfg = composed(
        "attention=tiled", "model=llama_tiny", "seq_len=64", "optim.lr=3e-4", "experiment=seqlen_scaling_tiny"
    )
    choices = choices_of(cfg.hydra.runtime.choices)
    cfg = OmegaConf.masked_copy(cfg, [key for key in cfg if key != "hydra"])
    written = header(cfg, choices)
    assert "_target_" not in str(written)
    saved = admit(written, [])
    again, same = recompose(saved, [])
    assert OmegaConf.to_container(again) == OmegaConf.to_container(cfg) and same == choices

    other, choices = recompose(
        saved, ["attention=naive", "optim.lr=1", "trainer.max_steps=7", "model.dropout=0.1"]
    )
    refuse_changes(saved, choices, other)
    assert (other.attention._target_, other.attention.name) == ("attention.naive.NaiveAttention", "naive")
    assert choices["attention"] == "naive" and choices["model"] == "llama_tiny"
    assert (other.optim.lr, other.trainer.max_steps, other.model.dropout, other.seq_len) == (1, 7, 0.1, 64)
    assert other.sweep.warm_up == 2 and "block_q" not in other.attention

    older = replace(saved, config=copy.deepcopy(saved.config))
    del older.config["model"]["sparsity"]  # an option that came after the checkpoint
    refuse_changes(older, same, recompose(older, [])[0])
    with pytest.raises(ValueError, match=r"model.sparsity \(there null, asked local\)"):
        refuse_changes(older, same, recompose(older, ["model.sparsity=local"])[0])

    changed, choices = recompose(saved, ["seed=5", "model.n_layer=9", "data=synthetic"])
    with pytest.raises(ValueError, match=r"another data \(there stdlib, asked synthetic\)"):
        refuse_changes(saved, choices, changed)
    changed, choices = recompose(saved, ["seed=5", "model.n_layer=9"])
    with pytest.raises(ValueError, match=r"model.n_layer \(there 2, asked 9\), seed \(there 1337, asked 5\)"):
        refuse_changes(saved, choices, changed)


def saved_run(*overrides: str) -> dict[str, Any]:
    """The entries of a checkpoint that a new run with these overrides writes."""
    cfg = composed(*overrides)
    choices = choices_of(cfg.hydra.runtime.choices)
    cfg = OmegaConf.masked_copy(cfg, [key for key in cfg if key != "hydra"])
    return header(cfg, choices)


def header(cfg: Any, choices: dict[str, Any]) -> dict[str, Any]:
    model = vars(GPTConfig(vocab_size=1, seq_len=cfg.seq_len, **cfg.model))
    return {"choices": choices, "config": portable(cfg, choices), "model": model}


def resumed(saved: dict[str, Any], *overrides: str) -> tuple[Any, Any]:
    return recompose(admit(saved, [*overrides]), [*overrides])


def test_another_file_of_a_group_leaves_what_was_set_by_hand() -> None:
    saved = saved_run(
        "experiment=quickstart", "attention=naive", "attention.decode=tiled", "trainer.max_steps=6",
        "trainer.limit_val_batches=3", "schedule.min_factor=0.5", "callbacks.samples=null",
    )  # fmt: skip
    same, _ = resumed(saved, "trainer=default", "callbacks=default")
    assert plain(same) == saved["config"]
    cfg, choices = resumed(saved, "trainer=ddp", "attention=tiled", "schedule=wsd", "trainer.max_steps=9")
    assert (cfg.trainer.max_steps, cfg.trainer.val_check_interval, cfg.trainer.limit_val_batches) == (
        9,
        300,
        3,
    )
    assert cfg.trainer.devices == "auto" and cfg.trainer.strategy._target_.endswith("ReplicaStrategy")
    assert (cfg.attention.name, cfg.attention.block_q, cfg.attention.decode) == ("tiled", 128, "tiled")
    # both files warm up alike, and end elsewhere
    assert (cfg.schedule.warmup_steps, cfg.schedule.min_factor, "decay_steps" in cfg.schedule) == (
        50,
        0.0,
        False,
    )
    back, _ = resumed(header(cfg, choices), "trainer=default", "attention=naive")
    assert (back.trainer.strategy, back.trainer.max_steps) == ("auto", 9) and "block_q" not in back.attention


def test_of_a_file_that_is_gone_nothing_is_kept() -> None:
    saved = saved_run("attention=tiled")
    saved["choices"]["attention"] = saved["config"]["attention"]["name"] = "removed"
    cfg, _ = resumed(saved, "attention=naive")
    assert plain(cfg)["attention"] == {"name": "naive", "decode": None}


ADDED = ("+callbacks.es._target_=x.Stop", "+callbacks.es.monitor=val/loss")


def test_an_addition_given_again_as_it_was_is_taken() -> None:
    saved = saved_run(*ADDED)
    with pytest.raises(ValueError, match=r"callbacks\.es beside the keys of conf/"):
        resumed(saved)
    cfg, _ = resumed(saved, *ADDED)
    assert OmegaConf.to_container(cfg.callbacks.es) == {"_target_": "x.Stop", "monitor": "val/loss"}


@pytest.mark.parametrize("typed", [["data._target_=x.y"], ["data.corpus.dataset=x"], ADDED, []])
def test_what_generating_does_not_read_is_passed_over(typed: list[str]) -> None:
    data = ["data=tinystories"] if "dataset" in str(typed) else []
    saved = saved_run("attention=tiled", "attention.block_q=64", "attention.decode=naive", *data, *typed)
    saved["choices"]["experiment"] = None if typed else "renamed"
    with pytest.raises(ValueError, match="The checkpoint's c"):
        admit(saved, [])
    cfg, _ = recompose(admit(saved, [], lenient=True), [])
    assert (cfg.attention.name, cfg.attention.block_q, cfg.attention.decode) == ("tiled", 64, "naive")
    saved["config"]["attention"]["_target_"] = "os.mkdir"
    with pytest.raises(ValueError, match=r"attention\._target_ other than conf/ has it"):
        admit(saved, [], lenient=True)


def falling(step: int, max_steps: int, **_: Any) -> float:
    return 1 - step / max_steps


TARGETS = ["optim._target_=torch.optim.Adam", "schedule._target_=tests.test_configs.falling"]


@pytest.mark.parametrize("given", [[], TARGETS[:1]])
def test_code_in_the_place_of_conf_s_has_to_be_given_again(given: list[str]) -> None:
    key = "schedule" if given else "optim"
    with pytest.raises(ValueError, match=rf"{key}\._target_ other .* give it again: {key}\._target_=\.\.\."):
        resumed(saved_run(*TARGETS), *given)


@pytest.mark.parametrize(
    ("schedule", "said"),
    [
        ("tests.test_configs.falling", ["learning rate at step 20: 0.0006 as saved -> 0.0008"]),
        # what the file alone names is not called, so that its learning rate is not known
        (
            "model.training.schedules.cosine",
            ["schedule._target_: tests.test_configs.falling -> model.training.schedules.cosine"],
        ),
    ],
)
def test_code_that_is_given_again_counts(schedule: str, said: list[str]) -> None:
    again = [TARGETS[0], f"schedule._target_={schedule}", "trainer.max_steps=100"]
    saved = admit(saved_run(*TARGETS, "trainer.max_steps=50"), again)
    assert "_target_" not in str(saved.config)
    cfg, choices = recompose(saved, again)
    refuse_changes(saved, choices, cfg)
    assert (cfg.schedule._target_, cfg.optim._target_) == (schedule, "torch.optim.Adam")
    changed = "trainer.max_steps: 50 -> 100"
    assert sorted(changes(saved, again, cfg, choices, 20)) == sorted([changed, *said])
    same = [*TARGETS, "trainer.max_steps=50"]
    assert changes(saved, same, recompose(saved, same)[0], choices, 20) == []


def test_a_file_chosen_anew_has_its_own_code() -> None:
    typed = ["schedule=cosine", "optim=adamw"]
    saved = admit(saved_run(*TARGETS), typed)
    cfg, choices = recompose(saved, typed)
    refuse_changes(saved, choices, cfg)
    assert set(changes(saved, typed, cfg, choices, 20)) == {
        "schedule._target_: tests.test_configs.falling -> model.training.schedules.cosine",
        "optim._target_: torch.optim.Adam -> torch.optim.AdamW",
    }


def test_what_stands_where_keys_are_given_is_refused_in_words() -> None:
    saved = saved_run()
    saved["config"]["data"]["corpus"] = "x"
    typed = ["data.corpus.val_fraction=0.1"]
    admitted = admit(saved, typed)
    cfg, choices = recompose(admitted, typed)
    with pytest.raises(ValueError, match=r"another data\.corpus \(there x, asked {"):
        refuse_changes(admitted, choices, cfg)


def test_code_that_is_new_is_said() -> None:
    saved = admit(saved_run(), [])
    cfg, choices = recompose(saved, TARGETS[:1])
    assert changes(saved, TARGETS[:1], cfg, choices, 20) == [
        "optim._target_: torch.optim.AdamW -> torch.optim.Adam"
    ]


@pytest.mark.parametrize(
    ("typed", "other"),
    [
        (["data=fineweb_edu", "data.corpus.config=sample-100BT"], "data.corpus.config=sample-10BT"),
        (["data=openwebtext", "data.corpus.dataset=me/mine"], "data.corpus.dataset=you/yours"),
        (["data=shakespeare", "data.corpus.revision=abc"], "data.corpus.revision=null"),
    ],
)
def test_a_data_set_of_one_s_own_is_taken_where_it_is_given_again(typed: list[str], other: str) -> None:
    saved, again = admit(saved_run(*typed), typed[1:]), typed[1:]
    cfg, choices = recompose(saved, again)
    refuse_changes(saved, choices, cfg)
    key, _, value = typed[1].partition("=")
    assert OmegaConf.select(cfg, key) == value and changes(saved, again, cfg, choices, 1) == []
    cfg, choices = recompose(saved, [other])
    with pytest.raises(
        ValueError, match=rf"another {key} \(there {value}, asked {other.partition('=')[2]}\)"
    ):
        refuse_changes(saved, choices, cfg)


@pytest.mark.parametrize("again", [[], ["data.tokenizer=char"], ["data.tokenizer.kind=char"]])
def test_a_tokenizer_given_by_its_kind_alone_resumes(again: list[str]) -> None:
    saved = admit(saved_run("data=tinystories", "data.tokenizer=char"), again)
    cfg, choices = recompose(saved, again)
    refuse_changes(saved, choices, cfg)
    assert cfg.data.tokenizer == {"kind": "char", "vocab_size": 2048, "sample_mb": 16, "path": None}
    assert changes(saved, again, cfg, choices, 1) == []
    cfg, choices = recompose(saved, ["data.tokenizer=byte"])
    with pytest.raises(ValueError, match=r"data\.tokenizer\.kind \(there char, asked byte\)"):
        refuse_changes(saved, choices, cfg)


def test_names_are_text() -> None:
    typed = ["name=1e3", "+name=true,b", "name=1", "name=null", "optim.lr=1e3", 'name="1e3"']
    assert without_nulls(typed) == ['name="1e3"', '+name="true",b', *typed[2:]]
    assert composed(*without_nulls(["runs_dir=2025_11"])).runs_dir == "2025_11"
    assert composed(*without_nulls(["name=1e3", "init_from=1.50"])).name == "1e3"
    assert split_ckpt(["ckpt=1e3", "name=2e3"]) == ("1e3", ['name="2e3"'])


def test_a_recipe_is_for_new_runs() -> None:
    with pytest.raises(ValueError, match=r"experiment=quickstart cannot go with ckpt=: .*a whole recipe"):
        resumed(saved_run(), "experiment=quickstart")


def test_a_renamed_key_is_taken_from_checkpoints_and_command_lines_with_a_notice(monkeypatch, capsys) -> None:
    saved = saved_run("optim.lr=0.25", "model.norm=rmsnorm")
    saved["config"]["optim"]["learning_rate"] = saved["config"]["optim"].pop("lr")
    saved["model"]["norms"] = saved["model"].pop("norm")
    saved["config"]["model"]["norms"] = saved["config"]["model"].pop("norm")
    with pytest.raises(TypeError, match="norms"):
        resumed(saved)
    monkeypatch.setattr(renames, "RENAMED", {"optim.learning_rate": "optim.lr", "model.norms": "model.norm"})
    cfg, _ = resumed(saved)
    assert (cfg.optim.lr, cfg.model.norm) == (0.25, "rmsnorm")
    assert sorted(capsys.readouterr().err.splitlines()) == [
        "note: the checkpoint's config has model.norms, which is now called model.norm.",
        "note: the checkpoint's config has optim.learning_rate, which is now called optim.lr.",
    ]
    assert without_nulls(["optim.learning_rate=1", "logger=null"]) == ["optim.lr=1", "~logger"]
    assert split_ckpt(["ckpt=a", "model.norms=layernorm"]) == ("a", ["model.norm=layernorm"])
    said = capsys.readouterr().err
    assert "note: the command line has model.norms, which is now called model.norm." in said
