"""The log store in Redis: the interface `LogStore` over the parts of this package."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Container, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar

from tailrace.errors import (
    ClaimTaken,
    JournalDamaged,
    LeaseLost,
    ModelError,
    StorageError,
    StreamError,
    StreamExpired,
    UnknownStream,
)
from tailrace.streams._rows import Rows
from tailrace.streams._startup_recovery import MAX_RECOVERIES, TOO_MANY_RECOVERIES, end_of
from tailrace.streams.log import Claim, Ender, Reader, Record, StreamLog
from tailrace.streams.log_store import Lease
from tailrace.streams.redis._claims import Claims
from tailrace.streams.redis._connection import Connection
from tailrace.streams.redis._facts import check_facts
from tailrace.streams.redis._finished import FinishedStreams
from tailrace.streams.redis._follower import Entries, KeyFollower
from tailrace.streams.redis._members import Members
from tailrace.streams.redis._mirror import Mirror, Wish
from tailrace.streams.redis._scripts import STOP, TAKE
from tailrace.streams.redis._stored import Gone, Stored, load
from tailrace.streams.redis._writer import Writer
from tailrace.types import Event, Failure, Status

__all__ = ["RedisLogStore", "open_redis"]

logger = logging.getLogger("tailrace.journal")

_T = TypeVar("_T")

_UNREAD_S = 30.0  # how long a stream of another server is followed without readers
_CLOSE_S = 2.0
_DAY_MS = 24 * 3600 * 1000
_TAKES_AT_ONCE = 32
_STOPPED = Failure("cancelled", "The stream was stopped.")


class RedisLogStore:
    """A `LogStore` that many servers share. `open_redis` makes one.

    Redis away: events wait, and no stream begins. After `give_up_after_s` all streams of this server end with an error.
    """

    is_durable = True

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
        self._retention_s = retention_s
        self._connection = connection
        self._keys = connection.keys
        self._rows = rows
        self._lease_s = lease_s
        self._fail_all: list[Callable[[StorageError], None]] = []
        self._members = Members(connection, lease_s=lease_s)
        self._claims = Claims(connection)
        self._writer = Writer(
            connection,
            self._members,
            rows,
            retention_s=retention_s,
            give_up_after_s=give_up_after_s,
            give_up=self._give_up,
            on_lease_lost=self._on_lease_lost,
            on_missing=self._store,
        )
        self._finished = FinishedStreams(
            connection,
            self._members,
            self._claims,
            rows,
            retention_s=retention_s,
            budget_bytes=budget_bytes,
            keeps=keeps_finished,
        )
        self._followers: list[KeyFollower] = []
        self._running: dict[str, StreamLog] = {}  # that this server writes
        self._mirrors: dict[str, Mirror] = {}  # that other servers write
        self._remote_readers: dict[str, dict[int, Reader]] = {}  # by stream and epoch of the reading server
        self._outbox: asyncio.Queue[tuple[int, str, Wish]] = asyncio.Queue()  # epoch, stream id, wish
        self._orphaned = asyncio.Event()
        self._has_new_epoch = asyncio.Event()
        self._positions = itertools.count(1)  # in the sorted set of streams of this server
        self._is_closed = False

    # Facts

    @property
    def epoch(self) -> int:
        return self._members.epoch

    @property
    def num_streams(self) -> int:
        return len(self._running) + len(self._finished)

    @property
    def num_servers(self) -> int:
        """Return how many servers share this store now."""
        return 1 + len(self._members.alive)

    @property
    def write_error(self) -> StorageError | None:
        return self._writer.errors.current

    async def wait_writable(self) -> None:
        await self._writer.errors.wait()

    def on_write_failure(self, fail_all: Callable[[StorageError], None]) -> None:
        self._fail_all.append(fail_all)

    # Writing

    async def open(self, record: Record) -> Lease:
        if self.write_error is not None:
            raise self.write_error.with_traceback(None)
        log = StreamLog(record)
        await self._finished.keep(record)
        try:
            if record.claim is not None:
                await self._claims.take(record, record.claim)
            await self._store(log)
        except ClaimTaken:
            raise
        except StorageError as error:
            self._finished.abandon(record)
            self._writer.failed(error)
            raise
        except BaseException:
            self._finished.abandon(record)
            raise
        self._running[log.stream_id] = log
        return Lease(log, self.epoch)

    async def _store(self, log: StreamLog) -> None:
        """Store a new stream, or one that Redis has lost. Raises: StorageError."""
        await self._own([log.stream_id])  # first: if this server dies now, others find it
        await self._writer.open(log)
        await self._claims.keep(log.record)

    def append(self, lease: Lease, events: Sequence[Event]) -> None:
        log = lease.log
        if self._is_closed or lease.epoch != self.epoch:
            raise LeaseLost("Another server writes this stream now.")
        if log.end is not None:
            return
        if self._running.get(log.stream_id) is not log:
            raise LeaseLost("Another server writes this stream now.")
        self._writer.append(log, events)

    def flush(self) -> None:
        pass  # the writer has begun already, and waiting for it is not possible here

    def queued(self, lease: Lease) -> Sequence[Event]:
        return self._writer.queued(lease.log)

    def end(self, lease: Lease) -> None:
        log = lease.log
        if self._running.pop(log.stream_id, None) is None:
            return
        for reader in self._remote_readers.pop(log.stream_id, {}).values():
            reader.__exit__()
        self._finished.add(log)

    def _give_up(self, error: StorageError) -> None:
        for fail_all in self._fail_all:
            fail_all(error)

    def _on_lease_lost(self, log: StreamLog) -> None:
        """Another server writes this stream now: whoever produces it here stops, and its readers leave."""
        self._writer.drop(log)
        if self._running.pop(log.stream_id, None) is None:
            return
        self._remote_readers.pop(log.stream_id, None)
        if log.producer is not None:
            log.producer.lease_lost()

    async def recall(self, owner: str, claim: Claim) -> StreamLog | None:
        stream_id = await self._claims.find(owner, claim)
        if stream_id is None:
            return None
        try:
            return await self.read(owner, stream_id)
        except StreamError:
            return None

    # Reading

    async def read(self, owner: str, stream_id: str, after: int = 0) -> StreamLog:
        log = self._running.get(stream_id) or await self._find(owner, stream_id)
        if log.record.owner != owner:
            raise UnknownStream("There is no such stream.")
        log.check_position(after)
        return log

    async def _find(self, owner: str, stream_id: str) -> StreamLog:
        """Return a stream that has ended, or that another server writes. Raises: as `read`."""
        mirror = self._mirrors.get(stream_id)
        if mirror is not None:
            mirror.unread_since_s = time.monotonic()
            return mirror.log
        finished = await self._finished.find(stream_id)
        if finished is not None:
            return finished
        stored = await load(self._connection, stream_id)
        if stored is None or stored.owner != owner:
            raise UnknownStream("There is no such stream.")
        if isinstance(stored, Gone):
            raise StreamExpired("This stream is no longer kept.")
        return self._log_of_another_task(stream_id) or await self._follow(stream_id, stored)

    def _log_of_another_task(self, stream_id: str) -> StreamLog | None:
        """Return the log that another task made while this one waited for its own answer."""
        mirror = self._mirrors.get(stream_id)
        return self._running.get(stream_id) or (mirror.log if mirror is not None else self._finished.cached(stream_id))

    async def _follow(self, stream_id: str, stored: Stored) -> StreamLog:
        """Return the log of a stored stream; follow the stream if it has not ended."""
        log = StreamLog(self._rows.read_record(stream_id, stored.record), stored.events(self._rows, stream_id))
        if stored.has_ended:
            log.record = log.record.finished()
            ttl_ms = await self._ask(self._connection.client.pttl(self._keys.stream(stream_id)))
            self._finished.cache(log, max(0, ttl_ms) / 1000)
            return log
        mirror = Mirror(log, stored.epoch, self._rows, ask=self._wish, on_end=self._on_mirror_end)
        self._mirrors[stream_id] = mirror
        follower = self._followers[self._keys.shard_of(stream_id)]
        follower.follow(self._keys.events(stream_id), f"{log.last_seq}-0", partial(self._take, mirror))
        await follower.wake()
        return log

    def _take(self, mirror: Mirror, entries: Entries) -> None:
        try:
            mirror.take(entries)
        except JournalDamaged:
            logger.error("a stream of another server cannot be read")
            self._give_up_mirror(mirror)

    def _on_mirror_end(self, mirror: Mirror) -> None:
        self._unfollow(mirror)
        mirror.log.record = mirror.log.record.finished()
        self._finished.cache(mirror.log)

    def _give_up_mirror(self, mirror: Mirror) -> None:
        """Stop following a stream that has not ended, and send its readers away."""
        self._unfollow(mirror)
        mirror.log.park()

    def _unfollow(self, mirror: Mirror) -> None:
        stream_id = mirror.log.stream_id
        self._mirrors.pop(stream_id, None)
        self._followers[self._keys.shard_of(stream_id)].unfollow(self._keys.events(stream_id))
        mirror.log.producer = None

    # Stopping and deleting

    async def stop(self, owner: str, stream_id: str) -> StreamLog:
        log = await self.read(owner, stream_id)
        if log.end is not None:
            return log
        if self._running.get(stream_id) is log:
            log.stop()
        else:
            await self._stop_elsewhere(stream_id)
        await self._wait_for_end(log)
        return log

    async def _stop_elsewhere(self, stream_id: str) -> None:
        """Ask the server that writes a stream to end it; if that server is dead, the next one does. Raises:
        StorageError."""
        epoch = await self._connection.run(STOP, self._keys.of_stream(stream_id))
        if epoch is not None:
            await self._tell(int(epoch), stream_id, "stop")

    async def _wait_for_end(self, log: StreamLog) -> None:
        """Raises: StorageError if the end cannot be written, or its server is gone and no other takes over."""
        until_s = time.monotonic() + self._lease_s + 5
        with Reader(log, log.last_seq, at_end_only=True) as reader:
            while log.end is None and not log.is_parked and self.write_error is None and time.monotonic() < until_s:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(reader.wait(), 0.2)
        if log.end is None:
            error = self.write_error or StorageError("The server of this stream does not answer.")
            raise error.with_traceback(None)

    async def delete(self, owner: str, stream_id: str) -> None:
        log = await self.read(owner, stream_id)
        if log.end is None:
            return
        await self._finished.delete(stream_id)

    async def streams_of(self, owner: str) -> list[str]:
        client = self._connection.client
        keys = [key async for key in self._connection.scan(self._keys.all_streams)]
        return [self._keys.id_of(key) for key in keys if await self._ask(client.hget(key, "owner")) == owner.encode()]

    # Streams of dead servers

    async def wait_for_orphans(self) -> None:
        await self._orphaned.wait()

    async def take_over(self, models: Container[str] | None = None) -> list[Lease]:
        self._orphaned.clear()
        await self._members.find_dead()
        leases: list[Lease] = []
        for epoch in sorted(self._members.dead):
            owned = await self._ask(self._connection.client.zrange(self._keys.owned(epoch), 0, -1))
            for start in range(0, len(owned), _TAKES_AT_ONCE):
                some = [stream_id.decode() for stream_id in owned[start : start + _TAKES_AT_ONCE]]
                leases += await self._take_some(epoch, some, models)
            if not await self._ask(self._connection.client.zcard(self._keys.owned(epoch))):
                await self._members.forget(epoch)
        return leases

    async def _take_some(self, epoch: int, stream_ids: list[str], models: Container[str] | None) -> list[Lease]:
        client, owned = self._connection.client, self._keys.owned(epoch)
        if models is not None and not self._members.is_long_dead(epoch, self._retention_s):
            of = await asyncio.gather(*(self._ask(client.hget(self._keys.stream(one), "model")) for one in stream_ids))
            stream_ids = [one for one, model in zip(stream_ids, of, strict=True) if _is_ours(model, models)]
        if not stream_ids:
            return []
        await self._own(stream_ids)  # before they are taken: if this server dies now, others find them here
        answers = await asyncio.gather(
            *(self._connection.run(TAKE, self._keys.of_stream(one), epoch, self.epoch) for one in stream_ids)
        )
        leases, not_ours = [], []
        for stream_id, answer in zip(stream_ids, answers, strict=True):
            lease = self._taken(stream_id, answer) if answer is not None else None
            if lease is not None:
                leases.append(lease)
            elif stream_id not in self._running:
                not_ours.append(stream_id)
        if not_ours:
            await self._ask(client.zrem(self._keys.owned(self.epoch), *not_ours))
        await self._ask(client.zrem(owned, *stream_ids))
        return leases

    def _taken(self, stream_id: str, answer: Sequence[Any]) -> Lease | None:
        """Return the lease of a stream that was taken over; None if it cannot go on."""
        record_row, rows, takes, stop = answer
        try:
            record = self._rows.read_record(stream_id, record_row)
        except JournalDamaged:
            logger.error("stream %s cannot be read and is lost", stream_id)
            return None
        is_whole, events = True, []
        for row in rows:
            try:
                events += self._rows.read_events(stream_id, row)
            except JournalDamaged:
                logger.error("stream %s was damaged and ends before the damage", stream_id)
                is_whole = False
                break
        mirror = self._mirrors.get(stream_id)
        if mirror is not None:  # its readers stay
            mirror.extend(1, events)
            log = mirror.log
            self._unfollow(mirror)
        else:
            log = StreamLog(record, events)
        self._running[stream_id] = log
        lease = Lease(log, self.epoch)
        if not is_whole:
            self._end(lease, "error", Failure(JournalDamaged.code, "The rest of this stream was damaged."))
        elif stop == b"1":
            self._end(lease, "cancelled", _STOPPED)
        elif takes > MAX_RECOVERIES:
            self._end(lease, "interrupted", TOO_MANY_RECOVERIES)
        else:
            return lease
        return None

    def _end(self, lease: Lease, status: Status, failure: Failure) -> None:
        """End a stream that has no producer."""
        lease.log.producer = Ender(partial(self.end, lease))
        self._writer.append(lease.log, [end_of(lease.log, status, failure)])

    async def _own(self, stream_ids: Sequence[str]) -> None:
        """List streams as those of this server. Raises: StorageError."""
        positions = {stream_id: next(self._positions) for stream_id in stream_ids}
        await self._ask(self._connection.client.zadd(self._keys.owned(self.epoch), positions))

    # Other servers

    def _wish(self, mirror: Mirror, wish: Wish) -> None:
        mirror.unread_since_s = time.monotonic()
        self._outbox.put_nowait((mirror.epoch, mirror.log.stream_id, wish))

    async def _tell(self, epoch: int, stream_id: str, wish: Wish) -> None:
        """Send a message to another server. Raises: StorageError."""
        client, inbox = self._connection.client, self._keys.inbox(self._keys.shard_of(stream_id), epoch)
        message = {"kind": wish, "stream": stream_id, "from": self.epoch}
        await self._ask(client.xadd(inbox, message, maxlen=10_000))
        await self._ask(client.pexpire(inbox, _DAY_MS))

    def _on_messages(self, entries: Entries) -> None:
        for _, message in entries:
            if message[b"kind"] == b"wake":
                continue
            stream_id, reading_epoch = message[b"stream"].decode(), int(message[b"from"])
            log = self._running.get(stream_id)
            if log is None:
                continue
            readers = self._remote_readers.setdefault(stream_id, {})
            match message[b"kind"]:
                case b"stop":
                    log.cancel()
                case b"join" if reading_epoch not in readers:
                    readers[reading_epoch] = Reader(log, log.last_seq).__enter__()
                case b"leave" if reading_epoch in readers:
                    readers.pop(reading_epoch).__exit__()

    # Tasks

    async def start(self) -> None:
        """Join the other servers. Raises: ModelError."""
        await check_facts(self._connection, self._rows)
        await self._join()

    async def _join(self) -> None:
        await self._members.join()
        self._followers = [
            KeyFollower(self._connection, self._keys.inbox(shard, self.epoch)) for shard in range(self._keys.num_shards)
        ]
        for shard, follower in enumerate(self._followers):
            follower.follow(self._keys.inbox(shard, self.epoch), "0-0", self._on_messages)

    async def run(self) -> None:
        """Write, follow and tidy up until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._writer.run())
            group.create_task(self._members.run(self._on_tick, self._on_declared_dead))
            group.create_task(self._send_wishes())
            group.create_task(self._finished.run())
            group.create_task(self._run_followers())

    async def _run_followers(self) -> None:
        while True:
            self._has_new_epoch.clear()
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(follower.run()) for follower in self._followers]
                await self._has_new_epoch.wait()
                for task in tasks:
                    task.cancel()

    async def _send_wishes(self) -> None:
        while True:
            epoch, stream_id, wish = await self._outbox.get()
            with contextlib.suppress(StorageError):  # `_on_tick` says again what matters
                if wish == "stop":
                    await self._stop_elsewhere(stream_id)
                else:
                    await self._tell(epoch, stream_id, wish)

    async def _on_declared_dead(self) -> None:
        """Other servers take the streams of this one over. It begins again under a new epoch."""
        for log in list(self._running.values()):
            self._on_lease_lost(log)
        for mirror in list(self._mirrors.values()):
            self._give_up_mirror(mirror)
        await self._join()
        self._has_new_epoch.set()

    async def _on_tick(self) -> None:
        if self._members.dead:
            self._orphaned.set()
        for readers in list(self._remote_readers.values()):
            for epoch in readers.keys() - self._members.alive:
                readers.pop(epoch).__exit__()
        for mirror in list(self._mirrors.values()):
            await self._check_mirror(mirror)

    async def _check_mirror(self, mirror: Mirror) -> None:
        """See whether a followed stream has another writer now, or events that were compacted before they were read."""
        log = mirror.log
        if not log.num_readers and time.monotonic() - mirror.unread_since_s > _UNREAD_S:
            self._give_up_mirror(mirror)
            return
        epoch, last = await self._ask(self._connection.client.hmget(self._keys.stream(log.stream_id), "epoch", "last"))
        if epoch is None:
            if mirror.is_missing:
                self._give_up_mirror(mirror)
            mirror.is_missing = True  # its server may write it again, if Redis has lost everything
            return
        mirror.is_missing = False
        if int(last) > log.last_seq:
            stored = await load(self._connection, log.stream_id)
            if isinstance(stored, Stored) and log.producer is mirror:
                mirror.extend(1, stored.events(self._rows, log.stream_id))
        if int(epoch) != mirror.epoch:
            mirror.epoch = int(epoch)
            if log.num_readers:
                self._wish(mirror, "join")

    async def close(self) -> None:
        """Write what waits, and give the lease back. What cannot be written is lost."""
        self._is_closed = True
        with contextlib.suppress(StorageError, TimeoutError):
            async with asyncio.timeout(_CLOSE_S):
                await self._writer.flush()
                await self._finished.tidy_up()
                await self._members.leave()

    async def _ask(self, command: Awaitable[_T]) -> _T:
        return await self._connection.ask(command)


