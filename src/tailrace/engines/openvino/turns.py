"""Schedules the start of sequences, so that compiling grammars leaves most of the time to running sequences.

The library compiles a grammar in the step of a sequence's first token, and all other sequences wait: up to 0.2 s, a
limit that `trial` enforces. It keeps compiled grammars. So sequences with a new grammar begin one after the other, with
pauses in between for the others.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque

from tailrace.engines.promise import Sequence
from tailrace.types import Grammar

__all__ = ["Turns"]

PAUSES = 3.0  # length of a pause, relative to the step that compiled a grammar
MAX_KNOWN = 4096


class Turns:
    """The queue of sequences that have not begun, in order of arrival, except those whose grammar has to be
    compiled."""

    def __init__(self) -> None:
        self._ready: list[Sequence] = []
        self._held: deque[Sequence] = deque()
        self._compiling: Sequence | None = None
        self._known: OrderedDict[Grammar, None] = OrderedDict()
        self._paused_until_s = 0.0

    @property
    def is_compiling(self) -> bool:
        """Whether a sequence with a new grammar has begun and has no token yet."""
        return self._compiling is not None

    def add(self, sequence: Sequence) -> None:
        grammar = sequence.sampling.grammar
        (self._ready if grammar is None or grammar in self._known else self._held).append(sequence)

    def drop(self, sequence_id: int) -> None:
        """Remove a sequence that has ended. Unknown ids are ignored."""
        self._ready = [sequence for sequence in self._ready if sequence.sequence_id != sequence_id]
        self._held = deque(sequence for sequence in self._held if sequence.sequence_id != sequence_id)
        if self._compiling is not None and self._compiling.sequence_id == sequence_id:
            self._compiling = None

    def take(self, *, is_alone: bool) -> list[Sequence]:
        """Return the sequences that may begin now. `is_alone`: no other sequence runs, so none would have to wait."""
        taken, self._ready = self._ready, []
        if self._held and self._compiling is None and (is_alone or time.monotonic() >= self._paused_until_s):
            self._compiling = self._held.popleft()
            taken.append(self._compiling)
        return taken

    def on_delta(self, sequence_id: int, took_s: float) -> None:
        """Report a sequence's delta, from a step that took `took_s`."""
        if self._compiling is None or self._compiling.sequence_id != sequence_id:
            return
        grammar, self._compiling = self._compiling.sampling.grammar, None
        assert grammar is not None
        self._known[grammar] = None
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
        self._paused_until_s = time.monotonic() + PAUSES * took_s
        for sequence in [held for held in self._held if held.sampling.grammar == grammar]:
            self._held.remove(sequence)
            self._ready.append(sequence)
