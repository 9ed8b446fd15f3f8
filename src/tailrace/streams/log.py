"""One stream: its events in order, numbered from 1 by their place, and whoever follows them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol

from tailrace.streams.record import Record
from tailrace.types import End, Event, TextDelta

__all__ = ["Producer", "Reader", "StreamLog"]

logger = logging.getLogger("tailrace.streams")

_TAKE_EVENTS = 512  # so that a long replay neither blocks the loop nor piles up in front of a slow socket
_EVENT_BYTES = 200  # of one event in memory, apart from its text (CPython 3.11, measured over 100,000 events)


class Producer(Protocol):
    """Who feeds a log, as far as its readers are concerned."""

    @property
    def status(self) -> str:
        """queued, running, or how it ended."""

    def cancel(self) -> None:
        """End the stream as cancelled. Does nothing when it has ended."""

    def unread(self) -> None:
        """The last reader has left."""

    def read(self) -> None:
        """Somebody reads again."""

    def ended(self) -> None:
        """The terminal event can be read."""


class StreamLog:
    """The events of one request, as far as they may be seen. Used from one event loop only."""

    __slots__ = ("_ending", "_readers", "_waiting", "end", "events", "is_parked", "number", "producer", "record")

    def __init__(self, record: Record, events: Sequence[Event] = (), *, number: int = 0) -> None:
        self.record = record
        self.number = number  # in the journal
        self.events: list[Event] = list(events)  # seq n is events[n - 1]
        last = self.events[-1] if self.events else None
        self.end: End | None = last if isinstance(last, End) else None
        self.is_parked = False  # it has not ended, but nothing more comes from this process
        self.producer: Producer | None = None
        self._readers = 0
        self._waiting: set[Reader] = set()  # for the next event
        self._ending: set[Reader] = set()  # for the terminal one

    @property
    def stream_id(self) -> str:
        return self.record.stream_id

    @property
    def num_readers(self) -> int:
        return self._readers

    @property
    def status(self) -> str:
        """queued, running, or the status of the terminal event."""
        if self.end is not None:
            return self.end.status
        return self.producer.status if self.producer is not None else "running"

    @property
    def last_seq(self) -> int:
        return len(self.events)

    @property
    def num_bytes(self) -> int:
        """About how much memory it takes."""
        text = sum(len(event.text) for event in self.events if isinstance(event, TextDelta))
        return text + _EVENT_BYTES * len(self.events) + len(self.record.memo)

    def append(self, event: Event) -> None:
        """Let an event be seen, and wake whoever waits for it. After the terminal event nothing is added any more.

        Whoever produces events hands them to the store, whose journal has them before they come here.
        """
        if self.end is not None:
            return
        self.events.append(event)
        if self._waiting:
            waiting, self._waiting = self._waiting, set()
            for reader in waiting:
                reader.wake()
        if type(event) is End:
            self.end = event
            for reader in self._ending:
                reader.wake()
            if self.producer is not None:
                try:
                    self.producer.ended()
                except Exception:  # a defect of ours must not keep other streams' events from being seen
                    logger.exception("the end of a stream could not be attended to")

    def cancel(self) -> None:
        """Have the stream end as cancelled, if it has not ended."""
        if self.end is None and self.producer is not None:
            self.producer.cancel()

    def park(self) -> None:
        """Send the readers away: what is to come will come from another process."""
        self.is_parked = True
        for reader in (*self._waiting, *self._ending):
            reader.wake()

    def text(self, choice: int = 0) -> str:
        """All the text of a choice so far."""
        return "".join(event.text for event in self.events if type(event) is TextDelta and event.choice == choice)


class Reader:
    """One who follows a log from behind `after`. A context manager: leaving it is what the log notices.

    With `at_end_only` it is woken by the terminal event alone, for answers that are given in one piece.
    """

    __slots__ = ("_log", "_wakeup", "at_end_only", "cursor")

    def __init__(self, log: StreamLog, after: int = 0, *, at_end_only: bool = False) -> None:
        self._log = log
        self._wakeup: asyncio.Future[None] | None = None
        self.cursor = after
        self.at_end_only = at_end_only

    def __enter__(self) -> Reader:
        log = self._log
        log._readers += 1
        if log._readers == 1 and log.producer is not None:
            log.producer.read()
        return self

    def __exit__(self, *exc_info: object) -> None:
        log = self._log
        log._readers -= 1
        if log._readers == 0 and log.producer is not None:
            log.producer.unread()

    def take(self) -> Sequence[Event]:
        """Events that this reader has not had, at most so many at once, and the cursor moved behind them."""
        events = self._log.events[self.cursor : self.cursor + _TAKE_EVENTS]
        self.cursor += len(events)
        return events

    @property
    def is_finished(self) -> bool:
        """Nothing more will come."""
        log = self._log
        return (log.end is not None or log.is_parked) and self.cursor >= len(log.events)

    async def wait(self) -> None:
        """Return when there is something to take, or when `wake` was called.

        Cancellation: leaves the reader as it was.
        """
        log = self._log
        if log.end is not None or log.is_parked or (self.cursor < len(log.events) and not self.at_end_only):
            return
        self._wakeup = asyncio.get_running_loop().create_future()
        try:
            (log._ending if self.at_end_only else log._waiting).add(self)
            await self._wakeup
        finally:
            self._wakeup = None
            log._ending.discard(self)
            log._waiting.discard(self)

    def wake(self) -> None:
        """Make a `wait` in progress return."""
        if self._wakeup is not None and not self._wakeup.done():
            self._wakeup.set_result(None)
