"""The block pool: nothing leaked, nothing shared that differs, promises kept, after any order of events."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from model.generation.blocks import BlockPool, Lease

SIZE, BLOCKS, WINDOW = 4, 12, 5


@dataclass(eq=False)
class Row:
    tokens: list[int]
    lease: Lease
    most: int
    filled: int


class Rows(RuleBasedStateMachine):
    """Rows of few different tokens join, are written, grow, look back on less, leave."""

    rows = Bundle("rows")

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(BLOCKS, SIZE)
        self.live: list[Row] = []
        self.contents: dict[int, tuple] = {}  # block -> all tokens up to its end

    @rule(
        target=rows,
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=20),
        more=st.integers(0, 16),
    )
    def join(self, tokens, more):
        pool = self.pool
        most = len(tokens) + more
        lease = pool.admit(pool.digests(tokens), most)
        if lease is None:
            # alone in the pool everything fits
            assert self.live or pool.blocks_of(most) > BLOCKS
            return multiple()
        row = Row(list(tokens), lease, most, len(lease.blocks) * SIZE)
        assert row.filled < len(tokens)
        for at, block in enumerate(lease.blocks):  # what is shared is what this row would have computed
            assert self.contents[block] == tuple(tokens[: (at + 1) * SIZE])
        self.live.append(row)
        return row

    @rule(row=rows, count=st.integers(1, 9), token=st.integers(0, 1))
    def go_on(self, row, count, token):
        """More of the prompt, or of what comes behind it."""
        if row not in self.live:
            return
        end = min(row.filled + count, row.most)
        row.tokens += [token] * (end - len(row.tokens))
        before = set(row.lease.blocks)
        taken = self.pool.grow(row.lease, end)
        assert not before & set(taken) and 0 not in taken
        held = {block for other in self.live if other is not row for block in other.lease.blocks}
        assert not held & set(taken)  # what is written to is nobody else's
        for at in range(row.filled // SIZE, end // SIZE):
            self.contents[row.lease.blocks[at]] = tuple(row.tokens[: (at + 1) * SIZE])
        row.filled = end
        self.pool.written(row.lease, end)

    @rule(row=rows)
    def look_back_on_less(self, row):
        if row in self.live:
            self.pool.leave_behind(row.lease, row.filled - WINDOW)
            first = max(0, row.filled - WINDOW)
            assert None not in row.lease.blocks[first // SIZE :]
            assert not any(row.lease.blocks[: first // SIZE])

    @rule(row=consumes(rows))
    def leave(self, row):
        """At the end, or cancelled in the middle."""
        if row in self.live:
            self.live.remove(row)
            self.pool.release(row.lease)

    @invariant()
    def blocks_are_accounted_for(self):
        pool = self.pool
        holders = Counter(block for row in self.live for block in row.lease.blocks if block is not None)
        assert [holders[block] for block in range(BLOCKS + 1)] == pool.holders
        assert pool.held == len(holders)
        apart = [*pool.empty, *pool.unheld, *holders]
        assert sorted(apart) == list(range(1, BLOCKS + 1))  # each once, none lost

    @invariant()
    def promises_can_be_kept(self):
        pool = self.pool
        assert pool.promised == sum(row.lease.most - len(row.lease.blocks) for row in self.live)
        assert pool.promised <= len(pool.empty) + len(pool.unheld)

    @invariant()
    def what_is_found_is_there(self):
        pool = self.pool
        assert {block: digest for digest, block in pool.found.items()} == pool.digest_of
        assert not set(pool.empty) & set(pool.digest_of) and set(pool.unheld) <= set(pool.digest_of)


TestRows = Rows.TestCase
TestRows.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)


def filled(pool: BlockPool, tokens: list[int]):
    lease = pool.admit(pool.digests(tokens), len(tokens))
    pool.grow(lease, len(tokens))
    pool.written(lease, len(tokens))
    return lease


def test_the_least_recently_used_goes_first():
    pool = BlockPool(4, 2)
    a, b = filled(pool, [1, 1, 9]), filled(pool, [2, 2, 9])
    pool.release(a)
    pool.release(b)
    again = pool.admit(pool.digests([1, 1, 5]), 3)  # used again: now [2, 2] is the oldest
    assert len(again.blocks) == 1
    pool.release(again)
    third = pool.admit([], 6)
    pool.grow(third, 6)  # two empty blocks, and one that is found
    assert pool.missing(pool.digests([1, 1, 5])) == 1 and pool.missing(pool.digests([2, 2, 5])) == 0


def test_without_sharing_nothing_is_found():
    pool = BlockPool(8, 2, sharing=False)
    filled(pool, [1, 1, 1])
    assert pool.digests([1, 1, 1]) == [] and not pool.found and filled(pool, [1, 1, 1]).blocks == [3, 4]


def test_a_row_takes_no_more_than_it_was_admitted_with():
    pool = BlockPool(8, 2)
    lease = pool.admit([], 3)
    with pytest.raises(AssertionError, match="no more than"):
        pool.grow(lease, 5)