def _is_ours(model: bytes | None, models: Container[str]) -> bool:
    """Return whether a stream is of one of these models. One that is missing is taken, so that its id goes."""
    return model is None or model.decode() in models


@asynccontextmanager
async def open_redis(
    url: str,
    *,
    lease_s: float = 10.0,
    retention_s: float = 900.0,
    budget_bytes: int = 256 * 2**20,
    key: bytes | None = None,
    keep_finished: bool = True,
    give_up_after_s: float = 5.0,
) -> AsyncIterator[RedisLogStore]:
    """Open the store at a URL (`_connection.py`), and take part in it until the context is left.

    `lease_s` is how long the streams of this server wait at most, after it has died, until another server takes them
    over. `key` encrypts what is stored. Raises: ModelError.
    """
    async with Connection.open(url) as connection:
        store = RedisLogStore(
            connection,
            Rows(key),
            lease_s=lease_s,
            retention_s=retention_s,
            budget_bytes=budget_bytes,
            keeps_finished=keep_finished,
            give_up_after_s=give_up_after_s,
        )
        try:
            await store.start()
        except StorageError as error:
            raise ModelError(error.message) from None
        try:
            async with asyncio.TaskGroup() as group:
                running = group.create_task(store.run())
                yield store
                running.cancel()
        finally:
            await store.close()
