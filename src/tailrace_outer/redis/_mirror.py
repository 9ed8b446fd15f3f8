"""A copy of a stream that another server writes, for the readers on this server."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Literal

from tailrace.streams.log import StreamLog
from tailrace.streams.producer import Producer
from tailrace.streams.rows import Rows
from tailrace.types import Event
from tailrace_outer.redis._follower import Entries
from tailrace_outer.redis._stored import for_clients

__all__ = ["Mirror"]

Message = Literal["join", "leave", "stop"]


class Mirror(Producer):
    """The producer of such a copy. What readers want is told to the server that writes the stream.

    `ask` sends that server a message: its stream has a reader here, has none any more, or shall be stopped. `on_end` is
    called when the terminal event has come.
    """

    def __init__(
        self,
        log: StreamLog,
        epoch: int,
        rows: Rows,
        *,
        ask: Callable[[Mirror, Message], None],
        on_end: Callable[[Mirror], None],
    ) -> None:
        self.log = log
        self.epoch = epoch  # of the server that writes the stream
        self.unread_since_s = time.monotonic()  # only while it has no readers
        self.num_missing = 0  # how often Redis did not have the stream when it was last asked
        self._rows = rows
        self._ask = ask
        self._on_end = on_end
        log.producer = self

    def take(self, entries: Entries) -> None:
        """Add the events of new entries. Raises: JournalDamaged."""
        for entry_id, fields in entries:
            last = int(entry_id.partition(b"-")[0])
            with for_clients():
                events = self._rows.read_events(self.log.stream_id, fields[b"e"])
            self.extend(last - len(events) + 1, events)

    def extend(self, first: int, events: Sequence[Event]) -> None:
        """Add the events that are new. `first` is the number of the first one. After a gap nothing is added."""
        if first > self.log.last_seq + 1:
            return
        self.log.extend(events[self.log.last_seq + 1 - first :])

    def read(self) -> None:
        self._ask(self, "join")

    def unread(self) -> None:
        self._ask(self, "leave")

    def cancel(self) -> None:
        self._ask(self, "stop")

    def ended(self) -> None:
        self._on_end(self)
