"""`@serve.batch` with HTTP requests as arguments: a batch begins with requests whose bodies are there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message
from tests.serve.batches import LONG_S, drain, start, together, within
from tests.waiting import idle

from tailrace_outer.serve.batching import batch


class _HalfSent:
    """A request whose client has sent a part of the body. It sends the rest, or leaves, when the test says so."""

    def __init__(self) -> None:
        self._messages: asyncio.Queue[Message] = asyncio.Queue()
        self._messages.put_nowait({"type": "http.request", "body": b'{"x":', "more_body": True})
        self.request = Request({"type": "http", "method": "POST", "headers": []}, self._messages.get)

    def send_rest(self) -> None:
        self._messages.put_nowait({"type": "http.request", "body": b"1}", "more_body": False})

    def leave(self) -> None:
        self._messages.put_nowait({"type": "http.disconnect"})


@batch(max_batch_size=2, batch_wait_timeout_s=LONG_S)
async def _bodies(requests: list[Request]) -> list[Any]:
    return [await request.json() for request in requests]


@batch(max_batch_size=2, batch_wait_timeout_s=LONG_S)
async def _streamed_bodies(requests: list[Request]) -> AsyncIterator[list[Any]]:
    yield [await request.json() for request in requests]


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_batch_has_only_requests_whose_bodies_are_there(is_stream: bool) -> None:
    def call(client: _HalfSent) -> Any:
        return drain(_streamed_bodies(client.request)) if is_stream else _bodies(client.request)

    leaving, *others = [_HalfSent() for _ in range(3)]
    calls = [start(call(client)) for client in (leaving, *others)]
    await idle()
    for client in others:
        client.send_rest()
    expected = [[{"x": 1}]] if is_stream else [{"x": 1}]
    assert await together(*calls[1:]) == expected * 2
    leaving.leave()
    with pytest.raises(ClientDisconnect):
        await within(calls[0])


async def test_a_body_that_was_read_as_a_stream_is_not_waited_for() -> None:
    @batch(max_batch_size=1)
    async def methods(requests: list[Request]) -> list[str]:
        return [request.method for request in requests]

    client = _HalfSent()
    client.send_rest()
    assert b"".join([piece async for piece in client.request.stream()]) == b'{"x":1}'
    assert await within(methods(client.request)) == "POST"
