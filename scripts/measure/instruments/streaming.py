"""Text to a terminal as its tokens come: whole characters, stop strings held back, one row after another."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from itertools import takewhile

CONTEXT = 8  # tokens before a new one that are decoded with it: a decoder may strip spaces from the first
OPEN_BYTES = 3  # most bytes of a character that lacks one


class TextStream:
    """The text of tokens that come one by one, given out as soon as it is final: never half a UTF-8
    character, and nothing that may yet begin a stop string, which ends the text and is left out of it.
    `context`: the tokens before, of the prompt."""

    def __init__(
        self, decode: Callable[[list[int]], str], stops: Sequence[str] = (), context: Sequence[int] = ()
    ):
        self.decode, self.stops = decode, list(stops)
        self.parts = [list(context[-4 * CONTEXT :]), []]  # tokens; each part ends where a character does
        self.before = decode(self.parts[0])  # of the text of all parts, what has been taken
        self.changed = 0  # tokens since it was read so
        self.text = ""
        self.given = 0
        self.stopped = False

    def feed(self, token: int) -> str:
        """The text that has become final by this token."""
        self.parts[-1].append(token)
        return self._take(self._fresh(final=False), hold=True)

    def finish(self) -> str:
        """The text held back, once nothing more can come."""
        return self._take(self._fresh(final=True), hold=False)

    def _fresh(self, final: bool) -> str:
        """The text that is new and, unless `final`, cannot change. U+FFFD at its end may be bytes of a
        character that is not complete; then some decoders read the bytes before anew, too."""
        text = self.decode([token for part in self.parts for token in part])
        self.changed = 0 if text.startswith(self.before) else self.changed + 1
        if not final and 0 < self.changed <= OPEN_BYTES:
            return ""
        closed = max(len(text.rstrip("\ufffd")), len(text) - (0 if final else OPEN_BYTES))
        same = (a == b for a, b in zip(text, self.before, strict=False))
        fresh = text[sum(takewhile(bool, same)) : closed]
        if closed < len(text):
            self.before = max(self.before, text[:closed], key=len)
            return fresh
        while sum(map(len, self.parts[1:])) >= CONTEXT:
            del self.parts[0]
        self.before = self.decode([token for part in self.parts for token in part])
        self.parts.append([])
        return fresh

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
    """Writes rows one after the other: the first unfinished one as it comes, then those behind it.
    `contexts`: the tokens of `prompts`."""

    def __init__(
        self,
        prompts: Sequence[str],
        decode: Callable[[list[int]], str],
        stops: Sequence[str],
        eot: int | None,
        contexts: Sequence[Sequence[int]],
    ):
        self.streams = [TextStream(decode, stops, context) for context in contexts]
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
