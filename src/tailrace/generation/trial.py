"""A request that was in an engine when that died, run again with nothing beside it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tailrace.engines.promise import Delta, Sequence
from tailrace.errors import EngineError, EngineLost
from tailrace.generation.blame import Culprit

if TYPE_CHECKING:
    from tailrace.generation.run import Run, SequenceRunner

__all__ = ["Suspect", "Trial"]

_TRIAL_S = 30.0  # then it is taken off: it is slow, which kills nobody


@dataclass(frozen=True, slots=True, eq=False)
class Suspect:
    """A request that was in an engine when that died. Its stream may have been cancelled since; it is tried anyhow."""

    run: Run
    culprit: Culprit
    sequences: tuple[Sequence, ...]  # that the engine had of it
    place: int  # tokens that the engine had given of all of them


class Trial:
    """Runs a suspect's sequences up to one token past the place where the engine died, or to their end. What they say
    is shown to nobody: the stream itself waits.

    The engine must be empty. `on_over` is called when it has let go of them all; `on_death` if it dies before.
    """

    def __init__(
        self,
        suspect: Suspect,
        engine: SequenceRunner,
        new_sequence_id: Callable[[], int],
        *,
        on_over: Callable[[], None],
        on_death: Callable[[], None],
    ) -> None:
        self.suspect = suspect
        self._engine = engine
        self._on_over = on_over
        self._on_death = on_death
        self._running = {new_sequence_id(): sequence for sequence in suspect.sequences}
        self.num_tokens = 0  # that the engine has given
        self._is_over = False
        self._timer = asyncio.get_running_loop().call_later(_TRIAL_S, self._stop)

    def start(self) -> None:
        """Raises: EngineLost if the engine is gone already. Nothing is called then."""
        try:
            for sequence_id, sequence in list(self._running.items()):
                self._engine.submit(replace(sequence, sequence_id=sequence_id), self)
        except EngineLost:
            self.forget()
            raise

    def forget(self) -> None:
        """Call nobody any more."""
        self._is_over = True
        self._timer.cancel()

    def push(self, delta: Delta) -> None:
        self.num_tokens += len(delta.token_ids)
        if delta.finish_reason is not None:
            self._running.pop(delta.sequence_id, None)
        if not self._running:
            self._finish(self._on_over)
        elif self.num_tokens > self.suspect.place:
            self._stop()

    def lost(self, error: EngineError) -> None:
        self._finish(self._on_death)

    def _stop(self) -> None:
        for sequence_id in self._running:
            self._engine.abort(sequence_id)

    def _finish(self, report: Callable[[], None]) -> None:
        if not self._is_over:
            self.forget()
            report()
