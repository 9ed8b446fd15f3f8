"""The journal on disk.

Readers see only events that are committed to the file. Events of one turn of the event loop are committed together at
its end, and shown then. So an engine's step costs one commit, however many streams there are. A commit goes to the
operating system and survives a crash of this process. The file is synced every `sync_s`; a power cut may lose the
commits since the last sync. See docs/durability.md.

When the file cannot be written, events wait and are not shown. After `give_up_after_s` all streams are ended. A reserve
file is deleted first, to make room for the terminal events.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from tailrace.errors import JournalDamaged, ModelError, StorageError
from tailrace.streams import startup_recovery
from tailrace.streams._compaction import MAX_EXPIRED, Compaction
from tailrace.streams._database import Database, TailRow
from tailrace.streams._index import Finished
from tailrace.streams._wal import WriteAheadLog
from tailrace.streams.log import StreamLog, enqueue, without_producers
from tailrace.streams.notes import Note
from tailrace.streams.old_journals import LIFETIME_PROPERTY
from tailrace.streams.rows import Rows, elements
from tailrace.streams.startup_recovery import Unfinished
from tailrace.streams.write_errors import WriteErrors
from tailrace.types import Event, Record

__all__ = ["DiskJournal"]

logger = logging.getLogger("tailrace.journal")

_SEALED_PROPERTY = "sealed"
_KIND_PROPERTY = "kind"  # whose streams these are; journals of earlier versions do not say
_KINDS = (b"models", b"apps")
_EPOCH_PROPERTY = "epoch"
_EPOCH_BYTES = 8
_RETRY_S = 0.02
_PROBE_S = 1.0
_CLEANUP_PAUSE_S = 0.005  # shortest pause between two steps of compaction
_CLEANUP_PAUSE = 2.0  # length of the pause, as a multiple of the last step's time


class DiskJournal:
    """Streams in a directory that this journal locks. The caller must `close` it.

    `epoch` counts the servers that have used the directory, including this one.

    The streams are those of models, or `of_apps`.
    `keep_finished=False` deletes streams from the disk when they finish. `lifetime_s` is how long after the last write
    clients can still read the streams. Other servers use it to remove old journals; a journal without it is never
    removed.

    Raises: ModelError if the directory cannot be used.
    """

    def __init__(
        self,
        directory: Path,
        *,
        journal_key: bytes | None = None,
        of_apps: bool = False,
        keep_finished: bool = True,
        lifetime_s: float | None = None,
        sync_s: float = 0.1,
        give_up_after_s: float = 5.0,
    ) -> None:
        self._database = Database(directory, erases=not keep_finished)
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self._database.close)
            try:
                self._rows = self._open_rows(Rows(journal_key, of_apps=of_apps))
                self._check_kind(directory, b"apps" if of_apps else b"models")
                if lifetime_s is not None:
                    self._database.write_property(LIFETIME_PROPERTY, repr(lifetime_s).encode())
                self.epoch = self._next_epoch()
                self._database.reserve.hold()
            except StorageError as error:
                raise ModelError(f"The journal cannot be kept in {directory}: {error.message}") from None
            on_failure.pop_all()
        self.keeps_finished = keep_finished
        self._sync_s = sync_s
        self.write_errors = WriteErrors("The journal", give_up_after_s=give_up_after_s)
        self.on_end: Callable[[StreamLog], None] = lambda log: None  # called when a terminal event is committed
        self.on_damage: Callable[[], None] = lambda: None  # called when damage was found while this server runs
        self._retry_timer: asyncio.TimerHandle | None = None
        self.commit_s = 0.0  # for how long commits have held up the event loop, all together
        self._wal: WriteAheadLog | None = None  # while the journal is maintained
        self._is_broken = False  # a sync failed, so the journal is unusable until a restart
        self._pending: dict[StreamLog, list[Event]] = {}  # nothing follows a terminal event
        self._is_scheduled = False
        self._compaction = Compaction(self._database, self._rows, keeps=keep_finished)
        self._committed = asyncio.Event()  # set while commits are not synced
        self._compaction_due = asyncio.Event()
        if self._database.damaged_path is not None:
            logger.error("the journal was damaged and is now %s; a new one was created", self._database.damaged_path)
        elif self._database.has_lost_commits:
            logger.error("the end of the journal was damaged and is lost")

    def _check_kind(self, directory: Path, kind: bytes) -> None:
        """Raises: ModelError if the journal has streams of the other kind, whose events have another form."""
        known = self._database.read_property(_KIND_PROPERTY)
        if known == kind:
            return
        if known is not None and known in _KINDS:  # a damaged property may be anything
            raise ModelError(
                f"{directory} has the streams of {known.decode()}, and this server would keep those of "
                f"{kind.decode()}. Choose another --data-dir."
            )
        self._database.write_property(_KIND_PROPERTY, kind)

    def _open_rows(self, rows: Rows) -> Rows:
        """Raises: ModelError if the journal was encrypted with another journal key."""
        sealed = self._database.read_property(_SEALED_PROPERTY)
        try:
            if sealed is not None:
                rows.open(sealed, _SEALED_PROPERTY)
            elif rows.is_encrypting:
                self._database.write_property(_SEALED_PROPERTY, rows.encrypt(b"", _SEALED_PROPERTY))
        except JournalDamaged:
            raise ModelError("The journal was encrypted with another key: see --journal-key-file.") from None
        return rows

    # Writing

    def _next_epoch(self) -> int:
        """Raises: StorageError."""
        last = self._database.read_property(_EPOCH_PROPERTY)
        is_whole = isinstance(last, bytes) and len(last) == _EPOCH_BYTES  # a damaged property may be anything
        epoch = int.from_bytes(last) % 2 ** (8 * _EPOCH_BYTES - 1) + 1 if last is not None and is_whole else 1
        self._database.write_property(_EPOCH_PROPERTY, epoch.to_bytes(_EPOCH_BYTES))
        return epoch

    def begin(self, record: Record) -> StreamLog:
        """Write a new stream. It is committed when this returns. Raises: StorageError."""
        with self._write_now():
            number = self._database.begin(record.stream_id, self._rows.encode_record(record), record.owner)
        return StreamLog(record, number=number)

    @contextlib.contextmanager
    def _write_now(self) -> Iterator[None]:
        """Context of a write that is not retried later. Raises: StorageError."""
        self.write_errors.check()
        try:
            yield
        except StorageError as error:
            self._write_failed(error)
            raise
        self._committed.set()

    def append(self, log: StreamLog, events: Sequence[Event]) -> None:
        """Queue events. They are committed and shown at the end of this turn of the event loop. During a write error
        they wait. Events after the terminal event are dropped."""
        if enqueue(self._pending, log, events) and not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self.flush)

    def flush(self, *, only_ends: bool = False) -> None:
        """Commit the queued events now, if that is possible. After a failed sync only terminal events are written."""
        self._is_scheduled = False
        pending = self._pending
        if not pending or (self._is_broken and self.write_errors.current is not None and not only_ends):
            return
        join = self._rows.join_events
        added = [elements(events) for events in pending.values()]
        rows = [
            TailRow(log.number, log.last_seq + 1, join(log.stream_id, len(events), encoded))
            for (log, events), encoded in zip(pending.items(), added, strict=True)
        ]
        begun_s = time.monotonic()
        try:
            self._database.append(rows)
        except StorageError as error:
            self._write_failed(error)
            return
        finally:
            self.commit_s += time.monotonic() - begun_s
        self._pending = {}
        self._committed.set()
        if self.write_errors.current is not None and not self.write_errors.has_given_up:
            self._recovered()
        for (log, events), encoded in zip(pending.items(), added, strict=True):
            log.encoded += encoded
            log.extend(events)
            if log.end is not None:
                self.finish(log)

    # Write errors

    def _write_failed(self, error: StorageError) -> None:
        if self.write_errors.failed(error):
            self._database.set_lock_wait(False)
            self._retry_timer = asyncio.get_running_loop().call_later(_RETRY_S, self._retry)

    def _recovered(self) -> None:
        if self._retry_timer is not None:
            self._retry_timer.cancel()
        self._database.set_lock_wait(True)
        self.write_errors.recovered()

    def _retry(self) -> None:
        """Try to write again, on a timer, until it works. Gives up all streams when it took too long."""
        delay_s = _PROBE_S if self.write_errors.has_given_up else _RETRY_S
        self._retry_timer = asyncio.get_running_loop().call_later(delay_s, self._retry)
        self.flush()
        if not self._pending:
            self._probe()
        error = self.write_errors.current
        if error is not None and self.write_errors.is_too_long():
            self._give_up(error)

    def _probe(self) -> None:
        if self._is_broken:
            return
        try:
            self._database.reserve.hold()
            self._database.probe()
        except StorageError as error:
            self._write_failed(error)
            return
        self._recovered()

    def _give_up(self, error: StorageError) -> None:
        """End all streams. Events that wait are dropped; readers never see them."""
        self._pending = without_producers(self._pending)
        self.write_errors.give_up(error)
        self._database.reserve.free()
        self.flush(only_ends=True)
        # The reserve was too small. Terminal events that cannot be written are not shown, so send the readers away.
        for log in self._pending:
            log.release(error)

    # Ends

    def finish(self, log: StreamLog) -> None:
        """Queue a stream that has ended for compaction, and report it."""
        self._compaction.finished.append(log)
        self._compaction_due.set()
        self.on_end(log)

    def forget(self, stream_ids: Sequence[str]) -> None:
        """Replace these finished streams by tombstones, later."""
        self._compaction.expired += stream_ids
        self._compaction_due.set()

    def delete(self, stream_id: str) -> None:
        """Delete a finished stream before this returns. Raises: StorageError."""
        self._database.forget([stream_id], most_expired=MAX_EXPIRED)

    # Reading

    def load(self, stream_id: str) -> StreamLog:
        """Read a finished stream. Raises: JournalDamaged if it is lost, StorageError if it cannot be read now."""
        for log in self._compaction.finished:
            if log.stream_id == stream_id:
                return log
        found = self._database.load(stream_id)
        if found is None:
            raise JournalDamaged("This stream was damaged on disk and is lost.")
        record, events = found
        return StreamLog(self._rows.read_record(stream_id, record), self._rows.read_events(stream_id, events))

    def finished(self) -> Sequence[Finished]:
        """Return the finished streams of earlier processes, in no particular order."""
        return startup_recovery.finished(self._database, self._rows)

    def expired(self) -> Sequence[tuple[str, str]]:
        """Return (stream id, owner) of expired streams, oldest first."""
        return self._database.expired()

    def damage_age_s(self) -> float | None:
        """Return the seconds since an unknown set of streams was lost by damage; None if none was."""
        return self._database.damage_age_s()

    def unfinished(self) -> Sequence[Unfinished]:
        """Return the streams that an earlier process did not finish, in the order in which they began."""
        return startup_recovery.unfinished(self._database, self._rows)

    # Notes of extensions (`notes.NoteRows`)

    def add_notes(self, notes: Iterable[tuple[bytes, bytes]]) -> None:
        """Commit notes before this returns: all or none. Raises: StorageError."""
        with self._write_now():
            self._database.add_notes(self._sealed(notes))

    def change_notes(self, notes: Iterable[tuple[bytes, bytes]], erased: Iterable[bytes]) -> None:
        """As `add_notes`, instead of all notes with these row keys and with those of `erased`. Raises: StorageError."""
        with self._write_now():
            self._database.change_notes(self._sealed(notes), erased)

    def _sealed(self, notes: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        return [(key, self._rows.encrypt(body, key.hex())) for key, body in notes]

    def erase_notes(self, keys: Iterable[bytes]) -> None:
        """Raises: StorageError."""
        with self._write_now():
            self._database.erase_notes(keys)

    def note_sizes(self, first: bytes, end: bytes, most: int) -> list[tuple[bytes, int]]:
        """Raises: StorageError."""
        found = self._database.note_sizes(first, end, most)
        return [(key, num_bytes - self._rows.num_added(begin)) for key, num_bytes, begin in found]

    def notes(self, first: bytes, end: bytes) -> Iterator[Note]:
        """Yield the notes with row keys from `first` to before `end`, in the order of writing. Those with a damaged row
        key are deleted."""
        nobodys: list[int] = []
        for row, key, body in self._database.notes(first, end):
            if not isinstance(key, bytes):
                nobodys.append(row)
                continue
            try:
                yield Note(row, key, self._rows.open(body, key.hex()))
            except JournalDamaged:
                yield Note(row, key, None)
        if nobodys:
            self._database.drop_notes(nobodys)
            self.record_damage()

    def cut_notes(self, cuts: Mapping[bytes, int]) -> None:
        """Delete the notes of each row key from a row on. Raises: StorageError."""
        self._database.cut_notes(cuts)

    async def sync_notes(self) -> None:
        """Return when all notes are on the disk. Raises: StorageError."""
        if self._wal is not None:
            await self._sync(self._wal)
        if self._wal is None or self._is_broken:
            raise StorageError("The journal of this server cannot be written.")

    def record_damage(self) -> None:
        """Store that something was lost now. Raises: StorageError."""
        self._database.record_damage()
        self.on_damage()

    # Maintenance

    async def maintain(self) -> None:
        """Sync, compact and checkpoint the journal until cancelled."""
        with contextlib.closing(WriteAheadLog(self._database)) as wal:
            self._wal = wal
            async with asyncio.TaskGroup() as group:
                group.create_task(self._sync_commits(wal))
                group.create_task(self._compact(wal))

    async def _sync_commits(self, wal: WriteAheadLog) -> None:
        while True:
            await self._committed.wait()
            await asyncio.sleep(self._sync_s)
            self._committed.clear()
            await self._sync(wal)
            await wal.checkpoint()

    async def _compact(self, wal: WriteAheadLog) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._compaction_due.wait()
            await asyncio.sleep(self._sync_s)
            self._compaction_due.clear()
            try:
                begun_s = loop.time()
                while self._compaction.step():
                    await asyncio.sleep(max(_CLEANUP_PAUSE_S, _CLEANUP_PAUSE * (loop.time() - begun_s)))
                    begun_s = loop.time()
                if not self.keeps_finished:
                    await wal.empty()
            except StorageError:
                self._compaction_due.set()

    async def _sync(self, wal: WriteAheadLog) -> None:
        try:
            await wal.sync()
        except OSError as error:
            # The kernel does not write the lost pages again, so the file cannot be trusted any more.
            logger.error("The journal cannot be synced: %s.", error.strerror)
            self._is_broken = True
            self._write_failed(StorageError("The journal of this server cannot be written."))

    def close(self) -> None:
        """Flush, compact and close the file. Events that cannot be written are lost."""
        with contextlib.suppress(StorageError):
            self.flush()
            while self._compaction.step():
                pass
        self._database.close()
