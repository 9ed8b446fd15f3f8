"""A TCP proxy that imitates a bad network. It works in front of any server, and knows nothing of HTTP.

It never changes, loses or repeats bytes inside a connection. It decides when bytes arrive, in what pieces, how many,
and how the connection ends. A script has one line for each connection; later connections are not disturbed::

    from tailrace.testing import Chaos, Flow, Line

    cut, bytewise = Flow(end_after_bytes=700, end="reset"), Flow(piece_bytes=1)
    with Chaos(8000, [Line(to_client=cut), Line(to_client=bytewise)]) as chaos:
        read(chaos.url)  # is cut off in the middle, reconnects, and gets the rest byte by byte

With `async with` it runs on the event loop of the test, with `with` in its own thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Literal

__all__ = ["Chaos", "Flow", "Line"]

End = Literal["fin", "reset", "half", "hole"]

_PIECE_BYTES = 64 * 2**10
_BUFFER_BYTES = 16 * 2**10  # of the kernel, in each direction at each end
_MAX_PIECES = 256  # that are received together
_INTERVAL_S = 0.05  # a flow with a rate carries a piece in this time


@dataclass(frozen=True, slots=True)
class Flow:
    """How one direction of a connection carries its bytes, and how many.

    `end` happens when `end_after_bytes` have passed:

    - `fin`: the connection is closed at both sides.
    - `reset`: the connection is reset at both sides. Bytes that were not read yet may be lost.
    - `half`: this direction is closed, and the other continues.
    - `hole`: this direction carries no more bytes, and stays open. With 0 bytes in both directions, the connection is
      accepted, and nothing else happens.
    """

    piece_bytes: int = _PIECE_BYTES  # the most bytes in one write
    delay_s: float = 0.0  # after each piece
    bytes_per_s: float = 0.0  # on average; 0 is unlimited
    end_after_bytes: int | None = None
    end: End = "fin"


@dataclass(frozen=True, slots=True)
class Line:
    """One connection."""

    to_client: Flow = Flow()
    to_server: Flow = Flow()


class Chaos:
    """Listens at `url` during its context. At the end of the context it closes all connections.

    `script` gives one line for each new connection, and may be endless. `server_port` may be changed for later
    connections; if no server listens there, they are reset. `num_connections` counts all connections.
    """

    def __init__(self, server_port: int, script: Iterable[Line] = (), *, host: str = "127.0.0.1") -> None:
        self.server_port = server_port
        self.num_connections = 0
        self.port = 0
        self._host = host
        self._script = iter(script)
        self._loop: asyncio.AbstractEventLoop
        self._serving: asyncio.Task[None]
        self._thread: threading.Thread

    @property
    def url(self) -> str:
        return f"http://{self._host}:{self.port}"

    def __enter__(self) -> Chaos:
        self._start(asyncio.new_event_loop())
        self._thread = threading.Thread(target=self._run, name="chaos", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._serving.cancel)
        self._thread.join()

    async def __aenter__(self) -> Chaos:
        self._start(asyncio.get_running_loop())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._serving.cancel()
        await asyncio.wait([self._serving])

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        listener = socket.create_server((self._host, 0), backlog=1024)
        listener.setblocking(False)
        _shrink_buffers(listener)  # accepted connections inherit it
        self.port = listener.getsockname()[1]
        self._loop = loop
        self._serving = loop.create_task(self._serve(listener))

    def _run(self) -> None:
        with contextlib.closing(self._loop), contextlib.suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._serving)

    async def _serve(self, listener: socket.socket) -> None:
        with listener:
            async with asyncio.TaskGroup() as lines:
                while True:
                    client, _ = await asyncio.get_running_loop().sock_accept(listener)
                    self.num_connections += 1
                    lines.create_task(self._connect(client, next(self._script, Line())))

    async def _connect(self, client: socket.socket, line: Line) -> None:
        with client, socket.socket() as server:
            server.setblocking(False)
            _shrink_buffers(server)
            try:
                await asyncio.get_running_loop().sock_connect(server, (self._host, self.server_port))
                async with asyncio.TaskGroup() as directions:
                    directions.create_task(_carry(server, client, line.to_client))
                    directions.create_task(_carry(client, server, line.to_server))
            except* _Ended:
                for end in (client, server):
                    with contextlib.suppress(OSError):
                        end.shutdown(socket.SHUT_WR)  # close() with unread bytes would reset the connection
            except* OSError:
                for end in (client, server):
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


class _Ended(Exception):
    """The script ends this connection."""


async def _carry(source: socket.socket, sink: socket.socket, flow: Flow) -> None:
    """Raises: _Ended; OSError if one side, or the script, resets the connection."""
    loop = asyncio.get_running_loop()
    size = min(flow.piece_bytes, max(1, int(flow.bytes_per_s * _INTERVAL_S))) if flow.bytes_per_s else flow.piece_bytes
    is_paced = bool(flow.delay_s or flow.bytes_per_s)
    # A paced flow receives one piece at a time, so that later bytes wait at the sender.
    most = size if is_paced else min(_PIECE_BYTES, size * _MAX_PIECES)
    num_passed = 0
    while num_passed != flow.end_after_bytes:
        room = most if flow.end_after_bytes is None else min(most, flow.end_after_bytes - num_passed)
        received = await loop.sock_recv(source, room)
        if not received:
            sink.shutdown(socket.SHUT_WR)
            return
        num_passed += len(received)
        for start in range(0, len(received), size):
            await loop.sock_sendall(sink, received[start : start + size])
        await asyncio.sleep(flow.delay_s + len(received) / flow.bytes_per_s if flow.bytes_per_s else flow.delay_s)
    match flow.end:
        case "fin":
            raise _Ended
        case "reset":
            raise ConnectionResetError
        case "half":
            sink.shutdown(socket.SHUT_WR)
        case "hole":
            await loop.create_future()


def _shrink_buffers(end: socket.socket) -> None:
    """Use small buffers, so that each side soon notices when the other stops reading."""
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
