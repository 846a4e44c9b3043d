"""Token files and the windows read from them.

Window i of the training data is a pure function of (seed, i): no state, no shuffle buffer, no memory in the
size of the corpus. Epoch e = i // n_windows visits every window once, in an order that a small Feistel
network keyed by (seed, e) gives, and shifts all window boundaries by a phase of its own, so that no token is
always at the same position.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from conf.values import UserError

IGNORE = -1  # the target that the loss ignores
NO_TARGET = 1 << 31  # the top bit of a token of 32 bits: it is nobody's target
_ROUNDS = 6


class TokenFile:
    """Tokens in a memory-mapped file, opened at first use and again in every process.
    path: plain little-endian `dtype` tokens. documents: int64 offsets, one past each document's last token.
    """

    def __init__(
        self, path: str | Path, dtype: str, n_tokens: int, documents: str | Path | None = None
    ) -> None:
        self.path, self.dtype, self.n_tokens, self.documents = path, dtype, n_tokens, documents
        self._tokens: np.ndarray | None = None
        self._ends: np.ndarray | None = None

    @classmethod
    def from_array(cls, tokens: np.ndarray, document_ends: np.ndarray | None = None) -> TokenFile:
        """Tokens in memory, for synthetic data and tests."""
        file = cls("", str(tokens.dtype), len(tokens))
        file._tokens = tokens
        file._ends = np.array([len(tokens)], dtype=np.int64) if document_ends is None else document_ends
        return file

    def __len__(self) -> int:
        return self.n_tokens

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | ({"_tokens": None, "_ends": None} if self.path else {})

    @property
    def tokens(self) -> np.ndarray:
        """(n_tokens,) a plain view: slicing an np.memmap itself costs several times more."""
        if self._tokens is None:
            self._tokens = np.asarray(
                np.memmap(self.path, dtype=self.dtype, mode="r", shape=(self.n_tokens,))
            )
        return self._tokens

    @property
    def document_ends(self) -> np.ndarray:
        """(n_documents,) int64."""
        if self._ends is None:
            self._ends = np.asarray(np.memmap(self.documents, dtype="<i8", mode="r"))
        return self._ends


def mix(x: np.ndarray) -> np.ndarray:
    """splitmix64: uint64 -> uint64, element-wise, every output bit depends on every input bit."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def permute(positions: np.ndarray, n: int, keys: np.ndarray) -> np.ndarray:
    """Where `positions` of range(n) go under the permutation that each key names; all (B,) uint64.

    A Feistel network permutes the next power of two; what lands outside range(n) walks on along its cycle
    until it is inside, which keeps it a bijection. At most half the domain is outside: two steps on average.
    """
    bits = max(2, (n - 1).bit_length())
    low = np.uint64(bits // 2)
    low_mask, high_mask = (np.uint64((1 << b) - 1) for b in (bits // 2, bits - bits // 2))
    round_keys = [mix(keys + np.uint64(r)) for r in range(_ROUNDS)]
    out, walking = positions.copy(), np.arange(len(positions))
    while len(walking):
        x = out[walking]
        high, rest = x >> low, x & low_mask
        for r, key in enumerate(round_keys):
            if r % 2:
                rest = rest ^ (mix(high ^ key[walking]) & low_mask)
            else:
                high = high ^ (mix(rest ^ key[walking]) & high_mask)
        out[walking] = (high << low) | rest
        walking = walking[out[walking] >= n]
    return out


@dataclass(frozen=True)
class Masking:
    """The masked-language objective of BERT (Devlin et al. 2019, section 3.1): a `fraction` of the tokens of
    a window are its targets, at their own positions. Of these, 80% are read as `mask_id`, 10% as a random
    token and 10% as they are. What is drawn depends on `seed`, the window's index and the position alone."""

    fraction: float
    mask_id: int
    seed: int

    def __call__(
        self, x: np.ndarray, targets: np.ndarray, indices: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and targets, (B, T), of tokens `x` and what may be a target of them; indices: (B,)."""
        keys = mix(mix(np.full(1, self.seed % 2**64, dtype=np.uint64)) ^ indices.astype(np.uint64))
        drawn = mix(keys[:, None] + np.arange(x.shape[1], dtype=np.uint64))
        chosen = (_unit(drawn) < self.fraction) & (targets != IGNORE)
        how = _unit(mix(drawn))
        other = (mix(~drawn) % np.uint64(self.mask_id)).astype(np.int64)
        read = np.where(how < 0.8, self.mask_id, np.where(how < 0.9, other, x))
        return np.where(chosen, read, x), np.where(chosen, targets, IGNORE)


def _unit(x: np.ndarray) -> np.ndarray:
    """Random bits as numbers in [0, 1), float64."""
    return (x >> np.uint64(11)).astype(np.float64) * 2.0**-53


class Windows:
    """Reads windows of T = seq_len tokens.

    masking: predict masked tokens in place of the next one.
    document_mask: batches also hold `document_ids` (B, T) int32, numbers 0, 1, 2... of the documents of each
    window, and the first token of a document is nobody's target: its predecessor sees another document. The
    end-of-text token before it stays a target.
    """

    def __init__(
        self, file: TokenFile, seq_len: int, document_mask: bool = False, masking: Masking | None = None
    ) -> None:
        self.file, self.seq_len, self.document_mask, self.masking = file, seq_len, document_mask, masking

    def starts(self, indices: np.ndarray) -> np.ndarray:
        """(B,) int64: the first token of each window."""
        raise NotImplementedError

    def batch(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """(B, T): input_ids and targets, int64, targets one token on; document_ids, int32, if asked for."""
        indices = np.asarray(indices, dtype=np.int64)
        starts, T, tokens = self.starts(indices), self.seq_len, self.file.tokens
        ahead = 0 if self.masking else 1  # from a token to its target
        if (starts < len(tokens) - T).all():
            rows = sliding_window_view(tokens, T + 1)[starts]  # (B, T + 1)
            x, y = rows[:, :T].astype(np.int64), rows[:, ahead : ahead + T].astype(np.int64)
        else:  # the last validation window, and what fills up behind it
            x = np.zeros((len(starts), T), dtype=np.int64)
            y = np.full((len(starts), T), IGNORE, dtype=np.int64)
            for row, s in enumerate(starts.tolist()):
                n = max(0, min(T, len(tokens) - 1 - s))
                x[row, :n], y[row, :n] = tokens[s : s + n], tokens[s + ahead : s + ahead + n]
        if tokens.dtype.itemsize == 4:
            x &= NO_TARGET - 1
            y[y >= NO_TARGET] = IGNORE
        ids = {"document_ids": self._document_ids(starts, y, ahead)} if self.document_mask else {}
        if self.masking:
            x, y = self.masking(x, y, indices)
        return {"input_ids": x, "targets": y, **ids}

    def _document_ids(self, starts: np.ndarray, targets: np.ndarray, ahead: int) -> np.ndarray:
        ends, T = self.file.document_ends, self.seq_len
        first = np.searchsorted(ends, starts, side="right")
        last = np.searchsorted(ends, starts + T, side="right")
        new_document = np.zeros((len(starts), T + 1), dtype=np.int32)
        for row, s in enumerate(starts.tolist()):
            at = ends[first[row] : last[row]] - s  # 1..T: where, in this window, the next document starts
            new_document[row, at] = 1
            if ahead:
                targets[row, at - 1] = IGNORE
        return np.cumsum(new_document[:, :T], axis=1, dtype=np.int32)


class TrainWindows(Windows):
    """Endless: window i for every i >= 0. UserError where the corpus is shorter than one window."""

    def __init__(
        self,
        file: TokenFile,
        seq_len: int,
        seed: int,
        document_mask: bool = False,
        masking: Masking | None = None,
    ) -> None:
        super().__init__(file, seq_len, document_mask, masking)
        n = len(file)
        if n < seq_len + 1:
            raise UserError(
                f"the training split has {n} tokens, and one window of seq_len={seq_len} needs "
                f"{seq_len + 1}: set seq_len to at most {max(n - 1, 1)}, or give more text"
            )
        self.n_windows = max(1, (n - seq_len) // seq_len)  # as many as fit at every phase
        self.n_phases = min(seq_len, n - self.n_windows * seq_len)
        self.seed = seed

    def starts(self, indices: np.ndarray) -> np.ndarray:
        epochs, positions = np.divmod(indices.astype(np.uint64), np.uint64(self.n_windows))
        seed = mix(np.full(1, self.seed % 2**64, dtype=np.uint64))
        keys = mix(seed ^ epochs)
        phases = mix(~keys) % np.uint64(self.n_phases)
        windows = permute(positions, self.n_windows, keys)
        return (windows * np.uint64(self.seq_len) + phases).astype(np.int64)


class ValWindows(Windows):
    """Consecutive windows: every token of the split but the first is a target exactly once.

    Indices beyond the last window give one with nothing to predict, so that all ranks can do as many batches.
    """

    def __init__(
        self,
        file: TokenFile,
        seq_len: int,
        document_mask: bool = False,
        max_tokens: int | None = None,
        masking: Masking | None = None,
    ) -> None:
        super().__init__(file, seq_len, document_mask, masking)
        if len(file) < 2:
            raise UserError(
                f"the validation split has {len(file)} tokens and needs 2 or more: give more text"
            )
        self.n_windows = -(-(len(file) - 1) // seq_len)
        if max_tokens is not None:
            self.n_windows = min(self.n_windows, max(1, max_tokens // seq_len))

    def has_targets(self) -> bool:
        return any(
            (self.batch(np.arange(i, min(i + 64, self.n_windows)))["targets"] != IGNORE).any()
            for i in range(0, self.n_windows, 64)
        )

    def starts(self, indices: np.ndarray) -> np.ndarray:
        return np.where(indices < self.n_windows, indices * self.seq_len, len(self.file))
