"""Durable streams of several servers, when Redis or a server fails, or something that was acknowledged is lost."""

from __future__ import annotations

import asyncio
import contextlib
import types
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager
from functools import partial
from pathlib import Path

import msgspec
import pytest
from tests.plugins.durable_streams.homes import BUDGET_BYTES, append, content, create, servers
from tests.streams.broken_links import breaking, slow
from tests.testing.redis_server import OwnRedis, own_cluster, own_redis, watched_redis
from tests.waiting import wait_until

from tailrace.errors import JournalDamaged, JournalFull, ModelError, StorageError, UnknownStream
from tailrace.streams.notes import AppendResult, EntryId
from tailrace.streams.rows import Rows
from tailrace_outer.redis._connection import Connection
from tailrace_outer.redis.redis_store import open_redis
from tailrace_outer.redis.shared_log import RedisSharedLog
from tailrace_plugins.durable_streams import durable_stream as stream_module
from tailrace_plugins.durable_streams import shared_durable_streams as shared_module
from tailrace_plugins.durable_streams.durable_changes import Stamp
from tailrace_plugins.durable_streams.durable_opening import open_durable
from tailrace_plugins.durable_streams.durable_streams import DurableStreams
from tailrace_plugins.durable_streams.operations import Creation
from tailrace_plugins.durable_streams.shared_durable_streams import SharedDurableStreams

Kind = Callable[[Path], AbstractContextManager[tuple[str, list[OwnRedis]]]]
_KEY = "tailrace:{0}:durable"
_AOF = ("--appendonly", "yes", "--appendfsync", "no")
deep = [pytest.mark.deep, pytest.mark.timeout(600)]


async def write_some(streams: DurableStreams, first: int, count: int) -> None:
    for number in range(first, first + count):
        await append(streams, b"a", b"%d" % number, stamp=Stamp("p", 0, number))


def numbers(count: int) -> list[bytes]:
    return [b"%d" % number for number in range(count)]


def shared_log(connection: Connection) -> RedisSharedLog:
    return RedisSharedLog("durable", connection, Rows(None), give_up_after_s=60.0)


@asynccontextmanager
async def by_hand(url: str) -> AsyncIterator[SharedDurableStreams]:
    """A server that hears of the others only when it asks Redis for something."""
    async with Connection.open(url) as connection:
        streams = SharedDurableStreams(shared_log(connection))
        await streams.load(BUDGET_BYTES)
        task = asyncio.create_task(streams.run())
        yield streams
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


# Redis is away


async def test_redis_is_killed_and_has_a_file(tmp_path: Path) -> None:
    """Calls wait; nothing is lost, and nothing is there twice."""
    with own_redis(tmp_path, *_AOF) as (url, process):
        async with servers(url) as (one, other):
            await create(one, b"a")
            writing = asyncio.create_task(write_some(one, 0, 300))
            await wait_until(lambda: process.file_bytes > 5_000)
            process.restart()
            await writing
            assert await content(one, b"a") == await content(other, b"a") == numbers(300)
        async with servers(url, 1) as (late,):
            assert await content(late, b"a") == numbers(300)


@pytest.mark.deep
async def test_redis_does_not_answer(tmp_path: Path) -> None:
    """The append fails and may have happened all the same. Repeated by its producer, it is there once."""
    with own_redis(tmp_path) as (url, process):
        async with servers(url, give_up_after_s=0.1) as (one, other):
            await create(one, b"a")
            process.stop()
            attempts = [append(one, b"a", b"0", stamp=Stamp("p", 0, 0)), content(other, b"a")]
            for outcome in await asyncio.gather(*attempts, return_exceptions=True):
                assert type(outcome) is StorageError
            process.resume()
            while True:
                with contextlib.suppress(StorageError):
                    await append(one, b"a", b"0", stamp=Stamp("p", 0, 0))
                    break
            await wait_until(lambda: bool(process.client().ping()))
            assert await content(other, b"a") == [b"0"]


@pytest.mark.parametrize("command", [b"unheard", b"durable:tail"], ids=["append", "load"])
async def test_an_answer_is_lost(tmp_path: Path, command: bytes) -> None:
    """The change is made once, although it has no producer."""
    with own_redis(tmp_path) as (url, _):
        async with servers(url, 1) as (first,):
            await create(first, b"a")
        async with breaking(url, command) as broken, servers(broken, 1) as (one,), servers(url, 1) as (other,):
            await append(one, b"a", b"unheard")
            await append(other, b"a", b"next")
            assert await content(one, b"a") == [b"unheard", b"next"]


