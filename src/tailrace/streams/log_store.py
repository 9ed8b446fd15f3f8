"""The promise that every home of streams keeps: memory, a file on this machine, or a service that many servers share.

A server opens a stream and gets a *lease*, the right to write it. It appends events; a reader sees an event when it is
kept, and not before. When the server dies, another one takes its streams over, with a larger *epoch*: from then on the
old lease is refused. A home on one machine always wins its own streams.

`tailrace.testing.check_log_store` states the laws as code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tailrace.errors import StorageError
from tailrace.streams.log import Claim, Record, StreamLog
from tailrace.types import Event

__all__ = ["Lease", "LogStore"]


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to write one stream, which one server has at a time.

    `log` holds what is kept of the stream so far. The store adds to it; its owner never does.
    """

    log: StreamLog
    epoch: int

    @property
    def stream_id(self) -> str:
        return self.log.stream_id


class LogStore(Protocol):
    """Keeps streams. Used from one event loop only.

    Methods that are not coroutines return at once, whatever the home: they stand on the path of every token.
    Coroutines may wait for another machine. A home on this machine never suspends them.
    """

    @property
    def epoch(self) -> int:
        """Of this server, from 1. Each server over the same home has a larger one than those before it."""

    @property
    def is_durable(self) -> bool:
        """Whether the next server finds the streams of this one."""

    @property
    def num_streams(self) -> int:
        """Streams of this server that can be read, running or finished."""

    @property
    def write_error(self) -> StorageError | None:
        """Why nothing can be kept just now."""

    async def wait_writable(self) -> None:
        """Return when there is no write error. Raises: StorageError if that takes too long."""

    def on_write_failure(self, fail_all: Callable[[StorageError], None]) -> None:
        """Have `fail_all` called when nothing could be kept for too long. It ends all streams that it has leases of:
        the events that still wait are given up before it is called."""

    async def open(self, record: Record) -> Lease:
        """Keep a new stream, owned by `record.owner`. When this returns, the stream is safe.

        Cancellation: leaves no stream. Raises: StorageError.
        """

    def append(self, lease: Lease, events: Sequence[Event]) -> None:
        """Queue events. All that is queued in one turn of the event loop is kept together at its end, and readers see
        it then; while there is a write error, it waits. Behind the terminal event nothing is kept.

        Raises: LeaseLost if another server has taken the stream over, or this store is closed.
        """

    def flush(self) -> None:
        """Keep what is queued now, if it can be kept now."""

    def retract(self, lease: Lease) -> None:
        """Flush, then drop what is still queued for this stream. Afterwards `lease.log` is all that will be seen."""

    def end(self, lease: Lease) -> None:
        """The terminal event can be read: the time that the stream is kept begins."""

    async def read(self, owner: str, stream_id: str, after: int = 0) -> StreamLog:
        """The stream, with `after` events at least. It grows as events are kept, up to the terminal one. `Reader`
        follows it.

        Raises: UnknownStream if this owner never had such a stream, StreamExpired if it is no longer kept,
        SeqOutOfRange if it has fewer events than `after`, StorageError if it cannot be read now, JournalDamaged if it
        may have been lost.
        """

    async def recall(self, owner: str, claim: Claim) -> StreamLog | None:
        """The stream that this owner's idempotency key began, while it is kept. Two owners may use the same key.

        Raises: IdempotencyConflict if the key came with another request, StorageError.
        """

    async def stop(self, owner: str, stream_id: str) -> StreamLog:
        """Have a stream end as cancelled. Its end can be read when this returns. Does nothing to one that has ended.

        Raises: as `read`; Draining if the stream goes on in the next server, StorageError if its end cannot be kept.
        """

    async def delete(self, owner: str, stream_id: str) -> None:
        """Forget a finished stream for good before this returns; running ones stay.

        Raises: as `read`; StorageError if that cannot be kept.
        """

    def streams_of(self, owner: str) -> list[str]:
        """The ids of an owner's streams that can be read here, running or finished."""

    async def take_over(self) -> list[Lease]:
        """The streams of servers that are gone, as far as they have not ended, in the order in which they began. Each
        is handed to exactly one server, once. Finished streams and idempotency keys are found from then on as well.

        Raises: StorageError.
        """
