"""ASGI applications that wait for new content of a durable stream."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from starlette.types import ASGIApp, Receive, Scope, Send

from tailrace.dialects.durable_answers import body_of, num_bytes_of, sse_of
from tailrace.dialects.wire import HEARTBEAT
from tailrace.durable.page import Follower, Page, Readable, page_of
from tailrace.errors import StorageError, UnknownStream
from tailrace.http.answers import client_disconnected

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


async def _wait(follower: Follower, at_most_s: float) -> None:
    timer = asyncio.get_running_loop().call_later(max(0.0, at_most_s), follower.wake)
    try:
        await follower.wait()
    finally:
        timer.cancel()


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
        """Raises: UnknownStream if the stream was deleted meanwhile, StorageError if it goes on, but not here: an empty
        answer would bring the client back at once."""
        with self.stream.follower(self.position) as follower:
            async with _watched(receive, follower) as client:
                await _wait(follower, self.wait_s)
        if client.is_gone:
            return
        if self.stream.is_gone:
            raise UnknownStream("This stream was deleted.")
        page = page_of(self.stream, self.position, PAGE_BYTES)
        if self.stream.is_halted and not page.pieces and not page.is_closed:
            raise StorageError("The stream goes on, but not on this server. Ask again.", retry_after_s=1.0)
        await self.answer(page)(scope, receive, send)


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
        page = self._next_page(follower)
        pieces: Iterable[bytes] = sse_of(page, self.cursor())
        while not client.is_gone:
            for piece in pieces:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            if page.is_closed or self.stream.is_halted or time.monotonic() >= end_s:
                return
            if page.is_up_to_date:
                await _wait(follower, min(self.heartbeat_s or _TAIL_S, end_s - time.monotonic()))
            else:
                await asyncio.sleep(0)  # `send` does not yield if the buffer has space
            page = self._next_page(follower)
            pieces = sse_of(page, self.cursor()) if page.pieces or page.is_closed else (HEARTBEAT,)

    def _next_page(self, follower: Follower) -> Page:
        page = page_of(self.stream, follower.cursor, PAGE_BYTES)
        follower.cursor = page.position
        return page
