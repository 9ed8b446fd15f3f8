"""Connections to Redis that break, are slow, or lead to a server that has moved."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any
from urllib.parse import urlsplit

__all__ = ["breaking", "demotable", "movable", "slow"]

_Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def breaking(url: str, command: bytes) -> AsyncIterator[str]:
    """Yields the URL of a proxy that forwards the first such command, and breaks the connection when its answer
    comes."""
    was_seen = False

    async def forward(near: _Ends, far: _Ends) -> None:
        (reader, writer), (far_reader, far_writer) = near, far
        breaks = False

        async def send() -> None:
            nonlocal was_seen, breaks
            while piece := await reader.read(1 << 16):
                if command in piece and not was_seen:
                    was_seen = breaks = True
                far_writer.write(piece)

        async with contextlib.AsyncExitStack() as ends, asyncio.TaskGroup() as group:
            for end in (writer, far_writer):
                ends.push_async_callback(end.wait_closed)
                ends.callback(end.close)
            sending = group.create_task(send())
            while (piece := await far_reader.read(1 << 16)) and not breaks:
                writer.write(piece)
            sending.cancel()

    async with _proxy([url], forward) as there:
        yield there
    assert was_seen


@asynccontextmanager
async def slow(url: str, delay_s: float) -> AsyncIterator[str]:
    """Yields the URL of a proxy that passes everything on later."""

    async with _proxy([url], partial(_forward, delay_s=delay_s)) as there:
        yield there


@asynccontextmanager
async def movable(url: str) -> AsyncIterator[tuple[str, Callable[[str], None]]]:
    """Yields a URL that is an address of another one, and a function that moves it to a third one. Connections that are
    open stay where they are."""
    targets = [url]
    async with _proxy(targets, _forward) as there:
        yield there, targets.append


@asynccontextmanager
async def demotable(url: str) -> AsyncIterator[tuple[str, Callable[[str], None]]]:
    """Yields the URL of a proxy, and a function: after its call, connections that are open answer each command with
    this error. New ones lead to the server."""
    errors: list[str] = []

    async def forward(near: _Ends, far: _Ends) -> None:
        (reader, writer), (far_reader, far_writer) = near, far
        was_demoted = bool(errors)

        async def send() -> None:
            with contextlib.closing(far_writer):
                while piece := await reader.read(1 << 16):
                    if errors and not was_demoted:
                        writer.write(f"-{errors[0]}\r\n".encode())
                    else:
                        far_writer.write(piece)

        async def receive() -> None:
            with contextlib.closing(writer):
                while piece := await far_reader.read(1 << 16):
                    writer.write(piece)

        await asyncio.gather(send(), receive())

    async with _proxy([url], forward) as there:
        yield there, errors.append


async def _forward(near: _Ends, far: _Ends, *, delay_s: float = 0.0) -> None:
    async def pump(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError), contextlib.closing(target):
            while piece := await source.read(1 << 16):
                await asyncio.sleep(delay_s)
                target.write(piece)

    await asyncio.gather(pump(near[0], far[1]), pump(far[0], near[1]))


@asynccontextmanager
async def _proxy(
    targets: Sequence[str], forward: Callable[[_Ends, _Ends], Coroutine[Any, Any, None]]
) -> AsyncIterator[str]:
    """Yields the URL of a server that connects to the last target for each of its connections, and calls `forward` with
    both."""
    parts = urlsplit(targets[0])
    connections: list[asyncio.Task[None]] = []

    async def run(near: _Ends) -> None:
        target = urlsplit(targets[-1])
        await forward(near, await asyncio.open_connection(target.hostname, target.port))

    def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(asyncio.create_task(run((reader, writer))))

    async with await asyncio.start_server(connect, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        try:
            yield parts._replace(netloc=parts.netloc.replace(str(parts.port), str(port))).geturl()
        finally:  # from Python 3.12.1 on, leaving the server waits for its connections
            for connection in connections:
                connection.cancel()
            await asyncio.gather(*connections, return_exceptions=True)
