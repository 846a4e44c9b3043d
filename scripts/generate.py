"""Generate text from a trained model, and stream it:

    python scripts/generate.py ckpt=last prompt="def main" max_new_tokens=200 temperature=0.8 top_k=50 seed=1
    python scripts/generate.py ckpt=Qwen/Qwen3-0.6B prompt="What is attention?" chat=true

The keys below are those of conf/generate.yaml. Of a run's config, only attention can be changed:
attention=tiled uses another implementation, attention.decode=naive only for decoding. The text goes to
stdout, everything else to stderr.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__" and not __package__:  # python scripts/<command>.py: see there
    import _checkout  # noqa: F401

from conf.generation import CONFIG, parse
from conf.values import UserError

if TYPE_CHECKING:
    import torch

    from attention.base import Attention
    from model.gpt import GPT

MOST_TOKENS = 2**28  # of all rows together, 8 bytes each


def placement(device: str, precision: str, key: str = "precision") -> tuple[torch.device, torch.dtype]:
    """Where the model generates, and in which dtype. key: what the command calls it."""
    import torch

    if not re.fullmatch(r"auto|cpu|cuda(:\d{1,2})?|mps", device, flags=re.ASCII):
        raise UserError(f"device={device}: choose auto, cpu, cuda, cuda:1 or mps.")
    if device == "mps" and not torch.backends.mps.is_available():
        raise UserError("device=mps: PyTorch sees no such device here; device=cpu works.")
    where = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    if where.type == "cuda" and (where.index or 0) >= torch.cuda.device_count():
        raise UserError(
            f"device={device}: PyTorch sees {torch.cuda.device_count()} CUDA devices; device=cpu works."
        )
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    if precision != "auto" and precision not in dtypes:
        raise UserError(f"{key}={precision}: choose one of auto, {', '.join(dtypes)}.")
    if where.type == "cuda" and precision in ("auto", "bf16"):
        with torch.cuda.device(where):
            able = torch.cuda.is_bf16_supported(including_emulation=False)
        if precision == "bf16" and not able:
            name = torch.cuda.get_device_name(where)
            raise UserError(f"{key}=bf16: {name} has no bf16; choose fp16, fp32 or auto.")
        precision = "bf16" if able else "fp32"
    elif precision == "auto":
        precision = "fp32"
    return where, dtypes[precision]


def decoding_attention(
    cfg: Any,
    model: GPT,
    batch: int,
    tokens: int,
    compiled: bool = False,
    cache: frozenset[str] = frozenset(),
    fused: bool = False,
) -> Attention:
    """What decodes: `attention.decode`, else the run's own attention where it can, else auto's choice; auto
    itself where that leaves it to a fused step's own attention."""
    from attention.auto import AutoAttention
    from conf.compose import build_attention
    from model.calls import attention_call
    from model.generation.fused import attends

    own, weight = model.transformer.h[0].attn.attention, model.transformer.wte.weight
    call = attention_call(
        model.config,
        "decode",
        batch=batch,
        tokens=tokens,
        device=weight.device,
        dtype=weight.dtype,
        cache=cache,
    )
    asked = cfg.attention.get("decode")
    chosen = build_attention(cfg, asked) if asked else own
    reasons = chosen.unsupported_reasons(call)
    auto = build_attention(cfg, "auto") if fused or (reasons and not asked) else None
    if fused and attends(model.config, auto) and ((reasons and not asked) or chosen.name == "auto"):
        say(f"attention={chosen.name} leaves decoding to the fused step's own attention.")
        return auto
    if asked or not reasons:
        if isinstance(chosen, AutoAttention) and not reasons:
            name, why = chosen.choice(call, compiled=compiled)
            say(f"attention={chosen.name} decodes with {name}: {why}.")
        return chosen
    other = auto.resolve(call)
    say(
        f"attention={own.name} cannot decode with a KV cache ({'; '.join(reasons)}): "
        f"attention.decode={other.name} will."
    )
    return other


def say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def read_prompts(options: dict[str, Any]) -> list[str]:
    texts = [options["prompt"]]
    if options["prompt_file"]:
        try:
            text = Path(options["prompt_file"]).read_text(encoding="utf-8-sig")  # as training reads text
        except UnicodeDecodeError as error:
            raise UserError(
                f"prompt_file={options['prompt_file']} is not UTF-8 text ({error.reason}): give one prompt a "
                "line."
            ) from None
        except OSError as error:
            raise UserError(f"prompt_file={options['prompt_file']}: {error.strerror}.") from None
        texts = [line for line in text.split("\n") if line]  # not at form feeds, which are text
        if not texts:
            raise UserError(
                f"prompt_file={options['prompt_file']} has no line with text in it: give one prompt a line."
            )
    for text in texts:
        if any("\ud800" <= char <= "\udfff" for char in text):  # what Python makes of bytes that are no text
            raise UserError(f"prompt={text!r} is not UTF-8 text.")
    return [text for text in texts for _ in range(options["num_samples"])]


