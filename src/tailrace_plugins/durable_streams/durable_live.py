"""ASGI applications that wait for new content of a durable stream."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import assert_never

from starlette.types import ASGIApp, Receive, Scope, Send

from tailrace.errors import TailraceError
from tailrace.server import HEARTBEAT, Follower, client_disconnected
from tailrace_plugins.durable_streams.durable_answers import body_of, num_bytes_of, sse_of
from tailrace_plugins.durable_streams.page import Page, Readable, next_page, page_of

__all__ = ["PAGE_BYTES", "LongPoll", "Tail", "WholePage"]

PAGE_BYTES = 2**20  # of one answer or event; an append is never split
_TAIL_S = 60.0  # after which the client reconnects, as in the protocol


class _Client:
    is_gone = False

    async def watch(self, receive: Receive, follower: Follower) -> None:
        await client_disconnected(receive)
        self.is_gone = True
        follower.wake()


@asynccontextmanager
async def _watched(receive: Receive, follower: Follower) -> AsyncIterator[_Client]:
    """Wake the follower when the client disconnects."""
    client = _Client()
    async with asyncio.TaskGroup() as group:
        watcher = group.create_task(client.watch(receive, follower))
        yield client
        watcher.cancel()


@dataclass(frozen=True, slots=True)
class WholePage:
    """An answer with the content of a page."""

    page: Page
    headers: Mapping[str, str]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {**self.headers, "content-length": str(num_bytes_of(self.page))}
        pairs = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": pairs})
        for piece in body_of(self.page):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body"})


@dataclass(frozen=True, slots=True)
class LongPoll:
    """Waits for content after a position, and answers once."""

    stream: Readable
    position: int
    answer: Callable[[Page], ASGIApp]
    wait_s: float

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises: UnknownStream if the stream was deleted meanwhile, StorageError if it goes on, but not here."""
        with self.stream.follower(self.position) as follower:
            async with _watched(receive, follower) as client:
                page = await next_page(self.stream, follower, PAGE_BYTES, at_most_s=self.wait_s)
        if client.is_gone:
            return
        match page:
            case Page():
                await self.answer(page)(scope, receive, send)
            case TailraceError():
                raise page
            case never:
                assert_never(never)


@dataclass(frozen=True, slots=True)
class Tail:
    """Server-sent events from a position, for about a minute."""

    stream: Readable
    position: int
    cursor: Callable[[], int]
    headers: Mapping[str, str]
    heartbeat_s: float  # 0: none

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(name.encode(), value.encode("latin-1")) for name, value in self.headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        with self.stream.follower(self.position) as follower:
            async with _watched(receive, follower) as client:
                await self._write(follower, client, send)
        if not client.is_gone:
            await send({"type": "http.response.body"})

    async def _write(self, follower: Follower, client: _Client, send: Send) -> None:
        """Write pages. The first page is sent even if it is empty: it has the client's position."""
        end_s = time.monotonic() + _TAIL_S
        page: Page | TailraceError = page_of(self.stream, follower.cursor, PAGE_BYTES)
        is_first = True
        while not client.is_gone:
            match page:
                case Page():
                    has_news = is_first or page.pieces or page.is_closed
                    for piece in sse_of(page, self.cursor()) if has_news else (HEARTBEAT,):
                        await send({"type": "http.response.body", "body": piece, "more_body": True})
                case TailraceError():
                    return
                case never:
                    assert_never(never)
            follower.cursor, is_first = page.position, False
            left_s = end_s - time.monotonic()
            if page.is_closed or left_s <= 0:
                return
            if not page.is_up_to_date:
                await asyncio.sleep(0)  # `send` does not yield if the buffer has space
            page = await next_page(
                self.stream, follower, PAGE_BYTES, at_most_s=min(self.heartbeat_s or _TAIL_S, left_s)
            )
