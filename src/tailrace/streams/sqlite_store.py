"""The log store in a file on this machine: the journal, which the next server finds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from tailrace.errors import LeaseLost
from tailrace.streams._index import LocalLogStore, StreamIndex
from tailrace.streams.damage import damaged_until_s
from tailrace.streams.disk import DiskJournal
from tailrace.streams.log import StreamLog
from tailrace.streams.log_store import Lease, StoreState
from tailrace.streams.notes import LocalNotes
from tailrace.streams.producer import Ender
from tailrace.streams.tables import LocalTable
from tailrace.types import Event, Record

__all__ = ["SqliteLogStore", "open_sqlite"]


class SqliteLogStore(LocalLogStore):
    """A `LogStore` over a journal. `open_sqlite` makes one.

    The journal's directory is locked, so only one server uses it at a time.
    """

    def __init__(self, journal: DiskJournal, *, retention_s: float, budget_bytes: int) -> None:
        index = StreamIndex(
            retention_s=retention_s,
            budget_bytes=budget_bytes,
            archive=journal,
            is_complete=journal.keeps_finished,
        )
        super().__init__(index, journal.epoch, journal.write_errors)
        self._journal = journal
        self._read_damage()
        journal.on_end = index.finish
        journal.on_damage = self._read_damage

    @property
    def state(self) -> StoreState:
        return replace(super().state, commit_s=self._journal.commit_s)

    async def open(self, record: Record) -> Lease:
        log = self._journal.begin(record)
        self.index.admit(log)
        return Lease(log, self.epoch)

    def append(self, lease: Lease, events: Sequence[Event]) -> None:
        if lease.epoch != self._valid_epoch:
            raise LeaseLost("Another server writes this stream now.")
        self._journal.append(lease.log, events)

    async def stop(self, owner: str, stream_id: str) -> StreamLog:
        log = self.index.get(stream_id, owner)
        log.stop()
        self._journal.flush()
        if log.end is None:
            self.write_errors.check()
        return log

    async def delete(self, owner: str, stream_id: str) -> None:
        log = self.index.get(stream_id, owner)
        if self.index.is_finished(stream_id):
            self._journal.delete(stream_id)
            self.index.delete(log)

    def _unfinished(self) -> list[Lease]:
        finished = self._journal.finished()
        unfinished = self._journal.unfinished()
        self.index.restore(finished, self._journal.expired())
        leases = []
        for log, end in unfinished:
            self.index.admit(log)
            if log.end is not None:  # the earlier process stopped before compaction
                self._journal.finish(log)
            elif end is not None:
                log.producer = Ender()
                self._journal.append(log, (end,))
            else:
                leases.append(Lease(log, self.epoch))
        self._journal.flush()
        return leases

    async def notes_of(self, name: str) -> LocalNotes:
        return LocalNotes(name, self._journal, lambda: self.index.damaged_until_s)

    async def table_of(self, name: str) -> LocalTable:
        return await LocalTable.open(await self.notes_of(name))

    def _read_damage(self) -> None:
        self.index.damaged_until_s = damaged_until_s(self._journal.damage_age_s(), self.index.retention_s)

    def close(self) -> None:
        super().close()
        self._journal.close()


@asynccontextmanager
async def open_sqlite(
    directory: Path,
    *,
    retention_s: float = 900.0,
    budget_bytes: int = 256 * 2**20,
    journal_key: bytes | None = None,
    of_apps: bool = False,
    keep_finished: bool = True,
    lifetime_s: float | None = None,
    sync_s: float = 0.1,
    give_up_after_s: float = 5.0,
) -> AsyncIterator[SqliteLogStore]:
    """Open a store in its own directory. A background task syncs it every `sync_s` and compacts it. The other settings
    are those of `DiskJournal` and `StreamIndex`.

    Raises: ModelError if the directory cannot be used.
    """
    journal = DiskJournal(
        directory,
        journal_key=journal_key,
        of_apps=of_apps,
        keep_finished=keep_finished,
        lifetime_s=lifetime_s,
        sync_s=sync_s,
        give_up_after_s=give_up_after_s,
    )
    store = SqliteLogStore(journal, retention_s=retention_s, budget_bytes=budget_bytes)
    try:
        async with asyncio.TaskGroup() as group:
            maintenance = group.create_task(journal.maintain())
            yield store
            maintenance.cancel()
    finally:
        store.close()
