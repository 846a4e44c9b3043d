"""Trained models that a command computes with: one of a run of ours, or a pretrained one of others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from conf.compose import build_attention, composed
from conf.initial import pretrained, require_folder
from conf.resume import own_value, recompose
from conf.saved import admit
from conf.values import UserError

if TYPE_CHECKING:
    from data.tokenizer_base import Tokenizer
    from model.gpt import GPT

# Of a pretrained model's context, whatever its config.json says, as the table of a rotary embedding is made
# for all of it: tokens, and numbers of that table, which are fewer tokens where heads are wider than 512.
LONGEST, TABLE = 2**17, 2**26


def require_causal(model: Any, given: str) -> None:
    """UserError where a model sees the tokens whose probability is asked for."""
    if not model.config.causal:
        raise UserError(
            f"{given} was trained with model.causal=false: each token sees the next one, so it gives a text "
            "no probability and cannot continue it. Give a run with model.causal=true."
        )


def load_model(
    ckpt: str, overrides: list[str], runs_dir: str | None = None, key: str = "ckpt"
) -> tuple[GPT, Tokenizer, DictConfig]:
    """The model (fp32, on the CPU), its tokenizer and a config, whose attention it has; overrides of
    attention alone, as no other would change what has been trained.

    ckpt: a run's name, `<run>/best`, `last` or a checkpoint; else a folder of pretrained weights, or the id
        of a model of the Hub, organisation/name. The context of these is what they know, up to LONGEST.
    key: what the command calls it"""
    from model.training.runs import runs_folder

    runs = runs_folder(runs_dir or own_value("runs_dir", []))
    if is_pretrained(ckpt, runs):
        return _of_others(ckpt, overrides, key)
    else:
        return _of_run(ckpt, overrides, runs, key)


def is_pretrained(ckpt: str, runs: Path) -> bool:
    """Whether it names a model of others: what may be both is taken as a run."""
    from model.pretrained.folder import HUB_ID

    if ckpt == "last":
        return False
    first, _, name = ckpt.removeprefix(f"{runs}/").partition("/")
    if Path(ckpt).is_file() or (runs / first / "checkpoints").is_dir():
        return False
    of_hub = name not in ("", "best") and not ckpt.startswith(f"{runs}/") and HUB_ID.fullmatch(ckpt)
    of_hub = of_hub and not ckpt.endswith(".ckpt")  # of a mistyped file the Hub knows nothing
    return Path(ckpt, "config.json").is_file() or bool(of_hub and not Path(ckpt).exists())


def _of_others(given: str, overrides: list[str], key: str) -> tuple[GPT, Tokenizer, DictConfig]:
    from data.tokenizer_file import JSONTokenizer
    from model.gpt import GPT, GPTConfig, Unfilled

    found, cfg = pretrained(given, key), composed(overrides)
    assert found.tokenizer is not None
    tokenizer = JSONTokenizer.from_dict(found.tokenizer)
    try:
        tokenizer.begin_texts()
    except UserError as error:
        raise UserError(f"{key}={given} is refused: {error}.") from None
    config = GPTConfig(**found.fields, seq_len=1)
    config = replace(config, seq_len=min(config.positions, LONGEST, TABLE // config.head_size))
    with Unfilled():
        model = GPT(config, build_attention(cfg))
    found.copy(model)
    return model, tokenizer, cfg


def _of_run(ckpt: str, overrides: list[str], runs: Path, key: str) -> tuple[GPT, Tokenizer, DictConfig]:
    from data.tokenizers import tokenizer_from_dict
    from model.gpt import GPT, GPTConfig, Unfilled
    from model.pretrained.base_weights import plain_weights
    from model.training.checkpoint import CheckpointError, read_checkpoint, resolve

    require_folder(ckpt, key)
    path = resolve(ckpt, runs, key=key)
    checkpoint = read_checkpoint(path, verified=True)
    saved = checkpoint["tilegpt"]
    if saved["tokenizer"] is None:
        raise UserError(
            f"{path} was trained on random tokens (data=synthetic): there is no text to generate."
        )
    if (saved["config"].get("data") or {}).get("mask_fraction") is not None:
        raise UserError(
            f"{path} was trained to fill gaps (data.mask_fraction): it neither continues a text nor gives it "
            "a probability."
        )
    cfg, _ = recompose(admit(saved, overrides, lenient=True), overrides)
    tokenizer, fields = tokenizer_from_dict(saved["tokenizer"]), saved["model"]
    if tokenizer.vocab_size != fields["vocab_size"]:
        raise CheckpointError(
            f"{path} is refused: its tokenizer has {tokenizer.vocab_size} tokens, and its model "
            f"{fields['vocab_size']}."
        )
    weights = plain_weights(checkpoint, path)  # before the model: what it would take is known to be there
    with Unfilled():
        model = GPT(GPTConfig(**fields), build_attention(cfg))
    model.load_state_dict(weights)
    return model, tokenizer, cfg
