"""The queue of events, and the task that commits them: one round trip for all streams, one at a time."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from tailrace.errors import JournalDamaged, StorageError
from tailrace.streams.log import StreamLog, enqueue, without_producers
from tailrace.streams.rows import Rows
from tailrace.streams.write_errors import WriteErrors
from tailrace.types import End, Event
from tailrace_outer.redis._connection import Connection
from tailrace_outer.redis._finished import lifetimes_ms
from tailrace_outer.redis._members import Members
from tailrace_outer.redis._patience import PROBE_S, RETRY_S
from tailrace_outer.redis._scripts import APPEND, MISSING, OPEN, OTHER_WRITER
from tailrace_outer.redis._stored import Stored, load

__all__ = ["Writer"]

logger = logging.getLogger("tailrace.journal")

_encode = msgspec.msgpack.Encoder().encode
_STREAMS_AT_ONCE = 128  # in one call of a script, which stops Redis for as long


_Batch = list[tuple[StreamLog, list[Event]]]


class Writer:
    """Events wait here until they are committed; then they are added to their logs.

    After an error the events wait, and are sent again. Redis adds only what follows the last event that it has, so it
    does not matter whether it got them the first time. After `give_up_after_s` without success, the waiting events are
    dropped and all streams are ended.

    `on_other_writer` is called with a log that another server writes now, as Redis says, and must `drop` it if that is
    true. `on_missing` is called with a log that Redis has lost, and must `open` it again. `on_unreadable` is called
    with one of which Redis has events that cannot be read, and `on_behind` with one of which another server has written
    events that are not the next ones here; both must `drop` it. `on_end` is called with a log whose terminal event is
    committed.
    """

    def __init__(
        self,
        connection: Connection,
        members: Members,
        rows: Rows,
        *,
        retention_s: float,
        give_up_after_s: float,
        on_other_writer: Callable[[StreamLog], Awaitable[None]],
        on_missing: Callable[[StreamLog], Awaitable[object]],
        on_unreadable: Callable[[StreamLog], None],
        on_behind: Callable[[StreamLog], None],
        on_end: Callable[[StreamLog], None],
    ) -> None:
        self._connection = connection
        self._members = members
        self._rows = rows
        self._lifetimes_ms = lifetimes_ms(retention_s)
        self._on_other_writer = on_other_writer
        self._on_missing = on_missing
        self._on_unreadable = on_unreadable
        self._on_behind = on_behind
        self._on_end = on_end
        self._queues: dict[StreamLog, list[Event]] = {}
        self._num_restored = 0  # streams, in this commit
        self._is_queued = asyncio.Event()
        self.errors = WriteErrors("The log store", give_up_after_s=give_up_after_s)

    # The queue

    def append(self, log: StreamLog, events: Sequence[Event]) -> None:
        """Queue events. Those behind the terminal one are dropped."""
        if enqueue(self._queues, log, events):
            self._is_queued.set()

    def drop(self, log: StreamLog) -> None:
        """Drop the waiting events of a stream that another server writes."""
        self._queues.pop(log, None)
        log.queued = ()

    # Committing

    async def run(self) -> None:
        """Commit until cancelled."""
        while True:
            await self._is_queued.wait()
            self._is_queued.clear()
            while self._queues or self.errors.current is not None:
                try:
                    await self._commit()
                except StorageError as error:
                    self.failed(error)
                    await asyncio.sleep(PROBE_S if self.errors.has_given_up else RETRY_S)
                    if self.errors.is_too_long():
                        self._end_all(error)
                else:
                    if self.errors.current is not None:
                        self.errors.recovered()

    async def flush(self) -> None:
        """Commit what waits, once. Raises: StorageError."""
        if self._queues:
            await self._commit()

    async def _commit(self) -> None:
        """Raises: StorageError."""
        batch = [(log, list(events)) for log, events in self._queues.items()]
        if not batch:  # only to see whether Redis answers
            await self._connection.ask(self._connection.client.ping())
            return
        await _all(self._commits(batch))
        if self._num_restored:
            logger.warning("Redis had lost the last events of %d streams. They are written again.", self._num_restored)
            self._num_restored = 0

    def _commits(self, batch: _Batch) -> list[Awaitable[None]]:
        """Return what commits the batch: calls of the script with streams of one shard each."""
        of_shard: dict[int, _Batch] = {}
        for entry in batch:
            of_shard.setdefault(self._connection.keys.shard_of(entry[0].stream_id), []).append(entry)
        return [
            self._commit_group(shard, entries[start : start + _STREAMS_AT_ONCE])
            for shard, entries in of_shard.items()
            for start in range(0, len(entries), _STREAMS_AT_ONCE)
        ]

    async def _commit_group(self, shard: int, group: _Batch) -> None:
        """Raises: StorageError."""
        failed = await self._append(shard, [(log, log.last_seq + 1, events) for log, events in group])
        for position, (log, events) in enumerate(group):
            last = failed.get(position)
            if last is None:
                self._committed(log, events)
            elif last == OTHER_WRITER:
                await self._on_other_writer(log)
            elif last == MISSING:
                await self._on_missing(log)
            elif last > log.last_seq:
                await self._read_committed(log, events)
            else:
                await self._restore(log, int(last))

    async def _append(self, shard: int, group: Sequence[tuple[StreamLog, int, Sequence[Event]]]) -> dict[int, int]:
        """Run APPEND for streams of one shard, with the number of the first event of each. Returns what was found
        instead where the events could not be added, by position. Raises: StorageError."""
        numbers, rows = [], []
        for log, first, events in group:
            stream_id = log.record.stream_id
            row = self._rows.encode_events(stream_id, events)
            rows.append(row)
            numbers.append((stream_id, first, first + len(events) - 1, type(events[-1]) is End, len(row)))
        keys, times = [self._connection.keys.base(shard)], self._lifetimes_ms
        found = await self._connection.run(APPEND, keys, self._members.epoch, *times, _encode(numbers), b"".join(rows))
        return dict(zip(found[::2], found[1::2], strict=True))

    def _committed(self, log: StreamLog, events: Sequence[Event]) -> None:
        queue = self._queues.get(log)
        if queue is not None:
            del queue[: len(events)]
            if not queue:
                del self._queues[log]
        self._show(log, events)

    def _show(self, log: StreamLog, events: Sequence[Event]) -> None:
        log.extend(events)
        if log.end is not None:
            self._on_end(log)

    async def open(self, log: StreamLog) -> None:
        """Store a new stream, or one that Redis has lost, with the events of its log. Raises: StorageError."""
        record = log.record
        row = self._rows.encode_record(record)
        keys = self._connection.keys.of_opening(log.stream_id, self._members.epoch)
        about = self._members.epoch, row, record.owner, record.model, log.stream_id, next(self._members.positions)
        if not await self._connection.run(OPEN, keys, *about):
            await self._on_other_writer(log)
        elif log.events:
            await self._restore(log, 0)

    async def _restore(self, log: StreamLog, last: int) -> None:
        """Write again what Redis has lost: the events after number `last`, which readers have seen. Raises:
        StorageError."""
        self._num_restored += 1
        shard = self._connection.keys.shard_of(log.stream_id)
        found = (await self._append(shard, [(log, last + 1, log.events[last:])])).get(0)
        if found is not None and last < found < log.last_seq:
            await self._append(shard, [(log, found + 1, log.events[found:])])

    async def _read_committed(self, log: StreamLog, events: list[Event]) -> None:
        """Redis has more events than the log: those of a write whose reply was lost. If it has others, Redis had lost
        the stream, and the server from which this one took it has written it meanwhile. Raises: StorageError."""
        stored = await load(self._connection, log.stream_id)
        if not isinstance(stored, Stored):
            return
        if stored.epoch != self._members.epoch:  # it was taken over since then
            await self._on_other_writer(log)
            return
        try:
            new = stored.events(self._rows, log.stream_id)[log.last_seq :]
        except JournalDamaged:  # of this stream alone
            logger.error("stream %s was damaged in Redis and cannot go on", log.stream_id)
            self._on_unreadable(log)
            return
        same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(new, events, strict=False)))
        if new[same:] and type(new[-1]) is not End and type(events[-1]) is not End:
            self._on_behind(log)  # what produces it here would go on with events that Redis has already
            return
        if same:
            self._committed(log, events[:same])
        self._show(log, new[same:])
        queue = self._queues.get(log, [])
        if log.end is not None:  # what was to end it in another way comes too late
            self.drop(log)
        elif new[same:] and queue and type(queue[0]) is End:  # it was decided without the events that were just read
            usage = queue[0].usage._replace(num_completion_tokens=log.num_tokens)
            queue[0] = msgspec.structs.replace(queue[0], usage=usage)

    # Write errors

    def failed(self, error: StorageError) -> None:
        self.errors.failed(error)
        self._is_queued.set()  # so that `run` finds out when it is over

    def _end_all(self, error: StorageError) -> None:
        """Drop the waiting events, and end all streams."""
        self._queues = without_producers(self._queues)
        self.errors.give_up(error)
        for log in self._queues:  # their ends cannot be written, so nobody may see them: send the readers away
            log.release(error)


async def _all(calls: Sequence[Awaitable[None]]) -> None:
    """Await all of them, and then raise the first error: two tries at once could add the same events twice."""
    if len(calls) == 1:  # mostly; a task and two turns of the event loop less
        await calls[0]
        return
    for outcome in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome
