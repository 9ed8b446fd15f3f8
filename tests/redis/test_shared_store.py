"""Two servers over one Redis: what one does, the other sees. And what happens when a server or Redis dies."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import redis
from tests.redis.shared_streams import DONE, LEASE_S, Writer, begin, delta, seen, takes
from tests.streams.broken_links import slow
from tests.testing.redis_server import delete_keys, own_redis, prefix_of, shared_url
from tests.waiting import LONG_S, wait_until

from tailrace.errors import (
    ClaimTaken,
    JournalDamaged,
    LeaseLost,
    ModelError,
    SeqOutOfRange,
    StorageError,
    StreamExpired,
    UnknownStream,
)
from tailrace.streams import Ender, Reader
from tailrace.types import ANONYMOUS, Claim, End, Failure, Usage
from tailrace_outer.redis.redis_store import RedisLogStore, open_redis


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    shared_url()
    return prefix_of(tmp_path)


@asynccontextmanager
async def server(prefix: str, **more: float) -> AsyncIterator[RedisLogStore]:
    async with open_redis(f"{shared_url()}?prefix={prefix}", lease_s=LEASE_S, **more) as store:  # type: ignore[arg-type]
        yield store


@asynccontextmanager
async def pair(prefix: str) -> AsyncIterator[tuple[RedisLogStore, RedisLogStore]]:
    try:
        async with server(prefix) as one, server(prefix) as other:
            yield one, other
    finally:
        delete_keys(prefix)


async def test_a_reader_elsewhere_sees_every_event(prefix: str) -> None:
    async with pair(prefix) as (one, other):
        writer = await begin(one, delta(1), delta(2))
        log = await other.read(ANONYMOUS, writer.lease.stream_id, 1)
        assert log.events == [delta(1), delta(2)]
        with Reader(log, 2) as reader:
            for number in range(3, 40):
                writer.write(delta(number))
                await seen(log, number)
            writer.write(DONE)
            await seen(log, 40)
            assert [reader.take(), reader.take()] == [[delta(number) for number in range(3, 40)], DONE]
        await seen(writer.lease.log, 40)  # Redis may answer the other server first
        assert log.events == writer.lease.log.events
        assert await other.read(ANONYMOUS, writer.lease.stream_id) is log


async def test_many_streams_begin_at_the_same_time(prefix: str) -> None:
    """More than there are connections to Redis."""
    url = f"{shared_url()}?prefix={prefix}"
    async with open_redis(url, lease_s=60.0) as one, open_redis(url, lease_s=60.0) as other:
        writers = await asyncio.gather(*(begin(one, delta(1)) for _ in range(100)))
        logs = await asyncio.gather(*(other.read(ANONYMOUS, writer.lease.stream_id) for writer in writers))
        assert [log.events for log in logs] == [[delta(1)]] * 100
        assert one.write_errors.current is None
    delete_keys(prefix)


async def test_a_reader_changes_to_a_server_that_is_behind(prefix: str) -> None:
    """A client may have seen events of which its next server has not heard yet."""
    async with (
        server(prefix) as one,
        slow(f"{shared_url()}?prefix={prefix}", 0.05) as url,
        open_redis(url, lease_s=LEASE_S) as other,
    ):
        writer = await begin(one, delta(1))
        stream_id = writer.lease.stream_id
        log = await other.read(ANONYMOUS, stream_id)
        writer.write(delta(2), delta(3))
        assert (await one.read(ANONYMOUS, stream_id, 3)).events == [delta(1), delta(2), delta(3)]
        assert (await other.read(ANONYMOUS, stream_id, 3)).events == [delta(1), delta(2), delta(3)]
        assert await other.read(ANONYMOUS, stream_id) is log
        for store in (one, other):
            with pytest.raises(SeqOutOfRange):
                await store.read(ANONYMOUS, stream_id, 4)
    delete_keys(prefix)


async def test_the_writer_knows_of_a_reader_that_came_while_redis_did_not_answer(tmp_path: Path) -> None:
    """Otherwise it would cancel a stream that is read."""
    with own_redis(tmp_path, "--appendonly", "yes", "--appendfsync", "always") as (url, process):
        async with open_redis(url, lease_s=60.0) as one, open_redis(url, lease_s=60.0) as other:
            writer = await begin(one, delta(1))
            log = await other.read(ANONYMOUS, writer.lease.stream_id)
            process.kill()
            with Reader(log):
                await asyncio.sleep(0.5)  # the first attempt to tell it fails
                process.start()
                await wait_until(lambda: writer.heard == ["read"])


async def test_the_writer_knows_of_readers_on_a_server_that_redis_had_forgotten(prefix: str) -> None:
    async with pair(prefix) as (one, other):
        writer = await begin(one, delta(1))
        log = await other.read(ANONYMOUS, writer.lease.stream_id)
        with Reader(log), redis.Redis.from_url(shared_url()) as client:
            await wait_until(lambda: writer.heard == ["read"])
            while writer.heard[-1] == "read":  # the writer has not seen yet that it is missing
                client.srem(f"{prefix}:{{0}}:servers", str(other.epoch))
                await asyncio.sleep(0.001)
            await wait_until(lambda: writer.heard[-1] == "read")


async def test_a_server_that_is_behind_does_not_show_a_deleted_stream(prefix: str) -> None:
    """It has not heard of the end yet, and will not: the events are gone."""
    async with (
        server(prefix) as one,
        slow(f"{shared_url()}?prefix={prefix}", 0.05) as url,
        open_redis(url, lease_s=LEASE_S) as other,
    ):
        writer = await begin(one, delta(1))
        stream_id = writer.lease.stream_id
        log = await other.read(ANONYMOUS, stream_id)
        writer.write(DONE)
        await seen(writer.lease.log, 2)
        await one.delete(ANONYMOUS, stream_id)
        with pytest.raises(StreamExpired):
            await other.read(ANONYMOUS, stream_id)
        assert log.end is not None or log.released is not None
    delete_keys(prefix)


async def test_a_server_that_follows_many_streams_keeps_its_lease(prefix: str) -> None:
    """Looking after them takes longer than the lease lasts if Redis is far away and they are looked after in turn."""
    async with (
        server(prefix) as one,
        slow(f"{shared_url()}?prefix={prefix}", 0.01) as url,
        open_redis(url, lease_s=LEASE_S) as other,
    ):
        epoch = other.epoch
        logs = [await other.read(ANONYMOUS, (await begin(one)).lease.stream_id) for _ in range(60)]
        with contextlib.ExitStack() as readers:
            for log in logs:
                readers.enter_context(Reader(log))
            await asyncio.sleep(3 * LEASE_S)
        assert other.epoch == epoch
    delete_keys(prefix)


async def test_the_writer_knows_of_readers_elsewhere(prefix: str) -> None:
    async with pair(prefix) as (one, other):
        writer = await begin(one, delta(1))
        log = await other.read(ANONYMOUS, writer.lease.stream_id)
        with Reader(log):
            await wait_until(lambda: writer.heard == ["read"])
        await wait_until(lambda: writer.heard == ["read", "unread"])


async def test_a_stream_is_stopped_and_deleted_elsewhere(prefix: str) -> None:
    async with pair(prefix) as (one, other):
        writer = await begin(one, delta(1))
        stream_id = writer.lease.stream_id
        log = await other.stop(ANONYMOUS, stream_id)
        assert log.end is not None and log.end.status == "cancelled"  # noqa: PT018
        assert writer.heard.count("cancel") == 1  # and it may hear of the reader that waits for the end
        await other.delete(ANONYMOUS, stream_id)
        for store in (one, other):
            with pytest.raises(StreamExpired):
                await store.read(ANONYMOUS, stream_id)
            with pytest.raises(UnknownStream):
                await store.read("you", stream_id)


async def test_a_key_begins_one_stream(prefix: str) -> None:
    async with pair(prefix) as (one, other):
        claim = Claim("key", b"request")
        begun = await asyncio.gather(*(begin(store, claim=claim) for store in (one, other)), return_exceptions=True)
        (writer,) = [result for result in begun if isinstance(result, Writer)]
        (refused,) = [result for result in begun if not isinstance(result, Writer)]
        assert isinstance(refused, ClaimTaken)
        for store in (one, other):
            found = await store.recall(ANONYMOUS, claim)
            assert found is not None
            assert found.stream_id == writer.lease.stream_id
        writer.write(DONE)
        await seen(writer.lease.log, 1)
        await one.delete(ANONYMOUS, writer.lease.stream_id)
        assert await other.recall(ANONYMOUS, claim) is None
        # Its stream is gone: one of those that come at the same time takes it.
        again = await asyncio.gather(*(begin(store, claim=claim) for store in (one, other)), return_exceptions=True)
        (writer,) = [result for result in again if isinstance(result, Writer)]
        (refused,) = [result for result in again if not isinstance(result, Writer)]
        assert isinstance(refused, ClaimTaken)


async def test_a_stream_that_cannot_be_read_is_written_no_longer(prefix: str) -> None:
    """Redis has an event of it that its writer knows nothing of. The other streams are written as before."""
    async with pair(prefix) as (one, _):
        damaged, sound = await begin(one, delta(1)), await begin(one, delta(1))
        key = f"{prefix}:{{0}}:stream:{damaged.lease.stream_id}"
        with redis.Redis.from_url(shared_url()) as client:
            client.xadd(key.replace(":stream:", ":events:"), {"e": b"no events"}, "2-0")
            client.hset(key, "last", 2)
        damaged.write(delta(2))
        sound.write(delta(2), DONE)
        await seen(sound.lease.log, 3)
        await wait_until(lambda: damaged.heard == ["lease_lost"])
        assert one.write_errors.current is None


async def test_a_stream_that_cannot_be_read_is_given_up_alone(prefix: str) -> None:
    """The others are looked after as before: one that Redis has lost is given up, too."""
    async with pair(prefix) as (one, other), contextlib.AsyncExitStack() as readers:
        writers = [await begin(one, delta(1)) for _ in range(40)]  # more than are looked after at the same time
        logs = [await other.read(ANONYMOUS, writer.lease.stream_id) for writer in writers]
        for log in logs:
            readers.enter_context(Reader(log))
        with redis.Redis.from_url(shared_url()) as client:
            client.hset(f"{prefix}:{{0}}:stream:{logs[0].stream_id}", mapping={"last": 9, "events": b"no events"})
            client.delete(f"{prefix}:{{0}}:stream:{logs[-1].stream_id}")
        await wait_until(lambda: logs[0].released is not None and logs[-1].released is not None)
        assert isinstance(logs[0].released, JournalDamaged)
        assert not isinstance(logs[-1].released, JournalDamaged)
        assert [log for log in logs if log.released is not None] == [logs[0], logs[-1]]


async def test_a_frozen_server_is_fenced(prefix: str) -> None:
    """The lease of a server that does not run goes to another one, whose events are the only ones from then on."""
    async with pair(prefix) as (one, other):
        writer = await begin(one, delta(1))
        stream_id = writer.lease.stream_id
        epoch = one.epoch
        with Reader(writer.lease.log, 1):
            with redis.Redis.from_url(shared_url()) as client:  # as after a pause in which the lease ran out
                client.set(f"{prefix}:{{0}}:lease:{one.epoch}", "dead")
            (lease,) = await takes(other)
            assert lease.log.events == [delta(1)]
            other.append(lease, [delta(2)])
            await seen(lease.log, 2)
            with contextlib.suppress(LeaseLost):  # or it has noticed already
                writer.write(delta(3))
            await wait_until(lambda: "lease_lost" in writer.heard)
            assert writer.lease.log.released is not None
        with pytest.raises(LeaseLost):
            writer.write(delta(4))
        await wait_until(lambda: one.epoch > epoch)
        log = await one.read(ANONYMOUS, stream_id)
        assert log.events == [delta(1), delta(2)]
        other.append(lease, [delta(5)])
        await seen(log, 3)
        assert log.events == [delta(1), delta(2), delta(5)]


async def test_streams_go_to_one_server_each(prefix: str) -> None:
    async with pair(prefix) as (one, other):
        async with server(prefix) as dying:
            ids = [(await begin(dying, delta(1))).lease.stream_id for _ in range(50)]
            foreign = (await begin(dying, model="another")).lease.stream_id
        got: list[str] = []
        async with asyncio.timeout(LONG_S):
            while len(got) < len(ids):
                some = await asyncio.gather(one.take_over({"m"}), other.take_over({"m"}))
                got += [lease.stream_id for leases in some for lease in leases]
        assert sorted(got) == sorted(ids)
        assert [lease.stream_id for lease in await other.take_over({"another"})] == [foreign]


async def test_a_stream_is_taken_again_if_the_answer_was_lost(prefix: str) -> None:
    """In Redis this server is the writer, but the server does not know it."""
    async with pair(prefix) as (_, other):
        async with server(prefix) as dying:
            stream_id = (await begin(dying, delta(1))).lease.stream_id
        with redis.Redis.from_url(shared_url()) as client:
            client.hset(f"{prefix}:{{0}}:stream:{stream_id}", "epoch", other.epoch)
        (lease,) = await takes(other)
        assert lease.stream_id == stream_id


async def test_a_stream_begun_by_a_server_that_does_not_know_of_its_death(prefix: str) -> None:
    """The others had looked already what the dead server left."""
    async with pair(prefix) as (one, other), open_redis(f"{shared_url()}?prefix={prefix}", lease_s=8.0) as frozen:
        epoch = frozen.epoch
        with redis.Redis.from_url(shared_url()) as client:
            client.set(f"{prefix}:{{0}}:lease:{epoch}", "dead")
            assert await other.take_over({"m"}) == []
            await wait_until(lambda: not client.sismember(f"{prefix}:{{0}}:servers", str(epoch)))
        stream_id = (await begin(frozen)).lease.stream_id
        found: list[str] = []
        async with asyncio.timeout(LONG_S):
            while not found:
                taken = [await store.take_over({"m"}) for store in (one, other)]
                found = [lease.stream_id for leases in taken for lease in leases]
        assert found == [stream_id]


async def test_a_server_that_comes_back_hears_of_stops(prefix: str) -> None:
    """It has a new epoch, and messages come to that."""
    async with server(prefix) as store:
        old = store.epoch
        with redis.Redis.from_url(shared_url()) as client:
            client.set(f"{prefix}:{{0}}:lease:{old}", "dead")
        await wait_until(lambda: store.epoch != old)
        writer = await begin(store, delta(1))
        async with server(prefix) as other:
            log = await other.stop(ANONYMOUS, writer.lease.stream_id)
        assert log.status == "cancelled"


async def test_streams_begun_while_a_server_comes_back_are_taken_over(prefix: str) -> None:
    """They belong to its old epoch, and no other server is there."""
    try:
        async with server(prefix) as store:
            old, begun = store.epoch, []

            async def begin_many() -> None:
                while store.epoch == old:
                    with contextlib.suppress(StorageError):
                        begun.append(await begin(store))

            with redis.Redis.from_url(shared_url()) as client:
                client.set(f"{prefix}:{{0}}:lease:{old}", "dead")
            await asyncio.gather(*(begin_many() for _ in range(16)))
            missing = {writer.lease.stream_id for writer in begun if writer.lease.epoch == old}
            async with asyncio.timeout(LONG_S):
                while missing:
                    missing -= {lease.stream_id for lease in await takes(store)}
    finally:
        delete_keys(prefix)


async def test_readers_stay_when_their_server_takes_over(prefix: str) -> None:
    async with pair(prefix) as (one, other):
        async with server(prefix) as dying:
            writer = await begin(dying, delta(1))
            mine = await one.read(ANONYMOUS, writer.lease.stream_id)
            theirs = await other.read(ANONYMOUS, writer.lease.stream_id)
            readers = Reader(mine), Reader(theirs)
            for reader in readers:
                reader.__enter__()
            await wait_until(lambda: writer.heard == ["read"])
        (lease,) = await takes(one)
        assert lease.log is mine
        taker = Writer(one, lease)
        taker.write(delta(2), DONE)
        for log in (mine, theirs):
            await seen(log, 3)
            assert log.events == [delta(1), delta(2), DONE]


async def test_a_stop_survives_the_server_that_should_execute_it(prefix: str) -> None:
    async with pair(prefix) as (one, other):
        async with server(prefix) as dying:
            writer = await begin(dying, delta(1))
            stream_id = writer.lease.stream_id
            writer.lease.log.producer = Ender()  # which does not react
            stopping = asyncio.create_task(other.stop(ANONYMOUS, stream_id))
            await asyncio.sleep(0.2)
        assert await one.take_over({"m"}) == []
        log = await stopping
        assert log.end is not None
        assert log.end.status == "cancelled"


async def test_redis_away_for_a_moment(tmp_path: Path) -> None:
    """Events wait while Redis does not answer, and all of them come."""
    with own_redis(tmp_path) as (url, process):
        async with open_redis(url, lease_s=20.0, give_up_after_s=30.0) as store:
            writer = await begin(store, delta(1))
            process.stop()
            writer.write(delta(2))
            await wait_until(lambda: store.write_errors.current is not None)
            with pytest.raises(StorageError):
                await begin(store)
            writer.write(delta(3))
            assert writer.lease.log.events == [delta(1)]
            assert writer.lease.log.queued == [delta(2), delta(3)]
            process.resume()
            await seen(writer.lease.log, 3)
            assert writer.lease.log.events == [delta(1), delta(2), delta(3)]
            await store.write_errors.wait()


async def test_redis_away_for_too_long(tmp_path: Path) -> None:
    """All streams end with an error, which can be read when Redis is back."""
    with own_redis(tmp_path) as (url, process):
        async with open_redis(url, lease_s=60.0, give_up_after_s=0.5) as store:
            writer = await begin(store, delta(1))
            failed: list[StorageError] = []

            def fail_all(error: StorageError) -> None:
                failed.append(error)
                writer.write(End("error", Usage(2, 1), Failure(error.code, error.message)))

            store.write_errors.on_give_up.append(fail_all)
            process.stop()
            writer.write(delta(2))
            await wait_until(lambda: bool(failed))
            process.resume()
            await wait_until(lambda: writer.lease.log.end is not None)
            log = await store.read(ANONYMOUS, writer.lease.stream_id)
            assert log.events[0] == delta(1)
            assert log.end is not None
            assert log.end.status == "error"


async def test_redis_away_for_too_long_when_a_stream_only_has_to_end(tmp_path: Path) -> None:
    """Its end, which nobody would write again, still comes."""
    with own_redis(tmp_path) as (url, process):
        async with open_redis(url, lease_s=60.0, give_up_after_s=0.5) as store:
            writer = await begin(store, delta(1))
            log = writer.lease.log
            log.producer = Ender()
            failed: list[StorageError] = []
            store.write_errors.on_give_up.append(failed.append)
            process.stop()
            writer.write(DONE)
            await wait_until(lambda: bool(failed))
            process.resume()
            await wait_until(lambda: log.end is not None)
            assert (await store.read(ANONYMOUS, writer.lease.stream_id)).events == [delta(1), DONE]


async def test_redis_loses_everything(tmp_path: Path) -> None:
    """A stream that runs is written again: nothing that a reader has seen gets another number or another text. It keeps
    its idempotency key."""
    claim = Claim("key", b"request")
    with own_redis(tmp_path) as (url, process):
        async with open_redis(url, lease_s=20.0, give_up_after_s=30.0) as store:
            writer = await begin(store, delta(1), delta(2), claim=claim)
            process.restart()
            writer.write(delta(3))
            await seen(writer.lease.log, 3)
            async with open_redis(url, lease_s=20.0) as other:
                log = await other.read(ANONYMOUS, writer.lease.stream_id)
                assert log.events == [delta(1), delta(2), delta(3)]
                assert await other.recall(ANONYMOUS, claim) is log
                await wait_until(lambda: store.state.num_servers == other.state.num_servers == 2)
                assert await other.take_over({"m"}) == []
                await store.close()
                (lease,) = await takes(other)
                assert lease.log.events == [delta(1), delta(2), delta(3)]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--maxmemory-policy", "allkeys-lru"), "maxmemory-policy is allkeys-lru"),
        (("--requirepass", "secret"), "refuses the name or the password"),
        (("--replicaof", "127.0.0.1 1"), "is a replica"),
    ],
)
async def test_a_redis_that_cannot_keep_streams(tmp_path: Path, options: tuple[str, ...], reason: str) -> None:
    with own_redis(tmp_path, *options) as (url, _), pytest.raises(ModelError) as raised:
        async with open_redis(url):
            pass
    assert reason in raised.value.message


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("redis://127.0.0.1:1/0", "cannot be reached"),
        ("redis://", "another kind"),
        ("http://127.0.0.1/", "another kind"),
        ("redis://127.0.0.1/main", "not a number"),
        ("rediss://127.0.0.1/0/main", "not a number"),
        ("redis://127.0.0.1/0?prefx=a", "unknown parameter: prefx"),
        ("redis+sentinel://127.0.0.1/main", "Sentinel without a port"),
        ("redis+sentinel://127.0.0.1:26379/", "does not name the service"),
    ],
)
async def test_a_url_that_leads_nowhere(url: str, reason: str) -> None:
    with pytest.raises(ModelError) as raised:
        async with open_redis(url):
            pass
    assert reason in raised.value.message
    assert "secret" not in raised.value.message


async def test_servers_with_different_keys_do_not_mix(prefix: str) -> None:
    try:
        async with server(prefix):
            with pytest.raises(ModelError, match="--journal-key-file"):
                async with open_redis(f"{shared_url()}?prefix={prefix}", journal_key=b"k" * 32):
                    pass
    finally:
        delete_keys(prefix)


async def test_what_is_stored_is_encrypted(prefix: str) -> None:
    try:
        async with open_redis(f"{shared_url()}?prefix={prefix}", journal_key=b"k" * 32) as store:
            writer = await begin(store, delta(1))
            with redis.Redis.from_url(shared_url()) as client:
                kept = [client.dump(key) or b"" for key in client.scan_iter(match=f"{prefix}:*")]
            assert len(kept) >= 5
            assert not any(b"Once" in value or b"word" in value for value in kept)
            assert writer.lease.log.events == [delta(1)]
    finally:
        delete_keys(prefix)


async def test_finished_streams_are_compacted_and_expire(prefix: str) -> None:
    try:
        async with server(prefix, retention_s=4.0) as store, server(prefix) as other:
            done = await begin(store, delta(1))
            done.write(DONE)
            await seen(done.lease.log, 2)
            stream_id = done.lease.stream_id
            with redis.Redis.from_url(shared_url()) as client:
                await wait_until(lambda: not client.exists(f"{prefix}:{{0}}:events:{stream_id}"))
                assert (await other.read(ANONYMOUS, stream_id)).events == [delta(1), DONE]
                await wait_until(lambda: not client.exists(f"{prefix}:{{0}}:stream:{stream_id}"))
            with pytest.raises(StreamExpired):
                await store.read(ANONYMOUS, stream_id)
    finally:
        delete_keys(prefix)
