"""Servers for tests of durable streams: one, or two over one Redis that answer the requests of a client in turn."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import httpx
from tests.api.process import Server
from tests.http.turns import Turns
from tests.testing.redis_server import delete_keys, shared_url
from tests.waiting import LONG_S

__all__ = ["BEGINNING", "JSON", "KINDS", "TEXT", "Pair", "durable_server", "in_turn", "new_path"]

KINDS = ("one server", "two servers")
TEXT = {"content-type": "text/plain"}
JSON = {"content-type": "application/json"}
BEGINNING = "0000000000000000_0000000000000000"  # the offset of an empty stream
_NUMBERS = itertools.count()


def new_path() -> str:
    """Return the path of a new stream."""
    return f"/v1/durable/tests/{next(_NUMBERS)}"


class Pair(Server):
    """Two servers, as one. Their client sends each request to the other one than the request before."""

    def __init__(self, source: str, *flags: str) -> None:
        self._prefix = f"test-{secrets.token_hex(8)}"
        journal = ("--journal", f"{shared_url()}?prefix={self._prefix}")
        super().__init__(source, *flags, *journal)
        self.other = Server(source, *flags, *journal)

    def wait_ready(self, *, timeout_s: float = LONG_S) -> Pair:
        super().wait_ready(timeout_s=timeout_s)
        self.other.wait_ready(timeout_s=timeout_s)
        return self

    @property
    def http(self) -> httpx.Client:
        if self._client is None:
            turns = Turns([self.port, self.other.port])
            self._client = httpx.Client(base_url=self.url, timeout=LONG_S, transport=turns)
        return self._client

    def close(self) -> None:
        try:
            self.other.close()
        finally:
            super().close()
            delete_keys(self._prefix)


def durable_server(kind: str, *, source: str = "scripted", flags: Sequence[str] = ()) -> Server:
    """Start a server of one of the `KINDS`."""
    return Pair(source, *flags) if kind == "two servers" else Server(source, *flags)


@contextmanager
def in_turn(server: Server) -> Iterator[str]:
    """Yield a URL. Where there are two servers, its connections go to them in turn, as through a load balancer."""
    if not isinstance(server, Pair):
        yield server.url
        return
    ports = itertools.cycle([server.port, server.other.port])

    def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.append(asyncio.get_running_loop().create_task(_forward(reader, writer, next(ports))))

    tasks: list[asyncio.Task[None]] = []
    loop = asyncio.new_event_loop()
    listener = loop.run_until_complete(asyncio.start_server(connect, "127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    finally:
        asyncio.run_coroutine_threadsafe(_close(listener, tasks), loop).result(LONG_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(LONG_S)
        loop.close()


async def _close(listener: asyncio.Server, tasks: Sequence[asyncio.Task[None]]) -> None:
    listener.close()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int) -> None:
    far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)

    async def pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError), contextlib.closing(target):
            while piece := await source.read(1 << 16):
                target.write(piece)
                await target.drain()

    await asyncio.gather(pump(reader, far_writer), pump(far_reader, writer))
