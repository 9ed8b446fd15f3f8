"""The pure part of durable streams: replaying the records gives the same state, and so do a snapshot and drafts."""

from __future__ import annotations

import contextlib

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.durable.draft import Draft
from tailrace.durable.operations import Creation, ProducerBatch
from tailrace.durable.page import position_of
from tailrace.durable.records import Created, DurableRecord, Stamp
from tailrace.durable.snapshot import snapshot
from tailrace.durable.store import DurableStore
from tailrace.errors import (
    RequestError,
    StorageError,
    StreamError,
)

TEXT = Creation("text/plain")
KEYS = (b"a", b"b", b"c", b"d")


def state(store: DurableStore) -> dict[bytes, tuple[object, ...]]:
    """Return everything that a client could see, and the charged size."""
    return {
        key: (
            stream.created, list(stream.chunks), dict(stream.producers), stream.last_seq, stream.is_closed,
            stream.closed_by, stream.is_gone, stream.num_forks, stream.num_bytes,
        )
        for key, stream in store.streams.items()
    }  # fmt: skip


# Whatever is done

creations = st.builds(
    Creation,
    content_type=st.sampled_from([None, "text/plain", "application/json", "Application/JSON; charset=utf-8"]),
    closes=st.booleans(),
    source=st.sampled_from([None, *KEYS]),
    fork_part=st.integers(0, 3),
)
batches = st.builds(
    ProducerBatch,
    body=st.sampled_from([b"", b"x", b"[1,2]", b"[]", b'{"a": [3]}', b"hello"]),
    content_type=st.sampled_from([None, "text/plain", "application/json"]),
    closes=st.booleans(),
    stamp=st.none() | st.builds(Stamp, st.sampled_from(["p", "q"]), st.integers(0, 2), st.integers(0, 3)),
    seq=st.none() | st.sampled_from(["1", "2", "3"]),
)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("create"), st.sampled_from(KEYS), creations, st.sampled_from([b"", b"[1,2]", b"first"])),
        st.tuples(st.just("fork"), st.sampled_from(KEYS), creations, st.integers(0, 5)),
        st.tuples(st.just("append"), st.sampled_from(KEYS), batches),
        st.tuples(st.just("delete"), st.sampled_from(KEYS)),
    ),
    max_size=40,
)


def take(store: DurableStore, step: tuple[object, ...]) -> object:
    """Return what can be compared."""
    match step:
        case ("create", bytes(key), Creation() as asked, bytes(body)):
            return store.create(key, asked, body)[0].end
        case ("fork", bytes(key), Creation() as asked, int(position)):
            offset = "0" * 16 + "_" + "0" * 16
            if asked.source is not None:
                source = store.find(asked.source)
                offset = source.offset(min(position, source.tail))
            fork = Creation(source=asked.source, fork_offset=offset, fork_part=asked.fork_part)
            return store.create(key, fork, b"")[0].end
        case ("append", bytes(key), ProducerBatch() as batch):
            return store.append(key, batch)
        case ("delete", bytes(key)):
            store.delete(key)
            return None
        case _:
            raise AssertionError(step)


@settings(max_examples=400, deadline=None)
@given(steps)
def test_replaying_the_records_gives_the_same_state(taken: list[tuple[object, ...]]) -> None:
    records: list[tuple[bytes, bytes]] = []
    store = DurableStore(
        budget_bytes=20_000, journal=lambda key, record: records.append((key, msgspec.msgpack.encode(record)))
    )
    for step in taken:
        before, num_bytes, num_records = state(store), store.num_bytes, len(records)
        contents = {key: b"".join(stream.take(0, 10**9)[0]) for key, stream in store.streams.items()}
        try:
            take(store, step)
        except (StreamError, RequestError):
            assert (state(store), store.num_bytes, len(records)) == (before, num_bytes, num_records)
        assert store.num_bytes == sum(stream.num_bytes for stream in store.streams.values()) <= 20_000
        for key, stream in store.streams.items():
            offsets = [stream.offset(position) for position in range(stream.tail + 1)]
            assert offsets == sorted(set(offsets))
            assert [position_of(stream, offset) for offset in offsets] == list(range(stream.tail + 1))
            if key in contents and key in before and before[key][0] is stream.created:
                assert b"".join(stream.take(0, 10**9)[0]).startswith(contents[key])

    decoder = msgspec.msgpack.Decoder(DurableRecord)
    for kept in (((key, decoder.decode(record)) for key, record in records), snapshot(store)):
        again = DurableStore(budget_bytes=0)
        again.restore(kept)
        assert state(again) == state(store)
        assert again.num_bytes == store.num_bytes

    for key in list(store.streams):
        with contextlib.suppress(StreamError):
            store.delete(key)
    assert (len(store), store.num_bytes) == (0, 0)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(steps, st.booleans()), max_size=6))
def test_drafts_change_the_state_only_when_they_are_kept(taken: list[tuple[list[tuple[object, ...]], bool]]) -> None:
    store, direct = (DurableStore(budget_bytes=20_000) for _ in range(2))
    for several, keeps in taken:
        draft, before = Draft(store), state(store)
        outcomes = [outcome(draft, step) for step in several]
        assert state(store) == before
        if keeps:
            assert outcomes == [outcome(direct, step) for step in several]
            expected = state(draft)
            draft.keep()
            assert state(store) == expected
    assert [*map(unnamed, state(store).items())] == [*map(unnamed, state(direct).items())]
    assert store.num_bytes == direct.num_bytes


def outcome(store: DurableStore, step: tuple[object, ...]) -> object:
    try:
        return take(store, step)
    except (StreamError, RequestError) as error:
        return repr(error)


def unnamed(item: tuple[bytes, tuple[object, ...]]) -> tuple[object, ...]:
    """Return the state of a stream without what is random."""
    key, (created, *rest) = item
    assert isinstance(created, Created)
    return key, msgspec.structs.replace(created, incarnation=""), *rest


def test_operations_that_the_journal_refuses_have_no_effect() -> None:
    store = DurableStore(budget_bytes=10**6)
    store.create(b"a", TEXT, b"one")

    def refuse(key: bytes, record: DurableRecord) -> None:
        raise StorageError("No.")

    store.journal, before = refuse, state(store)
    with pytest.raises(StorageError):
        store.append(b"a", ProducerBatch(b"two", "text/plain"))
    with pytest.raises(StorageError):
        store.create(b"b", TEXT, b"")
    with pytest.raises(StorageError):
        store.delete(b"a")
    assert state(store) == before
