"""Finds the text that kills engines: after a crash, the texts that were on the engine run alone on the next one, one
after the other, before any request begins. If the engine dies again while one runs, this text is proven to kill
engines: requests with it end, and it is refused for some minutes. After that only other texts of the same caller are
tried. Nobody sees the vectors of a trial.

An engine that was killed from outside is weak evidence. A text is tried if its request has lost two engines like this,
and is blamed when two more were killed while it ran alone.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Protocol

from tailrace.engines.interface import Delta, Prefill
from tailrace.errors import EngineError, EngineLost, PoisonRequest
from tailrace.generation.blame import Blame, Culprit
from tailrace.generation.run import SequenceRunner
from tailrace.generation.vector_run import VectorRun

__all__ = ["VectorTrials"]

_LOSSES_TO_TRY = 2  # of engines killed from outside
_KILLS_TO_BLAME = 2  # of engines killed from outside, while the text ran alone
_HOLD_S = 30.0  # after which no other trial begins on one engine


class _Engine(SequenceRunner, Protocol):
    has_crashed: bool  # whether the last engine crashed or hung, and was not killed


@dataclass(slots=True)
class _Suspect:
    run: VectorRun  # may have ended: its client may have left
    index: int
    num_kills: int = 0


class VectorTrials:
    """The texts that wait to be tried. It implements `engines.Receiver` for the one that runs."""

    def __init__(
        self, engine: _Engine, new_sequence_id: Callable[[], int], blame: Blame, runs: Collection[VectorRun]
    ) -> None:
        """`runs` are all requests in progress."""
        self._runs = runs
        self._engine = engine
        self._new_sequence_id = new_sequence_id
        self._blame = blame
        self._suspects: deque[_Suspect] = deque()  # the first one is tried
        self._running: int | None = None  # its sequence
        self._timer: asyncio.TimerHandle | None = None
        self._on_done: Callable[[], None] = lambda: None

    @property
    def is_trying(self) -> bool:
        return bool(self._suspects)

    def add(self, run: VectorRun, indexes: Iterable[int]) -> None:
        """The engine died while these texts of a request were on it."""
        if self._engine.has_crashed or run.times.num_losses >= _LOSSES_TO_TRY:
            self._suspects += (_Suspect(run, index) for index in indexes)

    def resume(self, on_done: Callable[[], None]) -> None:
        """An engine is ready, and nothing is on it. `on_done` is called when requests may begin, perhaps at once."""
        self._on_done = on_done
        if self._suspects:
            self._timer = asyncio.get_running_loop().call_later(_HOLD_S, self._on_hold_over)
        self._try_next()

    def _on_hold_over(self) -> None:
        """New requests have waited for long: try no other text. The one that runs goes on to its end, or until the
        supervisor finds that the engine hangs."""
        while len(self._suspects) > 1:
            self._suspects.pop()

    def forget(self) -> None:
        """No engine is expected."""
        self._suspects.clear()
        self._running = None
        self._stop_timer()

    def push(self, delta: Delta) -> None:
        if delta.sequence_id == self._running:
            self._running = None
            self._suspects.popleft()
            self._try_next()

    def report(self, progress: Prefill) -> None:
        """Nobody waits for a part of a trial."""

    def lost(self, error: EngineError) -> None:
        self._stop_timer()
        if self._running is None:
            return
        self._running = None
        suspect = self._suspects[0]
        suspect.num_kills += 1
        if self._engine.has_crashed or suspect.num_kills == _KILLS_TO_BLAME:
            self._blame_text(suspect)

    def _blame_text(self, suspect: _Suspect) -> None:
        """Refuse the text for some minutes. Requests in progress that have it end."""
        self._engine.failures = 0  # the text failed, and not the engine
        record = suspect.run.record
        self._blame.add(Culprit.of_prompt(record.caller, record.prompts[suspect.index]))
        for run in list(self._runs):
            try:
                self._blame.check_inputs(run.record)
            except PoisonRequest as error:
                run.fail(error)
        rest = (one for one in self._suspects if one.run.record.caller == record.caller and not one.run.is_over)
        self._suspects = deque(rest)

    def _try_next(self) -> None:
        if not self._suspects:
            self._finish()
            return
        suspect = self._suspects[0]
        sequence = suspect.run.sequence(self._new_sequence_id(), suspect.index)
        try:
            self._engine.submit(sequence, self)
        except EngineLost:
            self._stop_timer()
            return  # the next engine resumes
        self._running = sequence.sequence_id

    def _finish(self) -> None:
        self.forget()
        self._on_done()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
