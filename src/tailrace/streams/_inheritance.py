"""What an earlier process left in the journal, as far as it is what was written."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tailrace.errors import JournalDamaged
from tailrace.streams._clock import age_s
from tailrace.streams._database import Database, TailRow
from tailrace.streams._rows import Rows
from tailrace.streams._tidying import MAX_EXPIRED
from tailrace.streams.durable_records import DurableRecord
from tailrace.streams.journal import Finished
from tailrace.streams.log import StreamLog
from tailrace.types import End, Event, Failure, Status, TextDelta, Usage

__all__ = ["Unfinished", "finished", "notes", "unfinished"]

logger = logging.getLogger("tailrace.journal")

_MAX_RECOVERIES = 20  # of a stream that never got on: it may be what takes the server down
_LOST = "stream %s was damaged on disk, and is lost"
_DAMAGED = Failure("journal_damaged", "The rest of this stream was damaged on disk.")
_HOPELESS = Failure("interrupted", "The server stopped again and again while this stream was taken up.")


class Unfinished(NamedTuple):
    """A stream without an end, and the one that it gets where it cannot go on."""

    log: StreamLog
    end: End | None


def finished(database: Database, rows: Rows) -> list[Finished]:
    """Those that can still be read; of the others it is kept that they were there."""
    found, lost = [], []
    for stream_id, row, num_bytes, since in database.finished():
        try:
            found.append(Finished(stream_id, age_s(since), num_bytes, rows.read_record(stream_id, row).claim))
        except (JournalDamaged, ValueError, AttributeError):  # the time may be anything, too
            logger.error(_LOST, stream_id)
            lost.append(stream_id)
    if lost:
        database.forget(lost, most_expired=MAX_EXPIRED)
    return found


def unfinished(database: Database, rows: Rows) -> list[Unfinished]:
    """Those that had not ended, in the order in which they began. That they are taken up is counted."""
    tail: dict[int, list[TailRow]] = {}
    for row in database.tail():
        tail.setdefault(row.stream, []).append(row)
    found, lost = [], []
    database.count_recovery()
    for number, stream_id, sealed, recoveries in database.unfinished():
        try:
            record = rows.read_record(stream_id, sealed)
        except JournalDamaged:
            logger.error(_LOST, stream_id)
            lost.append((number, stream_id))
            continue
        events, is_whole = _events(rows, stream_id, tail.get(number, []))
        log = StreamLog(record, events, number=number)
        end = None
        if log.end is None and not is_whole:
            logger.error("stream %s was damaged on disk, and ends where it was", stream_id)
            end = _end(log, "error", _DAMAGED)
        elif log.end is None and isinstance(recoveries, int) and recoveries > _MAX_RECOVERIES:
            end = _end(log, "interrupted", _HOPELESS)
        found.append(Unfinished(log, end))
    if lost:
        database.drop(lost, most_expired=MAX_EXPIRED)
    return found


def notes(database: Database, rows: Rows) -> Iterator[tuple[bytes, DurableRecord]]:
    """What happened to durable streams, each up to the first record that is not what was written."""
    damaged: set[bytes] = set()
    for key, row in database.notes():
        if key in damaged:
            continue
        try:
            yield key, rows.read_note(key, row)
        except JournalDamaged:
            logger.error("a durable stream was damaged on disk, and ends where it was")
            damaged.add(key)


def _events(rows: Rows, stream_id: str, tail: Sequence[TailRow]) -> tuple[list[Event], bool]:
    """The events up to the first that is not there as it was written, and whether that is all of them."""
    events: list[Event] = []
    for row in tail:
        if row.seq != len(events) + 1:
            return events, False
        try:
            events += rows.read_events(stream_id, row.events)
        except JournalDamaged:
            return events, False
    return events, True


def _end(log: StreamLog, status: Status, failure: Failure) -> End:
    num_tokens = sum(len(event.token_ids) for event in log.events if isinstance(event, TextDelta))
    return End(status, Usage(log.record.num_prompt_tokens, num_tokens), failure)
