"""What is no Redis for streams, or not the one of this group of servers: one clear line, and nothing is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import redis
from tests.redis.shared_streams import DONE, LEASE_S, begin, delta, seen
from tests.testing.redis_server import OwnRedis, own_redis
from tests.waiting import wait_until

from tailrace.errors import JournalFull, ModelError
from tailrace.types import ANONYMOUS
from tailrace_outer.redis.redis_store import open_redis

_ROOM_BYTES = 4 * 2**20  # about 1 MB is Redis's own


async def _refusal(url: str) -> str:
    """Return why a store is not opened."""
    with pytest.raises(ModelError) as raised:
        async with open_redis(url):
            pass
    assert "\n" not in raised.value.message
    return raised.value.message


@asynccontextmanager
async def _answering(info: bytes) -> AsyncIterator[str]:
    """A server on a socket that answers INFO with these bytes, and refuses all other commands. Yields its URL."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while words := [await _word(reader) for _ in range(int((await reader.readline() or b"*0")[1:]))]:
                writer.write(info if words[0].upper() == b"INFO" else b"-ERR unknown command\r\n")
        finally:
            writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as listening:
        yield f"redis://127.0.0.1:{listening.sockets[0].getsockname()[1]}/0"


async def _word(reader: asyncio.StreamReader) -> bytes:
    length = int((await reader.readline())[1:])
    return (await reader.readexactly(length + 2))[:-2]


async def test_another_kind_of_server() -> None:
    async with _answering(b"HTTP/1.1 400 Bad Request\r\n\r\n") as url:
        assert "cannot be reached" in await _refusal(url)


@pytest.mark.parametrize("version", ["2.8.19", "6.0.16"])
async def test_an_old_redis(version: str) -> None:
    facts = f"redis_version:{version}\r\nrole:master\r\n".encode()
    async with _answering(b"$%d\r\n%s\r\n" % (len(facts), facts)) as url:
        assert f"has version {version}. --journal needs 6.2 or later" in await _refusal(url)


_OTHER_FORMS = [("format", "0", "another version"), ("format", "2", "another version"), ("shards", "16", "Cluster")]


@pytest.mark.parametrize(("fact", "kept", "reason"), _OTHER_FORMS)
async def test_servers_that_keep_streams_in_another_form(tmp_path: Path, fact: str, kept: str, reason: str) -> None:
    """A server of another version does not join. The one that runs goes on, and the other one has its own prefix."""
    with own_redis(tmp_path) as (url, process), process.client() as client:
        async with open_redis(url) as running:
            writer = await begin(running, delta(1))
            client.hset("tailrace:{0}:facts", fact, kept)
            message = await _refusal(url)
            assert reason in message
            assert "?prefix=" in message
            writer.write(DONE)
            await seen(writer.lease.log, 2)
            assert running.state.num_servers == 1
            async with open_redis(f"{url}?prefix=new") as other:
                await begin(other, delta(1))


@pytest.mark.parametrize("key", ["facts", "servers"])
async def test_another_program_has_the_prefix(tmp_path: Path, key: str) -> None:
    with own_redis(tmp_path) as (url, process), process.client() as client:
        client.set(f"tailrace:{{0}}:{key}", "its own")
        assert "Redis refuses a command of --journal: WRONGTYPE" in await _refusal(url)


async def test_a_user_who_may_not_write(tmp_path: Path) -> None:
    with own_redis(tmp_path) as (url, process), process.client() as client:
        client.acl_setuser("reader", enabled=True, passwords="+reader", keys=["*"], commands=["+@read", "+info"])
        assert "no permissions" in await _refusal(url.replace("redis://", "redis://reader:reader@"))


def _fill(client: redis.Redis) -> None:
    """Fill the memory until Redis refuses more."""
    number, size = 0, 2**16
    while size:
        try:
            client.set(f"room:{number}", b"x" * size)
            number += 1
        except redis.exceptions.OutOfMemoryError:
            size //= 2


def _make_room(client: redis.Redis) -> None:
    client.config_set("maxmemory", 0)


def _full(process: OwnRedis) -> redis.Redis:
    client = process.client()
    _fill(client)
    return client


async def test_a_full_redis_is_refused_at_the_start(tmp_path: Path) -> None:
    with own_redis(tmp_path, "--maxmemory", str(_ROOM_BYTES)) as (url, process), _full(process):
        assert "full" in await _refusal(url)


async def test_redis_becomes_full(tmp_path: Path) -> None:
    """New streams are refused, the others wait; with room again, every event comes."""
    with own_redis(tmp_path, "--maxmemory", str(_ROOM_BYTES)) as (url, process):
        async with open_redis(url, lease_s=60.0, give_up_after_s=60.0) as store:
            writer = await begin(store, delta(1))
            with _full(process) as client:
                writer.write(delta(2))
                await wait_until(lambda: store.write_errors.current is not None)
                assert isinstance(store.write_errors.current, JournalFull)
                with pytest.raises(JournalFull):
                    await begin(store)
                writer.write(DONE)
                assert writer.lease.log.events == [delta(1)]
                _make_room(client)
            await seen(writer.lease.log, 3)
            assert writer.lease.log.events == [delta(1), delta(2), DONE]
            await store.write_errors.wait()
            await begin(store, delta(1))


async def test_two_groups_of_servers_on_one_prefix(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each says so and goes on. No stream goes to a server that lacks its model."""
    with own_redis(tmp_path) as (url, _):
        async with open_redis(url, lease_s=LEASE_S) as one, open_redis(url, lease_s=LEASE_S) as other:
            assert await one.take_over({"m", "n"}) == []
            await wait_until(lambda: one.state.num_servers == 2)
            assert one.state.num_with_other_models == 0  # it does not know yet
            async with open_redis(url, lease_s=LEASE_S) as same:
                await same.take_over({"n", "m"})
                await other.take_over({"o"})
                await wait_until(
                    lambda: [store.state.num_with_other_models for store in (one, same, other)] == [1, 1, 2]
                )
                stream_id = (await begin(same, delta(1), model="n")).lease.stream_id
            assert caplog.text.count("A server with other models (o) shares this log store.") == 2
            assert caplog.text.count("A server with other models (m, n) shares this log store.") == 2
            await wait_until(lambda: other.state.num_with_other_models == 1)
            assert await other.take_over({"o"}) == []
            (lease,) = await one.take_over({"m", "n"})
            assert lease.stream_id == stream_id


async def test_redis_begins_to_drop_keys(tmp_path: Path) -> None:
    """Somebody changes the policy while servers run: readers on the server of a stream miss nothing."""
    with own_redis(tmp_path, "--maxmemory", str(_ROOM_BYTES)) as (url, process), process.client() as client:
        async with open_redis(url, lease_s=60.0) as store:
            writers = [await begin(store, delta(1)) for _ in range(8)]
            client.config_set("maxmemory-policy", "allkeys-random")
            gone = [f"tailrace:{{0}}:stream:{writer.lease.stream_id}" for writer in writers]
            number = 0
            while client.exists(*gone) == len(gone):
                client.set(f"room:{number}", b"x" * 2**14)
                number += 1
            _make_room(client)
            for writer in writers:
                writer.write(delta(2), DONE)
            for writer in writers:
                await seen(writer.lease.log, 3)
                log = await store.read(ANONYMOUS, writer.lease.stream_id)
                assert log.events == [delta(1), delta(2), DONE]
