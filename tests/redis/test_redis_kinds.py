"""Sentinel, Redis Cluster, a failover to a replica, and what Redis itself loses: the log store over each of them."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, closing
from functools import partial
from pathlib import Path

import pytest
import redis
from tests.http.certificates import write_certificate
from tests.redis.shared_streams import DONE, Writer, begin, delta, seen, takes
from tests.testing.redis_server import (
    OwnRedis,
    copy_keys,
    free_port,
    own_cluster,
    own_redis,
    prefix_of,
    watched_redis,
)  # fmt: skip

from tailrace.errors import ModelError, StreamExpired
from tailrace.streams import Lease, LogStore
from tailrace.testing import StoreLaw, store_laws
from tailrace.types import ANONYMOUS, Claim
from tailrace_outer.redis.redis_store import RedisLogStore, open_redis

Kind = Callable[[Path], AbstractContextManager[tuple[str, list[OwnRedis]]]]
LEASE_S = 2.0
PATIENT_S = 60.0  # longer than a failover takes on a busy machine
deep = [pytest.mark.deep, pytest.mark.timeout(600)]


@pytest.mark.parametrize("kind", [watched_redis, own_cluster])
async def test_streams_are_shared(tmp_path: Path, kind: Kind) -> None:
    """Streams are followed, stopped, deleted and taken over, and keys are found, over more streams than shards."""
    with kind(tmp_path) as (url, _):
        async with open_redis(url, lease_s=LEASE_S) as one:
            async with open_redis(url, lease_s=LEASE_S) as dying:
                claim = Claim("key", b"request")
                begun = [await begin(dying, delta(1), claim=claim if number == 0 else None) for number in range(40)]
                logs = [await one.read(ANONYMOUS, writer.lease.stream_id) for writer in begun]
                for writer in begun:
                    writer.write(delta(2), delta(3))
                for log in logs:
                    await seen(log, 3)
                assert await one.recall(ANONYMOUS, claim) is logs[0]
                stopped = await one.stop(ANONYMOUS, begun[0].lease.stream_id)
                assert stopped.status == "cancelled"
                await one.delete(ANONYMOUS, stopped.stream_id)
                with pytest.raises(StreamExpired):
                    await dying.read(ANONYMOUS, stopped.stream_id)
                found = set(await one.streams_of(ANONYMOUS))
                assert found == {log.stream_id for log in logs[1:]}
            taken: list[Writer] = []
            while len(taken) < 39:
                taken += [Writer(one, lease) for lease in await takes(one)]
            for writer in taken:
                assert writer.lease.log in logs
                writer.write(DONE)
            for log in logs[1:]:
                await seen(log, 4)
                assert log.events == [delta(1), delta(2), delta(3), DONE]


@pytest.fixture(scope="module")
def cluster_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with own_cluster(tmp_path_factory.mktemp("cluster")) as (url, _):
        yield url


@pytest.mark.parametrize("law", store_laws, ids=str)
@pytest.mark.deep
def test_a_cluster_keeps(law: StoreLaw, cluster_url: str) -> None:
    @asynccontextmanager
    async def in_cluster(path: Path) -> AsyncIterator[LogStore]:
        async with open_redis(f"{cluster_url}?prefix={prefix_of(path)}", lease_s=LEASE_S) as store:
            yield store

    def snapshot(source: Path, target: Path) -> None:
        with redis.RedisCluster.from_url(cluster_url) as client:
            copy_keys(prefix_of(source), prefix_of(target), client)

    law(in_cluster, snapshot=snapshot)


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """Warn here of connections that a test has left open."""
    yield
    gc.collect()


@pytest.mark.parametrize(
    "kind", [watched_redis, pytest.param(partial(own_cluster, with_replicas=True), id="own_cluster", marks=deep)]
)
async def test_a_replica_is_promoted(tmp_path: Path, kind: Kind) -> None:
    """The primary is killed in mid-stream. What the replica has not received is written again: readers see a pause."""
    with kind(tmp_path) as (url, servers):
        shared = partial(open_redis, url, lease_s=PATIENT_S, give_up_after_s=PATIENT_S)
        async with shared() as one, shared() as other:
            writers = [await begin(one, delta(1)) for _ in range(20)]
            logs = [await other.read(ANONYMOUS, writer.lease.stream_id) for writer in writers]
            for number in range(2, 41):
                for writer in writers:
                    writer.write(delta(number))
                if number == 20:
                    await seen(logs[0], 10)
                    servers[0].kill()
                await asyncio.sleep(0.002)  # the times at which steps end
            for writer in writers:
                writer.write(DONE)
            expected = [*map(delta, range(1, 41)), DONE]
            for writer, log in zip(writers, logs, strict=True):
                await seen(log, 41)
                await seen(writer.lease.log, 41)
                assert log.events == writer.lease.log.events == expected
            assert one.write_errors.current is None
            await begin(one, delta(1))


@pytest.mark.parametrize("fsync", ["always", "everysec", "no"])
async def test_redis_is_killed(tmp_path: Path, fsync: str) -> None:
    """With a file nothing is lost by kill -9, however seldom it is synced: the operating system has it."""
    with own_redis(tmp_path, "--appendonly", "yes", "--appendfsync", fsync) as (url, process):
        async with open_redis(url, lease_s=LEASE_S) as one:
            writers = [await begin(one, delta(1)) for _ in range(10)]
            for number in range(2, 30):
                for writer in writers:
                    writer.write(delta(number))
            await seen(writers[-1].lease.log, 15)
            process.kill()  # and the server with it
            readable = {writer.lease.stream_id: list(writer.lease.log.events) for writer in writers}
            process.start()
            async with open_redis(url, lease_s=LEASE_S) as other:
                for stream_id, events in readable.items():
                    assert (await other.read(ANONYMOUS, stream_id)).events[: len(events)] == events


async def _ten_writers(store: RedisLogStore, process: OwnRedis) -> tuple[list[Writer], int]:
    """Return writers of 29 events each, and the size of Redis's file after the first ones."""
    writers = [await begin(store, delta(1)) for _ in range(10)]
    kept = process.file_bytes
    for number in range(2, 30):
        for writer in writers:
            writer.write(delta(number))
        await seen(writers[-1].lease.log, number)
    return writers, kept


