"""Redis has a stream whose server does not know it: the answer to its opening was lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import redis
from tests.redis.shared_streams import DONE, LEASE_S, Writer, begin, delta, new_record, seen, takes
from tests.streams.broken_links import breaking
from tests.testing.redis_server import delete_keys, own_redis, prefix_of, shared_url
from tests.waiting import wait_until

from tailrace.errors import ClaimTaken, StorageError, UnknownStream
from tailrace.streams import Reader
from tailrace.streams.rows import Rows
from tailrace.types import ANONYMOUS, Claim, Record
from tailrace_outer.redis._claims import Claims
from tailrace_outer.redis._connection import Connection
from tailrace_outer.redis._redis_keys import Keys
from tailrace_outer.redis._scripts import OPEN, TAKE
from tailrace_outer.redis._topics import Topics
from tailrace_outer.redis.redis_store import RedisLogStore, open_redis

_BASE = "tailrace:{0}:"
_CLAIM = Claim("key", b"request")


@asynccontextmanager
async def unanswered(
    tmp_path: Path, claim: Claim | None = _CLAIM
) -> AsyncIterator[tuple[RedisLogStore, RedisLogStore, Record, redis.Redis]]:
    """Yields a server that has opened a stream and got no answer, another server, the record, and a client."""
    with own_redis(tmp_path) as (url, process), process.client() as client:
        async with open_redis(url, lease_s=LEASE_S) as other, breaking(url, OPEN.sha.encode()) as broken:
            await begin(other)  # so that Redis knows the script
            async with open_redis(broken, lease_s=LEASE_S) as store:
                record = new_record(claim=claim)
                with pytest.raises(StorageError):
                    await store.open(record)
                assert client.exists(_stream(record))
                await store.write_errors.wait()
                yield store, other, record, client


def _stream(record: Record) -> str:
    return f"{_BASE}stream:{record.stream_id}"


async def test_a_reader_that_finds_it_while_it_is_opened_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin, found = Topics.begin, []

    async def begin_and_read(topics: Topics, record: Record) -> None:
        await begin(topics, record)
        found.append(await store.read(ANONYMOUS, record.stream_id))

    async with open_redis(f"{shared_url()}?prefix={prefix_of(tmp_path)}", lease_s=LEASE_S) as store:
        monkeypatch.setattr(Topics, "begin", begin_and_read)
        writer = Writer(store, await store.open(new_record()))
        writer.write(delta(1), DONE)
        assert found == [writer.lease.log]
        await seen(writer.lease.log, 2)
    delete_keys(prefix_of(tmp_path))


@pytest.mark.parametrize("claim", [None, _CLAIM], ids=["no key", "key"])
async def test_it_is_opened_again(tmp_path: Path, claim: Claim | None) -> None:
    async with unanswered(tmp_path, claim) as (store, other, record, _):
        writer = Writer(store, await store.open(record))
        writer.write(delta(1), DONE)
        await seen(writer.lease.log, 2)
        assert (await other.read(ANONYMOUS, record.stream_id)).events == [delta(1), DONE]
        if claim is not None:
            found = await other.recall(ANONYMOUS, claim)
            assert found is not None
            assert found.stream_id == record.stream_id


async def test_it_is_not_opened_again_when_it_was_recalled_and_has_ended(tmp_path: Path) -> None:
    async with unanswered(tmp_path) as (store, other, record, _):
        assert await other.recall(ANONYMOUS, _CLAIM) is not None
        (lease,) = await takes(store)
        Writer(store, lease).write(delta(1), DONE)
        await seen(lease.log, 2)
        with pytest.raises(ClaimTaken):
            await store.open(record)


@pytest.mark.parametrize("claim", [None, _CLAIM], ids=["no key", "key"])
async def test_it_is_deleted(tmp_path: Path, claim: Claim | None) -> None:
    """Nobody knows its id."""
    async with unanswered(tmp_path, claim) as (store, other, record, client):
        await wait_until(lambda: not client.exists(_stream(record)))
        assert not client.zcard(f"{_BASE}owned:{store.epoch}")
        assert (await begin(other, claim=claim)).lease.stream_id != record.stream_id


async def test_a_client_that_repeats_its_key_elsewhere_gets_it(tmp_path: Path) -> None:
    """Its server continues it, and knows of the reader."""
    async with unanswered(tmp_path) as (store, other, record, client):
        log = await other.recall(ANONYMOUS, _CLAIM)
        assert log is not None
        assert log.stream_id == record.stream_id
        with Reader(log):
            (lease,) = await takes(store)
            assert lease.log.num_readers == 1
            with pytest.raises(ClaimTaken):
                await store.open(record)
            assert await store.recall(ANONYMOUS, _CLAIM) is lease.log
            writer = Writer(store, lease)
            writer.write(delta(1))
            await seen(log, 1)
        await wait_until(lambda: writer.heard == ["unread"])
        assert [client.ttl(key) > 86_000 for key in client.keys(f"{_BASE}claim:*")] == [True]
        assert await store.take_over({"m"}) == []


async def test_a_client_that_repeats_its_key_at_the_same_server_gets_it(tmp_path: Path) -> None:
    async with unanswered(tmp_path) as (store, _, _, _):
        log = await store.recall(ANONYMOUS, _CLAIM)
        assert log is not None
        with Reader(log):
            (lease,) = await takes(store)
            assert lease.log is log
            Writer(store, lease).write(delta(1), DONE)
            await seen(log, 2)


async def test_it_arrives_after_its_server_has_deleted_it_and_left(tmp_path: Path) -> None:
    """It stores nothing: nobody would find the stream."""
    async with unanswered(tmp_path) as (store, other, record, client):
        await wait_until(lambda: not client.exists(_stream(record)))
        keys = Keys("tailrace").of_opening(record.stream_id, store.epoch)
        arguments = store.epoch, b"record", record.owner, record.model, record.stream_id, 1
        assert client.eval(OPEN.text, len(keys), *keys, *arguments) == 0
        assert not client.exists(_stream(record))
        with pytest.raises(UnknownStream):
            await other.read(ANONYMOUS, record.stream_id)


async def test_it_arrives_at_a_redis_that_has_lost_its_server_and_that_server_is_dead(tmp_path: Path) -> None:
    """As after a failover. It names its server, so another one finds the stream."""
    record = new_record()
    with own_redis(tmp_path) as (url, process), process.client() as client:
        async with open_redis(url, lease_s=LEASE_S) as dead:
            pass
        client.flushall()
        async with open_redis(url, lease_s=LEASE_S) as store:
            keys = Keys("tailrace").of_opening(record.stream_id, dead.epoch)
            row = Rows(None).encode_record(record)
            arguments = dead.epoch, row, record.owner, record.model, record.stream_id, 1
            assert client.eval(OPEN.text, len(keys), *keys, *arguments) == 1
            (lease,) = await takes(store)
            assert lease.stream_id == record.stream_id
            Writer(store, lease).write(DONE)
            await seen(lease.log, 1)
            await wait_until(lambda: not client.sismember(f"{_BASE}writers", str(dead.epoch)))


@pytest.mark.parametrize("lives", [True, False], ids=["and it lives", "and it is dead"])
async def test_a_stream_without_events_is_taken_over_and_the_answer_is_lost(tmp_path: Path, lives: bool) -> None:
    """A client may have its id: it is not deleted, and a dead server is listed again."""
    url = f"{shared_url()}?prefix={prefix_of(tmp_path)}"
    async with open_redis(url, lease_s=LEASE_S) as store, Connection.open(url) as connection:
        async with open_redis(url, lease_s=LEASE_S) as dead:
            stream_id = (await begin(dead)).lease.stream_id
        async with open_redis(url, lease_s=LEASE_S) as gone:
            pass
        epoch = store.epoch if lives else gone.epoch
        keys = connection.keys.of_opening(stream_id, epoch)
        assert await connection.run(TAKE, keys, dead.epoch, epoch, stream_id, 1) is not None
        await connection.client.zrem(connection.keys.owned(0, dead.epoch), stream_id)  # by another server that looks
        assert [lease.stream_id for lease in await takes(store)] == [stream_id]
    delete_keys(prefix_of(tmp_path))


async def test_its_key_is_repeated_too_late(tmp_path: Path) -> None:
    """Another server has found it, and meanwhile it is deleted."""
    async with unanswered(tmp_path) as (_, other, record, client):
        await other.read(ANONYMOUS, record.stream_id)
        await wait_until(lambda: not client.exists(_stream(record)))
        assert await other.recall(ANONYMOUS, _CLAIM) is None
        assert not client.exists(_stream(record))


async def test_another_server_has_taken_it_over(tmp_path: Path) -> None:
    """It is not deleted: that server writes it."""
    async with unanswered(tmp_path, None) as (store, other, record, client):
        client.hset(_stream(record), "epoch", other.epoch)
        await wait_until(lambda: client.zscore(f"{_BASE}owned:{store.epoch}", record.stream_id) is None)
        assert client.exists(_stream(record))


async def test_a_stream_that_is_stored_too_late_has_lost_its_key(tmp_path: Path) -> None:
    """Another server has begun a stream with the key meanwhile: it took this one for lost."""
    late, other = new_record(claim=_CLAIM), new_record(claim=_CLAIM)
    async with Connection.open(f"{shared_url()}?prefix={prefix_of(tmp_path)}") as connection:
        claims = Claims(connection)
        await claims.take(late, _CLAIM)
        await connection.client.set(connection.keys.gone(late.stream_id), late.owner)
        await claims.take(other, _CLAIM)
        assert not await claims.keep(late)
        assert await claims.keep(other)
        assert await claims.find(ANONYMOUS, _CLAIM) == other.stream_id
        await claims.end(late, 0.001)
        assert await claims.find(ANONYMOUS, _CLAIM) == other.stream_id
    delete_keys(prefix_of(tmp_path))


async def test_a_server_that_keeps_the_key_of_an_ended_stream_too_late_changes_nothing(tmp_path: Path) -> None:
    """It was frozen. Another server has taken the stream over and ended it."""
    record = new_record(claim=_CLAIM)
    async with Connection.open(f"{shared_url()}?prefix={prefix_of(tmp_path)}") as connection:
        claims = Claims(connection)
        await claims.take(record, _CLAIM)
        await claims.end(record, 100.0)
        await claims.take(record, _CLAIM)
        assert await claims.keep(record)
        assert await claims.find(ANONYMOUS, _CLAIM) == record.stream_id
        assert 60_000 < await connection.client.pttl(connection.keys.claim(ANONYMOUS, _CLAIM.key)) <= 100_000
    delete_keys(prefix_of(tmp_path))


async def test_the_key_of_a_running_stream_is_kept_for_a_day_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"{shared_url()}?prefix={prefix_of(tmp_path)}"
    async with open_redis(url, lease_s=LEASE_S) as store, Connection.open(url) as connection:
        writer = await begin(store, claim=_CLAIM)
        key = connection.keys.claim(ANONYMOUS, _CLAIM.key)
        assert 86_000 < await connection.client.ttl(key) <= 86_400
        monkeypatch.setattr("tailrace_outer.redis.redis_store.KEYS_S", 0.0)
        await connection.client.expire(key, 100)
        while await connection.client.ttl(key) <= 100:
            await asyncio.sleep(0.01)
        assert 86_000 < await connection.client.ttl(key) <= 86_400
        writer.write(DONE)
        await seen(writer.lease.log, 1)
        while await connection.client.ttl(key) > 900:
            await asyncio.sleep(0.01)
    delete_keys(prefix_of(tmp_path))


async def test_a_key_whose_stream_was_stored_meanwhile_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server sees that the stream is not stored, and is frozen before it takes the key."""
    monkeypatch.setattr("tailrace_outer.redis._claims.CATCH_UP_S", -1.0)
    first, other = new_record(claim=_CLAIM), new_record(claim=_CLAIM)
    async with Connection.open(f"{shared_url()}?prefix={prefix_of(tmp_path)}") as connection:
        claims, client = Claims(connection), connection.client
        await claims.take(first, _CLAIM)
        exists = client.exists

        async def exists_and_is_stored_then(key: str) -> int:
            found: int = await exists(key)
            if key == connection.keys.stream(first.stream_id):
                await client.hset(key, "epoch", 1)
                assert await claims.keep(first)
            return found

        monkeypatch.setattr(client, "exists", exists_and_is_stored_then)
        with pytest.raises(ClaimTaken):
            await claims.take(other, _CLAIM)
        assert await claims.find(ANONYMOUS, _CLAIM) == first.stream_id
    delete_keys(prefix_of(tmp_path))
