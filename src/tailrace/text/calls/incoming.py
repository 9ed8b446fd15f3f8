"""Text that arrives in pieces, for parsers that are written as generators.

A parser takes text from an `Incoming` in order, like from a string. Where it needs text that has not arrived yet, it
yields. Whoever adds text continues it. So a parser reads like the format that it parses, and its result cannot depend
on how the text was cut.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from functools import lru_cache
from typing import TypeAlias, TypeVar

from tailrace.text.stops import overlap

__all__ = ["Incoming", "Wait", "run"]

T = TypeVar("T")
Wait: TypeAlias = Generator[None, None, T]  # yields while it needs more text, and returns its result

_SPACE = re.compile(r"[ \t\n\r]*")  # of JSON


class Incoming:
    """Text that arrives in pieces, and a position in it. `text` has no more than what somebody may still read.

    `is_complete`: no more text will arrive. `is_cut`: then, whether it ended at a limit, and not because the model
    wanted to end there.
    """

    __slots__ = ("_mark", "at", "is_complete", "is_cut", "text")

    def __init__(self, text: str = "", *, is_complete: bool = False) -> None:
        self.text = text
        self.at = 0
        self.is_complete = is_complete
        self.is_cut = False
        self._mark: int | None = None

    def add(self, text: str) -> None:
        """Add a piece. Text before the position is dropped, unless it is marked."""
        kept = self.at if self._mark is None else self._mark
        self.text = self.text[kept:] + text
        self.at -= kept
        if self._mark is not None:
            self._mark = 0

    def end(self, *, is_cut: bool) -> None:
        self.is_complete, self.is_cut = True, is_cut

    def mark(self) -> None:
        """Keep the text from here on, so that `rewind` can come back. There is one mark."""
        self._mark = self.at

    def rewind(self) -> bool:
        """Go back to the mark. Returns whether there was one."""
        if self._mark is None:
            return False
        self.at, self._mark = self._mark, None
        return True

    def forget(self) -> None:
        """Remove the mark."""
        self._mark = None

    def take(self, size: int) -> str:
        """Take characters that have arrived."""
        taken = self.text[self.at : self.at + size]
        self.at += len(taken)
        return taken

    def char(self) -> Wait[str]:
        """Return the next character without taking it; "" at the end."""
        while self.at >= len(self.text):
            if self.is_complete:
                return ""
            yield
        return self.text[self.at]

    def space(self) -> Wait[str]:
        """Take white space."""
        taken = ""
        while True:
            match = _SPACE.match(self.text, self.at)
            assert match is not None
            taken += match[0]
            self.at = match.end()
            if self.at < len(self.text) or self.is_complete:
                return taken
            yield

    def upcoming(self, *markers: str) -> Wait[str]:
        """Return the longest of these markers that comes next, without taking it; "" if none does."""
        longest = max(map(len, markers), default=0)
        while True:
            rest = self.text[self.at : self.at + longest]
            may_grow = not self.is_complete and any(len(one) > len(rest) and one.startswith(rest) for one in markers)
            if not may_grow:
                return max((one for one in markers if one and rest.startswith(one)), key=len, default="")
            yield

    def skip(self, *markers: str) -> Wait[str]:
        """Take the longest of these markers if one comes next, and return it."""
        found = yield from self.upcoming(*markers)
        self.at += len(found)
        return found

    def until(self, *markers: str, most: int) -> Wait[tuple[str, str]]:
        """Take the text before the first of these markers, and then the marker. Returns both; the marker is "" if the
        text ends before one, or has none within `most` characters. Then nothing is taken."""
        seen = 0  # characters after the position that have no marker
        longest = max(map(len, markers))
        while True:
            start = self._first(markers, self.at + seen)
            if start is not None and start[0] - self.at <= most:
                text = self.text[self.at : start[0]]
                self.at = start[0] + len(start[1])
                return text, start[1]
            if self.is_complete or len(self.text) - self.at > most + longest:
                return "", ""
            seen = max(0, len(self.text) - self.at - longest + 1)
            yield

    def pieces(self, *markers: str) -> Wait[tuple[str, str]]:
        """Take text that is certainly before the first of these markers, or the marker itself. Returns (text, "") or
        ("", marker); ("", "") at the end of the text. Call it again for more.

        This is in the path of every token, so markers are compared only where one of them may begin.
        """
        beginnings = _beginnings(markers)
        while self.at == len(self.text):
            if self.is_complete:
                return "", ""
            yield
        begin = beginnings.search(self.text, self.at)
        stop = len(self.text) if begin is None else begin.start()
        if stop > self.at:
            return self.take(stop - self.at), ""
        marker = yield from self.skip(*markers)
        return ("", marker) if marker else (self.take(1), "")

    def _first(self, markers: tuple[str, ...], begin: int) -> tuple[int, str] | None:
        """Return the position of the first marker, and the longest marker there; None if none has arrived whole, or if
        an earlier or longer one may still be arriving."""
        found = [(position, -len(one), one) for one in markers if (position := self.text.find(one, begin)) >= 0]
        if not found:
            return None
        position, _, marker = min(found)
        if not self.is_complete:
            tail = self.text[max(begin, len(self.text) - max(map(len, markers))) :]
            arriving = len(self.text) - max(overlap(tail, one) for one in markers)
            if arriving < position or (arriving == position and self._may_grow(markers, position, marker)):
                return None
        return position, marker

    def _may_grow(self, markers: tuple[str, ...], position: int, marker: str) -> bool:
        rest = self.text[position:]
        return any(len(one) > len(rest) and one.startswith(rest) and len(one) > len(marker) for one in markers)


@lru_cache(maxsize=256)
def _beginnings(markers: tuple[str, ...]) -> re.Pattern[str]:
    """Return a pattern of what a marker may begin with: its first three characters, or fewer at the end."""
    return re.compile("|".join(sorted({_beginning(marker[:3]) for marker in markers})) or "(?!)")


def _beginning(text: str) -> str:
    return re.escape(text[0]) + (rf"(?:\Z|{_beginning(text[1:])})" if text[1:] else "")


def run(parser: Wait[T]) -> T:
    """Return the result of a parser whose text is complete. It never has to wait."""
    try:
        next(parser)
    except StopIteration as done:
        result: T = done.value
        return result
    raise AssertionError("a parser waits for more of a complete text")
