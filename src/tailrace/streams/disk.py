"""The journal on disk.

Its law: what a reader has seen is in the file. Events that come in one turn of the event loop are committed together at
its end, and shown then; so an engine's step costs one commit, whatever the number of streams. A commit goes to the
operating system, which keeps it whatever happens to this process; every `sync_s` the file is synced, which is what a
power cut may take. See docs/durability.md.

When the file cannot be written, events wait and are not shown. After `patience_s` no stream can go on: all are ended,
for which a reserve of disk is given up.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from tailrace.errors import JournalDamaged, ModelError, StorageError
from tailrace.streams._cipher import Cipher, PlainText, RowCipher
from tailrace.streams._clock import age_s, stamp
from tailrace.streams._database import Database, FinishedRow, TailRow
from tailrace.streams._wal import WriteAheadLog
from tailrace.streams.durable_records import Dropped, DurableRecord
from tailrace.streams.journal import Finished
from tailrace.streams.log import StreamLog
from tailrace.streams.record import Record
from tailrace.types import End, Event, Failure, Status, TextDelta, Usage

__all__ = ["DiskJournal"]

logger = logging.getLogger("tailrace.journal")

_SEALED_FACT = "sealed"
_RETRY_S = 0.02
_PROBE_S = 1.0
_QUIET_S = 0.5  # trouble that is over by then is nobody's business
_BREATH_S = 0.005  # between two pieces of tidying up, for everybody else
_MAX_RECOVERIES = 5  # of a stream that never got on: it may be what takes the server down
_MAX_EXPIRED = 100_000
_TIDY_EVENTS = 4_000  # at once, so that tidying up never holds the loop for long
_FORGET_AT_ONCE = 64  # streams
_VACUUM_PAGES = 64

_encode_record = msgspec.msgpack.Encoder().encode
_decode_record = msgspec.msgpack.Decoder(Record).decode
_decode_note = msgspec.msgpack.Decoder(DurableRecord).decode
_encode_events = msgspec.msgpack.Encoder().encode
_decode_events = msgspec.msgpack.Decoder(list[Event]).decode


class DiskJournal:
    """Keeps the `Journal` promise in a directory of its own. `close` it at the end.

    `keep_finished=False` leaves no finished stream on disk. Raises: ModelError if the directory cannot be used.
    """

    is_durable = True

    def __init__(
        self,
        directory: Path,
        *,
        key: bytes | None = None,
        keep_finished: bool = True,
        sync_s: float = 0.1,
        patience_s: float = 5.0,
    ) -> None:
        self._database = Database(directory, erases=not keep_finished)
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self._database.close)
            try:
                self._cipher = self._keyed(key)
                self._database.hold_reserve()
            except StorageError as error:
                raise ModelError(f"The journal cannot be kept in {directory}: {error.message}") from None
            on_failure.pop_all()
        self.keeps = keep_finished
        self._sync_s = sync_s
        self._patience_s = patience_s
        self.trouble: StorageError | None = None
        self.on_trouble: Callable[[StorageError], None] = lambda error: None
        self._trouble_since = 0.0
        self._has_given_up = False
        self._is_known = False  # to whoever reads the log
        self._waiting: list[asyncio.Future[None]] = []  # for the end of trouble
        self._pending: list[tuple[StreamLog, Event]] = []
        self._owed: list[TailRow] = []  # ends that were seen before they could be written
        self._is_scheduled = False
        self._finished: list[StreamLog] = []  # to be moved into one row
        self._expired: list[str] = []
        self._has_room = False  # unused, in the file
        self._changed = asyncio.Event()
        self._unsynced = False
        self._is_broken = False
        if self._database.set_aside is not None:
            logger.error("the journal was damaged and is now %s; a new one is begun", self._database.set_aside)

    def _keyed(self, key: bytes | None) -> RowCipher:
        """Raises: ModelError if the journal was sealed with another key."""
        cipher = Cipher(key) if key is not None else PlainText()
        sealed = self._database.fact(_SEALED_FACT)
        try:
            if sealed is not None:
                cipher.open(sealed, _SEALED_FACT)
            elif key is not None:
                self._database.keep_fact(_SEALED_FACT, cipher.seal(b"", _SEALED_FACT))
        except JournalDamaged:
            raise ModelError("The journal is sealed with another key: --journal-key-file names its file.") from None
        return cipher

    # Writing

    def begin(self, record: Record) -> StreamLog:
        if self.trouble is not None:
            raise self.trouble
        body = self._cipher.seal(_encode_record(record), record.stream_id)
        try:
            number = self._database.begin(record.stream_id, body)
        except StorageError as error:
            self._stuck(error)
            raise
        self._note_change()
        return StreamLog(record, number=number)

    def append(self, log: StreamLog, event: Event) -> None:
        self._pending.append((log, event))
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._scheduled_flush)

    def retract(self, log: StreamLog) -> None:
        self.flush()
        self._pending = [entry for entry in self._pending if entry[0] is not log]

    def _scheduled_flush(self) -> None:
        self._is_scheduled = False
        self.flush()

    def flush(self) -> None:
        if not self._pending:
            return
        pending = self._pending
        try:
            self._check()
            self._database.append([*self._owed, *self._rows(pending)])
        except StorageError as error:
            self._stuck(error)
            return
        self._pending, self._owed = [], []
        self._note_change()
        if self.trouble is not None and not self._has_given_up:
            self._is_well()
        for log, event in pending:
            log.append(event)

    def _check(self) -> None:
        """Raises: StorageError for good, once a sync has failed."""
        if self._is_broken and self.trouble is not None:
            raise self.trouble

    def _rows(self, pending: Sequence[tuple[StreamLog, Event]]) -> list[TailRow]:
        """A row for each stream."""
        events_of: dict[StreamLog, list[Event]] = {}
        for log, event in pending:
            events = events_of.get(log)
            if events is None:
                events_of[log] = [event]
            else:
                events.append(event)
        seal = self._cipher.seal
        return [
            TailRow(log.number, log.last_seq + 1, seal(_encode_events(events), log.stream_id))
            for log, events in events_of.items()
        ]

    def _note_change(self) -> None:
        if not self._unsynced:
            self._unsynced = True
            self._changed.set()

    # Trouble

    def _stuck(self, error: StorageError) -> None:
        loop = asyncio.get_running_loop()
        if self.trouble is None:
            self._database.be_patient(False)
            self._trouble_since = loop.time()
            loop.call_later(_RETRY_S, self._retry)
        self.trouble = error

    def _is_well(self) -> None:
        if self._is_known:
            logger.warning("The journal can be written again.")
        self.trouble = None
        self._has_given_up = self._is_known = False
        self._database.be_patient(True)
        self._tell()

    async def well(self) -> None:
        while self.trouble is not None:
            if self._has_given_up:
                raise self.trouble
            changed = asyncio.get_running_loop().create_future()
            self._waiting.append(changed)
            await changed

    def _tell(self) -> None:
        waiting, self._waiting = self._waiting, []
        for changed in waiting:
            if not changed.done():
                changed.set_result(None)

    def _retry(self) -> None:
        """Until it goes on, or has not for too long."""
        loop = asyncio.get_running_loop()
        self.flush() if self._pending else self._probe()
        if self.trouble is None:
            return
        waited_s = loop.time() - self._trouble_since
        if not self._is_known and waited_s > _QUIET_S:
            self._is_known = True
            logger.error("%s Streams wait.", self.trouble.message)
        if not self._has_given_up and waited_s >= self._patience_s:
            self._give_up(self.trouble)
        loop.call_later(_PROBE_S if self._has_given_up else _RETRY_S, self._retry)

    def _probe(self) -> None:
        try:
            self._check()
            self._database.hold_reserve()
            self._database.append(self._owed)
        except StorageError as error:
            self.trouble = error
            return
        self._owed = []
        self._is_well()

    def _give_up(self, error: StorageError) -> None:
        """End every stream: behind what was seen of it, since what waits never will be."""
        self._has_given_up = True
        self._tell()
        self._pending.clear()
        self.on_trouble(error)
        self._database.use_reserve()
        self.flush()
        # Even the reserve was not enough. A reader is not left waiting for that; it is written later.
        self._owed = self._rows(self._pending)
        pending, self._pending = self._pending, []
        for log, event in pending:
            log.append(event)

    # Ends

    def finish(self, log: StreamLog) -> int:
        self._finished.append(log)
        self._changed.set()
        return log.num_bytes

    def forget(self, stream_ids: Sequence[str]) -> None:
        self._expired += stream_ids
        self._changed.set()

    def delete(self, stream_id: str) -> None:
        self._database.forget([stream_id], most_expired=_MAX_EXPIRED)

    def _tidy(self) -> bool:
        """Some of what can wait: finished streams into one row, expired ones and dead rows away. Whether there is
        more."""
        num_finished = num_events = 0
        while num_finished < len(self._finished) and num_events < _TIDY_EVENTS:
            num_events += self._finished[num_finished].last_seq
            num_finished += 1
        finished, self._finished = self._finished[:num_finished], self._finished[num_finished:]
        expired, self._expired = self._expired[:_FORGET_AT_ONCE], self._expired[_FORGET_AT_ONCE:]
        try:
            if finished and self.keeps:
                self._database.finish([self._finished_row(log) for log in finished])
            elif finished:
                self._database.drop([(log.number, log.stream_id) for log in finished], most_expired=_MAX_EXPIRED)
            if expired:
                self._database.forget(expired, most_expired=_MAX_EXPIRED)
                self._has_room = True
            has_dead = self._database.sweep()
        except StorageError:
            self._finished[:0], self._expired[:0] = finished, expired
            raise
        return has_dead or bool(self._finished or self._expired)

    def _finished_row(self, log: StreamLog) -> FinishedRow:
        seal, stream_id = self._cipher.seal, log.stream_id
        record = seal(_encode_record(log.record.finished()), stream_id)
        return FinishedRow(log.number, stream_id, record, seal(_encode_events(log.events), stream_id), stamp())

    # Reading

    def load(self, stream_id: str) -> StreamLog | None:
        found = self._database.load(stream_id)
        if found is None:
            raise JournalDamaged("This stream was damaged on disk, and is lost.")
        record, events = (self._cipher.open(part, stream_id) for part in found)
        return StreamLog(_decode_record(record), _decode_events(events))

    def finished(self) -> Iterator[Finished]:
        for stream_id, sealed, num_bytes, finished in self._database.finished():
            with _skipping(stream_id):
                record = _decode_record(self._cipher.open(sealed, stream_id))
                yield Finished(stream_id, age_s(finished), num_bytes, record.claim)

    def expired(self) -> Sequence[str]:
        return self._database.expired()

    def unfinished(self) -> list[StreamLog]:
        rows: dict[int, list[TailRow]] = {}
        for row in self._database.tail():
            rows.setdefault(row.stream, []).append(row)
        logs, lost = [], []
        self._database.count_recovery()
        for number, stream_id, sealed, recoveries in self._database.unfinished():
            try:
                if sealed is None:
                    raise JournalDamaged("its record")
                record = _decode_record(self._cipher.open(sealed, stream_id))
            except (JournalDamaged, msgspec.DecodeError):
                logger.error(_LOST, stream_id)
                lost.append((number, stream_id))
                continue
            events, is_whole = self._events_of(rows.get(number, []), stream_id)
            log = StreamLog(record, events, number=number)
            logs.append(log)
            if log.end is None and not is_whole:
                logger.error("stream %s was damaged on disk, and ends where it was", stream_id)
                self._end(log, "error", _DAMAGED)
            elif log.end is None and recoveries > _MAX_RECOVERIES:
                self._end(log, "interrupted", _HOPELESS)
        if lost:
            self._database.drop(lost, most_expired=_MAX_EXPIRED)
        self.flush()
        return logs

    def _events_of(self, rows: Sequence[TailRow], stream_id: str) -> tuple[list[Event], bool]:
        """The events up to the first that is not there as it was written, and whether that is all of them."""
        events: list[Event] = []
        for row in rows:
            try:
                if row.seq != len(events) + 1 or row.events is None:
                    return events, False
                events += _decode_events(self._cipher.open(row.events, stream_id))
            except (JournalDamaged, msgspec.DecodeError):
                return events, False
        return events, True

    def _end(self, log: StreamLog, status: Status, failure: Failure) -> None:
        num_tokens = sum(len(event.token_ids) for event in log.events if isinstance(event, TextDelta))
        self.append(log, End(status, Usage(log.record.num_prompt_tokens, num_tokens), failure))

    # Durable streams

    def note(self, key: bytes, record: DurableRecord) -> None:
        if isinstance(record, Dropped):
            self._database.erase(key)
        else:
            self._database.note(key, self._cipher.seal(_encode_record(record), key.hex()))
        self._note_change()

    def notes(self) -> Iterator[tuple[bytes, DurableRecord]]:
        damaged: set[bytes] = set()
        for key, body in self._database.notes():
            try:
                if body is None:
                    raise JournalDamaged("a record")
                record = _decode_note(self._cipher.open(body, key.hex()))
            except (JournalDamaged, msgspec.DecodeError):
                damaged.add(key)
                logger.error("a durable stream was damaged on disk, and ends where it was")
            if key not in damaged:
                yield key, record

    # Keeping up

    async def keep_up(self) -> None:
        """Sync what was committed, put away what has ended, and empty the write-ahead log; until cancelled."""
        with contextlib.closing(WriteAheadLog(self._database)) as wal:
            while True:
                await self._changed.wait()
                await asyncio.sleep(self._sync_s)
                self._changed.clear()
                if self._unsynced:
                    self._unsynced = False
                    await self._sync(wal)
                with contextlib.suppress(StorageError):
                    while self._tidy():  # noqa: ASYNC110  # a breath in between, nothing is awaited
                        await asyncio.sleep(_BREATH_S)
                    if self._has_room:
                        self._has_room = self._database.give_room_back(_VACUUM_PAGES)
                if self._has_room:
                    self._changed.set()
                await wal.checkpoint()

    async def _sync(self, wal: WriteAheadLog) -> None:
        try:
            await wal.sync()
        except OSError as error:
            # What the kernel has dropped it does not try again: nothing here can be relied on any more.
            logger.error("The journal cannot be synced: %s.", error.strerror)
            self._is_broken = True
            self._stuck(StorageError("The journal of this server cannot be written."))

    def close(self) -> None:
        """Put everything away. What could not be written is lost with this process."""
        with contextlib.suppress(StorageError):
            self.flush()
            while self._tidy():
                pass
        self._database.close()


_LOST = "stream %s was damaged on disk, and is lost"
_DAMAGED = Failure("journal_damaged", "The rest of this stream was damaged on disk.")
_HOPELESS = Failure("interrupted", "The server stopped again and again while this stream was taken up.")


@contextlib.contextmanager
def _skipping(stream_id: str) -> Iterator[None]:
    try:
        yield
    except (JournalDamaged, msgspec.DecodeError, ValueError):
        logger.error(_LOST, stream_id)
