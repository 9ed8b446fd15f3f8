"""Schedules the start of sequences, so that compiling grammars leaves most of the time to running sequences.

The library compiles a grammar in the step of a sequence's first token, and all other sequences wait: up to half a
second on two cores, because `compile_grammars` limits the steps of compiling. It keeps compiled grammars. So sequences
with a new grammar begin one after the other, with pauses in between for the others.

A replay that must compute tokens alone (`Sequence.schedule`) begins while no other sequence runs, and the others wait
until it is past these tokens. Of all sequences that run, at most one has such tokens: while it decoded alone, none of
the others had begun. If others run nevertheless, or have waited for MAX_RESERVED_S, it runs beside them. Then its ids
may differ, which the server notices.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque

from tailrace.engines.interface import Sequence
from tailrace.types import Grammar

__all__ = ["Turns"]

PAUSES = 3.0  # length of a pause, relative to the step that compiled a grammar
MAX_KNOWN = 4096
MAX_RESERVED_S = 30.0  # how long sequences wait for a replay that runs alone


class Turns:
    """The queue of sequences that have not begun, in order of arrival, except those whose grammar has to be
    compiled."""

    def __init__(self) -> None:
        self._ready: list[Sequence] = []
        self._held: deque[Sequence] = deque()
        self._compiling: Sequence | None = None
        self._known: OrderedDict[Grammar, None] = OrderedDict()
        self._paused_until_s = 0.0
        self._reserved: Sequence | None = None  # the replay for which the others wait
        self._reserved_until_s = 0.0

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
        if self._reserved is not None and self._reserved.sequence_id == sequence_id:
            self._reserved = None

    def take(self, *, is_alone: bool) -> list[Sequence]:
        """Return the sequences that may begin now. `is_alone`: no other sequence runs, so none would have to wait."""
        if self._reserved is not None and time.monotonic() < self._reserved_until_s:
            return []
        if is_alone and (replay := self._take_replay()) is not None:
            return [replay]
        taken, self._ready = self._ready, []
        if self._held and self._compiling is None and (is_alone or time.monotonic() >= self._paused_until_s):
            self._compiling = self._held.popleft()
            taken.append(self._compiling)
        return taken

    def on_delta(self, sequence_id: int, num_tokens: int, took_s: float) -> None:
        """Report a sequence's delta, up to its `num_tokens`-th token, from a step that took `took_s`."""
        reserved = self._reserved
        if reserved is not None and reserved.sequence_id == sequence_id and num_tokens >= reserved.schedule.alone_end:
            self._reserved = None
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

    def _take_replay(self) -> Sequence | None:
        """Return a replay that must compute tokens alone, for which the others wait from now on."""
        queue: list[Sequence] | deque[Sequence]
        for queue in (self._ready, self._held):
            for sequence in queue:
                if sequence.schedule.alone_end:
                    queue.remove(sequence)
                    if queue is self._held:
                        self._compiling = sequence
                    self._reserved = sequence
                    self._reserved_until_s = time.monotonic() + MAX_RESERVED_S
                    return sequence
        return None
