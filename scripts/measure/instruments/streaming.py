"""Text to a terminal as its tokens come: whole characters, stop strings held back, one row after another."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence


class TextStream:
    """The text of tokens that come one by one, given out as soon as it is final: never half a UTF-8
    character, and nothing that may yet begin a stop string, which ends the text and is left out of it."""

    def __init__(self, decode: Callable[[list[int]], str], stops: Sequence[str] = ()):
        self.decode, self.stops = decode, list(stops)
        self.tokens: list[int] = []  # those whose last character is still open
        self.taken = 0  # characters of their text that are in `text`
        self.text = ""
        self.given = 0
        self.stopped = False

    def feed(self, token: int) -> str:
        """The text that has become final by this token."""
        self.tokens.append(token)
        text = self.decode(self.tokens)
        if text.endswith("\ufffd"):  # bytes that are no character, or not yet: only the last can still change
            fresh, self.taken = text[self.taken : -1], len(text) - 1
        else:
            fresh, self.taken = text[self.taken :], 0
            self.tokens.clear()
        return self._take(fresh, hold=True)

    def finish(self) -> str:
        """The text held back, once nothing more can come."""
        fresh = self.decode(self.tokens)[self.taken :] if self.tokens else ""
        self.tokens.clear()
        return self._take(fresh, hold=False)

    def _take(self, fresh: str, hold: bool) -> str:
        if self.stopped:
            return ""
        longest = max(map(len, self.stops), default=0)
        begin = max(0, len(self.text) - longest + 1)
        self.text += fresh
        found = [at for at in (self.text.find(stop, begin) for stop in self.stops) if at >= 0]
        end = len(self.text)
        if found:
            self.stopped, end = True, min(found)
            self.text = self.text[:end]
        elif hold:
            begun = [n for stop in self.stops for n in range(1, len(stop)) if self.text.endswith(stop[:n])]
            end -= max(begun, default=0)
        piece = self.text[self.given : end]
        self.given = max(self.given, end)
        return piece


class Terminal:
    """Writes rows one after the other: the first unfinished one as it comes, then those behind it."""

    def __init__(
        self,
        prompts: Sequence[str],
        decode: Callable[[list[int]], str],
        stops: Sequence[str],
        eot: int | None,
    ):
        self.streams = [TextStream(decode, stops) for _ in prompts]
        self.waiting = list(prompts)  # per row the text not written yet, the prompt first
        self.finished = [False] * len(prompts)
        self.eot = eot
        self.current = 0
        self._write()

    def on_token(self, row: int, token: int) -> bool:
        """Take a token; True when the row's text has come to a stop string."""
        stream = self.streams[row]
        if token == self.eot:
            self.finish(row)
        else:
            self.waiting[row] += stream.feed(token)
            if stream.stopped:
                self.finish(row)
        self._write()
        return stream.stopped

    def finish(self, row: int) -> None:
        if not self.finished[row]:
            self.waiting[row] += self.streams[row].finish()
            self.finished[row] = True

    def close(self) -> None:
        for row in range(len(self.streams)):
            self.finish(row)
        self._write()

    def _write(self) -> None:
        while self.current < len(self.streams):
            sys.stdout.write(self.waiting[self.current])
            self.waiting[self.current] = ""
            if not self.finished[self.current]:
                break
            self.current += 1
            sys.stdout.write("\n" if self.current == len(self.streams) else "\n" + "-" * 40 + "\n")
        sys.stdout.flush()