async def test_redis_is_full(tmp_path: Path) -> None:
    """Appends are refused, reads are answered."""
    with own_redis(tmp_path) as (url, process), process.client() as client:
        async with servers(url) as (one, other):
            await create(one, b"a", body=b"0")
            client.config_set("maxmemory", "1mb")
            refused, read = await asyncio.gather(append(one, b"a", b"1"), content(one, b"a"), return_exceptions=True)
            assert type(refused) is JournalFull
            assert read == [b"0"]
            client.config_set("maxmemory", "0")
            await append(other, b"a", b"2")
            assert await content(one, b"a") == [b"0", b"2"]


# Redis loses something


@pytest.mark.parametrize("saves", [False, True], ids=["everything", "the end"])
async def test_redis_loses_what_servers_have(tmp_path: Path, saves: bool, caplog: pytest.LogCaptureFixture) -> None:
    """A server writes it again, before anything else is appended."""
    with own_redis(tmp_path) as (url, process), process.client() as client:
        async with servers(url) as (one, other):
            await create(one, b"a")
            await write_some(one, 0, 5)
            if saves:
                client.save()
            await write_some(other, 5, 5)
            process.restart()
            await append(one, b"a", b"10", stamp=Stamp("p", 0, 10))
            assert await content(other, b"a") == numbers(11)
            assert (await append(other, b"a", b"9", stamp=Stamp("p", 0, 9))).outcome == "repeated"
        async with servers(url, 1) as (late,):
            assert await content(late, b"a") == numbers(11)
    assert "written again" in caplog.text


async def test_a_server_that_has_just_started_recognizes_what_was_lost(tmp_path: Path) -> None:
    """It has loaded a snapshot, and Redis returns to a state before it."""
    with own_redis(tmp_path) as (url, process), process.client() as client:
        async with by_hand(url) as one:
            await create(one, b"a")
            await write_some(one, 0, 3)
            client.save()
            await write_some(one, 3, 3)
            await churn(one)
            await wait_until(lambda: int(client.hget(_KEY, "first") or 0) > 10)
        async with by_hand(url) as late:
            process.restart()
            assert await content(late, b"a") == numbers(6)
            async with by_hand(url) as other:
                assert await content(other, b"a") == numbers(6)


