"""A TCP proxy between browser and server that can be cut, restored and observed."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from types import TracebackType

__all__ = ["Cable", "Request"]


@dataclass(frozen=True, slots=True)
class Request:
    """The head of a request that went through."""

    method: str
    target: str
    headers: dict[str, str]


class Cable:
    """Listens on a port of its own and forwards to `port`, which may change while it runs."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.requests: list[Request] = []
        self._own_port = 0
        self._server: asyncio.Server | None = None
        self._ends: set[asyncio.StreamWriter] = set()
        self._pumps: set[asyncio.Task[None]] = set()
        self._is_cut = True
        self._flows: list[asyncio.Event] = []  # of the open connections

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._own_port}"

    async def __aenter__(self) -> Cable:
        await self.mend()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.cut()

    async def mend(self) -> None:
        """Let connections through again, at the same address."""
        self._is_cut = False
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", self._own_port)
        self._own_port = self._server.sockets[0].getsockname()[1]

    async def cut(self) -> None:
        """Break all connections, as a reset does, and refuse new ones."""
        assert self._server is not None
        self._is_cut = True
        self._server.close()
        for end in self._ends:
            end.transport.abort()
        for flow in self._flows:
            flow.set()
        while self._pumps:
            await asyncio.wait(self._pumps)

    def freeze(self) -> None:
        """Open connections stay open and carry nothing, as after a router lost its state. New connections work."""
        for flow in self._flows:
            flow.clear()

    def seen(self, method: str, path: str = "") -> list[Request]:
        """Return the requests of a method whose path ends with a text."""
        return [
            each for each in self.requests if each.method == method and each.target.partition("?")[0].endswith(path)
        ]

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.port)
        except OSError:
            writer.transport.abort()
            return
        if self._is_cut:
            writer.transport.abort()
            far_writer.transport.abort()
            return
        flow = asyncio.Event()
        flow.set()
        self._flows.append(flow)
        self._ends |= {writer, far_writer}
        heads = _Heads(self.requests)
        for source, sink, listener in ((reader, far_writer, heads), (far_reader, writer, None)):
            pump = asyncio.create_task(self._pump(source, sink, listener, flow))
            self._pumps.add(pump)
            pump.add_done_callback(self._pumps.discard)

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, heads: _Heads | None, flow: asyncio.Event
    ) -> None:
        with contextlib.suppress(ConnectionError):
            while piece := await reader.read(1 << 16):
                await flow.wait()
                if heads is not None:
                    heads.feed(piece)
                writer.write(piece)
                await writer.drain()
        self._ends.discard(writer)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


class _Heads:
    """Finds the heads of requests in what a client sends."""

    def __init__(self, requests: list[Request]) -> None:
        self._requests = requests
        self._received = b""
        self._body_bytes = 0

    def feed(self, piece: bytes) -> None:
        self._received += piece
        while self._received:
            skipped = min(self._body_bytes, len(self._received))
            self._received, self._body_bytes = self._received[skipped:], self._body_bytes - skipped
            head, end, rest = self._received.partition(b"\r\n\r\n")
            if self._body_bytes or not end:
                return
            self._received = rest
            line, *fields = head.decode("latin-1").split("\r\n")
            method, target, _ = line.split(" ")
            headers = {name.lower(): text for name, _, text in (field.partition(": ") for field in fields)}
            self._body_bytes = int(headers.get("content-length", 0))
            self._requests.append(Request(method, target, headers))
