"""The logs of apps' streams in the process of the front."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from tests.apps.one_app import client_of, one_app
from tests.testing.redis_server import own_redis, prefix_of, shared_url
from tests.waiting import LONG_S, wait_until

from tailrace.errors import SeqOutOfRange
from tailrace.settings import Settings
from tailrace.streams.opening import for_apps
from tailrace.types import Payload, Record, TextDelta, new_stream_id
from tailrace_outer.apps.app_streams import AppStreams
from tailrace_outer.apps.events import Memo
from tailrace_outer.redis.redis_store import open_redis


async def test_a_stream_taken_over_by_another_server_is_handed_over() -> None:
    """Its readers are sent away, its generator is stopped, and other streams are not affected."""
    may_continue, stopped = asyncio.Event(), asyncio.Event()

    async def items() -> AsyncIterator[str]:
        yield "one"
        try:
            await may_continue.wait()
            yield "two"
            await asyncio.Event().wait()
        finally:
            stopped.set()

    async with one_app(items) as hosted:
        reading = asyncio.create_task(client_of(hosted.front).get("/"))
        async with asyncio.timeout(LONG_S):
            while not [feed for feed in hosted.streams.feeds if feed.lease.log.last_seq]:
                await asyncio.sleep(0.001)  # until the first item is there
            (feed,) = hosted.streams.feeds
            hosted.store.close()  # from now on it refuses what comes, as it does when another server writes the stream
            may_continue.set()
            await stopped.wait()
            answer = await reading
        assert b'"one"' in answer.content
        assert b"two" not in answer.content
        stream_id = feed.lease.stream_id
        message = "Another server writes this stream now."
        error = {"code": "lease_lost", "message": message, "retryable": True, "stream_id": stream_id, "last_seq": 1}
        shown = json.dumps({"status": "released", "error": error}, separators=(",", ":"))
        assert answer.text.endswith(f"event: released\ndata: {shown}\nid: {stream_id}-1\n\n")
        assert not hosted.streams.feeds
        assert not hosted.streams.num_ended
        assert feed.lease.log.end is None


async def test_a_stream_is_ended_although_redis_fails_when_it_was_taken_over(tmp_path: Path) -> None:
    """The end is dropped with all that waits when the server gives up, and has to be written again."""
    with own_redis(tmp_path) as (url, redis):
        record = Record(new_stream_id(), 1.5, model="app")
        async with open_redis(url, of_apps=True) as gone:
            await gone.open(record)
        async with open_redis(url, of_apps=True, give_up_after_s=0.1) as store, asyncio.TaskGroup() as group:
            streams = AppStreams(for_apps(store), Settings(), group)
            await streams.recover()
            redis.stop()  # before the end is written
            log = await store.read(record.owner, record.stream_id)
            has_given_up = asyncio.Event()
            store.write_errors.on_give_up.append(lambda _: has_given_up.set())
            async with asyncio.timeout(LONG_S):
                await has_given_up.wait()
            redis.resume()
            await wait_until(lambda: log.end is not None)
            assert log.status == "interrupted"
            assert streams.num_ended == {("app", "interrupted"): 1}


@pytest.mark.parametrize(("memo", "position"), [(Memo(), 3), (Memo("recorded", "text/plain"), 15)])
async def test_a_reader_changes_to_a_server_that_is_behind(tmp_path: Path, memo: Memo, position: int) -> None:
    """A client may have seen events, or bytes, of which its next server has not heard yet."""
    url = f"{shared_url()}?prefix={prefix_of(tmp_path)}"
    record = Record(new_stream_id(), 1.5, model="app", memo=msgspec.json.encode(memo))
    opened, may_continue, written, over = (threading.Event() for _ in range(4))

    async def write() -> None:
        async with open_redis(url, of_apps=True) as one:
            store = for_apps(one)
            lease = await store.open(record)
            opened.set()
            await asyncio.to_thread(may_continue.wait, LONG_S)
            store.append(lease, [Payload(piece) for piece in (b"11111", b"22222", b"33333")])
            await wait_until(lambda: lease.log.last_seq == 3)
            written.set()
            await asyncio.to_thread(over.wait, LONG_S)

    async with open_redis(url, of_apps=True) as other, asyncio.TaskGroup() as group:
        writing = group.create_task(asyncio.to_thread(asyncio.run, write()))
        await asyncio.to_thread(opened.wait, LONG_S)
        log = await other.read(record.owner, record.stream_id)
        may_continue.set()
        try:
            assert written.wait(LONG_S)  # without a turn of this event loop, in which `other` would hear of it
            assert log.last_seq == 0
            streams = AppStreams(for_apps(other), Settings(), group)
            await streams.resume(record.owner, f"{record.stream_id}-{position}")
            assert log.last_seq == 3
            with pytest.raises(SeqOutOfRange):
                await streams.resume(record.owner, f"{record.stream_id}-{position + 1}")
        finally:
            over.set()
            await writing


async def test_bytes_that_an_earlier_version_kept_as_text(tmp_path: Path) -> None:
    url = f"{shared_url()}?prefix={prefix_of(tmp_path)}"
    record = Record(new_stream_id(), 1.5, model="app", memo=msgspec.json.encode(Memo("recorded", "image/png")))
    async with open_redis(url, of_apps=True) as earlier, open_redis(url, of_apps=True) as other:
        lease = await earlier.open(record)
        earlier.append(lease, [TextDelta("\x89PNG", ()), TextDelta("\xff\0", ())])
        await wait_until(lambda: lease.log.last_seq == 2)
        log = await for_apps(other).read(record.owner, record.stream_id, 2)
        assert log.events == [Payload(b"\x89PNG"), Payload(b"\xff\0")]
