"""How long a response with MCP tools goes on without a reader, and what its reader gets in a silence."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest
from starlette.types import Message
from tests.plugins.tool_loop.test_loop_ends import _slow_house
from tests.plugins.tool_loop.test_tool_deaths import BODY, begin, request_with
from tests.waiting import LONG_S

pytest.importorskip("mcp")

from tailrace.errors import RequestError
from tailrace_plugins.tool_loop.asking import Asking
from tailrace_plugins.tool_loop.response_answers import EventsAnswer


@pytest.mark.parametrize(
    ("header", "claim", "is_on_socket", "linger_s"),
    [
        (None, None, False, 0.0),
        (None, "key", False, 60.0),
        (None, None, True, 60.0),
        ("86400", None, False, 86_400.0),
        ("0", "key", True, 0.0),
    ],
)
def test_how_long_it_lingers(header: str | None, claim: str | None, is_on_socket: bool, linger_s: float) -> None:
    request = request_with({} if header is None else {"x-tailrace-linger": header})
    assert Asking.of(request, claim, 60.0, () if is_on_socket else None).linger_s == linger_s


@pytest.mark.parametrize("header", ["1.5", "-1", "86401", "soon"])
def test_a_linger_time_has_the_form_of_all_requests(header: str) -> None:
    with pytest.raises(RequestError):
        Asking.of(request_with({"x-tailrace-linger": header}), None, 60.0)


async def test_a_silence_has_events_as_often_as_the_server_says(tmp_path: Path) -> None:
    async with _slow_house(tmp_path) as (_, loops):
        loop = await begin(loops, request_with({}), BODY)
        await loop.wait(0)
        beats = asyncio.Event()

        async def send(message: Message) -> None:
            if b"event: keepalive" in message.get("body", b""):
                beats.set()

        async def receive() -> Message:
            message: Message = await asyncio.get_running_loop().create_future()
            return message

        answering = asyncio.create_task(EventsAnswer(loop, 0, 0.01)({"type": "http"}, receive, send))
        async with asyncio.timeout(LONG_S):
            await beats.wait()
        answering.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await answering
        await loops.cancel(loop)
