"""`check_log_store` passes correct stores, and names the law that a broken store breaks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Container, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from tailrace.errors import SeqOutOfRange
from tailrace.streams import Lease, LogStore, MemoryLogStore, SqliteLogStore, StreamLog, open_sqlite
from tailrace.streams.disk import DiskJournal
from tailrace.testing import StoreLaw, check_log_store, store_laws
from tailrace.types import ANONYMOUS, Claim, Event, Record

MakeStore = Callable[[Path], AbstractAsyncContextManager[LogStore]]


@asynccontextmanager
async def in_memory(directory: Path) -> AsyncIterator[LogStore]:
    with contextlib.closing(MemoryLogStore()) as store:
        yield store


@asynccontextmanager
async def on_disk(directory: Path) -> AsyncIterator[LogStore]:
    async with open_sqlite(directory) as store:
        yield store


@asynccontextmanager
async def sealed(directory: Path) -> AsyncIterator[LogStore]:
    async with open_sqlite(directory, journal_key=b"k" * 32) as store:
        yield store


@pytest.mark.parametrize("make", [in_memory, on_disk, sealed])
@pytest.mark.parametrize("law", store_laws, ids=str)
def test_our_stores_keep(law: StoreLaw, make: MakeStore) -> None:
    law(make)


def test_all_laws_in_one() -> None:
    check_log_store(in_memory)


class _Broken(SqliteLogStore):
    """A store in a file with one fault, which the subclass adds."""

    def __init__(self, journal: DiskJournal) -> None:
        super().__init__(journal, retention_s=900.0, budget_bytes=2**20)


class _Doubles(_Broken):
    """Keeps each event twice."""

    def append(self, lease: Lease, events: Sequence[Event]) -> None:
        super().append(lease, [event for event in events for _ in range(2)])


class _Loses(_Broken):
    """Keeps only the first of several events in one append."""

    def append(self, lease: Lease, events: Sequence[Event]) -> None:
        super().append(lease, events[:1])


class _Reverses(_Broken):
    """Reverses the events of one append."""

    def append(self, lease: Lease, events: Sequence[Event]) -> None:
        super().append(lease, events[::-1])


class _Mixes(_Broken):
    """Appends to the stream of the last append."""

    _last: Lease | None = None

    def append(self, lease: Lease, events: Sequence[Event]) -> None:
        super().append(self._last or lease, events)
        self._last = lease


class _Endless(_Broken):
    """Adds events after the terminal event."""

    def append(self, lease: Lease, events: Sequence[Event]) -> None:
        super().append(lease, events)
        if lease.log.end is not None:
            lease.log.events += events


class _EndlessOnDisk(_Broken):
    """Keeps events after the terminal event, without showing them."""

    def append(self, lease: Lease, events: Sequence[Event]) -> None:
        super().append(lease, events)
        self._journal.flush()
        log = StreamLog(lease.log.record, list(lease.log.events), number=lease.log.number)
        log.end = None
        for event in events:
            if event is not events[0]:
                self._journal.append(log, [event])
        self._journal.flush()


class _Silent(_Broken):
    """Does not wake waiting readers."""

    def append(self, lease: Lease, events: Sequence[Event]) -> None:
        asyncio.get_running_loop().call_soon(lease.log._waiting.clear)
        super().append(lease, events)


class _Boundless(_Broken):
    """Accepts every position."""

    async def read(self, owner: str, stream_id: str, after: int = 0) -> StreamLog:
        return self.index.get(stream_id, owner)


class _Strict(_Broken):
    """Refuses the position after the last event."""

    async def read(self, owner: str, stream_id: str, after: int = 0) -> StreamLog:
        log = await super().read(owner, stream_id, after)
        if log.last_seq == after > 0:
            raise SeqOutOfRange("There is nothing behind.")
        return log


class _NeverClosed(MemoryLogStore):
    """Keeps events after close."""

    def close(self) -> None:
        self.index.close()


class _Ageless(_Broken):
    """Accepts any epoch."""

    def append(self, lease: Lease, events: Sequence[Event]) -> None:
        super().append(replace(lease, epoch=self.epoch), events)


class _Forgetful(_Broken):
    """Does not know events that are not committed yet."""

    def append(self, lease: Lease, events: Sequence[Event]) -> None:
        super().append(lease, events)
        lease.log.queued = ()


class _Unstoppable(_Broken):
    async def stop(self, owner: str, stream_id: str) -> StreamLog:
        return self.index.get(stream_id, owner)


class _StopsLater(_Broken):
    """Returns from `stop` before the end can be read."""

    async def stop(self, owner: str, stream_id: str) -> StreamLog:
        log = self.index.get(stream_id, owner)
        log.stop()
        return log


class _StopsAll(_Broken):
    async def stop(self, owner: str, stream_id: str) -> StreamLog:
        for log in [*self.index._running.values()]:
            log.cancel()
        return await super().stop(owner, stream_id)


class _DeletesRunning(_Broken):
    async def delete(self, owner: str, stream_id: str) -> None:
        await super().delete(owner, stream_id)
        self.index._running.pop(stream_id, None)


class _KeepsDeleted(_Broken):
    """Deletes only in memory."""

    async def delete(self, owner: str, stream_id: str) -> None:
        self.index.delete(self.index.get(stream_id, owner))


class _NeverDeletes(_Broken):
    async def delete(self, owner: str, stream_id: str) -> None:
        self.index.get(stream_id, owner)


class _OneKeySpace(_Broken):
    """Finds the keys of all owners."""

    async def open(self, record: Record) -> Lease:
        return await super().open(msgspec.structs.replace(record, owner=ANONYMOUS))

    async def recall(self, owner: str, claim: Claim) -> StreamLog | None:
        return await super().recall(ANONYMOUS, claim)


class _AnyRequest(_Broken):
    """Finds a key for any request."""

    async def recall(self, owner: str, claim: Claim) -> StreamLog | None:
        known = self.index._claims.get((owner, claim.key))
        return await super().recall(owner, Claim(claim.key, known[0]) if known else claim)


class _Open(_Broken):
    """Shows the streams of all owners."""

    async def read(self, owner: str, stream_id: str, after: int = 0) -> StreamLog:
        log = self.index._running.get(stream_id) or self.index._cached.get(stream_id)
        return log if log is not None else await super().read(owner, stream_id, after)


class _OpenAfterwards(_Broken):
    """Loses the owners of finished streams at a restart."""

    def _unfinished(self) -> list[Lease]:
        taken = super()._unfinished()
        for stream_id, kept in self.index._finished.items():
            self.index._finished[stream_id] = kept._replace(owner="you")
        return taken


class _ForgetsWhose(_Broken):
    """Shows deleted streams of all owners as deleted."""

    def _unfinished(self) -> list[Lease]:
        taken = super()._unfinished()
        self.index._expired.update(dict.fromkeys(self.index._expired, ANONYMOUS))
        return taken


class _OpensLater(_Broken):
    """Keeps a stream only with its first event."""

    async def open(self, record: Record) -> Lease:
        log = StreamLog(record)
        self.index.admit(log)
        return Lease(log, self.epoch)

    def append(self, lease: Lease, events: Sequence[Event]) -> None:
        if not lease.log.number:
            lease.log.number = self._journal.begin(lease.log.record).number
        super().append(lease, events)


class _ShowsFirst(_Broken):
    """Shows events before they are kept."""

    def append(self, lease: Lease, events: Sequence[Event]) -> None:
        shadow = StreamLog(lease.log.record, lease.log.events, number=lease.log.number)
        for event in events:
            lease.log.extend([event])
            self._journal.append(shadow, [event])


class _SameEpoch(_Broken):
    """Does not increase the epoch."""

    def __init__(self, journal: DiskJournal) -> None:
        super().__init__(journal)
        self.epoch = 1


class _TakesAgain(_Broken):
    """Takes over a stream twice."""

    async def take_over(self, models: Container[str] | None = None, *, waits: bool = False) -> list[Lease]:
        self._has_taken_over = False
        return await super().take_over(models, waits=waits)


class _TakesSome(_Broken):
    """Does not take over the last stream."""

    def _unfinished(self) -> list[Lease]:
        return (super()._unfinished())[:-1] or []


class _TakesInAnyOrder(_Broken):
    def _unfinished(self) -> list[Lease]:
        return (super()._unfinished())[::-1]


class _TakesFinished(_Broken):
    """Also takes over finished streams."""

    def _unfinished(self) -> list[Lease]:
        taken = super()._unfinished()
        return taken + [Lease(self.index.get(stream_id, kept.owner), self.epoch)
                        for stream_id, kept in [*self.index._finished.items()]]  # fmt: skip


class _Overwrites(_Broken):
    """Overwrites the events of continued streams."""

    def _unfinished(self) -> list[Lease]:
        taken = super()._unfinished()
        for lease in taken:
            lease.log.events.clear()
        return taken


class _ForgetsKeys(_Broken):
    """Loses the keys at a restart."""

    def _unfinished(self) -> list[Lease]:
        taken = super()._unfinished()
        self.index._claims.clear()
        return taken


def _of(kind: Callable[[DiskJournal], LogStore]) -> MakeStore:
    @asynccontextmanager
    async def make(directory: Path) -> AsyncIterator[LogStore]:
        store = kind(DiskJournal(directory))
        try:
            yield store
        finally:
            assert isinstance(store, SqliteLogStore)
            store.close()

    return make


@pytest.mark.deep
@pytest.mark.parametrize(
    ("kind", "law"),
    [
        (_Doubles, "numbers_are_dense"),
        (_Loses, "numbers_are_dense"),
        (_Reverses, "numbers_are_dense"),
        (_Mixes, "streams_are_apart"),
        (_Endless, "one_terminal_event"),
        (_EndlessOnDisk, "one_terminal_event"),
        (_Silent, "followers_see_all"),
        (_Boundless, "reading_has_bounds"),
        (_Strict, "reading_has_bounds"),
        (_Ageless, "older_epochs_are_refused"),
        (_Forgetful, "queued_is_known"),
        (_Unstoppable, "stopping_ends"),
        (_StopsLater, "stopping_ends"),
        (_StopsAll, "stopping_ends"),
        (_DeletesRunning, "deleted_is_gone"),
        (_KeepsDeleted, "deleted_is_gone"),
        (_NeverDeletes, "deleted_is_gone"),
        (_OneKeySpace, "keys_belong_to_owners"),
        (_AnyRequest, "keys_belong_to_owners"),
        (_Open, "owners_are_apart"),
        (_OpenAfterwards, "finished_is_kept"),
        (_ForgetsWhose, "finished_is_kept"),
        (_OpensLater, "opened_is_kept"),
        (_ShowsFirst, "seen_is_kept"),
        (_SameEpoch, "epochs_grow"),
        (_Ageless, "old_owners_are_refused"),
        (_TakesAgain, "taken_over_once"),
        (_TakesSome, "taken_over_once"),
        (_TakesInAnyOrder, "taken_over_once"),
        (_TakesFinished, "finished_is_kept"),
        (_Overwrites, "streams_go_on"),
        (_ForgetsKeys, "finished_is_kept"),
    ],
)
def test_a_broken_store_breaks_its_law(kind: Callable[[DiskJournal], LogStore], law: str) -> None:
    (broken,) = [one for one in store_laws if one.name == law]
    with pytest.raises(AssertionError, match=law):
        broken(_of(kind))


def test_a_store_that_is_never_closed_breaks_its_law() -> None:
    @asynccontextmanager
    async def make(directory: Path) -> AsyncIterator[LogStore]:
        with contextlib.closing(_NeverClosed()) as store:
            yield store

    (broken,) = [one for one in store_laws if one.name == "closed_is_closed"]
    with pytest.raises(AssertionError, match="closed_is_closed"):
        broken(make)
