"""Many texts by continuous batching over a paged cache: rows join and leave at the boundaries of steps.

A step first takes up to `chunk` tokens of the prompts that have joined, cut where they are longer, so that
the rows in progress go on, and then decodes one token of each of these. A row joins when the pool has the
blocks that it may come to need; until then it waits, so that none is out of memory in the middle. Prompts
that begin alike are computed once. The context rule is that of model/generation/generate.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from conf.values import UserError
from model.generation.blocks import BlockPool, Lease
from model.generation.decode import Decoder, at_least_1, to_device
from model.generation.generate import Reader, window_start
from model.gpt import GPT


@dataclass(frozen=True)
class Pool:
    """Of a paged cache: `block` tokens in a block; `tokens` in all blocks, None for what the rows that decode
    at once may come to hold; `slots`, how many these are; `chunk`, the most tokens of prompts in a step;
    `prefix_caching`, whether prompts that begin alike share blocks."""

    block: int = 16
    tokens: int | None = None
    slots: int = 16
    chunk: int = 512
    prefix_caching: bool = True

    def __post_init__(self) -> None:
        for name in ("block", "tokens", "slots", "chunk"):
            at_least_1(name, getattr(self, name), null="what the rows need" if name == "tokens" else "")


@dataclass(eq=False)
class Row:
    """A text in the making: `count` of its at most `most` tokens have been chosen, the prompt's among them.

    start, window: the first token that it sees, and all from there on when it joined
    filled: how many of those it sees are in the cache
    """

    index: int
    prompt: list[int]
    count: int
    most: int
    start: int = 0
    window: list[int] | None = None
    digests: list[bytes] = field(default_factory=list)
    filled: int = 0
    lease: Lease = field(default_factory=lambda: Lease(0))
    slot: int = -1


def made_rows(prompts: Sequence[list[int]], most_new: Sequence[int]) -> list[Row]:
    if len(most_new) != len(prompts):
        raise UserError(
            f"max_new_tokens has {len(most_new)} numbers for {len(prompts)} prompts: give one for each, or "
            "one for all."
        )
    for new in most_new:
        at_least_1("max_new_tokens", new)
    most_new = map(int, most_new)
    return [Row(i, p, len(p), len(p) + new) for i, (p, new) in enumerate(zip(prompts, most_new, strict=True))]


def made_blocks(rows: Sequence[Row], seq_len: int, pool: Pool) -> BlockPool:
    """The blocks that `pool` asks for, as far as the rows can fill them. Raises UserError where a row does
    not fit by itself."""
    if pool.block > (most := max(seq_len, Pool.block)):
        raise UserError(
            f"block={pool.block}: it needs to be at most {most}, for a trained context of {seq_len}."
        )
    needed = sorted((held_at_most(row, seq_len) for row in rows), reverse=True)
    whole = [-(-n // pool.block) * pool.block for n in needed]
    tokens = sum(whole[: pool.slots]) if pool.tokens is None else min(pool.tokens, sum(whole))
    blocks = BlockPool(tokens // pool.block, pool.block, pool.prefix_caching)
    for row in rows:
        if (most := held_at_most(row, seq_len)) > blocks.capacity:
            new = row.most - row.count
            raise UserError(
                f"prompt {row.index} has {row.count} tokens, and with {new} new ones comes to {most} in the "
                f"cache; the pool holds {blocks.capacity}, a prompt of {max(0, blocks.capacity + 1 - new)} "
                f"beside them: give pool_tokens={blocks.blocks_of(most) * pool.block} or more, a shorter "
                "prompt, or fewer max_new_tokens."
            )
    return blocks


def held_at_most(row: Row, seq_len: int) -> int:
    """Tokens that `row` may come to have in the cache from here on: the last one is chosen, but never fed."""
    return min(seq_len, row.most - 1 - window_start(row.count, seq_len))


class Engine:
    """The steps; what is computed, found and held is counted on the way."""

    def __init__(self, model: GPT, decoder: Decoder, pool: BlockPool, reader: Reader, chunk: int):
        self.model, self.decoder, self.pool, self.reader, self.chunk = model, decoder, pool, reader, chunk
        self.cache, self.slots = decoder.cache, decoder.rows
        self.device, self.seq_len = model.device, model.config.seq_len
        self.window = model.config.window
        self.waiting: deque[Row] = deque()
        self.filling: list[Row] = []
        self.running: dict[int, Row] = {}
        self.free = list(range(len(self.slots.index)))[::-1]
        self.computed = self.found = self.reencoded = 0
        self.most = (0, 0)  # blocks held when it was most, and the tokens in them

    def run(self, rows: list[Row]) -> None:
        self.waiting.extend(rows)
        while self.waiting or self.filling or self.running:
            self.admit()
            if self.filling:
                self.fill()
            if self.running:
                self.decode()
        self.reader.read()

    def admit(self) -> None:
        """Rows join in their order, while there are slots and blocks for them."""
        while self.waiting and len(self.filling) + len(self.running) < len(self.slots.index):
            row = self.waiting[0]
            if row.window is None:
                row.start = window_start(row.count, self.seq_len)
                row.window = (row.prompt + self.reader.tokens[row.index])[row.start :]
                row.digests = self.pool.digests(row.window)
            coming = {digest for other in self.filling for digest in other.digests}
            if coming.intersection(row.digests[self.pool.missing(row.digests) :][:1]):
                return  # a prompt that begins alike is being computed
            lease = self.pool.admit(row.digests, held_at_most(row, self.seq_len))
            if lease is None:
                return
            row.lease, row.filled = lease, len(lease.blocks) * self.pool.size
            self.found += row.filled
            self.filling.append(self.waiting.popleft())

    def fill(self) -> None:
        """The next tokens of the prompts that have joined, `chunk` of them at most in one call."""
        left, parts = self.chunk, []
        for row in self.filling:
            tokens = row.window[row.filled :][:left]
            parts.append((row, tokens))
            left -= len(tokens)
            if not left:
                break
        longest = max(len(tokens) for _, tokens in parts)
        starts = [row.filled for row, _ in parts]
        for row, tokens in parts:
            self.pool.grow(row.lease, row.filled + len(tokens))
        columns = self.pool.blocks_of(max(starts) + longest)
        table = [[block or 0 for block in row.lease.blocks] for row, _ in parts]
        table = to_device([blocks + [0] * (columns - len(blocks)) for blocks in table], self.device)
        self.cache.append(table.to(torch.int32), to_device(starts, self.device), longest, not any(starts))
        padded = to_device([tokens + [0] * (longest - len(tokens)) for _, tokens in parts], self.device)
        last = to_device([len(tokens) - 1 for _, tokens in parts], self.device)
        logits = self.model.forward(padded, cache=self.cache, last=last)  # (R, 1, V padded)
        done = []
        for at, (row, tokens) in enumerate(parts):
            row.filled += len(tokens)
            self.computed += len(tokens)
            self.pool.written(row.lease, row.filled)
            self.forget(row)
            if row.filled == len(row.window):
                done.append(at)
        self.count_held()
        if done:
            self.join([parts[at][0] for at in done], self.slots.first(logits[to_device(done, self.device)]))

    def join(self, rows: list[Row], tokens: Tensor) -> None:
        """Rows whose prompts are in the cache go on to decode, from their first new tokens (R, 1)."""
        self.filling = [row for row in self.filling if row not in rows]
        for row in rows:
            row.slot = self.free.pop()
            self.running[row.slot] = row
            row.count += 1
        slots = to_device([row.slot for row in rows], self.device)
        width = self.cache.table.shape[1]
        blocks = [[block or 0 for block in row.lease.blocks] for row in rows]
        table = to_device([line + [0] * (width - len(line)) for line in blocks], self.device)
        self.cache.table[slots] = table.to(torch.int32)
        self.cache.active[slots] = 1
        self.cache.set_lengths(to_device([row.filled for row in rows], self.device), slots)
        self.slots.token[slots] = tokens
        self.push(rows, tokens)

    def decode(self) -> None:
        """One token more of every row in progress."""
        new = [
            (slot, len(row.lease.blocks), block)
            for slot, row in self.running.items()
            for block in self.pool.grow(row.lease, row.filled + 1)
        ]
        if new:
            slots, columns, blocks = to_device(list(zip(*new, strict=True)), self.device)
            self.cache.table[slots, columns - 1] = blocks.to(torch.int32)
        self.decoder.step()
        rows = [self.running.get(slot) for slot in range(len(self.slots.index))]
        for row in self.running.values():
            row.filled += 1
            row.count += 1
            self.forget(row)
        self.count_held()
        self.push(rows, self.slots.token)

    def push(self, rows: list[Row | None], tokens: Tensor) -> None:
        """Hand tokens to the reader; rows that have all theirs, are stopped, or fill the context leave."""
        self.reader.push([-1 if row is None else row.index for row in rows], tokens)
        full = [
            row
            for row in self.running.values()
            if row.count < row.most and row.count - row.start > self.seq_len
        ]
        if full:
            self.reader.read()  # its text is needed, to encode the end of it again
        stopped = self.reader.stopped
        full = [row for row in full if not stopped[row.index]]
        done = [row for row in self.running.values() if row.count == row.most or stopped[row.index]]
        if done or full:
            self.leave(done + full)
        for row in full:
            row.window = None
            self.reencoded += 1
        self.waiting.extendleft(reversed(full))

    def leave(self, rows: list[Row]) -> None:
        """Rows give back their slots and blocks; what the device still does to them comes before all else."""
        slots = to_device([row.slot for row in rows], self.device)
        self.cache.table[slots] = 0
        self.cache.active[slots] = 0
        self.cache.set_lengths(torch.zeros_like(slots), slots)
        for row in rows:
            self.pool.release(row.lease)
            self.free.append(row.slot)
            del self.running[row.slot]

    def forget(self, row: Row) -> None:
        """Blocks that no later token of a model with a window sees are given back."""
        if self.window is not None:
            self.pool.leave_behind(row.lease, row.filled - self.window)

    def count_held(self) -> None:
        rows = (*self.filling, *self.running.values())
        if self.pool.held > self.most[0]:
            seen = sum(row.filled if self.window is None else min(row.filled, self.window) for row in rows)
            self.most = self.pool.held, seen
