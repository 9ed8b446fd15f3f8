"""The log store in memory. Readers see events at once; the streams end with the process."""

from __future__ import annotations

from collections.abc import Sequence

from tailrace.errors import LeaseLost
from tailrace.streams._index import LocalLogStore, StreamIndex
from tailrace.streams.log import StreamLog
from tailrace.streams.log_store import Lease
from tailrace.streams.notes import LocalNotes
from tailrace.streams.tables import LocalTable
from tailrace.streams.write_errors import WriteErrors
from tailrace.types import Event, Record

__all__ = ["MemoryLogStore"]


class MemoryLogStore(LocalLogStore):
    """A `LogStore` in memory. The caller must `close` it."""

    is_durable = False

    def __init__(self, *, retention_s: float = 900.0, budget_bytes: int = 256 * 2**20) -> None:
        errors = WriteErrors("The memory", give_up_after_s=0.0)  # there will be none
        super().__init__(StreamIndex(retention_s=retention_s, budget_bytes=budget_bytes), 1, errors)

    async def open(self, record: Record) -> Lease:
        log = StreamLog(record)
        self.index.admit(log)
        return Lease(log, self.epoch)

    def append(self, lease: Lease, events: Sequence[Event]) -> None:
        if lease.epoch != self._valid_epoch:
            raise LeaseLost("Another server writes this stream now.")
        was_running = lease.log.end is None
        for event in events:
            lease.log.extend((event,))
        if was_running and lease.log.end is not None:
            self.index.finish(lease.log)

    async def stop(self, owner: str, stream_id: str) -> StreamLog:
        log = self.index.get(stream_id, owner)
        log.stop()
        return log

    async def delete(self, owner: str, stream_id: str) -> None:
        self.index.delete(self.index.get(stream_id, owner))

    async def notes_of(self, name: str) -> LocalNotes:
        return LocalNotes(name)

    async def table_of(self, name: str) -> LocalTable:
        return LocalTable(LocalNotes.in_memory(name))
