"""The pure part of durable streams: replaying the changes gives the same state, and so do a snapshot and drafts."""

from __future__ import annotations

import contextlib
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples
from tests.plugins.durable_streams.any_steps import outcome, state, steps, take, unnamed

from tailrace.errors import (
    RequestError,
    StorageError,
    StreamError,
)
from tailrace_plugins.durable_streams.draft import DraftStore
from tailrace_plugins.durable_streams.durable_changes import DurableChange
from tailrace_plugins.durable_streams.durable_store import DurableStore
from tailrace_plugins.durable_streams.operations import Creation, ProducerBatch
from tailrace_plugins.durable_streams.page import position_of
from tailrace_plugins.durable_streams.snapshot import snapshot

TEXT = Creation("text/plain")


@settings(max_examples=examples(400), deadline=None)
@given(steps)
def test_replaying_the_records_gives_the_same_state(taken: list[tuple[object, ...]]) -> None:
    changes: list[tuple[bytes, bytes]] = []
    store = DurableStore(
        budget_bytes=20_000, journal=lambda key, change: changes.append((key, msgspec.msgpack.encode(change)))
    )
    for step in taken:
        before, num_bytes, num_changes = state(store), store.num_bytes, len(changes)
        contents = {key: b"".join(stream.take(0, 10**9)[0]) for key, stream in store.streams.items()}
        try:
            take(store, step)
        except (StreamError, RequestError):
            assert (state(store), store.num_bytes, len(changes)) == (before, num_bytes, num_changes)
        assert store.num_bytes == sum(stream.num_bytes for stream in store.streams.values()) <= 20_000
        for key, stream in store.streams.items():
            offsets = [stream.offset(position) for position in range(stream.tail + 1)]
            assert offsets == sorted(set(offsets))
            assert [position_of(stream, offset) for offset in offsets] == list(range(stream.tail + 1))
            if key in contents and key in before and before[key][0] is stream.created:
                assert b"".join(stream.take(0, 10**9)[0]).startswith(contents[key])

    decoder = msgspec.msgpack.Decoder(DurableChange)
    for kept in (((key, decoder.decode(change)) for key, change in changes), snapshot(store)):
        again = DurableStore(budget_bytes=0)
        again.restore(kept)
        assert state(again) == state(store)
        assert again.num_bytes == store.num_bytes

    for key in list(store.streams):
        with contextlib.suppress(StreamError):
            store.delete(key)
    assert (len(store), store.num_bytes) == (0, 0)


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(st.tuples(steps, st.booleans()), max_size=6))
def test_drafts_change_the_state_only_when_they_are_kept(taken: list[tuple[list[tuple[object, ...]], bool]]) -> None:
    store, direct = (DurableStore(budget_bytes=20_000) for _ in range(2))
    for several, keeps in taken:
        draft, before = DraftStore(store), state(store)
        outcomes = [outcome(draft, step) for step in several]
        assert state(store) == before
        if keeps:
            assert outcomes == [outcome(direct, step) for step in several]
            expected = state(draft)
            draft.keep()
            assert state(store) == expected
    assert [*map(unnamed, state(store).items())] == [*map(unnamed, state(direct).items())]
    assert store.num_bytes == direct.num_bytes


def test_operations_that_the_journal_refuses_have_no_effect() -> None:
    store = DurableStore(budget_bytes=10**6)
    store.create(b"a", TEXT, b"one")

    def refuse(key: bytes, change: DurableChange) -> None:
        raise StorageError("No.")

    store.journal, before = refuse, state(store)
    with pytest.raises(StorageError):
        store.append(b"a", ProducerBatch(b"two", "text/plain"))
    with pytest.raises(StorageError):
        store.create(b"b", TEXT, b"")
    with pytest.raises(StorageError):
        store.delete(b"a")
    assert state(store) == before


def test_a_long_chain_of_forks_is_deleted() -> None:
    store = DurableStore(budget_bytes=10_000_000)
    keys = [b"%d" % number for number in range(3000)]
    store.create(keys[0], TEXT, b"")
    for before, key in pairwise(keys):
        store.create(key, Creation("text/plain", source=before), b"")
        store.delete(before)
    assert len(store) == 3000
    store.delete(keys[-1])
    assert (len(store), store.num_bytes) == (0, 0)
