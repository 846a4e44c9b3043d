"""The choice of a token: the best logit of each row, or of a race at a temperature (generation's Sampling
without a cut of the candidates)."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _tilegpt_step_race(
    logits, scores, tokens, noise, temperature, stride_b, N: tl.constexpr, DRAW: tl.constexpr,
    BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """scores and tokens (B, programs of a row): the best of BLOCK_N logits and its token."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    program, b = tl.program_id(0), tl.program_id(1)
    n = program * BLOCK_N + tl.arange(0, BLOCK_N)
    if DRAW:  # the noise was drawn before the step
        draw = tl.load(noise + b.to(tl.int64) * N + n, mask=n < N, other=1.0)
        handicap = tl.log(tl.maximum(draw, 1e-38))
    if PDL:
        tl.extra.cuda.gdc_wait()
    y = tl.load(logits + b.to(tl.int64) * stride_b + n, mask=n < N, other=float("-inf")).to(tl.float32)
    if DRAW:
        y = y / temperature - handicap
    best, place = tl.max(y, 0, return_indices=True)
    at = b * tl.num_programs(0) + program
    tl.store(scores + at, best)
    tl.store(tokens + at, program * BLOCK_N + place)


@triton.jit(do_not_specialize=["programs", "width"])
def _tilegpt_step_finish(
    scores, tokens, token, text, text_lengths, lengths, next_lengths, active, programs, width,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The best token of each row: given back, appended to its text (B, width) if there is one, and counted in
    the lengths, by active (B,) if only some rows decode."""
    b, i = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_wait()
    best = tl.load(scores + b * programs + i, mask=i < programs, other=float("-inf"))
    chosen = tl.load(tokens + b * programs + tl.argmax(best, 0)).to(tl.int64)
    tl.store(token + b, chosen)
    if text is not None:
        at = tl.load(text_lengths + b)
        tl.store(text + b * width + at, chosen)
        tl.store(text_lengths + b, at + 1)
    length = tl.load(lengths + b) + (1 if active is None else tl.load(active + b))
    tl.store(lengths + b, length)
    tl.store(next_lengths + b, (length + 1).to(tl.int32))
