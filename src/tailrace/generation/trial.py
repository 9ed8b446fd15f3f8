"""Runs a request that was on a dying engine again, alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import InitVar, dataclass, field

from msgspec.structs import replace

from tailrace.engines.interface import Delta, Prefill, Sequence
from tailrace.errors import EngineError, EngineLost
from tailrace.generation.blame import Culprit
from tailrace.generation.run import Run, SequenceRunner

__all__ = ["Suspect", "Trial"]


@dataclass(frozen=True, slots=True, eq=False)
class Suspect:
    """A request that was on an engine when the engine died. It is tried even if its stream was cancelled since."""

    run: Run
    culprit: Culprit
    sequences: tuple[Sequence, ...]  # those on the engine
    position: int  # tokens of these sequences when the engine died


@dataclass(slots=True, eq=False, repr=False)
class Trial:
    """Runs a suspect's sequences to one token past the position where the engine died, or to their end. Their tokens
    are not shown.

    The engine must be empty. `on_over` is called when the sequences have left it, `on_death` if it dies before.
    """

    suspect: Suspect
    engine: SequenceRunner
    new_sequence_id: InitVar[Callable[[], int]]
    on_over: Callable[[], None]
    on_death: Callable[[], None]
    num_tokens: int = 0  # generated so far
    _running: dict[int, Sequence] = field(init=False)
    _was_stopped: bool = False
    _is_over: bool = False

    def __post_init__(self, new_sequence_id: Callable[[], int]) -> None:
        self._running = {new_sequence_id(): sequence for sequence in self.suspect.sequences}

    @property
    def is_complete(self) -> bool:
        """Whether a trial that is over passed its position or reached its end."""
        return self._is_past or not self._was_stopped

    @property
    def _is_past(self) -> bool:
        return self.num_tokens > self.suspect.position

    def start(self) -> None:
        """Raises: EngineLost if the engine is already gone. Then no callback is called."""
        try:
            for sequence_id, sequence in list(self._running.items()):
                self.engine.submit(replace(sequence, sequence_id=sequence_id), self)
        except EngineLost:
            self.forget()
            raise

    def forget(self) -> None:
        """Call no callback any more."""
        self._is_over = True

    def push(self, delta: Delta) -> None:
        self.num_tokens += len(delta.token_ids)
        if delta.finish_reason is not None:
            self._running.pop(delta.sequence_id, None)
        if not self._running:
            self._finish(self.on_over)
        elif self._is_past:
            self.stop()

    def report(self, progress: Prefill) -> None:
        pass

    def lost(self, error: EngineError) -> None:
        self._finish(self.on_death)

    def stop(self) -> None:
        """Abort the sequences."""
        self._was_stopped = True
        for sequence_id in self._running:
            self.engine.abort(sequence_id)

    def _finish(self, report: Callable[[], None]) -> None:
        if not self._is_over:
            self.forget()
            report()