def run(model: GPT, tokenizer: Any, cfg: Any, options: dict[str, Any]) -> Any:
    """Generate, write, and say how fast it went."""
    from data.chat_template import encode_question
    from model.generation.engine import Pool, made_blocks, made_rows
    from model.generation.fused import wants_fused
    from model.generation.generate import checked, require_all
    from model.generation.paged_cache import paged_kinds
    from scripts.measure.instruments.streaming import Terminal

    texts, new = read_prompts(options), options["max_new_tokens"]
    if len(texts) * new > MOST_TOKENS:
        raise UserError(
            f"max_new_tokens={new} for {len(texts)} rows: at most {MOST_TOKENS} tokens in all; ask for fewer."
        )
    sampling = {key: options[key] for key in ("max_new_tokens", "temperature", "top_k", "top_p")}
    encode = partial(encode_question, tokenizer) if options["chat"] else tokenizer.encode
    _, prompts = checked(model, [encode(text) for text in texts], **sampling, eot=tokenizer.eot)
    context, longest = model.config.seq_len, max(map(len, prompts))
    if longest + new > context:
        say(f"Past the trained context of {context} tokens, the last {context // 2} or more are re-encoded.")
    capacity = min(context, longest + new)
    drafted = options["speculate"] is not None
    require_all(model, None, len(prompts), capacity, capacity)  # refusals come before anything else is said
    draft = smaller_model(model, tokenizer, options) if drafted else None
    paged, decoding = not drafted and is_paged(cfg, model, options, capacity), None
    if options["kv_cache"]:
        kinds = paged_kinds(model, options["cache_dtype"])
        kinds = kinds if paged or drafted else kinds - {"paged"}
        fused = not (options["compile"] or drafted) and kinds <= {"paged"}
        fused = fused and wants_fused(model, options["fused"])
        decoding = decoding_attention(cfg, model, len(prompts), capacity, options["compile"], kinds, fused)
        require_all(model, decoding, len(prompts), capacity, capacity, kinds)
    keys = ("block", "slots", "chunk", "prefix_caching")
    pool = Pool(tokens=options["pool_tokens"], **{key: options[key] for key in keys})
    if paged:
        made_blocks(made_rows(prompts, [new] * len(prompts)), context, pool)
    shown = [f"{text}\n" for text in texts] if options["chat"] else texts
    terminal = Terminal(shown, tokenizer.decode, options["stop"], tokenizer.eot, prompts)
    how = sampling | {key: options[key] for key in ("seed", "cache_dtype")}
    how |= {"eot": tokenizer.eot, "on_token": terminal.on_token, "decode_attention": decoding}
    result, done = generated(model, prompts, options, how, pool if paged else None, draft)
    terminal.close()
    say(f"{done}, set-up {result.setup_s:.1f} s, {result.reencoded} re-encodings, seed {result.seed})")
    return result


def generated(
    model: GPT, prompts: list[list[int]], options: dict[str, Any], how: dict[str, Any], pool: Any, draft: Any
) -> tuple[Any, str]:
    """The text by continuous batching, by drafts or in one batch, and what is said of it."""
    from model.generation.generate import generate
    from model.generation.serve import serve
    from model.generation.speculate import speculate

    steps = {key: options[key] for key in ("compile", "fused")}
    if pool is not None:
        result = serve(model, prompts, **how, **steps, pool=pool)
        new = sum(map(len, result.tokens))
        return result, (
            f"{new / result.seconds:,.0f} new tokens/s, {result.computed:,} tokens of prompts computed and "
            f"{result.found:,} found ({len(prompts)} rows, blocks of {result.most_bytes / 2**20:,.1f} MiB"
        )
    if options["speculate"] is not None:
        result = speculate(model, prompts, **how, draft=draft, draft_tokens=options["draft_tokens"])
        kept = f"{result.accepted:,} of {result.drafted:,} drafted tokens accepted, {result.calls:,} calls"
    else:
        result = generate(model, prompts, **how, **steps, kv_cache=options["kv_cache"])
        kept = "KV cache" if options["kv_cache"] else "no cache"
    return result, (
        f"prefill {result.prefill_tokens_per_s:,.0f} tokens/s, "
        f"decode {result.decode_tokens_per_s:,.0f} tokens/s ({len(prompts)} rows, {kept}"
    )


