"""The rules of durable streams: appends, limits and lifetimes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest
from tests.streams import virtual_time

from tailrace.errors import RequestError, SeqOutOfRange, StreamExpired, UnknownStream
from tailrace_plugins.durable_streams.durable_changes import Stamp
from tailrace_plugins.durable_streams.durable_errors import (
    SequenceGap,
    StaleEpoch,
    StreamClosed,
    StreamConflict,
    StreamsFull,
)
from tailrace_plugins.durable_streams.durable_store import DurableStore
from tailrace_plugins.durable_streams.operations import Creation, ProducerBatch
from tailrace_plugins.durable_streams.page import page_of, position_of

TEXT = Creation("text/plain")
JSON = Creation("application/json")


def append(
    store: DurableStore, key: bytes, body: bytes, *, stamp: Stamp | None = None, seq: str | None = None
) -> None:  # fmt: skip
    store.append(key, ProducerBatch(body, store.find(key).content_type, stamp=stamp, seq=seq))


# Producers, sequences, closing


def test_a_batch_is_appended_once() -> None:
    store = DurableStore(budget_bytes=10**6)
    store.create(b"a", TEXT, b"")
    for _ in range(2):
        append(store, b"a", b"one", stamp=Stamp("p", 0, 0))
        append(store, b"a", b"two", stamp=Stamp("p", 0, 1))
    append(store, b"a", b"three", stamp=Stamp("p", 1, 0))
    assert b"".join(store.find(b"a").take(0, 100)[0]) == b"onetwothree"
    with pytest.raises(StaleEpoch) as stale:
        append(store, b"a", b"late", stamp=Stamp("p", 0, 2))
    assert stale.value.epoch == 1
    with pytest.raises(SequenceGap) as gap:
        append(store, b"a", b"early", stamp=Stamp("p", 1, 2))
    assert (gap.value.expected, gap.value.received) == (1, 2)
    with pytest.raises(RequestError):
        append(store, b"a", b"odd", stamp=Stamp("p", 2, 1))


def test_a_closed_stream_accepts_only_the_batch_that_closed_it() -> None:
    store = DurableStore(budget_bytes=10**6)
    store.create(b"a", TEXT, b"")
    closing = ProducerBatch(b"end", "text/plain", closes=True, stamp=Stamp("p", 0, 0))
    assert store.append(b"a", closing).outcome == "appended"
    assert store.append(b"a", closing).outcome == "repeated"
    assert store.append(b"a", ProducerBatch(b"", closes=True)).outcome == "repeated"
    with pytest.raises(StreamClosed) as closed:
        append(store, b"a", b"more")
    assert closed.value.next_offset == store.find(b"a").end


def test_sequences_are_compared_as_bytes() -> None:
    store = DurableStore(budget_bytes=10**6)
    store.create(b"a", TEXT, b"")
    append(store, b"a", b"x", seq="b")
    for seq in ("b", "B", ""):
        with pytest.raises(StreamConflict):
            append(store, b"a", b"y", seq=seq)
    append(store, b"a", b"z", seq="b0")


# Room and time


def test_the_size_is_limited_and_expired_streams_free_space() -> None:
    async def scenario() -> None:
        store = DurableStore(budget_bytes=10_000)
        store.create(b"old", Creation("text/plain", ttl_s=10), b"x" * 6000)
        store.create(b"new", TEXT, b"")
        with pytest.raises(StreamsFull):
            append(store, b"new", b"y" * 6000)
        await asyncio.sleep(10)
        append(store, b"new", b"y" * 6000)
        assert len(store) == 1

    virtual_time.run(scenario())


def create_many(store: DurableStore) -> None:
    for n in range(1000):
        store.create(str(n).encode(), TEXT, b"")


def append_many(store: DurableStore) -> None:
    store.create(b"a", TEXT, b"")
    for _ in range(1000):
        append(store, b"a", b"x")


def write_many_messages(store: DurableStore) -> None:
    store.create(b"a", JSON, b"[" + b"1," * 3000 + b"1]")


def produce_many(store: DurableStore) -> None:
    store.create(b"a", TEXT, b"")
    for n in range(1000):
        append(store, b"a", b"x", stamp=Stamp(str(n), 0, 0))


def fork_many(store: DurableStore) -> None:
    store.create(b"a", TEXT, b"x")
    for n in range(1000):
        store.create(str(n).encode(), Creation(source=b"a"), b"")


@pytest.mark.parametrize("fill", [create_many, append_many, write_many_messages, produce_many, fork_many])
def test_all_kept_data_counts(fill: Callable[[DurableStore], None]) -> None:
    store = DurableStore(budget_bytes=100_000)
    with pytest.raises(StreamsFull):
        fill(store)
    assert store.num_bytes <= 100_000


def test_a_ttl_restarts_with_each_use() -> None:
    async def scenario() -> None:
        store = DurableStore(budget_bytes=10_000)
        store.create(b"a", Creation("text/plain", ttl_s=5), b"")
        await asyncio.sleep(4)
        append(store, b"a", b"x")
        await asyncio.sleep(4)
        stream = store.find(b"a")
        with stream.follower(1):
            await asyncio.sleep(60)
            assert store.find(b"a") is stream
        await asyncio.sleep(4.9)
        assert store.find(b"a") is stream
        await asyncio.sleep(0.1)
        with pytest.raises(UnknownStream):
            store.find(b"a")

    virtual_time.run(scenario())


def test_an_expired_stream_ends_and_its_forks_keep_their_data() -> None:
    store = DurableStore(budget_bytes=10_000)
    expires_s = time.time() + 0.05
    store.create(b"a", Creation("text/plain", expires_s=expires_s), b"one")
    store.create(b"b", Creation(source=b"a", ttl_s=60), b"two")
    while time.time() < expires_s:
        time.sleep(0.01)
    with pytest.raises(StreamExpired):
        store.find(b"a")
    with pytest.raises(StreamConflict):
        store.create(b"a", TEXT, b"")
    assert b"".join(store.find(b"b").take(0, 100)[0]) == b"onetwo"
    store.delete(b"b")
    with pytest.raises(UnknownStream):
        store.find(b"a")


# Reading


def test_an_offset_of_another_stream_is_noticed() -> None:
    store = DurableStore(budget_bytes=10_000)
    store.create(b"a", TEXT, b"one")
    stream = store.find(b"a")
    assert position_of(stream, stream.end) == 1
    for wrong in ("", "1", "0" * 16 + "_" + "0" * 15 + "1", "0" * 15 + "1_" + "0" * 15 + "4", "9" * 16 + "_" + "9" * 16,
                  "-1", "now", "\u0660" * 16 + "_" + "0" * 16):  # fmt: skip
        with pytest.raises(SeqOutOfRange):
            position_of(stream, wrong)


def test_a_page_ends_between_appends() -> None:
    store = DurableStore(budget_bytes=100_000)
    store.create(b"a", JSON, b"[1, 22]")
    append(store, b"a", b"[[3]]")
    stream = store.find(b"a")
    first = page_of(stream, 0, 1)
    assert (first.pieces, first.position, first.is_up_to_date) == ([b"1", b"22"], 1, False)
    rest = page_of(stream, first.position, 1)
    assert (rest.pieces, rest.is_up_to_date, rest.next) == ([b"[3]"], True, stream.end)
    assert page_of(stream, 0, 100).pieces == [b"1", b"22", b"[3]"]


@pytest.mark.parametrize("end", ["append", "close", "delete", "halt"])
def test_a_follower_wakes(end: str) -> None:
    async def scenario() -> None:
        store = DurableStore(budget_bytes=10_000)
        store.create(b"a", TEXT, b"one")
        with store.find(b"a").follower(1) as follower:
            waiting = asyncio.create_task(follower.wait())
            await asyncio.sleep(100)
            assert not waiting.done()
            match end:
                case "append":
                    append(store, b"a", b"two")
                case "close":
                    store.append(b"a", ProducerBatch(b"", closes=True))
                case "delete":
                    store.delete(b"a")
                case _:
                    store.close()
            await waiting
            await follower.wait()  # and from now on at once

    virtual_time.run(scenario())
