"""A proxy between a client and the server that changes how an answer arrives, but not its content.

Requests pass as they are. Of an answer's chunked body every byte becomes a chunk and a write of its own, so that a
client gets to see it alone however fast it reads; or the connection is cut at a place in it. What a WebSocket says is
one long body.

Or it puts a key in place of the one that each request has, and answers pass as they are.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType

from tests.waiting import LONG_S

__all__ = ["Cut", "Proxy"]

_FINE_BYTES = 32_768  # of a body go byte by byte; the rest in pieces of a size that divides nothing
_COARSE_BYTES = 97
_REQUEST_LINE = re.compile(rb"([A-Z]{3,7} [^ \r\n]+ HTTP/1\.1\r\n)")
_KEY_LINE = re.compile(rb"\r\n(?:authorization|x-api-key): [^\r]*(?=\r\n)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Cut:
    """Where connections are cut: after `events` events of a stream, and a number of bytes of the next event, which
    `more_bytes` lists in turn. The last newline of an event is cut off alone if `more_bytes` is None, and only then.
    With 0 events, answers of any kind are cut."""

    events: int
    more_bytes: Sequence[int] | None = (0,)

    def place(self, body: bytes, turn: int) -> int | None:
        """Return where to cut a body; None if it is still too short."""
        place = 0
        for _ in range(self.events):
            place = body.find(b"\n\n", place) + 2
            if place == 1:
                return None
        if self.more_bytes is None:
            found = body.find(b"\n\n", place)
            return found + 1 if found >= 0 else None
        place += self.more_bytes[turn % len(self.more_bytes)]
        place += body[place - 1 : place + 1] == b"\n\n"
        return place if place < len(body) else None


class Proxy:
    """A proxy on its own port, in its own thread, while its context is open.

    Without `cut`, every byte is sent separately. With `cut`, each event stream is cut, and `num_cuts` counts the cuts;
    `retry: 1000` becomes `retry: 0001`, so that clients reconnect sooner.
    """

    def __init__(self, port: int, cut: Cut | None = None, *, key: str = "") -> None:
        self._server_port = port
        self._cut = cut
        self._key = key
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="proxy")
        self._bound: Future[int] = Future()
        self._stop = asyncio.Event()
        self.num_cuts = 0
        self.url = ""

    def __enter__(self) -> Proxy:
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._bound.result(10)}"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(LONG_S)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        with contextlib.closing(self._loop):
            self._loop.run_until_complete(self._listen())

    async def _listen(self) -> None:
        connections: set[asyncio.Task[None]] = set()

        def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = self._loop.create_task(self._connect(reader, writer))
            connections.add(task)
            task.add_done_callback(connections.discard)

        try:
            listener = await asyncio.start_server(accept, "127.0.0.1", 0)
        except BaseException as error:
            self._bound.set_exception(error)
            raise
        self._bound.set_result(listener.sockets[0].getsockname()[1])
        await self._stop.wait()
        listener.close()
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)

    async def _connect(self, from_client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        from_server, to_server = await asyncio.open_connection("127.0.0.1", self._server_port)
        to_client.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        requests = self._loop.create_task(_pass_on(from_client, to_server, self._key))
        try:
            if self._key:
                await _pass_on(from_server, to_client)
            while await self._answer(from_server, to_client):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            requests.cancel()
            for writer in (to_server, to_client):
                writer.close()

    async def _answer(self, server: asyncio.StreamReader, client: asyncio.StreamWriter) -> bool:
        """Pass one answer on. Returns False if the connection is over."""
        head = await server.readuntil(b"\r\n\r\n")
        await _write(client, _bytes(head))
        cut = self._cut
        if cut is not None and cut.events and b"text/event-stream" not in head:
            cut = None
        if head.startswith(b"HTTP/1.1 101"):
            return await _pass_frames(server, client, cut)
        if b"transfer-encoding: chunked" not in head.lower():
            found = re.search(rb"\r\ncontent-length: ([0-9]+)\r\n", head, re.IGNORECASE)
            body = await server.readexactly(int(found[1]) if found else 0)
            await _write(client, _bytes(body[: cut.place(body, 0) if cut else None]))
            return cut is None
        if cut is not None:
            is_whole = await self._cut_body(server, client, cut)
        else:
            is_whole = await _split_body(server, client)
        if is_whole:
            await _write(client, [b"0\r\n\r\n"])
        return is_whole

    async def _cut_body(self, server: asyncio.StreamReader, client: asyncio.StreamWriter, cut: Cut) -> bool:
        body, num_written = b"", 0
        while chunk := await _chunk(server):
            body += chunk.replace(b"retry: 1000\n", b"retry: 0001\n")
            place = cut.place(body, self.num_cuts)
            await _write(client, _chunked([body[num_written:place]]))
            if place is not None:
                self.num_cuts += 1
                return False
            num_written = len(body)
        return True


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: str = "") -> None:
    """Pass the bytes of a client on. Clients send the head of a request in one write, and no body has such lines."""
    with contextlib.suppress(ConnectionError):
        while received := await reader.read(1 << 16):
            if key:
                received = _KEY_LINE.sub(b"", received)
                received = _REQUEST_LINE.sub(rb"\1Authorization: Bearer %b\r\n" % key.encode(), received)
            writer.write(received)
            await writer.drain()
        writer.close()


async def _pass_frames(server: asyncio.StreamReader, client: asyncio.StreamWriter, cut: Cut | None) -> bool:
    num_bytes = 0
    while received := await server.read(1 << 16):
        fine = max(0, _FINE_BYTES - num_bytes)
        num_bytes += len(received)
        if cut is not None and num_bytes > sum(cut.more_bytes or ()):
            break
        await _write(client, [*_bytes(received[:fine]), *_bytes(received[fine:], _COARSE_BYTES)])
    return False


async def _chunk(server: asyncio.StreamReader) -> bytes:
    """Return the next chunk of a body, b"" at its end."""
    size = int(await server.readuntil(b"\r\n"), 16)
    chunk = await server.readexactly(size + 2)
    return chunk[:-2]


async def _split_body(server: asyncio.StreamReader, client: asyncio.StreamWriter) -> bool:
    num_bytes = 0
    while chunk := await _chunk(server):
        fine = max(0, _FINE_BYTES - num_bytes)
        await _write(client, _chunked([*_bytes(chunk[:fine]), *_bytes(chunk[fine:], _COARSE_BYTES)]))
        num_bytes += len(chunk)
    return True


async def _write(client: asyncio.StreamWriter, pieces: Iterable[bytes]) -> None:
    for piece in pieces:
        client.write(piece)
    await client.drain()


def _chunked(pieces: Iterable[bytes]) -> Iterator[bytes]:
    return (b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces if piece)


def _bytes(content: bytes, size: int = 1) -> Iterator[bytes]:
    return (content[start : start + size] for start in range(0, len(content), size))
