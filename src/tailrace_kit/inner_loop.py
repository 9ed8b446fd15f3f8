"""Runs sequences as tasks of an asyncio loop inside an engine's `step`, for libraries with an async API."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Generic, Protocol, TypeVar

from tailrace.engines import Delta

__all__ = ["InnerLoop", "InnerRun"]

_Result = TypeVar("_Result")


class InnerRun(Protocol):
    """One sequence, with the output of its task that was not taken yet."""

    task: asyncio.Task[None]
    is_aborted: bool

    def take(self) -> Delta | None:
        """Return all new output as one delta, or None."""


_Run = TypeVar("_Run", bound=InnerRun)


class InnerLoop(Generic[_Run]):
    """Runs one task for each sequence. The loop runs only inside its methods."""

    def __init__(self) -> None:
        self.runs: dict[int, _Run] = {}
        self._loop = asyncio.new_event_loop()
        self._ending: set[asyncio.Task[None]] = set()
        self._is_running = False

    @property
    def is_closed(self) -> bool:
        return self._loop.is_closed()

    @property
    def has_aborted(self) -> bool:
        """Whether a sequence has to end in this step."""
        return any(run.is_aborted for run in self.runs.values())

    def return_for(self, descriptor: int) -> None:
        """Let `run` return when a descriptor can be read: see `tailrace.engines.interface.Waiting`."""
        self._loop.add_reader(descriptor, self.wake)

    def begin(self, sequence_id: int, run: _Run, follow: Coroutine[object, object, None]) -> None:
        run.task = self._loop.create_task(follow)
        self.runs[sequence_id] = run

    def abort(self, sequence_id: int) -> None:
        """Abort a sequence. Unknown ids are ignored."""
        run = self.runs.get(sequence_id)
        if run is not None:
            run.is_aborted = True
            run.task.cancel()

    def run(self, timeout_s: float) -> None:
        """Run the loop until a task calls `wake`, a descriptor of `return_for` can be read, or for `timeout_s`."""
        timer = self._loop.call_later(timeout_s, self._loop.stop)
        self._is_running = True
        self._loop.run_forever()
        self._is_running = False
        timer.cancel()

    def wake(self) -> None:
        """Report new output: `run` returns."""
        if self._is_running:
            self._loop.stop()

    def take(self) -> list[Delta]:
        """Return the new output of all sequences. Sequences that have ended are removed; `clean_up` lets their tasks
        release resources."""
        deltas = []
        for sequence_id, run in list(self.runs.items()):
            if (delta := run.take()) is not None:
                deltas.append(delta)
                if delta.finish_reason is not None:
                    self._await_end(self.runs.pop(sequence_id))
        return deltas

    def complete(self, work: Coroutine[object, object, _Result]) -> _Result:
        """Run a coroutine to its end, without a timeout."""
        return self._loop.run_until_complete(work)

    def clean_up(self, timeout_s: float) -> None:
        """Let the tasks of ended sequences release resources, for at most `timeout_s`."""
        if self._ending:
            self._loop.run_until_complete(asyncio.wait([*self._ending], timeout=timeout_s))

    def cancel_all(self, timeout_s: float) -> None:
        """Cancel every sequence, and wait for their tasks for at most `timeout_s`."""
        for run in self.runs.values():
            run.task.cancel()
            self._await_end(run)
        self.runs.clear()
        self.clean_up(timeout_s)

    def close(self) -> None:
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    def _await_end(self, run: _Run) -> None:
        if not run.task.done():
            self._ending.add(run.task)
            run.task.add_done_callback(self._ending.discard)
