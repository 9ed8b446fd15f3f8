"""The streams of a topic, such as a chat, that servers share: what Redis lists, and for how long."""

from __future__ import annotations

from pathlib import Path

import redis
from msgspec.structs import replace
from tests.redis.shared_streams import DONE, Writer, new_record, seen
from tests.testing.redis_server import prefix_of, shared_url
from tests.waiting import wait_until

from tailrace_outer.redis.redis_store import RedisLogStore, open_redis

_RETENTION_S = 600.0


def _listed(path: Path) -> tuple[list[str], float]:
    """Return the ids of the only topic, the newest first, and for how many seconds they are kept."""
    with redis.Redis.from_url(shared_url()) as client:
        (key,) = client.scan_iter(match=f"{prefix_of(path)}:*:topic:*", count=1_000)
        return [member.decode().strip("!") for member in client.zrevrange(key, 0, -1)], client.pttl(key) / 1000


async def _lists(path: Path, ids: list[str]) -> None:
    await wait_until(lambda: _listed(path)[0] == ids, timeout_s=30)


async def _begin(store: RedisLogStore, number: int) -> Writer:
    record = replace(new_record(), created_s=float(number), owner="me", wire="a", topics=("chat",))
    return Writer(store, await store.open(record))


async def test_of_answers_one_after_the_other_the_last_stays_listed(tmp_path: Path) -> None:
    url = f"{shared_url()}?prefix={prefix_of(tmp_path)}"
    async with open_redis(url, retention_s=_RETENTION_S) as store:
        for number in range(3):
            writer = await _begin(store, number)
            writer.write(DONE)
            await seen(writer.lease.log, 1)
            await _lists(tmp_path, [writer.lease.log.stream_id])
            assert await store.newest("me", "a", "chat", has_ended=True) is writer.lease.log
            assert await store.newest("me", "a", "chat") is None


async def test_an_ended_stream_does_not_let_a_running_one_expire(tmp_path: Path) -> None:
    url = f"{shared_url()}?prefix={prefix_of(tmp_path)}"
    async with open_redis(url, retention_s=_RETENTION_S) as store:
        first, second, third = [await _begin(store, number) for number in range(3)]
        ids = [writer.lease.log.stream_id for writer in (third, second, first)]
        assert _listed(tmp_path)[0] == ids
        third.write(DONE)
        second.write(DONE)
        await _lists(tmp_path, [ids[0], ids[2]])
        assert _listed(tmp_path)[1] > _RETENTION_S
        assert await store.newest("me", "a", "chat") is first.lease.log
        first.write(DONE)
        await wait_until(lambda: _listed(tmp_path)[1] <= _RETENTION_S, timeout_s=30)
        assert _listed(tmp_path)[0] == [ids[0]]
