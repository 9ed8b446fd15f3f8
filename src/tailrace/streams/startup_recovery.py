"""Read what an earlier process left in the journal, and skip what is damaged."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

from tailrace.errors import Interrupted, JournalDamaged
from tailrace.streams._clock import age_s, now
from tailrace.streams._compaction import MAX_EXPIRED
from tailrace.streams._database import Database, TailRow
from tailrace.streams._index import Finished, topics_of
from tailrace.streams.log import StreamLog
from tailrace.streams.rows import Rows, elements
from tailrace.types import End, Event, Failure, Status, Usage

__all__ = ["MAX_RECOVERIES", "TOO_MANY_RECOVERIES", "Unfinished", "end_of", "finished", "unfinished"]

logger = logging.getLogger("tailrace.journal")

MAX_RECOVERIES = 20  # of a stream that makes no progress: it may be the cause of the crashes
_LOST_STREAM = "stream %s was damaged on disk and is lost"
_DAMAGED = Failure(JournalDamaged.code, "The rest of this stream was damaged on disk.")
TOO_MANY_RECOVERIES = Failure(Interrupted.code, "The server stopped many times while it recovered this stream.")


class Unfinished(NamedTuple):
    """A stream without a terminal event. `end` is the terminal event that it gets if it cannot continue, else None."""

    log: StreamLog
    end: End | None


def finished(database: Database, rows: Rows) -> list[Finished]:
    """Return the finished streams that can be read. Damaged streams are replaced by tombstones."""
    found, lost, at = [], [], now()
    for stream_id, row, num_bytes, since in database.finished():
        try:
            record = rows.read_record(stream_id, row)
            kept = record.claim, record.owner, topics_of(record)
            found.append(Finished(stream_id, age_s(since, at), num_bytes, *kept))
        except (JournalDamaged, ValueError, TypeError, AttributeError):  # the timestamp may be damaged, and of any type
            logger.error(_LOST_STREAM, stream_id)
            lost.append(stream_id)
    if lost:
        database.forget(lost, most_expired=MAX_EXPIRED)
    return found


def unfinished(database: Database, rows: Rows) -> list[Unfinished]:
    """Return the streams that have not ended, in the order in which they began, and count a recovery of each."""
    tail: dict[int, list[TailRow]] = {}
    for row in database.tail():
        tail.setdefault(row.stream, []).append(row)
    found, lost = [], []
    database.count_recovery()
    for number, stream_id, sealed, recoveries in database.unfinished():
        try:
            record = rows.read_record(stream_id, sealed)
        except JournalDamaged:
            logger.error(_LOST_STREAM, stream_id)
            lost.append((number, stream_id))
            continue
        events, is_whole = _events(rows, stream_id, tail.get(number, []))
        log = StreamLog(record, events, number=number)
        log.encoded += elements(events)
        end = None
        if log.end is None and not is_whole:
            logger.error("stream %s was damaged on disk and ends before the damage", stream_id)
            end = end_of(log, "error", _DAMAGED)
        elif log.end is None and isinstance(recoveries, int) and recoveries > MAX_RECOVERIES:
            end = end_of(log, "interrupted", TOO_MANY_RECOVERIES)
        found.append(Unfinished(log, end))
    if lost:
        database.drop(lost, most_expired=MAX_EXPIRED)
    return found


def _events(rows: Rows, stream_id: str, tail: Sequence[TailRow]) -> tuple[list[Event], bool]:
    """Return the events before the first damaged one, and whether these are all events."""
    events: list[Event] = []
    for row in tail:
        if row.seq != len(events) + 1:
            return events, False
        try:
            events += rows.read_events(stream_id, row.events)
        except JournalDamaged:
            return events, False
    return events, True


def end_of(log: StreamLog, status: Status, failure: Failure) -> End:
    """Return the terminal event of a stream that has no producer."""
    return End(status, Usage(log.record.num_prompt_tokens, log.num_tokens), failure)
