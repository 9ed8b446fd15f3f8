"""What Redis has of a stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from tailrace.errors import JournalDamaged
from tailrace.streams.log import StreamLog
from tailrace.streams.rows import Rows
from tailrace.types import Event
from tailrace_outer.redis._connection import Connection
from tailrace_outer.redis._scripts import LOAD

__all__ = ["Gone", "Stored", "for_clients", "load"]


@dataclass(frozen=True, slots=True)
class Stored:
    """A stream. `rows` have its events in order, encoded."""

    owner: str
    epoch: int  # of its writer
    has_ended: bool
    record: bytes
    rows: Sequence[bytes]

    def events(self, rows: Rows, stream_id: str) -> list[Event]:
        """Decode the events. Raises: JournalDamaged."""
        with for_clients():
            return [event for row in self.rows for event in rows.read_events(stream_id, row)]

    def log(self, rows: Rows, stream_id: str) -> StreamLog:
        """Decode the stream. Raises: JournalDamaged."""
        with for_clients():
            record = rows.read_record(stream_id, self.record)
        return StreamLog(record, self.events(rows, stream_id))


@contextmanager
def for_clients() -> Iterator[None]:
    """Replace the message of JournalDamaged, which is a part of a sentence for the log."""
    try:
        yield
    except JournalDamaged:
        raise JournalDamaged("This stream is damaged in Redis and cannot be read.") from None


@dataclass(frozen=True, slots=True)
class Gone:
    """A stream that is no longer kept."""

    owner: str


async def load(connection: Connection, stream_id: str) -> Stored | Gone | None:
    """Return what Redis has; None if it does not know the stream. Raises: StorageError."""
    reply = await connection.run(LOAD, connection.keys.of_stream(stream_id))
    if not reply:
        return None
    if len(reply) == 1:
        return Gone(reply[0].decode())
    owner, epoch, ended, record, rows = reply
    return Stored(owner.decode(), int(epoch), ended == b"1", record, rows)
