"""The journal on disk.

Its law: what a reader has seen is in the file. Events that come in one turn of the event loop are committed together at
its end, and shown then; so an engine's step costs one commit, whatever the number of streams. A commit goes to the
operating system, which keeps it whatever happens to this process; every `sync_s` the file is synced, which is what a
power cut may take. See docs/durability.md.

When the file cannot be written, events wait and are not shown. After `give_up_after_s` no stream can go on: all are
ended, for which a reserve of disk is given up.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tailrace.durable.records import Dropped, DurableRecord
from tailrace.errors import JournalDamaged, ModelError, StorageError
from tailrace.streams import _inheritance as inheritance
from tailrace.streams._database import Database, TailRow
from tailrace.streams._index import Finished
from tailrace.streams._rows import Rows
from tailrace.streams._tidying import MAX_EXPIRED, Tidying
from tailrace.streams._wal import WriteAheadLog
from tailrace.streams.log import Record, StreamLog
from tailrace.streams.old_journals import LIFETIME_FACT
from tailrace.types import End, Event

__all__ = ["DiskJournal"]

logger = logging.getLogger("tailrace.journal")

_SEALED_FACT = "sealed"
_EPOCH_FACT = "epoch"
_EPOCH_BYTES = 8
_RETRY_S = 0.02
_PROBE_S = 1.0
_QUIET_S = 0.5  # a write error that is over by then is not logged
_CLEANUP_PAUSE_S = 0.005  # between two steps of tidying up, for everybody else; or
_CLEANUP_PAUSE = 2.0  # times what the last one took


class DiskJournal:
    """Streams in a directory of its own, which is locked. `close` it at the end.

    `epoch` counts the servers that have had the directory, this one included. The functions in `on_write_failure` are
    called when events could not be kept for `give_up_after_s`; they are to end all streams.

    `keep_finished=False` leaves no finished stream on disk. `lifetime_s` is how long after the last write the streams
    can still be asked for; other servers read it before they remove an old journal. Without it they never do.

    Raises: ModelError if the directory cannot be used.
    """

    def __init__(
        self,
        directory: Path,
        *,
        key: bytes | None = None,
        keep_finished: bool = True,
        lifetime_s: float | None = None,
        sync_s: float = 0.1,
        give_up_after_s: float = 5.0,
    ) -> None:
        self._database = Database(directory, erases=not keep_finished)
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self._database.close)
            try:
                self._rows = self._keyed(key)
                if lifetime_s is not None:
                    self._database.keep_fact(LIFETIME_FACT, repr(lifetime_s).encode())
                self.epoch = self._next_epoch()
                self._database.hold_reserve()
            except StorageError as error:
                raise ModelError(f"The journal cannot be kept in {directory}: {error.message}") from None
            on_failure.pop_all()
        self.keeps_finished = keep_finished
        self._sync_s = sync_s
        self._give_up_after_s = give_up_after_s
        self.write_error: StorageError | None = None  # why nothing can be kept just now
        self.on_write_failure: list[Callable[[StorageError], None]] = []
        self._failing_since_s = 0.0
        self._writable_since_s = -_QUIET_S
        self._retrying: asyncio.TimerHandle | None = None
        self._has_given_up = False
        self._is_logged = False  # the write error
        self._is_broken = False  # for good
        self._decided = asyncio.Event()  # whether the write error is over or lasts
        self._pending: list[tuple[StreamLog, Event]] = []
        self._is_scheduled = False
        self._tidying = Tidying(self._database, self._rows, keeps=keep_finished)
        self._committed = asyncio.Event()  # something that is not synced
        self._untidy = asyncio.Event()
        if self._database.set_aside is not None:
            logger.error("the journal was damaged and is now %s; a new one is begun", self._database.set_aside)
        elif self._database.is_cut:
            logger.error("the end of the journal was damaged, and is lost")

    def _keyed(self, key: bytes | None) -> Rows:
        """Raises: ModelError if the journal was sealed with another key."""
        rows = Rows(key)
        sealed = self._database.fact(_SEALED_FACT)
        try:
            if sealed is not None:
                rows.open(sealed, _SEALED_FACT)
            elif key is not None:
                self._database.keep_fact(_SEALED_FACT, rows.seal(b"", _SEALED_FACT))
        except JournalDamaged:
            raise ModelError("The journal is sealed with another key: --journal-key-file names its file.") from None
        return rows

    # Writing

    def _next_epoch(self) -> int:
        """Raises: StorageError."""
        last = self._database.fact(_EPOCH_FACT)
        is_whole = isinstance(last, bytes) and len(last) == _EPOCH_BYTES  # a damaged fact may be anything
        epoch = int.from_bytes(last) % 2 ** (8 * _EPOCH_BYTES - 1) + 1 if last is not None and is_whole else 1
        self._database.keep_fact(_EPOCH_FACT, epoch.to_bytes(_EPOCH_BYTES))
        return epoch

    def begin(self, record: Record) -> StreamLog:
        """Keep a new stream; when this returns, it is safe. Raises: StorageError."""
        with self._at_once():
            number = self._database.begin(record.stream_id, self._rows.of_record(record), record.owner)
        return StreamLog(record, number=number)

    @contextlib.contextmanager
    def _at_once(self) -> Iterator[None]:
        """Around what is kept now or not at all. Raises: StorageError."""
        if self.write_error is not None:
            raise self.write_error.with_traceback(None)
        try:
            yield
        except StorageError as error:
            self._write_failed(error)
            raise
        self._committed.set()

    def append(self, log: StreamLog, event: Event) -> None:
        """Keep an event at the end of this turn of the event loop, and let it be seen then; while there is a write
        error, it waits."""
        self._pending.append((log, event))
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self.flush)

    def retract(self, log: StreamLog) -> None:
        """Flush, and drop what was appended to a log and could not be kept."""
        self.flush()
        self._pending = [entry for entry in self._pending if entry[0] is not log]

    def flush(self, *, only_ends: bool = False) -> None:
        """Keep what was appended now, if it can be kept now. A disk that is broken is trusted with nothing any more,
        but for the ends of streams."""
        self._is_scheduled = False
        pending = self._pending
        if not pending or (self._is_broken and self.write_error is not None and not only_ends):
            return
        try:
            rows = self._rows_of(pending)
            if rows:
                self._database.append(rows)
        except StorageError as error:
            self._write_failed(error)
            return
        self._pending = []
        self._committed.set()
        if self.write_error is not None and not self._has_given_up:
            self._recovered()
        for log, event in pending:
            log.append(event)

    def _rows_of(self, pending: Sequence[tuple[StreamLog, Event]]) -> list[TailRow]:
        """A row for each stream that has not ended, with no event behind its terminal one."""
        events_of: dict[StreamLog, list[Event]] = {}
        for log, event in pending:
            events = events_of.get(log)
            if events is None:
                if log.end is None:
                    events_of[log] = [event]
            elif type(events[-1]) is not End:
                events.append(event)
        of_events = self._rows.of_events
        return [
            TailRow(log.number, log.last_seq + 1, of_events(log.stream_id, events)) for log, events in events_of.items()
        ]

    # Write errors

    def _write_failed(self, error: StorageError) -> None:
        loop = asyncio.get_running_loop()
        if self.write_error is None:
            self._decided.clear()
            self._database.be_patient(False)
            if loop.time() - self._writable_since_s > _QUIET_S:  # else it never was over
                self._failing_since_s = loop.time()
            self._retrying = loop.call_later(_RETRY_S, self._retry)
        self.write_error = error

    def _recovered(self) -> None:
        if self._retrying is not None:
            self._retrying.cancel()
        self._writable_since_s = asyncio.get_running_loop().time()
        if self._is_logged:
            logger.warning("The journal can be written again.")
        self.write_error = None
        self._has_given_up = self._is_logged = False
        self._database.be_patient(True)
        self._decided.set()

    async def wait_writable(self) -> None:
        """Return when there is no write error. Raises: StorageError if that takes too long."""
        while self.write_error is not None:
            if self._has_given_up:
                raise self.write_error.with_traceback(None)
            await self._decided.wait()

    def _retry(self) -> None:
        """Until it goes on, or has not for too long."""
        loop = asyncio.get_running_loop()
        self._retrying = loop.call_later(_PROBE_S if self._has_given_up else _RETRY_S, self._retry)
        self.flush()
        if not self._pending:
            self._probe()
        if self.write_error is None:
            return
        waited_s = loop.time() - self._failing_since_s
        if not self._is_logged and waited_s > _QUIET_S:
            self._is_logged = True
            logger.error("%s Streams wait.", self.write_error.message)
        if not self._has_given_up and waited_s >= self._give_up_after_s:
            self._give_up(self.write_error)

    def _probe(self) -> None:
        if self._is_broken:
            return
        try:
            self._database.hold_reserve()
            self._database.probe()
        except StorageError as error:
            self.write_error = error
            return
        self._recovered()

    def _give_up(self, error: StorageError) -> None:
        """End every stream: behind what was seen of it, since what waits never will be."""
        self._has_given_up = True
        self._decided.set()
        self._pending.clear()
        for fail_all in self.on_write_failure:
            fail_all(error)
        self._database.use_reserve()
        self.flush(only_ends=True)
        # Even the reserve was not enough. Nobody sees an end that is not kept, and nobody is left waiting for it.
        for log, _ in self._pending:
            log.park()

    # Ends

    def finish(self, log: StreamLog) -> None:
        """A stream has ended: put its events into one row, in time."""
        self._tidying.finished.append(log)
        self._untidy.set()

    def forget(self, stream_ids: Sequence[str]) -> None:
        """Keep of these finished streams only that they were there once."""
        self._tidying.expired += stream_ids
        self._untidy.set()

    def delete(self, stream_id: str) -> None:
        """Forget a finished stream for good before this returns. Raises: StorageError."""
        self._database.forget([stream_id], most_expired=MAX_EXPIRED)

    # Reading

    def load(self, stream_id: str) -> StreamLog:
        """A finished stream. Raises: JournalDamaged if it is lost, StorageError if it cannot be read now."""
        for log in self._tidying.finished:  # which still wait for their row
            if log.stream_id == stream_id:
                return log
        found = self._database.load(stream_id)
        if found is None:
            raise JournalDamaged("This stream was damaged on disk, and is lost.")
        record, events = found
        return StreamLog(self._rows.read_record(stream_id, record), self._rows.read_events(stream_id, events))

    def finished(self) -> Sequence[Finished]:
        """The finished streams that an earlier process left, in no order."""
        return inheritance.finished(self._database, self._rows)

    def expired(self) -> Sequence[tuple[str, str]]:
        """The ids of streams that are no longer kept, and whose they were, oldest first."""
        return self._database.expired()

    def damage_age_s(self) -> float | None:
        """Seconds since streams were lost by damage, nobody knows which; None if none were."""
        return self._database.damage_age_s()

    def unfinished(self) -> list[StreamLog]:
        """The streams that an earlier process could not finish, in the order in which they began."""
        found = inheritance.unfinished(self._database, self._rows)
        for log, end in found:
            if end is not None:
                self.append(log, end)
        self.flush()
        return [log for log, _ in found]

    # Durable streams

    def note(self, key: bytes, record: DurableRecord) -> None:
        """Keep what is about to happen to a durable stream before this returns. Raises: StorageError."""
        with self._at_once():
            if isinstance(record, Dropped):
                self._database.erase(key)
            else:
                self._database.note(key, self._rows.of_note(key, record))

    def notes(self) -> Iterator[tuple[bytes, DurableRecord]]:
        """What happened to the durable streams that there are, in the order in which it did."""
        return inheritance.notes(self._database, self._rows)

    # Keeping up

    async def keep_up(self) -> None:
        """Sync what was committed, tidy up, and empty the write-ahead log; until cancelled."""
        with contextlib.closing(WriteAheadLog(self._database)) as wal:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._keep_synced(wal))
                group.create_task(self._keep_tidy(wal))

    async def _keep_synced(self, wal: WriteAheadLog) -> None:
        while True:
            await self._committed.wait()
            await asyncio.sleep(self._sync_s)
            self._committed.clear()
            await self._sync(wal)
            await wal.checkpoint()

    async def _keep_tidy(self, wal: WriteAheadLog) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._untidy.wait()
            await asyncio.sleep(self._sync_s)
            self._untidy.clear()
            try:
                begun_s = loop.time()
                while self._tidying.step():
                    await asyncio.sleep(max(_CLEANUP_PAUSE_S, _CLEANUP_PAUSE * (loop.time() - begun_s)))
                    begun_s = loop.time()
                if not self.keeps_finished:
                    await wal.empty()
            except StorageError:
                self._untidy.set()

    async def _sync(self, wal: WriteAheadLog) -> None:
        try:
            await wal.sync()
        except OSError as error:
            # What the kernel has dropped it does not try again: nothing here can be relied on any more.
            logger.error("The journal cannot be synced: %s.", error.strerror)
            self._is_broken = True
            self._write_failed(StorageError("The journal of this server cannot be written."))

    def close(self) -> None:
        """Put everything away. What could not be written is lost with this process."""
        with contextlib.suppress(StorageError):
            self.flush()
            while self._tidying.step():
                pass
        self._database.close()
