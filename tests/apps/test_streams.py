"""The logs of apps' streams in the process of the front."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from tests.apps.one_app import client_of, one_app
from tests.waiting import LONG_S


async def test_a_stream_taken_over_by_another_server_is_handed_over() -> None:
    """Its readers have to reconnect, its generator is stopped, and other streams are not affected."""
    go_on, stopped = asyncio.Event(), asyncio.Event()

    async def items() -> AsyncIterator[str]:
        yield "one"
        try:
            await go_on.wait()
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
            go_on.set()
            await stopped.wait()
            answer = await reading
        assert b'"one"' in answer.content
        assert b"two" not in answer.content
        assert b"event:" not in answer.content
        assert not hosted.streams.feeds
        assert not hosted.streams.num_ended
        assert feed.lease.log.end is None
