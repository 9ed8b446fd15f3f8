"""Looks for stalls: gaps of more than a second in streams that have begun.

A look costs a microsecond for each running stream, and a token costs nothing. The price is that a gap is measured to a
quarter of a second.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Iterator
from typing import Literal, Protocol, TypeAlias

from tailrace.generation.generator import Generator

__all__ = ["STALL_CAUSES", "StallCause", "StallReport", "StallWatch"]

_LOOK_S = 0.25
_STALL_S = 1.0

# engine: no new token, also while the engine is replaced. journal: tokens that wait to be kept, or a commit that held
# up the server. reader: a client that does not take what is ready. server: the server itself did nothing.
StallCause: TypeAlias = Literal["engine", "journal", "reader", "server"]
STALL_CAUSES: tuple[StallCause, ...] = ("engine", "journal", "reader", "server")


class StallReport(Protocol):
    def on_stall(self, model: str, cause: StallCause, stalled_s: float, *, is_new: bool) -> None:
        """A stream has been stalled for `stalled_s` more. `is_new`: since the stall began."""


class StallWatch:
    """Reports the stalls of all running streams, as soon as they last a second, and then at each look."""

    def __init__(self, generators: Collection[Generator], report: StallReport) -> None:
        self._generators = generators
        self._report = report
        self._looked_s = time.monotonic()
        self._commit_s = 0.0
        # For each stream or reader and cause: its position, since when it is there, and for how long it is reported.
        self._seen: dict[tuple[object, StallCause], tuple[int, float, float]] = {}

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_S)
            self.look(time.monotonic())

    def look(self, now_s: float) -> None:
        """Look at all running streams."""
        blocked_s = now_s - self._looked_s - _LOOK_S
        self._looked_s = now_s
        commit_s = sum(store.state.commit_s for store in {generator.store for generator in self._generators})
        committing_s, self._commit_s = commit_s - self._commit_s, commit_s
        if blocked_s >= _STALL_S:  # nothing could move meanwhile
            self._report_block("journal" if committing_s > blocked_s / 2 else "server", blocked_s)
            self._seen.clear()
        seen = {}
        for model, thing, cause, position in self._positions():
            key = (thing, cause)
            before, since_s, reported_s = self._seen.get(key, (position, now_s, 0.0))
            if position != before:
                since_s, reported_s = now_s, 0.0
            stalled_s = now_s - since_s
            if stalled_s >= _STALL_S:
                self._report.on_stall(model, cause, stalled_s - reported_s, is_new=reported_s == 0)
                reported_s = stalled_s
            seen[key] = (position, since_s, reported_s)
        self._seen = seen

    def _positions(self) -> Iterator[tuple[str, object, StallCause, int]]:
        """Yield what should move in each stream that has a token."""
        for generator in self._generators:
            for run in generator.live:
                log = run.log
                num_shown, num_queued = len(log.events), len(log.queued)
                if not num_shown and not num_queued:
                    continue
                is_preempted = run.record.is_background and run.status == "queued"
                if run.end is None and not is_preempted:
                    yield generator.model, run, "engine", num_shown + num_queued
                if num_queued:
                    yield generator.model, run, "journal", num_shown
                for reader in log.readers:
                    if reader.cursor < num_shown and not reader.at_end_only:
                        yield generator.model, reader, "reader", reader.cursor

    def _report_block(self, cause: StallCause, blocked_s: float) -> None:
        for generator in self._generators:
            for run in generator.live:
                if run.log.events:
                    self._report.on_stall(generator.model, cause, blocked_s, is_new=True)