async def test_the_file_of_redis_has_lost_its_end(tmp_path: Path) -> None:
    """As after a power cut. A server that lives writes again what readers have seen."""
    with own_redis(tmp_path, "--appendonly", "yes", "--appendfsync", "no") as (url, process):
        async with open_redis(url, lease_s=PATIENT_S, give_up_after_s=PATIENT_S) as one:
            writers, kept = await _ten_writers(one, process)
            late = await begin(one, delta(1))
            process.kill()
            process.cut_file((kept + process.file_bytes) // 2)
            process.start()
            for writer in [*writers, late]:
                writer.write(DONE)
            async with open_redis(url, lease_s=LEASE_S) as other:
                for writer, count in [*((writer, 29) for writer in writers), (late, 1)]:
                    log = writer.lease.log
                    await seen(log, count + 1)
                    assert log.events == [*map(delta, range(1, count + 1)), DONE]
                    assert (await other.read(ANONYMOUS, log.stream_id)).events == log.events


async def test_the_file_of_redis_has_lost_its_end_and_the_server_died(tmp_path: Path) -> None:
    """The next server finds the beginning of each stream, without a gap."""
    with own_redis(tmp_path, "--appendonly", "yes", "--appendfsync", "no") as (url, process):
        async with open_redis(url, lease_s=LEASE_S) as one:
            _, kept = await _ten_writers(one, process)
            process.kill()
        process.cut_file((kept + process.file_bytes) // 2)
        process.start()
        async with open_redis(url, lease_s=LEASE_S) as other:
            leases: list[Lease] = []
            while len(leases) < 10:
                leases += await takes(other)
            counts = [lease.log.last_seq for lease in leases]
            assert 1 <= min(counts) <= max(counts) < 29
            for lease in leases:
                assert lease.log.events == [*map(delta, range(1, lease.log.last_seq + 1))]


@pytest.fixture(scope="module")
def encrypted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str, Path]]:
    """A Redis and its Sentinel, both with TLS and a password of their own: the address of Redis, that of the service,
    and the file of the certificate."""
    directory = tmp_path_factory.mktemp("encrypted")
    certificate, key = write_certificate(directory, "redis")
    tls = (
        f"tls-cert-file {certificate}\ntls-key-file {key}\ntls-ca-cert-file {certificate}\n"
        "tls-auth-clients no\ntls-replication yes\n"
    )
    ports = [free_port(), free_port()]
    config = f'tls-port {ports[0]}\n{tls}requirepass "p@ss"\nsave ""\n'
    with closing(OwnRedis(directory / "primary", config=config)):
        config = (
            f"tls-port {ports[1]}\n{tls}requirepass watching\n"
            f'sentinel monitor main 127.0.0.1 {ports[0]} 1\nsentinel auth-pass main "p@ss"\n'
        )
        with closing(OwnRedis(directory / "sentinel", "--sentinel", config=config)):
            yield f"127.0.0.1:{ports[0]}/0", f"127.0.0.1:{ports[1]}/main", certificate


async def test_tls_and_passwords(encrypted: tuple[str, str, Path]) -> None:
    address, service, certificate = encrypted
    direct = f"rediss://:p%40ss@{address}?ca_file={certificate}"
    found = f"rediss+sentinel://:p%40ss@{service}?ca_file={certificate}&sentinel_password=watching"
    async with open_redis(direct) as one, open_redis(found) as other:
        writer = await begin(one, delta(1))
        writer.write(DONE)
        log = await other.read(ANONYMOUS, writer.lease.stream_id)
        await seen(log, 2)
        assert log.events == [delta(1), DONE]


# redis-py does not wait until a refused TLS connection is closed, and the loop of the test ends before.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("password", "parameters", "reason"),
    [
        ("p%40ss", "ca_file={file}", "refuses the name or the password (?sentinel_user"),
        pytest.param(
            "p%40ss",
            "ca_file={file}&sentinel_password=wrong",
            "refuses the name or the password (?sentinel_user",
            marks=pytest.mark.deep,
        ),
        pytest.param(
            "wrong",
            "ca_file={file}&sentinel_password=watching",
            "refuses the name or the password",
            marks=pytest.mark.deep,
        ),
        ("p%40ss", "sentinel_password=watching", "CERTIFICATE_VERIFY_FAILED"),
        pytest.param(
            "p%40ss",
            "ca_file=/nowhere/ca.pem&sentinel_password=watching",
            "not a readable file of certificates",
            marks=pytest.mark.deep,
        ),
        ("p%40ss", "prefix=", "without a value: prefix"),
        pytest.param("p%40ss", "ca_fil={file}", "unknown parameter: ca_fil", marks=pytest.mark.deep),
    ],
)
async def test_a_sentinel_that_refuses(
    encrypted: tuple[str, str, Path], password: str, parameters: str, reason: str
) -> None:
    _, service, certificate = encrypted
    with pytest.raises(ModelError) as raised:
        async with open_redis(f"rediss+sentinel://:{password}@{service}?{parameters.format(file=certificate)}"):
            pass
    assert reason in raised.value.message
    assert not any(secret in raised.value.message for secret in ("p@ss", "wrong", "watching"))
