"""The log store in Redis: the interface `Store` over the parts of this package."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from tailrace.errors import ClaimTaken, JournalDamaged, LeaseLost, StorageError, StreamError, UnknownStream
from tailrace.settings import Settings
from tailrace.streams.log import Reader, StreamLog
from tailrace.streams.log_store import Lease, StoreState
from tailrace.streams.producer import Ender
from tailrace.streams.rows import Rows
from tailrace.streams.startup_recovery import end_of
from tailrace.types import Claim, Event, Failure, Record, Status
from tailrace_outer.redis._claims import TAKEN, Claims
from tailrace_outer.redis._connection import Connection, start_error
from tailrace_outer.redis._finished import FinishedStreams
from tailrace_outer.redis._follower import Followers
from tailrace_outer.redis._format import check_format
from tailrace_outer.redis._inventory import Inventory
from tailrace_outer.redis._lookup import Lookup
from tailrace_outer.redis._members import Members
from tailrace_outer.redis._mirrors import Mirrors
from tailrace_outer.redis._openings import Openings
from tailrace_outer.redis._orphans import Orphans
from tailrace_outer.redis._patience import CLOSE_S, KEYS_S, LATE_S
from tailrace_outer.redis._server_messages import Messages
from tailrace_outer.redis._topics import Topics
from tailrace_outer.redis._writer import Writer
from tailrace_outer.redis.shared_log import RedisSharedLog
from tailrace_outer.redis.shared_table import RedisTable
from tailrace_outer.redis.stream_states import Owned, Recalled, StreamStates

__all__ = ["RedisLogStore", "open_redis", "open_with_settings"]

logger = logging.getLogger("tailrace.journal")

_TAKEN_OVER = "Other servers took the streams of this server over."


class RedisLogStore:
    """A `LogStore` that many servers share. `open_redis` makes one.

    Redis away: events wait, and no stream begins. After `give_up_after_s` all streams of this server end with an error.
    """

    def __init__(
        self,
        connection: Connection,
        rows: Rows,
        *,
        lease_s: float,
        retention_s: float,
        budget_bytes: int,
        keeps_finished: bool,
        give_up_after_s: float,
    ) -> None:
        self._connection = connection
        self._rows = rows
        self._lease_s = lease_s
        self._streams = StreamStates()
        self._members = Members(connection, lease_s=lease_s)
        self._claims = Claims(connection)
        self._topics = Topics(connection)
        self._writer = Writer(
            connection,
            self._members,
            rows,
            retention_s=retention_s,
            give_up_after_s=give_up_after_s,
            on_other_writer=self._on_other_writer,
            on_missing=self._store,
            on_unreadable=self._on_lease_lost,
            on_behind=self._on_behind,
            on_end=self._on_end,
        )
        self.write_errors = self._writer.errors
        self._finished = FinishedStreams(
            connection,
            self._members,
            self._claims,
            self._topics,
            rows,
            self._streams,
            retention_s=retention_s,
            budget_bytes=budget_bytes,
            keeps=keeps_finished,
        )
        self._messages = Messages(connection, self._members, self._streams)
        self._followers = Followers(connection)
        self._mirrors = Mirrors(
            connection, self._followers, self._members, rows, self._messages, self._streams, on_end=self._finished.cache
        )
        self._lookup = Lookup(connection, rows, self._finished, self._mirrors, self._streams)
        self._openings = Openings(connection, self._members, self._streams)
        self._orphans = Orphans(connection, self._members, rows, self._streams, retention_s=retention_s)
        self._inventory = Inventory(self._members, self._finished, self._streams, store=self._store)
        self._give_up_after_s = give_up_after_s
        self._shared_logs: dict[str, RedisSharedLog] = {}  # of extensions, by their names
        self._tables: dict[str, RedisTable] = {}  # the same
        self._taking_over = asyncio.Lock()
        self._orphaned = asyncio.Event()
        self._is_due = asyncio.Event()  # to look after streams
        self._renewed_s = time.monotonic()  # when all idempotency keys were renewed
        self._is_closed = False

    # What the server is

    @property
    def epoch(self) -> int:
        return self._members.epoch

    @property
    def num_streams(self) -> int:
        return len(self._streams.of(Owned)) + len(self._finished)

    @property
    def state(self) -> StoreState:
        members = self._members
        return StoreState(
            self.epoch,
            self.num_streams,
            num_servers=1 + len(members.alive),
            num_with_other_models=len(members.with_other_models),
            clock_offset_s=members.clock_offset_s,
        )

    # Writing

    async def open(self, record: Record) -> Lease:
        self.write_errors.check()
        log, epoch = StreamLog(record), self.epoch
        opening = await self._openings.begin(record.stream_id)
        try:
            if record.claim is not None:
                await self._claims.take(record, record.claim)
            has_claim = await self._store(log)
        except ClaimTaken:
            self._streams.leave(record.stream_id, opening)
            raise
        except BaseException as error:
            self._streams.doubt(record.stream_id)
            if isinstance(error, StorageError):
                self._writer.failed(error)
            raise
        if not has_claim:  # it was stored so late that another server has begun a stream with the key
            self._streams.doubt(record.stream_id)
            raise ClaimTaken(TAKEN)
        if epoch != self.epoch:  # the others take it over
            self._streams.leave(record.stream_id, opening)
            raise StorageError(_TAKEN_OVER)
        if self._streams.get(record.stream_id) is not opening:  # it was taken over, and may have ended
            raise ClaimTaken(TAKEN) if record.claim is not None else StorageError(_TAKEN_OVER)
        log = self._mirrors.replace(log)
        self._streams.own(log)
        return Lease(log, epoch)

    async def _store(self, log: StreamLog) -> bool:
        """Store a new stream, or one that Redis has lost. Returns whether it has its idempotency key, if there is one.
        Raises: StorageError."""
        await self._writer.open(log)
        await self._topics.begin(log.record)
        return await self._claims.keep(log.record)

    def append(self, lease: Lease, events: Sequence[Event]) -> None:
        log = lease.log
        if self._is_closed or lease.epoch != self.epoch:
            raise LeaseLost("Another server writes this stream now.")
        if log.end is not None:
            return
        if not self._streams.owns(log):
            raise LeaseLost("Another server writes this stream now.")
        self._writer.append(log, events)

    def _on_end(self, log: StreamLog) -> None:
        if self._streams.owns(log):
            self._finished.add(log)

    async def _on_other_writer(self, log: StreamLog) -> None:
        """Redis says that another server writes this stream. A failover may have lost that it was taken over. Raises:
        StorageError."""
        if not await self._orphans.take_again(log.stream_id):
            self._on_lease_lost(log)

    def _on_lease_lost(self, log: StreamLog) -> None:
        """Another server writes this stream now: whoever produces it here stops, and its readers leave."""
        self._stop_writing(log, goes_on=False)

    def _on_behind(self, log: StreamLog) -> None:
        """This server goes on with the stream from what Redis has of it, as with that of a dead server."""
        self._stop_writing(log, goes_on=True)

    def _stop_writing(self, log: StreamLog, *, goes_on: bool) -> None:
        self._writer.drop(log)
        if self._streams.stop_owning(log, goes_on=goes_on) and log.producer is not None:
            log.producer.lease_lost()

    async def recall(self, owner: str, claim: Claim) -> StreamLog | None:
        stream_id = await self._claims.find(owner, claim)
        if stream_id is None:
            return None
        try:
            log = await self.read(owner, stream_id)
        except StreamError:
            return None
        if log.end is not None or self._streams.owns(log):
            return log
        is_kept = await self._claims.recall(stream_id, self.epoch) and await self._claims.keep(log.record)
        return log if is_kept else None

    # Reading

    async def read(self, owner: str, stream_id: str, after: int = 0) -> StreamLog:
        owned = self._streams.owned(stream_id)
        log = owned.log if owned is not None else await self._lookup.find(owner, stream_id)
        if log.record.owner != owner:
            raise UnknownStream("There is no such stream.")
        if after > log.last_seq:
            await self._lookup.catch_up(log, after)
            if after > log.last_seq and log.released is not None:
                raise log.released.with_traceback(None)
        log.check_position(after)
        return log

    async def newest(self, owner: str, wire: str, topic: str, *, has_ended: bool = False) -> StreamLog | None:
        for stream_id in await self._topics.listed(owner, wire, topic):
            with contextlib.suppress(StreamError, JournalDamaged):  # it is gone
                log = await self.read(owner, stream_id)
                if has_ended or log.end is None:
                    return log
        return None

    # Stopping and deleting

    async def stop(self, owner: str, stream_id: str) -> StreamLog:
        log = await self.read(owner, stream_id)
        if log.end is not None:
            return log
        if self._streams.owns(log):
            log.stop()
        else:
            await self._messages.stop(stream_id)
        await self._wait_for_end(log)
        return log

    async def _wait_for_end(self, log: StreamLog) -> None:
        """Raises: StorageError if the end cannot be written, or its server is gone and no other takes over."""
        errors = self._writer.errors
        with Reader(log, at_end_only=True) as reader, errors.calling(reader.wake), contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._lease_s + LATE_S):
                while not reader.take() and errors.current is None:
                    await reader.wait()
        if log.end is None:
            error = errors.current or log.released or StorageError("The server of this stream does not answer.")
            raise error.with_traceback(None)

    async def delete(self, owner: str, stream_id: str) -> None:
        log = await self.read(owner, stream_id)
        if log.end is None:
            return
        await self._finished.end(log.record)  # its server may be dead
        if not await self._finished.delete(stream_id):
            raise StorageError("The log store has lost the end of this stream, which goes on.")

    async def drop(self, log: StreamLog) -> None:
        await self.delete(log.record.owner, log.stream_id)

    async def streams_of(self, owner: str) -> list[str]:
        return await self._lookup.streams_of(owner)

    async def notes_of(self, name: str) -> RedisSharedLog:
        if name not in self._shared_logs:
            log = RedisSharedLog(name, self._connection, self._rows, give_up_after_s=self._give_up_after_s)
            self._shared_logs[name] = log
            self._follow_shared_log(log)
            await self._followers.of_shard(0).wake()
        return self._shared_logs[name]

    async def table_of(self, name: str) -> RedisTable:
        if name not in self._tables:
            table = RedisTable(name, self._connection, self._members, self._rows)
            await table.refresh()
            self._tables[name] = table
        return self._tables[name]

    def _follow_shared_log(self, log: RedisSharedLog) -> None:
        self._followers.of_shard(0).follow(log.tail_key, "0-0", log.take)

    # Streams of dead servers

    async def take_over(self, models: Collection[str] | None = None, *, waits: bool = False) -> list[Lease]:
        if waits:
            await self._orphaned.wait()
        self._members.models = models or ()
        self._orphaned.clear()
        leases = []
        async with self._taking_over:
            try:
                async for orphan in self._orphans.take(models):
                    await self._topics.begin(orphan.record)
                    await self._claims.keep(orphan.record)
                    # Meanwhile this server may have been declared dead, or have opened the stream once more.
                    if orphan.epoch != self.epoch or self._streams.is_written(orphan.record.stream_id):
                        continue
                    lease = Lease(self._mirrors.replace(StreamLog(orphan.record, orphan.events)), self.epoch)
                    if lease.log.end is not None:
                        self._finished.add(lease.log)
                        continue
                    self._streams.own(lease.log, orphan.former_epoch)
                    if orphan.end is None:
                        leases.append(lease)
                    else:
                        self._end(lease, *orphan.end)
            except StorageError:
                if not leases:
                    raise
        return leases

    def _end(self, lease: Lease, status: Status, failure: Failure) -> None:
        """End a stream that has no producer."""
        lease.log.producer = Ender()
        self._writer.append(lease.log, [end_of(lease.log, status, failure)])

    # Tasks

    async def start(self) -> None:
        """Join the other servers. Raises: ModelError."""
        await check_format(self._connection, self._rows)
        await self._members.join()
        self._follow_inboxes()

    def _follow_inboxes(self) -> None:
        self._followers.begin(self.epoch, self._messages.take, self._on_lost_connection)
        for log in self._shared_logs.values():
            self._follow_shared_log(log)

    def _on_lost_connection(self) -> None:
        """A read failed that waits all the time: Redis may have been restarted, or another one may replace it."""
        self._inventory.is_due = True
        for log in self._shared_logs.values():
            log.on_failure()

    async def run(self) -> None:
        """Write, follow and tidy up until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._writer.run())
            group.create_task(self._members.run(self._on_tick, self._on_declared_dead))
            group.create_task(self._messages.run())
            group.create_task(self._finished.run())
            group.create_task(self._followers.run())
            group.create_task(self._look_after_streams())

    async def _on_declared_dead(self) -> None:
        """Other servers take the streams of this one over. It begins again under a new epoch."""
        self._release_all_streams()
        await self._members.join()
        self._release_all_streams()  # what began meanwhile
        self._follow_inboxes()

    def _release_all_streams(self) -> None:
        for owned in list(self._streams.of(Owned).values()):
            self._on_lease_lost(owned.log)
        self._mirrors.give_up_all()

    def _on_tick(self) -> None:
        if self._members.dead:
            self._orphaned.set()
        self._messages.keep_readers(self._members.alive)
        if self._members.was_missing:
            self._mirrors.join_again()
        for log in self._shared_logs.values():
            log.on_tick()
        self._is_due.set()

    async def _look_after_streams(self) -> None:
        """After each tick, until cancelled. The lease is renewed meanwhile, however many streams there are."""
        while True:
            await self._is_due.wait()
            self._is_due.clear()
            with contextlib.suppress(StorageError):
                await self._openings.settle()
                if self._streams.of(Recalled):
                    self._orphaned.set()
                if not self._taking_over.locked():
                    await self._inventory.take()
                await self._mirrors.check()
                await self._renew_claims()
                for table in tuple(self._tables.values()):  # more may be opened meanwhile
                    await table.refresh()

    async def _renew_claims(self) -> None:
        """Keep the idempotency keys of the streams that run for another day. Raises: StorageError."""
        if (now_s := time.monotonic()) < self._renewed_s + KEYS_S:
            return
        for owned in tuple(self._streams.of(Owned).values()):
            await self._claims.keep(owned.log.record)
        self._renewed_s = now_s

    async def close(self) -> None:
        """Write what waits, and give the lease back. What cannot be written is lost."""
        self._is_closed = True
        with contextlib.suppress(StorageError, TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                await self._writer.flush()
                await self._finished.tidy_up()
                await self._openings.settle()
                await self._members.leave()


@asynccontextmanager
async def open_redis(
    url: str,
    *,
    of_apps: bool = False,
    lease_s: float = 10.0,
    retention_s: float = 900.0,
    budget_bytes: int = 256 * 2**20,
    journal_key: bytes | None = None,
    keep_finished: bool = True,
    give_up_after_s: float = 5.0,
    client: Any = None,  # Any: the clients of redis-py have no common type
) -> AsyncIterator[RedisLogStore]:
    """Open the store at a URL (`_connection.py`), and take part in it until the context is left.

    The streams of models and those `of_apps` have other keys, also at the same URL. A `client` of one Redis takes the
    place of the URL.
    `lease_s` is how long the streams of this server wait at most, after it has died, until another server takes them
    over. `journal_key` encrypts what is stored. Raises: ModelError.
    """
    async with Connection.open(url, "apps" if of_apps else "", client) as connection:
        store = RedisLogStore(
            connection,
            Rows(journal_key, of_apps=of_apps),
            lease_s=lease_s,
            retention_s=retention_s,
            budget_bytes=budget_bytes,
            keeps_finished=keep_finished,
            give_up_after_s=give_up_after_s,
        )
        try:
            await store.start()
        except StorageError as error:
            raise start_error(error) from None
        try:
            async with asyncio.TaskGroup() as group:
                running = group.create_task(store.run())
                yield store
                running.cancel()
        finally:
            await store.close()


def open_with_settings(
    settings: Settings, *, journal_key: bytes | None, of_apps: bool
) -> AbstractAsyncContextManager[RedisLogStore]:
    """Open the store that `--journal` names. Raises: ModelError."""
    return open_redis(
        settings.journal,
        of_apps=of_apps,
        lease_s=settings.lease_s,
        retention_s=settings.retention_s,
        budget_bytes=settings.retention_bytes,
        journal_key=journal_key,
        keep_finished=settings.keep_finished,
        give_up_after_s=settings.journal_wait_s,
    )
