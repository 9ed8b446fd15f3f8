"""Durable streams of several servers over one Redis: all servers keep the rules together, and see the same."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.plugins.durable_streams.any_steps import outcome, state, steps, unnamed
from tests.plugins.durable_streams.homes import append, content, create, servers
from tests.testing.redis_server import delete_keys, prefix_of, shared_url
from tests.waiting import wait_until

from tailrace.errors import StreamExpired, UnknownStream
from tailrace_plugins.durable_streams.durable_changes import Stamp
from tailrace_plugins.durable_streams.durable_errors import SequenceGap, StreamClosed, StreamConflict
from tailrace_plugins.durable_streams.durable_store import DurableStore
from tailrace_plugins.durable_streams.durable_streams import DurableStreams
from tailrace_plugins.durable_streams.operations import Creation


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    yield f"{shared_url()}?prefix={prefix_of(tmp_path)}"
    delete_keys(prefix_of(tmp_path))


async def test_what_one_server_has_confirmed_the_others_see(url: str) -> None:
    async with servers(url, 3) as (one, other, third):
        assert await create(one, b"a", body=b"0")
        assert not await create(other, b"a", body=b"0")
        expected = [b"0"]
        for number in range(1, 30):
            writer, reader = (one, other, third)[number % 3], (one, other, third)[(number + 1) % 3]
            expected.append(b"%d" % number)
            await append(writer, b"a", expected[-1])
            assert await content(reader, b"a") == expected
        await third.perform(lambda store: store.delete(b"a"))
        for streams in (one, other, third):
            with pytest.raises(UnknownStream):
                await streams.find(b"a")
    async with servers(url, 1) as (late,):
        assert await create(late, b"a")


async def test_writers_at_the_same_time(url: str) -> None:
    """Each batch is there once, in the same order for all, although each is sent to two servers at once."""
    async with servers(url, 3) as shared:
        await create(shared[0], b"a")

        async def produce(name: str, streams: list[DurableStreams]) -> None:
            for seq in range(40):
                body = f"{name} {seq};".encode()
                await asyncio.gather(*(append(one, b"a", body, stamp=Stamp(name, 0, seq)) for one in streams))

        await asyncio.gather(*(produce(str(n), [shared[n % 3], shared[(n + 1) % 3]]) for n in range(6)))
        seen = [await content(streams, b"a") for streams in shared]
        assert seen[0] == seen[1] == seen[2]
        for n in range(6):
            assert [one for one in seen[0] if one.startswith(b"%d " % n)] == [b"%d %d;" % (n, seq) for seq in range(40)]
        with pytest.raises(SequenceGap):
            await append(shared[1], b"a", b"x", stamp=Stamp("0", 0, 41))


async def test_sequences_of_two_servers(url: str) -> None:
    """Of two appends with one Stream-Seq, only one is accepted."""
    async with servers(url) as shared:
        await create(shared[0], b"a")
        for number in range(20):
            outcomes = await asyncio.gather(
                *(append(streams, b"a", b"%d" % n, seq=f"{number:03}") for n, streams in enumerate(shared)),
                return_exceptions=True,
            )
            assert sorted(isinstance(outcome, StreamConflict) for outcome in outcomes) == [False, True]
        assert len(await content(shared[0], b"a")) == 20


async def test_a_stream_is_created_once(url: str) -> None:
    async with servers(url, 3) as shared:
        for number in range(10):
            made = await asyncio.gather(*(create(streams, b"%d" % number) for streams in shared))
            assert sorted(made) == [False, False, True]


async def test_forks_closing_and_deletion_across_servers(url: str) -> None:
    async with servers(url) as (one, other):
        await create(one, b"source", body=b"one ")
        await append(other, b"source", b"two ")
        await create(other, b"fork", Creation(source=b"source"))
        await append(one, b"source", b"three")
        await append(one, b"fork", b"3", closes=True)
        assert await content(other, b"fork") == [b"one ", b"two ", b"3"]
        with pytest.raises(StreamClosed):
            await append(other, b"fork", b"more")
        await other.perform(lambda store: store.delete(b"source"))
        for streams in (one, other):
            with pytest.raises(StreamExpired):
                await streams.find(b"source")
        await one.perform(lambda store: store.delete_below(b"fo"))
        assert await create(other, b"source")


async def test_a_reader_sees_what_other_servers_append(url: str) -> None:
    async with servers(url) as (one, other):
        await create(one, b"a")
        stream = await other.use(b"a")
        with stream.follower(0) as follower:
            for number in range(1, 20):
                await append(one, b"a", b"%d" % number)
                while stream.tail < number:
                    await follower.wait()
                    follower.cursor = stream.tail
            await append(one, b"a", b"", closes=True)
            await follower.wait()
            await wait_until(lambda: stream.is_closed)
        assert [chunk.pieces for chunk in stream.chunks] == [(b"%d" % number,) for number in range(1, 20)]


@settings(max_examples=8, deadline=None)
@given(st.lists(st.tuples(steps, st.integers(0, 1)), max_size=6))
def test_servers_in_turn_do_what_one_server_does(taken: list[tuple[list[tuple[object, ...]], int]]) -> None:
    async def scenario(url: str) -> None:
        alone = DurableStore(budget_bytes=20_000)
        async with servers(url, budget_bytes=20_000) as shared:
            for several, turn in taken:
                operations = [partial(outcome, step=step) for step in several]
                outcomes = await asyncio.gather(*map(shared[turn].perform, operations))
                assert outcomes == [operation(alone) for operation in operations]
            for streams in shared:
                found = await streams.perform(lambda store: [*map(unnamed, state(store).items())])
                assert sorted(found, key=repr) == sorted(map(unnamed, state(alone).items()), key=repr)
        async with servers(url, 1) as (late,):
            assert sorted(await late.perform(lambda store: [*map(unnamed, state(store).items())]), key=repr) == sorted(
                map(unnamed, state(alone).items()), key=repr
            )

    prefix = f"test-{secrets.token_hex(8)}"
    try:
        asyncio.run(scenario(f"{shared_url()}?prefix={prefix}"))
    finally:
        delete_keys(prefix)
