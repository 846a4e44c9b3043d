"""The block pool of a paged cache: which row holds which blocks, and which blocks hold how prompts begin.

The host's part only: numbers of blocks, no tensors. Block 0 is nobody's (model/generation/paged_cache.py).
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(eq=False)
class Lease:
    """The blocks of a row, in the order of its tokens; None where a window has left them behind.

    most: blocks that the row may come to hold
    digests: of its first tokens, by which others find its full blocks
    """

    most: int
    blocks: list[int | None] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)


class BlockPool:
    """`blocks` blocks of `size` tokens, numbered from 1.

    A row is admitted with all that it may come to need, so that none is ever without a block in the middle;
    it takes them one by one, as its tokens come. With `sharing`, full blocks of prompts are kept under the
    hash of all tokens up to their end: rows that begin alike hold the same ones, and those that no row holds
    are taken for others only when no block is empty, the least recently used first."""

    def __init__(self, blocks: int, size: int, sharing: bool = True):
        self.size, self.sharing = size, sharing
        self.empty = deque(range(1, blocks + 1))
        self.holders = [0] * (blocks + 1)
        self.promised = 0  # blocks that admitted rows may take yet
        self.found: dict[bytes, int] = {}
        self.digest_of: dict[int, bytes] = {}
        self.unheld: OrderedDict[int, None] = OrderedDict()  # found, but held by no row; oldest first

    @property
    def capacity(self) -> int:
        """Tokens that one row can hold."""
        return (len(self.holders) - 1) * self.size

    @property
    def held(self) -> int:
        """Blocks that some row holds."""
        return len(self.holders) - 1 - len(self.empty) - len(self.unheld)

    def blocks_of(self, tokens: int) -> int:
        return -(-tokens // self.size)

    def digests(self, tokens: Sequence[int]) -> list[bytes]:
        """A hash of the tokens up to the end of each full block, but none of all tokens: a row computes its
        last one, for what follows it. Empty without sharing."""
        digests, digest = [], b""
        for end in range(self.size, len(tokens) if self.sharing else 0, self.size):
            part = b"".join(token.to_bytes(8, "little") for token in tokens[end - self.size : end])
            digest = hashlib.blake2b(digest + part, digest_size=16).digest()
            digests.append(digest)
        return digests

    def missing(self, digests: Sequence[bytes]) -> int:
        """Which of a row's blocks is the first that is not to be found."""
        return next((at for at, digest in enumerate(digests) if digest not in self.found), len(digests))

    def admit(self, digests: Sequence[bytes], most: int) -> Lease | None:
        """A lease for a row of at most `most` tokens; None where that does not fit now. Of its beginning it
        holds what is found."""
        shared = [self.found[digest] for digest in digests[: self.missing(digests)]]
        needed = self.blocks_of(most) - len(shared)
        taken_back = sum(self.holders[block] == 0 for block in shared)
        if needed + taken_back > len(self.empty) + len(self.unheld) - self.promised:
            return None
        for block in shared:
            self.unheld.pop(block, None)
            self.holders[block] += 1
        self.promised += needed
        return Lease(self.blocks_of(most), list(shared), list(digests))

    def grow(self, lease: Lease, tokens: int) -> list[int]:
        """The blocks that the row takes to hold `tokens`, which it was admitted with."""
        taken = []
        while len(lease.blocks) < self.blocks_of(tokens):
            assert len(lease.blocks) < lease.most, "a row takes no more than it was admitted with"
            if self.empty:
                block = self.empty.popleft()
            else:
                block, _ = self.unheld.popitem(last=False)
                del self.found[self.digest_of.pop(block)]
            self.holders[block] = 1
            self.promised -= 1
            lease.blocks.append(block)
            taken.append(block)
        return taken

    def written(self, lease: Lease, tokens: int) -> None:
        """The row's first `tokens` are in its blocks: others that begin alike may hold the full ones."""
        for digest, block in list(zip(lease.digests, lease.blocks, strict=False))[: tokens // self.size]:
            if block is not None and digest not in self.found:
                self.found[digest] = block
                self.digest_of[block] = digest

    def leave_behind(self, lease: Lease, first: int) -> None:
        """Give back the blocks all of whose tokens come before token `first`."""
        for at, block in enumerate(lease.blocks[: max(0, first) // self.size]):
            if block is not None:
                self._drop(block)
                lease.blocks[at] = None

    def release(self, lease: Lease) -> None:
        """Give back all, and the promise."""
        for block in reversed(lease.blocks):  # of what is found, ends go before the beginnings they need
            if block is not None:
                self._drop(block)
        self.promised -= lease.most - len(lease.blocks)
        lease.blocks, lease.most = [], 0

    def _drop(self, block: int) -> None:
        self.holders[block] -= 1
        if self.holders[block] == 0:
            if block in self.digest_of:
                self.unheld[block] = None
            else:
                self.empty.append(block)
