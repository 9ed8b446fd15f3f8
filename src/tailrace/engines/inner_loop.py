"""Sequences that are tasks of an asyncio loop, which runs inside an engine's `step`: for what can only be heard through
one."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Generic, Protocol, TypeVar

from tailrace.engines.promise import Delta

__all__ = ["InnerLoop", "InnerRun"]

_Found = TypeVar("_Found")


class InnerRun(Protocol):
    """One sequence: what its task has heard and nobody has taken."""

    task: asyncio.Task[None]
    is_aborted: bool

    def take(self) -> Delta | None:
        """All that is new, in one delta; None if nothing is."""


_Run = TypeVar("_Run", bound=InnerRun)


class InnerLoop(Generic[_Run]):
    """Carries one task a sequence. Nothing moves in it but while one of its methods runs."""

    def __init__(self) -> None:
        self.runs: dict[int, _Run] = {}
        self._loop = asyncio.new_event_loop()
        self._leaving: set[asyncio.Task[None]] = set()
        self._is_running = False

    @property
    def is_closed(self) -> bool:
        return self._loop.is_closed()

    @property
    def has_aborted(self) -> bool:
        """A sequence is to end in this step."""
        return any(run.is_aborted for run in self.runs.values())

    def begin(self, sequence_id: int, run: _Run, follow: Coroutine[object, object, None]) -> None:
        run.task = self._loop.create_task(follow)
        self.runs[sequence_id] = run

    def abort(self, sequence_id: int) -> None:
        """Ids that are not here are ignored."""
        run = self.runs.get(sequence_id)
        if run is not None:
            run.is_aborted = True
            run.task.cancel()

    def run(self, timeout_s: float) -> None:
        """Until a task calls `tell`, or for so long."""
        timer = self._loop.call_later(timeout_s, self._loop.stop)
        self._is_running = True
        self._loop.run_forever()
        self._is_running = False
        timer.cancel()

    def tell(self) -> None:
        """There is news: whoever runs the loop may go on."""
        if self._is_running:
            self._loop.stop()

    def take(self) -> list[Delta]:
        """What is new of all sequences. Those that have ended are gone then, and their tasks may put away what they
        hold when `see_off` runs."""
        deltas = []
        for sequence_id, run in list(self.runs.items()):
            if (delta := run.take()) is not None:
                deltas.append(delta)
                if delta.finish_reason is not None:
                    self._leave(self.runs.pop(sequence_id))
        return deltas

    def complete(self, work: Coroutine[object, object, _Found]) -> _Found:
        """Run it to its end, however long that takes."""
        return self._loop.run_until_complete(work)

    def see_off(self, timeout_s: float) -> None:
        """Give the tasks of sequences that have ended so long to put away what they hold."""
        if self._leaving:
            self._loop.run_until_complete(asyncio.wait([*self._leaving], timeout=timeout_s))

    def see_off_all(self, timeout_s: float) -> None:
        """End every sequence, and give their tasks so long."""
        for run in self.runs.values():
            run.task.cancel()
            self._leave(run)
        self.runs.clear()
        self.see_off(timeout_s)

    def close(self) -> None:
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    def _leave(self, run: _Run) -> None:
        if not run.task.done():
            self._leaving.add(run.task)
            run.task.add_done_callback(self._leaving.discard)
