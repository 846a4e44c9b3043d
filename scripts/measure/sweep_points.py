"""The points of a study: an experiment of conf/experiment with a `sweep` block, whose grid names overrides
with their values, and command-line overrides on top."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from attention import registry
from conf import compose, renames
from conf.compose import CONF, choices_of, one_length
from conf.values import UserError, compiled, number, whole
from scripts.measure.instruments import training_peers
from scripts.measure.rows import choices

# Keys of the config that no figure depends on, and those that a point says under a name of its own.
NOT_MEASURED = ("callbacks", "ckpt", "experiment", "hydra", "logger", "name", "overwrite")
NOT_MEASURED += ("runs_dir", "sweep", "trainer")
STATED = ("seq_len", "tokens_per_step", "precision", "compile", "checkpointing", "seed", "data.batch_size")

Row = dict[str, Any]


@dataclass(frozen=True)
class Study:
    """`overrides` are those of every point; a grid has a list of values for each key."""

    name: str
    overrides: tuple[str, ...]
    grid: dict[str, list[Any]]
    peers: tuple[str, ...]
    micro_tokens: int | None
    warm_up: int
    steps: int
    seconds: float
    timeout_s: float
    piece: int = 0  # tokens in which the loss of the first batch is computed, too


@dataclass(frozen=True)
class Task:
    """What the grid assigns; with `peer`, that in the place of ours (instruments/training_peers.py)."""

    assigned: dict[str, Any]
    peer: str = ""


@dataclass(frozen=True, eq=False)
class Point:
    """A task, the overrides that make its config, that config, and what its row says it is."""

    task: Task
    overrides: tuple[str, ...]
    cfg: Any
    fields: dict[str, Any]

    @property
    def peer(self) -> str:
        return self.task.peer


def composed(overrides: list[str]) -> tuple[Any, dict[str, Any]]:
    """The config as train.py composes it, without Hydra's own part, and the chosen file of each group."""
    cfg, chosen = _composed(tuple(map(renames.override, overrides)))
    return copy.deepcopy(cfg), dict(chosen)


def settings(cfg: Any, chosen: dict[str, Any]) -> dict[str, Any]:
    """What the config says otherwise than conf/ does for the same model and attention, and a row's `point`
    does not say under another name."""
    from omegaconf import OmegaConf

    usual = composed([])[1]
    said = {group: name for group, name in chosen.items() if group not in (*NOT_MEASURED, "experiment")}
    found = {
        group: name
        for group, name in said.items()
        if group not in ("model", "attention") and usual[group] != name
    }
    base = composed([f"{group}={name}" for group, name in said.items()])[0]
    mine, conf = (_leaves(OmegaConf.to_container(each, resolve=False)) for each in (cfg, base))
    for key, value in mine.items():
        top = key.partition(".")[0]
        another = top == "attention" and cfg.attention.name != chosen["attention"]
        if not (another or top in NOT_MEASURED or key in STATED) and conf.get(key, ...) != value:
            found[key] = value
    return found


@functools.cache  # Hydra takes 90 ms, a copy 2
def _composed(overrides: tuple[str, ...]) -> tuple[Any, dict[str, Any]]:
    from omegaconf import OmegaConf

    cfg = compose.composed(overrides, hydra=True)
    chosen = choices_of(cfg.hydra.runtime.choices)
    return OmegaConf.masked_copy(cfg, [key for key in cfg if key != "hydra"]), chosen


def study_of(overrides: list[str]) -> Study:
    """Raises UserError for an experiment that is no study, and for an override that the grid would undo."""
    from omegaconf import OmegaConf

    cfg, chosen = composed(overrides)
    block = OmegaConf.to_container(cfg, resolve=True).get("sweep")
    if block is None:
        studies = ", ".join(
            path.stem
            for path in sorted((CONF / "experiment").glob("*.yaml"))
            if "sweep" in OmegaConf.load(path)
        )
        asked = chosen.get("experiment")
        said = f"experiment={asked} has no sweep block" if asked else "experiment=... has to be given"
        raise UserError(f"{said}: choose one of {studies}.")
    grid = {key: _values(key, value) for key, value in _leaves(block["grid"]).items()}
    for override in overrides:
        key = override.lstrip("+").split("=")[0]
        if key in grid or (key == "data.batch_size" and block["micro_tokens"]):
            instead = f"sweep.grid.{key}=[...]" if key in grid else "sweep.micro_tokens=..., or null"
            raise UserError(f"{override}: the study gives {key} a value at each point; set {instead}.")
    common = tuple(override for override in overrides if not override.lstrip("+").startswith("sweep."))
    rest = {key: block[key] for key in ("micro_tokens", "warm_up", "steps", "seconds", "timeout_s")}
    whole("sweep.micro_tokens", rest["micro_tokens"], 1, null="data.batch_size rows")
    whole("sweep.warm_up", rest["warm_up"], 0)
    whole("sweep.steps", rest["steps"], 1)
    number("sweep.seconds", rest["seconds"], least=0)
    number("sweep.timeout_s", rest["timeout_s"], above=0)
    rest["piece"] = block.get("piece", 0)
    return Study(chosen["experiment"], common, grid, tuple(block["peers"]), **rest)


