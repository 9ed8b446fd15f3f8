"""A failover to a replica that lacks the last writes, while a server dies: its streams are taken over all the same.

Redis saves its state at one moment and returns to it later, as a replica does that has received nothing since then.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from redis.asyncio import Redis
from tests.redis.shared_streams import DONE, LEASE_S, Writer, begin, delta, seen
from tests.streams.broken_links import breaking, demotable, movable
from tests.testing.redis_server import delete_keys, own_redis, prefix_of, shared_url
from tests.waiting import until, wait_until

from tailrace.errors import StorageError, StreamExpired
from tailrace.streams import Reader
from tailrace.types import ANONYMOUS
from tailrace_outer.redis.redis_store import RedisLogStore, open_redis

_BASE = "tailrace:{0}:"
_PATIENT_S = 60.0


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    return prefix_of(tmp_path)


@asynccontextmanager
async def shared(url: str) -> AsyncIterator[RedisLogStore]:
    async with open_redis(url, lease_s=LEASE_S, give_up_after_s=_PATIENT_S) as store:
        yield store


async def test_it_is_emptied_while_a_server_starts(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server had just written the form of the data, and reads it now."""
    hgetall = Redis.hgetall
    emptied: list[int] = []

    async def empty_and_get(client: Redis, name: str) -> object:
        if not emptied:
            emptied.append(await client.delete(name))
        return await hgetall(client, name)

    monkeypatch.setattr(Redis, "hgetall", empty_and_get)
    async with shared(f"{shared_url()}?prefix={prefix}") as store:
        await begin(store)
    assert emptied == [1]
    delete_keys(prefix)


async def test_the_address_moves_to_another_primary(tmp_path: Path) -> None:
    """As by DNS, or a Service of Kubernetes. The former one is a replica now and keeps its connections. They are given
    up: writers and readers continue at the new one."""
    with (
        own_redis(tmp_path / "former", "--repl-diskless-sync-delay", "0") as (url, former),
        own_redis(tmp_path / "new", "--replicaof", "127.0.0.1", str(former.port)) as (new_url, new),
        former.client() as former_client,
        new.client() as new_client,
    ):
        until(lambda: new_client.info("replication")["master_link_status"] == "up")
        async with movable(url) as (address, move), shared(address) as one, shared(address) as other:
            writers = await asyncio.gather(*(begin(one, delta(1)) for _ in range(20)))  # as many connections
            logs = [await other.read(ANONYMOUS, writer.lease.stream_id) for writer in writers]
            new_client.replicaof("NO", "ONE")
            former_client.replicaof("127.0.0.1", "1")  # of nobody, so that it has to load nothing
            move(new_url)
            for number in (2, 3):
                for writer in writers:
                    writer.write(delta(number))
                for writer, log in zip(writers, logs, strict=True):
                    await seen(writer.lease.log, number)
                    await seen(log, number)
                former.kill()  # nobody needs it any more
            assert one.write_errors.current is None
            assert all(log.events == [delta(1), delta(2), delta(3)] for log in logs)


@pytest.mark.parametrize(
    "reply",
    [
        "READONLY You can't write against a read only replica.",
        "ERR Error running script (call to f_1): @user_script:1: -READONLY You can't write against a replica.",
        "UNBLOCKED force unblock from blocking operation, instance state changed (master -> replica?)",
        "MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.",
        "NOREPLICAS Not enough good replicas to write.",
        "LOADING Redis is loading the dataset in memory",
    ],
)
async def test_connections_to_a_former_primary_are_dropped(prefix: str, reply: str) -> None:
    async with demotable(f"{shared_url()}?prefix={prefix}") as (address, demote), shared(address) as store:
        writers = await asyncio.gather(*(begin(store, delta(1)) for _ in range(5)))  # as many connections
        demote(reply)
        for writer in writers:
            writer.write(delta(2))
            await seen(writer.lease.log, 2)
        await begin(store)
    delete_keys(prefix)


@asynccontextmanager
async def taking_over(store: RedisLogStore) -> AsyncIterator[list[Writer]]:
    """Take streams over as a server does. Yields those that were taken."""
    taken: list[Writer] = []

    async def run() -> None:
        while True:
            with contextlib.suppress(StorageError):
                taken.extend(Writer(store, lease) for lease in await store.take_over({"m"}, waits=True))

    task = asyncio.create_task(run())
    try:
        yield taken
    finally:
        task.cancel()


@pytest.mark.parametrize("was_written", [False, True])
async def test_the_take_over_is_lost(tmp_path: Path, was_written: bool) -> None:
    """The server that took the stream over still writes it, with what its readers have seen."""
    with own_redis(tmp_path) as (url, process), process.client() as client:
        async with shared(url) as store, taking_over(store) as taken:
            async with shared(url) as dying:
                stream_id, dead = (await begin(dying, delta(1))).lease.stream_id, str(dying.epoch)
                client.save()
            await wait_until(lambda: bool(taken))
            (writer,) = taken
            expected = [delta(1)]
            if was_written:
                writer.write(delta(2))
                expected.append(delta(2))
                await seen(writer.lease.log, 2)
            await wait_until(lambda: not client.sismember(f"{_BASE}servers", dead))
            process.restart()
            assert client.sismember(f"{_BASE}servers", dead)
            if not was_written:  # it finds the dead server again before it writes
                await wait_until(lambda: not client.sismember(f"{_BASE}servers", dead))
            writer.write(DONE)
            await seen(writer.lease.log, len(expected) + 1)
            assert writer.lease.log.events == [*expected, DONE]
            assert writer.heard == []
            async with shared(url) as other:
                assert (await other.read(ANONYMOUS, stream_id)).events == [*expected, DONE]