async def test_another_server_appends_before_it_is_noticed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What was lost is gone. All servers have the same, and readers are sent away."""
    with own_redis(tmp_path) as (url, process), process.client() as client:
        async with by_hand(url) as one:
            await create(one, b"a", body=b"0")
            client.save()
            await append(one, b"a", b"lost")
            stream = await one.use(b"a")
            process.restart()
            async with by_hand(url) as other:
                await append(other, b"a", b"1")
                assert await content(one, b"a") == [b"0", b"1"]
                assert isinstance(stream.released, StorageError)
                await append(one, b"a", b"2")
                assert await content(other, b"a") == [b"0", b"1", b"2"]
    assert "read again" in caplog.text


@pytest.mark.parametrize(
    "kind", [watched_redis, pytest.param(partial(own_cluster, with_replicas=True), id="own_cluster", marks=deep)]
)
async def test_a_replica_is_promoted(tmp_path: Path, kind: Kind) -> None:
    with kind(tmp_path) as (url, processes):
        slot = await _slot(processes[0])
        async with servers(url) as (one, other):
            await create(one, b"a")
            writing = asyncio.create_task(write_some(one, 0, 200))
            stream = await other.use(b"a")
            await wait_until(lambda: stream.tail >= 50)
            processes[slot * 3 // 16384].kill()
            await writing
            assert await content(other, b"a") == await content(one, b"a") == numbers(200)


async def _slot(process: OwnRedis) -> int:
    """Return the slot of the log in a cluster; 0 without one."""
    with process.client() as client:
        return int(client.execute_command("CLUSTER KEYSLOT", _KEY)) if client.info("cluster")["cluster_enabled"] else 0


async def test_a_cluster_has_durable_streams(tmp_path: Path) -> None:
    with own_cluster(tmp_path) as (url, _):
        async with servers(url) as (one, other):
            await create(one, b"a")
            await write_some(one, 0, 20)
            assert await content(other, b"a") == numbers(20)


# Snapshots


async def churn(streams: DurableStreams) -> None:
    """Append more than the log may have."""
    for _ in range(20):
        await create(streams, b"large")
        for _ in range(4):
            await append(streams, b"large", bytes(50_000))
        await streams.perform(lambda store: store.delete(b"large"))


async def test_the_log_is_bounded_while_a_reader_follows(tmp_path: Path) -> None:
    with own_redis(tmp_path) as (url, process), process.client() as client:
        async with servers(url) as (one, other), by_hand(url) as behind:
            await create(one, b"a")
            await create(one, b"fork", Creation(source=b"a"))
            stream = await other.use(b"a")
            with stream.follower(0):
                for number in range(0, 30, 10):
                    await write_some(one, number, 10)
                    await churn(one)
                await wait_until(lambda: int(client.hget(_KEY, "bytes") or 0) < 2 * 2**20)
                assert await content(one, b"a") == await content(other, b"a") == numbers(30)
                # If a snapshot came before an entry was read, the state is loaded again, and readers continue with it.
                assert (await other.use(b"a")).tail == 30
                assert (await other.use(b"a")).released is None
            assert int(client.hget(_KEY, "first") or 0) > 0
            assert client.memory_usage(f"{_KEY}:log", samples=0) < 2.5 * 2**20
            await wait_until(lambda: not client.keys(f"{_KEY}:new:*"))  # a server may be writing another snapshot
            # A server that has missed the entries themselves
            assert await content(behind, b"a") == numbers(30)
            assert (await append(behind, b"a", b"29", stamp=Stamp("p", 0, 29))).outcome == "repeated"
            await append(behind, b"fork", b"x")
            async with servers(url, 1) as (late,):
                assert await content(late, b"a") == numbers(30)
                assert await content(late, b"fork") == [b"x"]


async def test_deleted_content_leaves_redis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_module, "_ERASE_S", 0.0)
    with own_redis(tmp_path) as (url, process), process.client() as client:
        async with servers(url, 1) as (one,):
            await create(one, b"kept", body=b"public")
            await create(one, b"deleted", body=b"private")
            assert b"private" in b"".join(client.lrange(f"{_KEY}:log", 0, -1))
            await one.perform(lambda store: store.delete_below(b"del"))
            await wait_until(lambda: b"private" not in b"".join(client.lrange(f"{_KEY}:log", 0, -1)))
            assert await content(one, b"kept") == [b"public"]


async def test_snapshots_that_are_written_at_the_same_time_do_not_mix(tmp_path: Path) -> None:
    """A server may write one because the log is long, and one because Redis has lost something."""
    with own_redis(tmp_path) as (url, _):
        async with Connection.open(url) as connection:
            log, ids = shared_log(connection), [EntryId(1, b"12345678")]
            versions = [[b"%d" % n] * (3 * n + 1) for n in range(3)]
            done = await asyncio.gather(*(log.replace(ids, parts, lost=EntryId()) for parts in versions))
            assert any(done)
            loaded = await log.load()
            assert loaded.ids == ids
            assert loaded.bodies in versions


async def test_a_large_state_is_loaded(tmp_path: Path) -> None:
    """It takes many round trips."""
    with own_redis(tmp_path) as (url, _):
        async with servers(url, 1, budget_bytes=2**26) as (one,):
            for number in range(12):
                await create(one, b"%d" % number, body=bytes([number]) * 1_000_000)
            await one.perform(lambda store: [store.create(b"s%d" % n, Creation(), b"")[1] for n in range(3_000)])
        async with servers(url, 1, budget_bytes=2**26) as (late,):
            assert await content(late, b"7") == [bytes([7]) * 1_000_000]
            assert not await create(late, b"s2999", Creation())


# Servers


async def test_a_server_asks_for_a_turn(tmp_path: Path) -> None:
    """Others then wait until it has appended."""
    with own_redis(tmp_path) as (url, _):
        async with Connection.open(url) as connection:
            far, near = (shared_log(connection) for _ in range(2))

            async def try_append(log: RedisSharedLog, after: EntryId, *, asks: bool = False) -> AppendResult:
                return await log.append(after, log.entry(after, b"any"), asks_for_turn=asks)

            first = await try_append(near, EntryId())
            assert first.is_appended
            beaten = await try_append(far, EntryId(), asks=True)
            assert not beaten.is_appended
            assert [entry.entry_id for entry in beaten.entries] == [first.last]
            waits = await try_append(near, first.last)
            assert (waits.is_appended, waits.entries) == (False, [])
            second = await try_append(far, first.last)
            assert second.is_appended
            assert (await try_append(near, second.last)).is_appended


async def test_a_server_that_is_far_away_has_its_turn(tmp_path: Path) -> None:
    """Its round trip takes longer than the pauses between the appends of the others."""
    with own_redis(tmp_path) as (url, _):
        async with slow(url, 0.05) as far_url, servers(url, 1) as (near,), servers(far_url, 1) as (far,):
            await create(near, b"a")
            await create(near, b"b")
            busy = [asyncio.create_task(_append_forever(near)) for _ in range(4)]
            for number in range(2):
                await append(far, b"b", b"%d" % number)
            for task in busy:
                task.cancel()
            assert await content(near, b"b") == numbers(2)
            await append(near, b"b", b"2")


async def _append_forever(streams: DurableStreams) -> None:
    while True:
        await append(streams, b"a", b"x")
        if (await streams.find(b"a")).tail > 1_000:
            await streams.perform(lambda store: store.delete(b"a"))
            await create(streams, b"a")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """The clock of all TTLs, which a test moves on with `now_s`."""
    clock = types.SimpleNamespace(now_s=1_000.0, time=lambda: 0.0)
    clock.monotonic = lambda: clock.now_s
    monkeypatch.setattr(stream_module, "time", clock)
    return clock


async def test_a_ttl_runs_on_all_servers(tmp_path: Path, clock: types.SimpleNamespace) -> None:
    """A read on one server counts on the others. The stream is removed once, by whoever is asked first."""
    with own_redis(tmp_path) as (url, _):
        async with servers(url) as (one, other):
            await create(one, b"a", Creation("text/plain", ttl_s=100))
            for _ in range(5):
                clock.now_s += 95
                await one.use(b"a")
                await other.find(b"a")
            here, there = await one.use(b"a"), await other.find(b"a")
            with here.follower(0):
                for _ in range(5):
                    clock.now_s += 95
                    await wait_until(lambda: there.noted_s == clock.now_s)
            clock.now_s += 101
            for streams in (other, one):
                with pytest.raises(UnknownStream):
                    await streams.find(b"a")
            assert await create(one, b"a")


async def test_repeated_requests_restart_a_ttl_on_all_servers(tmp_path: Path, clock: types.SimpleNamespace) -> None:
    with own_redis(tmp_path) as (url, _):
        async with servers(url) as (one, other):
            wanted, stamp = Creation("text/plain", ttl_s=100), Stamp("p", 0, 0)
            assert await create(one, b"a", wanted)
            await other.find(b"a")
            clock.now_s += 95
            assert not await create(one, b"a", wanted)
            await other.find(b"a")
            clock.now_s += 95
            await append(other, b"a", b"x", stamp=stamp)
            await one.find(b"a")
            clock.now_s += 95
            assert (await append(one, b"a", b"x", stamp=stamp)).outcome == "repeated"
            await other.find(b"a")
            clock.now_s += 95
            await other.find(b"a")


async def test_a_log_without_its_entries_is_damaged(tmp_path: Path) -> None:
    with own_redis(tmp_path) as (url, process), process.client() as client:
        async with servers(url, 1) as (one,):
            await create(one, b"a")
            client.delete(f"{_KEY}:log")
        async with open_redis(url) as store:
            with pytest.raises(JournalDamaged, match="damaged"):
                async with open_durable(await store.notes_of("durable"), BUDGET_BYTES):
                    pass


async def test_a_snapshot_that_is_not_finished_expires(tmp_path: Path) -> None:
    with own_redis(tmp_path) as (url, process), process.client() as client:
        async with Connection.open(url) as connection:
            assert await shared_log(connection).replace([EntryId()], [])
        async with breaking(url, b"durable:new") as broken, Connection.open(broken) as connection:
            with pytest.raises(StorageError):
                await shared_log(connection).replace([EntryId()], [])
        (part,) = client.scan_iter(f"{_KEY}:new:*")
        assert client.pttl(part) > 0


async def test_the_key_encrypts_them(tmp_path: Path) -> None:
    with own_redis(tmp_path) as (url, process), process.client() as client:
        async with servers(url, key=bytes(32)) as (one, other):
            await create(one, b"secret path", body=b"secret text")
            assert await content(other, b"secret path") == [b"secret text"]
        assert b"secret" not in b"".join(client.lrange(f"{_KEY}:log", 0, -1))
        async with servers(url, 1, key=bytes(32)) as (late,):
            assert await content(late, b"secret path") == [b"secret text"]


async def test_servers_of_another_version_are_refused(tmp_path: Path) -> None:
    with own_redis(tmp_path) as (url, process), process.client() as client:
        async with servers(url, 1) as (one,):
            await create(one, b"a")
            row = client.lindex(f"{_KEY}:log", 0)
            assert isinstance(row, bytes)
            client.lset(f"{_KEY}:log", 0, row[:8] + b"\0" + msgspec.msgpack.encode([(b"a", {"type": "Later"})]))
        async with open_redis(url) as store:
            with pytest.raises(JournalDamaged, match="nother version of tailrace"):
                async with open_durable(await store.notes_of("durable"), BUDGET_BYTES):
                    pass
        client.hset("tailrace:{0}:facts", "durable", "2")
        with pytest.raises(ModelError, match="another version"):
            async with open_redis(url):
                pass
