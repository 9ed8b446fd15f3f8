"""The journal's file, and the rows of streams, alone."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from tests.streams.crash_workload import record_of

from tailrace.errors import JournalDamaged, StorageError
from tailrace.streams import StreamLog
from tailrace.streams._compaction import Compaction
from tailrace.streams._database import Database, TailRow
from tailrace.streams.rows import Rows, elements
from tailrace.types import (
    Attachment,
    CallReading,
    End,
    Event,
    Payload,
    Prompt,
    ReasoningFormat,
    Record,
    TextDelta,
    TextSegment,
    Usage,
    new_stream_id,
)


@pytest.mark.parametrize("count", [1, 2, 128, 129, 700])
def test_appends_are_atomic(tmp_path: Path, count: int) -> None:
    def num_rows() -> int:
        with closing(sqlite3.connect(tmp_path / "journal.sqlite")) as other:
            return int(other.execute("SELECT count(*) FROM tail").fetchone()[0])

    database = Database(tmp_path)
    with closing(database):
        rows = [TailRow(database.begin(f"stream-{number}", b"record"), 1, b"event") for number in range(count)]
        database.append(rows)
        assert num_rows() == count
        database.set_lock_wait(False)
        with closing(sqlite3.connect(tmp_path / "journal.sqlite", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            with pytest.raises(StorageError):
                database.append(rows)
            other.execute("ROLLBACK")
        database._connection.execute("PRAGMA max_page_count = 1")  # no larger than it is
        with pytest.raises(StorageError):
            database.append([*rows, TailRow(1, 2, b"x" * 2**20)])
        database._connection.execute("PRAGMA max_page_count = 1000000")
        assert num_rows() == count
        database.append([TailRow(row.stream, 2, b"another") for row in rows])
        assert num_rows() == 2 * count
    again = Database(tmp_path)
    with closing(again):
        assert num_rows() == 2 * count


IMAGE = Attachment.of(b"an image", "image/png", 3)


@pytest.mark.parametrize(
    ("prompt", "kept"),
    [
        (Prompt("Hi", ((1, 2),)), ["Hi", [1, 2]]),
        (Prompt("Hi", ((1,), IMAGE, (2,))), ["Hi", [[1], msgspec.to_builtins(IMAGE), [2]]]),
        (Prompt("Hi", (TextSegment("Hi", 1),)), ["Hi", [msgspec.to_builtins(TextSegment("Hi", 1))]]),
        (Prompt("", (), ReasoningFormat(("<a>",), ("</a>",))), ["", [], [["<a>"], ["</a>"]]]),
        (Prompt("", (), ReasoningFormat(("<a>",), ("</a>",), "inside")), ["", [], [["<a>"], ["</a>"], "inside"]]),
        (Prompt("", (), None, CallReading()), ["", [], None, {}]),
    ],
)
def test_prompts_are_kept_without_defaults(prompt: Prompt, kept: object) -> None:
    """Servers of the version before read no tuples with elements that they do not know, and of prompts only ids."""
    rows, record = Rows(None), Record(new_stream_id(), 5.0, prompts=(prompt, prompt))
    row = rows.encode_record(record)
    assert msgspec.msgpack.decode(row[1:])["prompts"] == [kept, kept]
    assert rows.read_record(record.stream_id, row) == record


def test_a_stream_of_a_model_has_no_bytes_of_apps() -> None:
    stream_id = new_stream_id()
    row = Rows(None, of_apps=True).encode_events(stream_id, [TextDelta("\xff", (1,))])
    assert Rows(None).read_events(stream_id, row) == [TextDelta("\xff", (1,))]
    of_apps: list[object] = [*Rows(None, of_apps=True).read_events(stream_id, row)]
    assert of_apps == [Payload(b"\xff")]
    for text in ("\u20ac", "\U0001f600"):
        with pytest.raises(JournalDamaged):
            Rows(None, of_apps=True).read_events(stream_id, Rows(None).encode_events(stream_id, [TextDelta(text, ())]))
    with pytest.raises(JournalDamaged):
        Rows(None).read_events(stream_id, b"\0" + msgspec.msgpack.encode([Payload(b"\xff")]))


class Failing(Database):
    """Fails once, after it has written the finished streams."""

    has_failed = False

    def sweep(self) -> bool:
        if not self.has_failed:
            self.has_failed = True
            raise StorageError("The disk is full.")
        return super().sweep()


@pytest.mark.parametrize("num_deltas", [1, 14, 15, 70_000])
def test_a_step_that_failed_behind_the_finished_streams_loses_no_event(tmp_path: Path, num_deltas: int) -> None:
    database, rows = Failing(tmp_path, erases=False), Rows(None)
    events: list[Event] = [TextDelta(f" {number}", (number,)) for number in range(num_deltas)]
    events.append(End("done", Usage(3, num_deltas)))
    record = record_of("s1")
    log = StreamLog(record, events, number=database.begin("s1", rows.encode_record(record)))
    for event in events:
        log.encoded += elements([event])
    compaction = Compaction(database, rows, keeps=True)
    compaction.finished.append(log)
    with pytest.raises(StorageError):
        compaction.step()
    compaction.step()
    found = database.load("s1")
    assert found is not None
    assert rows.read_events("s1", found[1]) == events
    assert not log.encoded
    database.close()
