"""Many texts at once over a paged cache: what model/generation/engine.py does, set up and accounted for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from attention.base import Attention
from model.generation.decode import Decoder, Slots
from model.generation.engine import Engine, Pool, made_blocks, made_rows
from model.generation.fused import FusedStep, wants_fused
from model.generation.generate import OnToken, Reader, checked, clock, require_all
from model.generation.paged_cache import paged_cache, paged_kinds
from model.gpt import GPT


@dataclass(frozen=True)
class Served:
    """What came of it.

    tokens: the new ones of each row, up to and with the one it stopped at
    first_s: seconds until the first of each row, from when all were there
    seconds, setup_s: of all; of allocation, compilation and capture before
    computed, found: tokens of prompts that were computed, and that were in the cache already
    most_bytes, held_bytes: of the blocks that rows held when it was most, and of the tokens in them
    """

    tokens: list[list[int]]
    seed: int
    first_s: list[float]
    seconds: float
    setup_s: float
    computed: int
    found: int
    reencoded: int
    most_bytes: int
    held_bytes: int


@torch.inference_mode()
def serve(
    model: GPT,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int | Sequence[int],
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    eot: int | None = None,
    on_token: OnToken | None = None,
    decode_attention: Attention | None = None,
    compile: bool = False,
    cache_dtype: str = "auto",
    fused: bool | None = None,
    pool: Pool | None = None,
) -> Served:
    """As `generate`, over a paged cache; `max_new_tokens` of all or of each. With a temperature the text also
    depends on what else is generated. Raises UserError, and UnsupportedAttention before anything runs."""
    pool = pool or Pool()
    each = isinstance(max_new_tokens, Iterable) and getattr(max_new_tokens, "ndim", 1) > 0
    most = 1 if each else max_new_tokens
    sampling, prompts = checked(model, prompts, most, temperature, top_k, top_p, eot, seed)
    most_new = list(max_new_tokens) if each else [most] * len(prompts)
    attention = decode_attention or model.transformer.h[0].attn.attention
    config, rows = model.config, made_rows(prompts, most_new)
    kinds = paged_kinds(model, cache_dtype)
    require_all(model, attention, pool.slots, config.seq_len, config.seq_len, kinds)
    blocks = made_blocks(rows, config.seq_len, pool)
    step = FusedStep if not compile and wants_fused(model, fused) else None
    training, device = model.training, model.device
    model.eval()
    try:
        with torch.cuda.device_of(model.transformer.wte.weight):
            began = clock(device)
            cache = paged_cache(model, min(pool.slots, len(rows)), blocks, attention, cache_dtype)
            slots = Slots(len(cache.rows), model, sampling, seed)
            decoder = Decoder(model, slots, cache, compile, step)
            reader = Reader(len(rows), device, eot, on_token, len(slots.index))
            engine = Engine(model, decoder, blocks, reader, pool.chunk)
            ready = clock(device)
            engine.run(rows)
            done = clock(device)
    finally:
        model.train(training)
    per_token = cache.nbytes / (len(blocks.holders) * pool.block)
    return Served(
        tokens=reader.tokens,
        seed=slots.seed,
        first_s=[first - ready for first in reader.first],
        seconds=done - ready,
        setup_s=ready - began,
        computed=engine.computed,
        found=engine.found,
        reencoded=engine.reencoded,
        most_bytes=round(per_token * pool.block * engine.most[0]),
        held_bytes=round(per_token * engine.most[1]),
    )