def smaller_model(model: GPT, tokenizer: Any, options: dict[str, Any]) -> GPT | None:
    """The model that `speculate` names, None for n-grams. Raises UserError, for other options too that drafts
    cannot be checked with."""
    from conf.trained import load_model
    from data.tokenizer_export import vocabulary

    asked = f"speculate={options['speculate']}"
    able = {"cache": ("auto", "dense"), "kv_cache": (True,), "compile": (False,), "fused": (None, False)}
    if wrong := given_besides(able, options):
        raise UserError(
            f"{asked} and {', '.join(wrong.values())}: drafts are checked by PyTorch's kernels over a cache "
            f"of their own; leave {' and '.join(wrong)} out."
        )
    require_checkable(model, f"ckpt={options['ckpt']}", asked)
    if options["speculate"] == "ngram":
        return None
    draft, its_tokenizer, _ = load_model(options["speculate"], [], options["runs_dir"], "speculate")
    require_checkable(draft, asked, asked)
    same = its_tokenizer.to_dict() == tokenizer.to_dict()
    if not same and vocabulary(its_tokenizer) != vocabulary(tokenizer):  # chat templates, say, may differ
        raise UserError(
            f"{asked} has another tokenizer than ckpt={options['ckpt']}: give a model with the same one, or "
            "speculate=ngram."
        )
    return finite(draft, asked, options["precision"], model.device, model.dtype)


def given_besides(able: dict[str, tuple[Any, ...]], options: dict[str, Any]) -> dict[str, str]:
    """Key -> key=value as typed, of the options that have none of the values that `able` gives them."""
    wrong = [key for key, values in able.items() if options[key] not in values]
    return {key: f"{key}={str(options[key]).lower()}" for key in wrong}


def require_checkable(model: GPT, given: str, asked: str) -> None:
    """UserError for a model that drafts cannot be checked with."""
    if model.config.position == "t5" or model.config.sparsity is not None:
        raise UserError(
            f"{given} has model.position=t5 or model.sparsity, which no attention reads from the cache that "
            f"drafts are checked over: leave {asked} out, or name a run without."
        )


def is_paged(cfg: Any, model: GPT, options: dict[str, Any], tokens: int) -> bool:
    """Whether `options` ask for a paged cache, and so for continuous batching. cache=auto does for a
    prompt_file, unless no attention, or not the one chosen to decode, can read such a cache."""
    from attention.naive import NaiveAttention
    from conf.compose import build_attention
    from model.calls import attention_call
    from model.generation.paged_cache import paged_kinds

    cache = options["cache"]
    if cache not in ("auto", "dense", "paged"):
        raise UserError(f"cache={cache}: choose auto, dense or paged.")
    able = {"cache": ("auto", "dense"), "cache_dtype": ("auto",), "compile": (False,), "fused": (None, False)}
    if not options["kv_cache"] and (wrong := given_besides(able, options)):
        raise UserError(
            f"{', '.join(wrong.values())} and kv_cache=false: a cache needs kv_cache=true, and so do compile "
            "and fused, which decode over one."
        )
    weight, kinds = model.transformer.wte.weight, paged_kinds(model, options["cache_dtype"])
    if cache != "auto" or not options["prompt_file"] or not options["kv_cache"]:
        return cache == "paged"
    how = {"batch": options["slots"], "tokens": tokens, "device": weight.device, "dtype": weight.dtype}
    asked = cfg.attention.get("decode")
    reader = build_attention(cfg, asked) if asked else NaiveAttention()  # which can all that any can
    reasons = reader.unsupported_reasons(attention_call(model.config, "decode", **how, cache=kinds))
    if reasons:
        say(f"cache=auto is dense: attention={reader.name} has {'; '.join(reasons)}.")
    return not reasons


def main(arguments: Sequence[str]) -> None:
    if any(argument in ("-h", "--help") for argument in arguments):
        print(__doc__, CONFIG.read_text(), sep="\n", end="")
        return
    from conf.command import user_errors  # which imports Hydra: half a second that --help need not wait

    user_errors(write)(arguments)


def write(arguments: Sequence[str]) -> None:
    from conf.trained import load_model
    from model.generation.weights import quantise_weights
    from model.training.out_of_memory import out_of_memory_told

    options, overrides = parse(arguments)
    device, dtype = placement(options["device"], options["precision"])
    model, tokenizer, cfg = load_model(options["ckpt"], overrides, options["runs_dir"])
    remedy = "ask for fewer num_samples= or max_new_tokens=, or keep less by cache_dtype=int8"
    with out_of_memory_told(remedy):
        model = finite(model, f"ckpt={options['ckpt']}", options["precision"], device, dtype)
        quantise_weights(model, options["weight_dtype"])
        run(model, tokenizer, cfg, options)


def finite(model: GPT, given: str, precision: str, device: torch.device, dtype: torch.dtype) -> GPT:
    """The model there; UserError where weights are not finite, as loaded or as this precision has them."""
    from model.generation.generate import not_finite, numbers

    diverged = "it diverged before it was saved. Of a run, give an earlier checkpoint, as ckpt=<run>/best."
    overflows = "it cannot hold these weights; choose bf16 or fp32."
    for source, remedy in ((given, diverged), (f"precision={precision}", overflows)):
        if bad := not_finite(model):
            raise UserError(
                f"{source}: {len(bad)} of {len(numbers(model))} weight tensors hold NaN or infinity, "
                f"{bad[0]} first: {remedy}"
            )
        model = model.to(device, dtype)
    return model


if __name__ == "__main__":
    main(sys.argv[1:])
