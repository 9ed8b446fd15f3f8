"""Redis has events of a stream that its server has not written: it had lost the stream, and the server from which this
one took it has written it again and gone on."""

from __future__ import annotations

from pathlib import Path

import redis
from tests.redis.shared_streams import DONE, LEASE_S, Writer, begin, delta, seen, takes
from tests.testing.redis_server import own_redis
from tests.waiting import wait_until

from tailrace.streams.rows import Rows
from tailrace.types import ANONYMOUS, Event
from tailrace_outer.redis.redis_store import open_redis

_BASE = "tailrace:{0}:"


def _write(client: redis.Redis, stream_id: str, number: int, event: Event) -> None:
    row = Rows(None).encode_events(stream_id, [event])
    client.xadd(f"{_BASE}events:{stream_id}", {"e": row}, id=f"{number}-0")
    client.hset(f"{_BASE}stream:{stream_id}", "last", str(number))


async def test_it_goes_on_from_there(tmp_path: Path) -> None:
    """What produces it here is behind, and would write its next events after those that Redis has."""
    with own_redis(tmp_path) as (url, process), process.client() as client:
        async with open_redis(url, lease_s=LEASE_S) as store:
            writer = await begin(store, delta(1))
            for number in (2, 3, 4):
                _write(client, writer.lease.stream_id, number, delta(number))
            writer.write(delta(2))
            await wait_until(lambda: writer.heard == ["lease_lost"])
            (lease,) = await takes(store)
            assert lease.log.events == [delta(number) for number in (1, 2, 3, 4)]
            Writer(store, lease).write(delta(5), DONE)
            await seen(lease.log, 6)


async def test_its_end_is_shown(tmp_path: Path) -> None:
    with own_redis(tmp_path) as (url, process), process.client() as client:
        async with open_redis(url, lease_s=LEASE_S) as store:
            writer = await begin(store, delta(1))
            _write(client, writer.lease.stream_id, 2, delta(2))
            _write(client, writer.lease.stream_id, 3, DONE)
            writer.write(delta(2))
            await seen(writer.lease.log, 3)
            assert (await store.read(ANONYMOUS, writer.lease.stream_id)).events == [delta(1), delta(2), DONE]
            assert writer.heard == []