def _values(key: str, value: Any) -> list[Any]:
    if value == "all":
        return registry.implementations() if key == "attention" else choices(key)
    return value if isinstance(value, list) else [value]


def _leaves(node: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested keys as dotted ones."""
    found: dict[str, Any] = {}
    for key, value in node.items():
        found |= _leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def shown(value: Any) -> str:
    """A value as the command line writes it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def assigned(key: str, value: Any) -> tuple[str, ...]:
    """The overrides that a value of a grid stands for."""
    return (f"{key}={shown(value)}",)


def tasks(study: Study) -> list[Task]:
    """Each peer at each of the other coordinates, compiled or not as it is used; then the grid, grid point
    after grid point, the last key fastest."""
    rest = {key: values for key, values in study.grid.items() if key not in ("attention", "compile")}
    peers = [Task(assigned, peer) for peer in study.peers for assigned in _product(rest)]
    return peers + [Task(assigned) for assigned in _product(study.grid)]


def _product(grid: dict[str, list[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def point_of(study: Study, task: Task, device: str, micro_batch: int | None = None) -> Point:
    """The point of a task on "cuda" or "cpu"; micro_batch: in place of the one that the study asks for."""
    overrides = [*study.overrides, *(word for item in task.assigned.items() for word in assigned(*item))]
    cfg, chosen = composed(overrides)
    whole("seq_len", cfg.seq_len, 1)
    one_length(cfg)
    if micro_batch is None and study.micro_tokens:
        if study.micro_tokens % cfg.seq_len:
            raise UserError(
                f"sweep.micro_tokens={study.micro_tokens} is no multiple of seq_len={cfg.seq_len}: choose "
                "lengths that divide it, or null for a micro-batch of data.batch_size rows."
            )
        micro_batch = study.micro_tokens // cfg.seq_len
    if micro_batch is not None:
        overrides.append(f"data.batch_size={micro_batch}")
        cfg.data.batch_size = micro_batch
    model = " ".join(
        [chosen["model"], *(override for override in overrides if override.startswith("model."))]
    )
    said = fields(study.name, cfg, model, device) | {"settings": settings(cfg, chosen)}
    if task.peer:
        peer, _ = training_peers.chosen(task.peer)
        said |= {"implementation": peer.name, "compile": peer.compiled and device == "cuda"}
    return Point(task, tuple(overrides), cfg, said)


def fields(study: str, cfg: Any, name: str, device: str) -> dict[str, Any]:
    """The `point` of a row, but for its settings."""
    model = cfg.model
    features = [f"{key}={model[key]}" for key in ("window", "softcap", "attn_dropout") if model[key]]
    features += [model["position"]] * (model["position"] in ("alibi", "t5"))
    features += ["documents"] * cfg.data.document_mask
    features += [f"LoRA of rank {cfg.finetune.rank}"] * (cfg.finetune.rank is not None)
    usual = "bf16-mixed" if device == "cuda" else "32-true"
    batch = cfg.data.batch_size
    return {
        "study": study,
        "implementation": cfg.attention.name,
        "pass": "train",
        "model": name,
        "heads": cfg.model.n_head,
        "kv_heads": cfg.model.n_kv_head or cfg.model.n_head,
        "head_dim": cfg.model.head_dim or cfg.model.n_embd // cfg.model.n_head,
        "seq_len": cfg.seq_len,
        "micro_batch": batch,
        "tokens_per_step": cfg.tokens_per_step or batch * cfg.seq_len,
        "causal": cfg.model.causal,
        "features": ", ".join(features),
        "dtype": usual if cfg.precision == "auto" else cfg.precision,
        "compile": compiled(cfg.compile, device, cfg.precision),
        "checkpointing": cfg.checkpointing,
        "seed": cfg.seed,
    }


def smaller(study: Study, asked: Point, device: str) -> Iterator[Point]:
    """The point with ever smaller micro-batches, powers of two: where the one asked for does not fit."""
    batch = asked.fields["micro_batch"]
    power = 1 << ((batch - 1).bit_length() - 1) if batch > 1 else 0
    while power:
        yield point_of(study, asked.task, device, power)
        power //= 2
