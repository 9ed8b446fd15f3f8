"""Who may begin when, so that compiling grammars leaves most of the time to those who are already talking.

The library compiles a grammar in the step of a sequence's first token, and all others wait for it: up to 0.2 s, which
`trial` sees to. What it has compiled it keeps. So sequences with a grammar that it does not know yet begin one
after the other, with a pause between them in which the others go on.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque

from tailrace.engines.promise import Sequence
from tailrace.types import Grammar

__all__ = ["Turns"]

PAUSES = 3.0  # times as long as the step before in which a grammar was compiled
MOST_KNOWN = 4096


class Turns:
    """Sequences that have not begun, first come first served, but for those whose grammar has to be compiled."""

    def __init__(self) -> None:
        self._ready: list[Sequence] = []
        self._held: deque[Sequence] = deque()
        self._compiling: Sequence | None = None
        self._known: OrderedDict[Grammar, None] = OrderedDict()
        self._rests_until_s = 0.0

    @property
    def is_compiling(self) -> bool:
        """A sequence has begun whose grammar was not known, and has not spoken."""
        return self._compiling is not None

    def add(self, sequence: Sequence) -> None:
        grammar = sequence.sampling.grammar
        (self._ready if grammar is None or grammar in self._known else self._held).append(sequence)

    def drop(self, sequence_id: int) -> None:
        """It has ended, wherever it was. An id that is not here is ignored."""
        self._ready = [sequence for sequence in self._ready if sequence.sequence_id != sequence_id]
        self._held = deque(sequence for sequence in self._held if sequence.sequence_id != sequence_id)
        if self._compiling is not None and self._compiling.sequence_id == sequence_id:
            self._compiling = None

    def take(self, *, is_alone: bool) -> list[Sequence]:
        """Those that may begin now. `is_alone`: nobody else would have to wait."""
        taken, self._ready = self._ready, []
        if self._held and self._compiling is None and (is_alone or time.monotonic() >= self._rests_until_s):
            self._compiling = self._held.popleft()
            taken.append(self._compiling)
        return taken

    def spoke(self, sequence_id: int, took_s: float) -> None:
        """A sequence said something or ended, in a step that took so long."""
        if self._compiling is None or self._compiling.sequence_id != sequence_id:
            return
        grammar, self._compiling = self._compiling.sampling.grammar, None
        assert grammar is not None
        self._known[grammar] = None
        if len(self._known) > MOST_KNOWN:
            self._known.popitem(last=False)
        self._rests_until_s = time.monotonic() + PAUSES * took_s
        for sequence in [held for held in self._held if held.sampling.grammar == grammar]:
            self._held.remove(sequence)
            self._ready.append(sequence)
