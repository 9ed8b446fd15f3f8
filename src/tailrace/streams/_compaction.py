"""Compaction: moves finished streams into one row each, deletes expired streams and dead rows, frees disk space."""

from __future__ import annotations

from tailrace.errors import StorageError
from tailrace.streams._clock import stamp
from tailrace.streams._database import Database, FinishedRow
from tailrace.streams.log import StreamLog
from tailrace.streams.rows import Rows

__all__ = ["MAX_EXPIRED", "Compaction"]

MAX_EXPIRED = 100_000
_EVENTS_AT_ONCE = 4_000  # so that a step does not block the event loop for long
_STREAMS_AT_ONCE = 64
_PAGES_AT_ONCE = 64


class Compaction:
    """Compacts the journal in small steps. With `keeps`, finished streams are kept; otherwise they are replaced by
    tombstones."""

    def __init__(self, database: Database, rows: Rows, *, keeps: bool) -> None:
        self._database = database
        self._rows = rows
        self._keeps = keeps
        self.finished: list[StreamLog] = []  # not compacted yet
        self.expired: list[str] = []
        self._has_unused_pages = False  # whether the file has unused pages

    def step(self) -> bool:
        """Do some of the work. Returns whether there is more. Raises: StorageError; the step can then be repeated."""
        num_finished = num_events = 0
        while num_finished < len(self.finished) and num_events < _EVENTS_AT_ONCE:
            num_events += self.finished[num_finished].last_seq
            num_finished += 1
        gone = set(self.expired)
        finished, self.finished = self.finished[:num_finished], self.finished[num_finished:]
        expired, self.expired = self.expired[:_STREAMS_AT_ONCE], self.expired[_STREAMS_AT_ONCE:]
        try:
            kept = [log for log in finished if self._keeps and log.stream_id not in gone]
            dropped = [log for log in finished if not self._keeps or log.stream_id in gone]
            if kept:
                self._database.finish([self._row(log) for log in kept])
            if dropped:
                self._database.drop([(log.number, log.stream_id) for log in dropped], most_expired=MAX_EXPIRED)
            if expired:
                self._database.forget(expired, most_expired=MAX_EXPIRED)
                self._has_unused_pages = True
            has_dead = self._database.sweep()
        except StorageError:
            self.finished[:0], self.expired[:0] = finished, expired
            raise
        for log in finished:
            log.encoded = bytearray()
        if has_dead or self.finished or self.expired:
            return True
        if self._has_unused_pages:
            self._has_unused_pages = self._database.vacuum(_PAGES_AT_ONCE)
        return self._has_unused_pages

    def _row(self, log: StreamLog) -> FinishedRow:
        stream_id = log.stream_id
        record = self._rows.encode_record(log.record.finished())
        events = self._rows.join_events(stream_id, len(log.events), log.encoded)
        return FinishedRow(log.number, stream_id, record, events, stamp())
