"""The interface of a log store: memory, a file on this machine, or a service that many servers share.

A server opens a stream and gets a *lease*, the right to write it. The server appends events; readers see an event after
it is committed. When the server dies, another server takes its streams over with a larger *epoch*. From then on the old
lease is refused. On one machine the next server always takes over all streams.

`tailrace.testing.check_log_store` tests that a store keeps these rules.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol

from tailrace.streams.log import StreamLog
from tailrace.streams.write_errors import WriteErrors
from tailrace.types import Claim, ContentT, Event, Record

__all__ = ["Lease", "LogStore", "StoreState"]


@dataclass(frozen=True, slots=True)
class Lease(Generic[ContentT]):
    """The right to write one stream. One server has it at a time.

    `log` holds the committed events. Only the store adds to it.
    """

    log: StreamLog[ContentT]
    epoch: int

    @property
    def stream_id(self) -> str:
        return self.log.stream_id


@dataclass(frozen=True, slots=True)
class StoreState:
    """What this server knows of its store, and of the servers that share it."""

    epoch: int  # of this server, from 1; larger than those of all earlier servers over the same store
    num_streams: int  # of this server that can be read, running or finished
    is_durable: bool = True  # whether the next server finds the streams of this one
    num_servers: int = 1  # with this one
    num_with_other_models: int = 0  # than this one
    clock_offset_s: float = 0.0  # by which this server's clock is ahead of the store's machine
    commit_s: float = 0.0  # for how long commits have held up the event loop, all together


class LogStore(Protocol[ContentT]):
    """Keeps streams: of models (`LogStore`), or of apps (`LogStore[Payload]`). Used from one event loop only.

    Methods that are not coroutines never wait, because every token passes them. Coroutines may wait for another
    machine. Stores on this machine never suspend them.
    """

    @property
    def state(self) -> StoreState: ...
    @property
    def write_errors(self) -> WriteErrors:
        """Return whether streams can be written at the moment. If not, queued events wait."""

    async def open(self, record: Record) -> Lease[ContentT]:
        """Store a new stream of `record.owner`. It is committed when this returns.

        Cancellation: leaves no stream. Raises: StorageError, ClaimTaken if another server has begun a stream with the
        idempotency key of this one.
        """

    def append(self, lease: Lease[ContentT], events: Sequence[Event[ContentT]]) -> None:
        """Queue events. Events of one turn of the event loop are committed together at its end; then readers see them.
        Until then they are in `StreamLog.queued`. During a write error they wait. Events after the terminal event are
        dropped. When that can be read, the retention of the stream starts.

        Raises: LeaseLost if another server has taken the stream over, or this store is closed.
        """

    async def read(self, owner: str, stream_id: str, after: int = 0) -> StreamLog[ContentT]:
        """Return the log of a stream, which has at least `after` events. The log grows until the terminal event. Follow
        it with a `Reader`.

        Raises: UnknownStream if this owner never had such a stream, StreamExpired if it has expired, SeqOutOfRange if
        it has fewer events than `after`, StorageError if it cannot be read now, JournalDamaged if it may have been
        lost.
        """

    async def recall(self, owner: str, claim: Claim) -> StreamLog[ContentT] | None:
        """Return the stream that this owner's idempotency key started; None if there is none. Two owners may use the
        same key.

        Raises: IdempotencyConflict if the key came with another request, StorageError.
        """

    async def newest(self, owner: str, wire: str, topic: str, *, has_ended: bool = False) -> StreamLog[ContentT] | None:
        """Return the newest unfinished stream of this owner with this `Record.wire` and one of `Record.topics`, on any
        server; None if there is none. With `has_ended` the stream may have ended, and must still be kept.

        Raises: StorageError.
        """

    async def stop(self, owner: str, stream_id: str) -> StreamLog[ContentT]:
        """End a stream as cancelled. Its end can be read when this returns. Does nothing if the stream has ended.

        Raises: as `read`; Draining if the next server continues the stream, StorageError if its end cannot be written.
        """

    async def delete(self, owner: str, stream_id: str) -> None:
        """Delete a finished stream before this returns. Does nothing to a running stream.

        Raises: as `read`; StorageError if the deletion cannot be written.
        """

    async def streams_of(self, owner: str) -> list[str]:
        """Return the ids of an owner's streams that can be read, running or finished. Raises: StorageError."""

    async def take_over(self, models: Collection[str] | None = None, *, waits: bool = False) -> list[Lease[ContentT]]:
        """Return leases of the unfinished streams of servers that are gone, in the order in which the streams began. If
        it `waits`, return only when another server has gone; never where there is no other.

        Each stream goes to exactly one server, once. From then on finished streams and idempotency keys can be read,
        too. `models` are those that this server has: where servers share a store, it leaves streams of other models to
        the others.

        Raises: StorageError.
        """
