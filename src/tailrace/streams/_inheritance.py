"""What an earlier process left in the journal, as far as it is what was written."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from tailrace.durable.records import Appended, Created, DurableRecord
from tailrace.errors import Interrupted, JournalDamaged
from tailrace.streams._clock import age_s
from tailrace.streams._database import Database, TailRow
from tailrace.streams._index import Finished
from tailrace.streams._rows import Rows
from tailrace.streams._tidying import MAX_EXPIRED
from tailrace.streams.log import StreamLog
from tailrace.types import End, Event, Failure, Status, TextDelta, Usage

__all__ = ["Unfinished", "finished", "notes", "unfinished"]

logger = logging.getLogger("tailrace.journal")

_MAX_RECOVERIES = 20  # of a stream that never got on: it may be what takes the server down
_LOST = "stream %s was damaged on disk, and is lost"
_DAMAGED = Failure(JournalDamaged.code, "The rest of this stream was damaged on disk.")
_HOPELESS = Failure(Interrupted.code, "The server stopped again and again while this stream was taken up.")


class Unfinished(NamedTuple):
    """A stream without an end, and the one that it gets where it cannot go on."""

    log: StreamLog
    end: End | None


def finished(database: Database, rows: Rows) -> list[Finished]:
    """Those that can still be read; of the others it is kept that they were there."""
    found, lost = [], []
    for stream_id, row, num_bytes, since in database.finished():
        try:
            record = rows.read_record(stream_id, row)
            found.append(Finished(stream_id, age_s(since), num_bytes, record.claim, record.owner))
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
    """What happened to durable streams, each up to the first record that is not what was written, or that rests on
    one. From there on its records are forgotten: what is appended from now on would be found behind the damage."""
    lengths: dict[bytes, int] = {}
    cuts: dict[bytes, int] = {}
    for row, key, body in database.notes():
        if key in cuts:
            continue
        try:
            record = rows.read_note(key, body)
            lengths[key] = _length(lengths, key, record)
        except JournalDamaged:
            end = "ends where it was" if key in lengths else "is lost"
            logger.error("a durable stream was damaged on disk, and %s", end)
            cuts[key] = row
            continue
        yield key, record
    if cuts:
        database.cut_notes(cuts)
    if not cuts.keys() <= lengths.keys():
        database.keep_damage()


def _length(lengths: Mapping[bytes, int], key: bytes, record: DurableRecord) -> int:
    """How many appends a durable stream has after a record, given how many each has before it. Raises: JournalDamaged
    if the record needs what is not there."""
    if isinstance(record, Created) and record.fork is not None:
        length = record.fork.position + bool(record.fork.part)
        if lengths.get(record.fork.source, -1) < length:
            raise JournalDamaged("a fork of what is lost")
    elif isinstance(record, Created):
        length = 0
    elif key in lengths:
        length = lengths[key]
    else:
        raise JournalDamaged("a stream without its beginning")
    return length + bool(record.pieces) if isinstance(record, Created | Appended) else length


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