async def test_the_connection_breaks_while_streams_are_taken(tmp_path: Path) -> None:
    """Redis no longer lists the stream as one of the dead server, and this server does not hear that."""
    with own_redis(tmp_path) as (url, _):
        async with shared(url) as dying:
            stream_id = (await begin(dying, delta(1))).lease.stream_id
        async with breaking(url, b"ZREM") as broken, shared(broken) as store, taking_over(store) as taken:
            await wait_until(lambda: bool(taken))
            assert taken[0].lease.stream_id == stream_id
            taken[0].write(DONE)
            await seen(taken[0].lease.log, 2)


async def test_a_dead_server_is_not_listed_any_more(tmp_path: Path) -> None:
    """As when one node of a cluster has lost the take-over, and another one knows that nothing of the server is left.
    Whoever has a reader of the stream finds out."""
    with own_redis(tmp_path) as (url, process), process.client() as client:
        async with shared(url) as dying:
            stream_id = (await begin(dying, delta(1))).lease.stream_id
        for name in ("servers", "writers"):
            client.srem(f"{_BASE}{name}", dying.epoch)
        async with shared(url) as store, taking_over(store) as taken:
            log = await store.read(ANONYMOUS, stream_id)
            with Reader(log, 1):
                await wait_until(lambda: bool(taken))
                taken[0].write(DONE)
                await seen(log, 2)


async def test_another_server_has_the_stream_and_is_not_listed(tmp_path: Path) -> None:
    """The same, when the server that has taken the stream over finds out."""
    with own_redis(tmp_path) as (url, process), process.client() as client:
        async with shared(url) as store, taking_over(store) as taken:
            writer = await begin(store, delta(1))
            stream_id = writer.lease.stream_id
            client.hset(f"{_BASE}stream:{stream_id}", "epoch", 17)
            client.zadd(f"{_BASE}owned:17", {stream_id: 1})
            writer.write(delta(2))
            await wait_until(lambda: bool(taken))
            assert writer.heard == ["lease_lost"]
            assert taken[0].lease.log.events == [delta(1)]


async def test_redis_loses_a_stream_that_has_no_event_yet(tmp_path: Path) -> None:
    """Its server stores it again, although it has nothing to write: so it outlives this server, too."""
    with own_redis(tmp_path) as (url, process), process.client() as client:
        async with shared(url) as store, taking_over(store) as taken:
            async with shared(url) as dying:
                stream_id = (await begin(dying)).lease.stream_id
                log = await store.read(ANONYMOUS, stream_id)
                with Reader(log, 0):
                    process.restart()
                    await wait_until(lambda: bool(client.exists(f"{_BASE}stream:{stream_id}")))
            await wait_until(lambda: bool(taken))
            taken[0].write(DONE)
            await seen(log, 1)


@pytest.mark.parametrize("is_own", [True, False], ids=["its server", "another server"])
async def test_a_stream_is_deleted_whose_end_redis_has_lost(tmp_path: Path, is_own: bool) -> None:
    """Its server deletes it: nobody would write the end again. Where another one writes it, it goes on."""
    with own_redis(tmp_path) as (url, process), process.client() as client:
        async with shared(url) as one, shared(url) as other:
            stream_id = (await begin(one, delta(1), DONE)).lease.stream_id
            if not is_own:
                client.hset(f"{_BASE}stream:{stream_id}", "epoch", other.epoch)
            client.hdel(f"{_BASE}stream:{stream_id}", "ended")
            client.delete(f"{_BASE}gone:{stream_id}")
            if is_own:
                await one.delete(ANONYMOUS, stream_id)
                for store in (one, other):
                    with pytest.raises(StreamExpired):
                        await store.read(ANONYMOUS, stream_id)
            else:
                with pytest.raises(StorageError):
                    await one.delete(ANONYMOUS, stream_id)
                assert (await one.read(ANONYMOUS, stream_id)).stream_id == stream_id


async def test_the_clock_of_the_new_primary_is_minutes_behind(tmp_path: Path) -> None:
    """A lease ends at a time of Redis. With the clock of the replica, that of a dead server would last for minutes."""
    with own_redis(tmp_path) as (url, process), process.client() as client:
        async with shared(url) as store, taking_over(store) as taken:
            async with shared(url) as dying:
                stream_id, lease = (await begin(dying, delta(1))).lease.stream_id, f"{_BASE}lease:{dying.epoch}"
                length = client.get(lease)
                assert length is not None
            client.set(lease, length, px=420_000)
            await wait_until(lambda: bool(taken))
            assert taken[0].lease.stream_id == stream_id
