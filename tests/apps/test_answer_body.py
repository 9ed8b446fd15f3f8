"""The queue between an app and the log of its stream."""

from __future__ import annotations

import asyncio

import pytest
from tests.waiting import wait_until

from tailrace_outer.apps.answer_body import QueuedBody
from tailrace_outer.serve.link import ChannelClosed


async def test_messages_arrive_in_order_and_then_the_end() -> None:
    stops: list[str] = []
    body = QueuedBody(lambda: stops.append("stop"))
    over: list[str] = []
    body.when_over(lambda: over.append("over"))
    receiving = asyncio.create_task(_receive_all(body))
    for number in range(100):
        await body.put(b"%d" % number)
    assert not over
    body.finish(b"failure")
    received, failure = await receiving
    assert received == [b"%d" % number for number in range(100)]
    assert failure == b"failure"
    assert over == ["over"]
    body.close()
    assert not stops, "the app's work is over"


async def test_the_app_waits_for_room() -> None:
    body = QueuedBody(lambda: None)
    num_put = 0

    async def put_all() -> None:
        nonlocal num_put
        for _ in range(1000):
            await body.put(b"")
            num_put += 1

    putting = asyncio.create_task(put_all())
    await wait_until(lambda: num_put > 0)
    had_room = num_put
    assert had_room < 1000
    await body.receive()
    await wait_until(lambda: num_put > had_room)
    assert num_put == had_room + 1
    body.close()
    with pytest.raises(ChannelClosed):
        await putting


async def test_closing_stops_the_app_once() -> None:
    stops: list[str] = []
    body = QueuedBody(lambda: stops.append("stop"))
    receiving = asyncio.create_task(_receive_all(body))
    body.close()
    body.close()
    assert stops == ["stop"]
    assert await receiving == ([], None)
    with pytest.raises(ChannelClosed):
        await body.put(b"late")


async def _receive_all(body: QueuedBody) -> tuple[list[bytes], bytes | None]:
    received: list[bytes] = []
    while True:
        try:
            received.append(await body.receive())
        except ChannelClosed as end:
            return received, end.failure
