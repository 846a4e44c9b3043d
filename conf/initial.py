"""Where a new run starts from: init_from, a pretrained model or a run of ours, taken over into the config.

All of it is read and checked before the run has a folder. The architecture then is the config's `model`, and
the tokenizer lies in the run's folder, so that the run resumes without what it started from.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from conf.resume import FREE
from conf.saved import parse
from conf.values import UserError, is_first
from model.config import GPTConfig

if TYPE_CHECKING:
    from data.tokenizer_base import Tokenizer
    from model.gpt import GPT
    from model.lora import Adapters

# What a new run may set of a model that it takes over: no weight depends on it. max_positions goes beyond the
# trained context.
OWN = {key for key in FREE if key.startswith("model.")} | {"model.max_positions"}
TOKENIZER = "tokenizer.json"
NAMING = ("data.tokenizer", "data.tokenizer.kind", "data.tokenizer.path")  # keys that name another tokenizer


@dataclass(frozen=True)
class Initial:
    """What a run starts from: the fields of its `GPTConfig` but for seq_len, its tokenizer as a dictionary
    (None: there is none), what copies its weights into a model, and the data.mask_fraction that it was
    trained with, whose mask is the last token of its vocabulary."""

    given: str
    fields: dict[str, Any]
    tokenizer: dict[str, Any] | None
    copy: Callable[[GPT], None]
    mask_fraction: float | None = None

    @property
    def name(self) -> str:
        """What a run that starts from it is called first."""
        return Path(self.given.removesuffix("/best").removesuffix(".ckpt")).name

    def load_into(self, net: GPT, data: DictConfig, tokenizer: Tokenizer | None) -> None:
        """UserError where `data` has another vocabulary; tokenizer: that of the data."""
        own, there = self.fields["vocab_size"], net.config.vocab_size
        if own != there:
            raise UserError(
                f"init_from={self.given} has a vocabulary of {own} tokens, and the data {there}: "
                f"{self._remedy(data)}."
            )
        self._require_same_tokens(tokenizer)
        self.copy(net)

    def _require_same_tokens(self, tokenizer: Tokenizer | None) -> None:
        """UserError where a token of the data is another than the weights have been trained with."""
        if tokenizer is None or self.tokenizer is None or tokenizer.to_dict() == self.tokenizer:
            return
        from data.storage import Unfinished
        from data.tokenizer_export import vocabulary
        from data.tokenizers import tokenizer_from_dict
        from model.training.runtime import say

        try:
            same = vocabulary(tokenizer) == vocabulary(tokenizer_from_dict(self.tokenizer))
        except Unfinished:  # GPT-2's, which is not there
            say("tokenizer  that of the data could not be compared with the one of init_from")
            return
        if not same:
            raise UserError(
                f"init_from={self.given} was trained with another tokenizer than the data has, if of as many "
                "tokens: leave data.tokenizer out, which it brings along."
            )

    def _remedy(self, data: DictConfig) -> str:
        asked = data.get("mask_fraction")
        if asked is not None and self.mask_fraction is None:
            return (
                f"data.mask_fraction={asked} adds a mask token, which it was not trained with; leave that out"
            )
        if asked is None and self.mask_fraction is not None:
            return f"one is the mask of data.mask_fraction={self.mask_fraction}, which it needs; set that"
        if "vocab_size" in (data.get("corpus") or {}):
            return f"set data.corpus.vocab_size={self.fields['vocab_size'] - (asked is not None)}"
        if self.tokenizer is None:
            return "it brings no tokenizer, and needs data with a vocabulary of that size"
        return "leave data.tokenizer out, which it brings along"


def read_initial(cfg: DictConfig, runs: Path, overrides: list[str]) -> Initial | None:
    """What init_from names, with its architecture set in `cfg`; None where it names nothing. UserError for
    what cannot be loaded, and for overrides that would make another model of it."""
    if cfg.init_from is None:
        return None
    if cfg.get("model") is None:
        raise UserError("init_from sets the keys of model: leave ~model out.")
    named = {p.key_or_group for p in parse(overrides)}
    if wrong := sorted(key for key in named if key.split(".")[0] == "model" and key not in OWN):
        raise UserError(
            f"init_from={cfg.init_from} brings its architecture: leave {', '.join(wrong)} out. What may be "
            f"set: {', '.join(sorted(OWN))}."
        )
    initial = _of_run(str(cfg.init_from), runs) or pretrained(str(cfg.init_from))
    trains = sorted(key for key in named if key.startswith("data.tokenizer.") and key not in NAMING)
    if trains and initial.tokenizer is not None:
        raise UserError(
            f"init_from={cfg.init_from} brings its tokenizer, and none is trained: leave {', '.join(trains)} "
            "out."
        )
    for key, value in initial.fields.items():
        if key != "vocab_size" and f"model.{key}" not in named:
            cfg.model[key] = value
    if cfg.model.max_positions is None and cfg.model.position == "learned":
        cfg.model.max_positions = initial.fields["max_positions"]  # the table's, whatever was asked for
    return initial


def _of_run(given: str, runs: Path) -> Initial | None:
    from model.pretrained.base_weights import plain_weights
    from model.training.checkpoint import read_checkpoint, resolve

    folder = runs / given.removesuffix("/best").removeprefix(f"{runs}/").rstrip("/")
    if not (Path(given).is_file() or (folder / "checkpoints").is_dir()):
        return None
    require_folder(given)
    path = resolve(given, runs)
    saved = read_checkpoint(path, verified=True, mmap=True)["tilegpt"]
    fields = vars(GPTConfig(**saved["model"])).copy()
    trained = fields.pop("seq_len")
    if fields["position"] in ("learned", "rope") and fields["max_positions"] is None:
        fields["max_positions"] = trained
    for key in GPTConfig.TRAINING:
        del fields[key]

    def copy(net: GPT) -> None:
        net.load_state_dict(plain_weights(read_checkpoint(path, verified=True, mmap=True), path))

    masked = (saved["config"].get("data") or {}).get("mask_fraction")
    return Initial(given, fields, saved["tokenizer"], copy, masked)


def require_folder(given: str, key: str = "init_from") -> None:
    """UserError for one file of a pretrained model; key: what the command calls it."""
    if Path(given).is_file() and given.endswith((".safetensors", ".bin", ".json")):
        raise UserError(
            f"{key}={given} is one file of a model: give its folder, {key}={Path(given).parent}, "
            "which also has config.json and the tokenizer."
        )


def pretrained(given: str, key: str = "init_from") -> Initial:
    """What a folder or an id of the Hub names; key: what the command calls it. UserError for what cannot be
    loaded."""
    from data.tokenizer_file import read_folder
    from model.pretrained.folder import read_pretrained

    found = read_pretrained(given, key)
    try:
        tokenizer = read_folder(found.folder, found.fields["vocab_size"])
    except UserError as error:
        raise UserError(f"{key}={given} is refused: {error}.") from None
    return Initial(given, found.fields, tokenizer, found.load_into)


def keep_tokenizer(initial: Initial, cfg: DictConfig, run: Path, overrides: list[str]) -> None:
    """Put its tokenizer into the run's folder, and have the data use it, unless the command line names
    another."""
    from data.storage import write_atomically

    given = any(p.key_or_group in NAMING for p in parse(overrides))
    if initial.tokenizer is None or given or cfg.data.get("tokenizer") is None:
        return
    path = run / TOKENIZER
    if not path.exists():
        write_atomically(path, [json.dumps(initial.tokenizer).encode()])
    cfg.data.tokenizer.kind, cfg.data.tokenizer.path = "file", str(path)


def adapters_of(cfg: DictConfig, starts: bool) -> Adapters | None:
    """The adapters that `finetune` asks for, None where it is all weights that train. starts: whether there
    are weights to train them beside, of init_from or of a checkpoint."""
    from model.lora import Adapters, require_peft

    asked = cfg.get("finetune") or {}
    if asked.get("rank") is None:
        return None
    adapters = Adapters(asked.rank, asked.alpha, list(asked.targets))
    require_peft(asked.dropout)
    if "FSDP2" in str(cfg.trainer.get("strategy")):
        raise UserError(
            "finetune=lora does not go with trainer=fsdp2 or context_parallel: use ddp, or finetune=full."
        )
    if not starts:
        raise UserError("finetune=lora trains beside weights that are there: give init_from=...")
    return adapters


def finetuned(
    cfg: DictConfig,
    net: GPT,
    run: Path,
    initial: Initial | None,
    ckpt: Path | None,
    tokenizer: Tokenizer | None,
    adapters: Adapters | None,
) -> dict[str, Any]:
    """Give `net` the weights of `initial`, whose tokens `tokenizer`, that of the data, has to have; what
    checkpoints are to say of what trains of it: nothing where it is all of it, else `adapters`, which are in
    `net` from now on. The weights beside them are those of `initial`, or of the run that resumes from `ckpt`,
    and are in its folder."""
    from model.lora import add_adapters
    from model.pretrained.base_weights import load_base, write_base
    from model.training.checkpoint import read_header
    from model.training.runtime import say

    if initial is not None:
        initial.load_into(net, cfg.data, tokenizer)
    if adapters is None:
        return {}
    if ckpt is not None:
        adapters = replace(adapters, base=read_header(ckpt)[0]["adapters"]["base"])
        load_base(net, ckpt, adapters, run)
    elif is_first():  # among these is the one that writes checkpoints, which say it
        adapters = replace(adapters, base=write_base(net, run))
    add_adapters(net, adapters, cfg.finetune.dropout)
    trained = sum(p.numel() for p in net.parameters() if p.requires_grad)
    say(f"finetune   LoRA of rank {adapters.rank}: {trained / 1e6:.2f}M parameters train")
    return {"adapters": adapters.to_dict()}
