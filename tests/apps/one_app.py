"""The front of an app in this process, connected by a real link to a fake app process."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, cast

import httpx
import msgspec
from starlette.types import ASGIApp, Message
from tests.waiting import LONG_S

from tailrace import serve
from tailrace.records.records_service import Records
from tailrace.settings import Settings
from tailrace.streams import MemoryLogStore
from tailrace.streams.opening import for_apps
from tailrace_outer.apps.app_streams import AppStreams
from tailrace_outer.apps.front import Front
from tailrace_outer.apps.pool import HostedApp, Pool
from tailrace_outer.serve.link import Channel, Link

__all__ = ["OneApp", "client_of", "one_app"]


class _Place:
    """A slot in a process."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.replica = self
        self.has_room = True

    async def lease(self) -> _Place:
        return self

    def release(self) -> None: ...


@dataclass(frozen=True)
class OneApp:
    front: Front
    streams: AppStreams
    store: MemoryLogStore


@contextlib.asynccontextmanager
async def one_app(items: Callable[[], AsyncIterator[Any]]) -> AsyncIterator[OneApp]:  # Any: as `serve.stream` takes
    """Run an app that answers with `serve.stream` of these items. At the end of the block, no answer may run."""
    loop = asyncio.get_running_loop()
    answers = set()

    def opened(channel: Channel, kind: str, head: bytes) -> None:
        task = loop.create_task(_answer(channel, items))

        def stop() -> None:
            task.cancel()

        channel.when_over(stop)
        answers.add(task)

    app = Link(opened, lambda: None, is_front=False)
    ours = Link(lambda channel, kind, head: None, lambda: None, is_front=True)
    for link, sock in zip((app, ours), socket.socketpair(), strict=True):
        await loop.create_unix_connection(lambda link=link: link, sock=sock)  # type: ignore[misc]  # of the loop
    with contextlib.closing(MemoryLogStore()) as store:
        async with asyncio.TaskGroup() as feeding:
            streams = AppStreams(for_apps(store), Settings(), feeding)
            front = Front(Settings(), streams, Records(Settings()))
            front.set_apps([HostedApp("app", "", {"App": cast(Pool, _Place(ours))})])
            front.is_open = True
            yield OneApp(front, streams, store)
    await asyncio.wait_for(asyncio.gather(*answers, return_exceptions=True), LONG_S)
    for link in (app, ours):
        link.abort()


async def _answer(channel: Channel, items: Callable[[], AsyncIterator[Any]]) -> None:
    async def send(message: Message) -> None:
        await channel.send(msgspec.msgpack.encode(message))

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    scope = {"type": "http", "method": "GET", "path": "/", "extensions": {"tailrace": {}}}
    await serve.stream(items())(scope, receive, send)
    channel.close()


def client_of(app: ASGIApp, **headers: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost", headers=headers)
