"""Streams in the database, on each kind of database."""

from __future__ import annotations

import pytest

from tailrace.records.kept_streams import KeptStreams
from tailrace.records.key_store import KeyStore
from tailrace.records.record_database import RecordDatabase
from tailrace.streams import StreamLog
from tailrace.types import End, Event, Failure, Prompt, Record, Sampling, Spent, TextDelta, Usage, new_stream_id


@pytest.fixture
def kept(database: RecordDatabase) -> KeptStreams:
    return KeptStreams(database)


def _log(owner: str = "me", created_s: float = 5.0, key_id: str = "") -> StreamLog:
    record = Record(
        new_stream_id(), created_s, "m", memo=b"memo\0", prompts=(Prompt("Hi", ((1, 2),)),), sampling=Sampling(seed=3),
        owner=owner, key_id=key_id, caller="10.0.0.1", keep=True,
    )  # fmt: skip
    events: list[Event] = [
        TextDelta("a\0é", (1,), logprobs=(-0.5,), top_logprobs=(((1, -0.5),),)),
        TextDelta("", (2,), finish_reason="stop", stop="x"),
        End("error", Usage(2, 2), Failure("code", "Said."), Spent(1.0, 0.5, 0.5), "replayed"),
    ]
    return StreamLog(record, events)


def test_a_stream_is_read_unchanged(kept: KeptStreams) -> None:
    log = _log()
    kept.put(log)
    kept.put(StreamLog(log.record, [End("cancelled", Usage(0, 0))]))  # once is enough
    found = kept.get("me", log.stream_id)
    assert found is not None
    assert (found.record, found.events, found.end) == (log.record.finished(), log.events, log.events[-1])
    assert found.status == "error"
    assert found.record.prompts == ()  # as in the journal


def test_owners_are_separate(kept: KeptStreams) -> None:
    log = _log()
    kept.put(log)
    assert kept.get("you", log.stream_id) is None
    kept.delete("you", log.stream_id)
    assert kept.get("me", log.stream_id) is not None
    kept.delete("me", log.stream_id)
    assert kept.get("me", log.stream_id) is None


def test_a_deleted_owner_gets_no_streams(kept: KeptStreams, database: RecordDatabase) -> None:
    keys = KeyStore(database)
    logs = [_log(owner, key_id=keys.create(owner).key.key_id) for owner in ("me", "you")]
    keys.forget("me")
    for log in logs:
        kept.put(log)
    assert [kept.get(log.record.owner, log.stream_id) is not None for log in logs] == [False, True]


@pytest.mark.parametrize("bad", ["", "a\0b", "x" * 22 + "/", "é" * 22, "A" * 22])
def test_unknown_ids(kept: KeptStreams, bad: str) -> None:
    assert kept.get("me", bad) is None


def test_old_streams_are_deleted(kept: KeptStreams) -> None:
    old, new = _log(created_s=5.0), _log(created_s=10.0)
    for log in (old, new):
        kept.put(log)
    kept.delete_before(10.0)
    assert kept.get("me", old.stream_id) is None
    assert kept.get("me", new.stream_id) is not None
