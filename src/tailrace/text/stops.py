"""Finds stop strings in streamed text, and holds back text that may be the start of one.

Searches all stop strings at once (Aho and Corasick, 1975). A state is the longest suffix of the text that is a prefix
of a stop string, which is exactly the text to hold back. A character costs constant amortised time.
"""

from __future__ import annotations

from collections import deque

from tailrace.errors import RequestError

__all__ = ["StopMatcher", "overlap"]


class StopMatcher:
    """Watches one sequence for stop strings.

    The first completed match counts; of several that end at the same character, the longest. So the result does not
    depend on how the text is split. With `include`, the stop string stays in the text, so that nothing is held back.

    Raises: RequestError for an empty stop string.
    """

    __slots__ = ("_done", "_edges", "_fallbacks", "_firsts", "_include", "_matches", "_prefixes", "_state")

    def __init__(self, stops: tuple[str, ...], include: bool) -> None:
        self._include = include
        self._state = 0
        self._done = False
        self._firsts = frozenset(stop[:1] for stop in stops)
        if "" in self._firsts:
            raise RequestError("A stop string must not be empty.", param="stop")
        self._edges: list[dict[str, int]] = [{}]  # by state: next character to next state
        self._prefixes = [""]  # by state: its text
        self._matches: list[str | None] = [None]  # by state: the longest stop string that ends here
        for stop in stops:
            self._add(stop)
        self._fallbacks = [0] * len(self._edges)  # by state: its longest proper suffix that is a state
        self._link()

    def _add(self, stop: str) -> None:
        state = 0
        for end, char in enumerate(stop, 1):
            following = self._edges[state].get(char)
            if following is None:
                following = self._edges[state][char] = len(self._edges)
                self._edges.append({})
                self._prefixes.append(stop[:end])
                self._matches.append(None)
            state = following
        self._matches[state] = stop

    def _link(self) -> None:
        """Compute the fallbacks breadth-first, since each one depends on shorter states."""
        waiting = deque(self._edges[0].values())
        while waiting:
            state = waiting.popleft()
            fallback = self._fallbacks[state]
            if self._matches[state] is None:
                self._matches[state] = self._matches[fallback]
            for char, following in self._edges[state].items():
                self._fallbacks[following] = self._step(fallback, char)
                waiting.append(following)

    def _step(self, state: int, char: str) -> int:
        while True:
            following = self._edges[state].get(char)
            if following is not None:
                return following
            if state == 0:
                return 0
            state = self._fallbacks[state]

    def push(self, text: str) -> tuple[str, str | None]:
        """Return the text that can be sent now, and the stop string if this text completes one.

        After a match, all text is dropped: ("", None).
        """
        if self._done:
            return "", None
        if self._state == 0 and self._firsts.isdisjoint(text):
            return text, None
        held = "" if self._include else self._prefixes[self._state]
        state = self._state
        for end, char in enumerate(text, 1):
            state = self._step(state, char)
            stop = self._matches[state]
            if stop is not None:
                self._done = True
                self._state = 0
                seen = held + text[:end]
                return (seen if self._include else seen[: len(seen) - len(stop)]), stop
        self._state = state
        seen = held + text
        if self._include:
            return seen, None
        return seen[: len(seen) - len(self._prefixes[state])], None

    def flush(self) -> str:
        """End the sequence. Returns the text that was held back, which is not a stop string."""
        held = "" if self._include else self._prefixes[self._state]
        self._state = 0
        return held


def overlap(text: str, marker: str) -> int:
    """Return how many characters at the end of a text may be the beginning of the marker."""
    return next((size for size in range(min(len(marker) - 1, len(text)), 0, -1) if marker.startswith(text[-size:])), 0)
