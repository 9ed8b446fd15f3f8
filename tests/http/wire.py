"""A client that shows every byte: HTTP/1.1 over a plain socket, which only knows framing."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any

__all__ = ["Wire", "as_json", "sse_data", "sse_ids"]

_TIMEOUT_S = 20.0


class Wire:
    """One connection. Closing it during an answer is a disconnect."""

    def __init__(self, port: int, *, receive_bytes: int = 0) -> None:
        self.socket = socket.socket()
        if receive_bytes:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        self.socket.settimeout(_TIMEOUT_S)
        try:
            self.socket.connect(("127.0.0.1", port))
        except OSError:
            self.socket.close()
            raise
        self._host = f"127.0.0.1:{port}"
        self._received = b""
        self._is_chunked = False
        self._length = 0
        self._left: int | None = None  # bytes of the chunk that was begun
        self._events = b""
        self.status = 0
        self.headers: dict[str, str] = {}

    def __enter__(self) -> Wire:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self.socket.close()

    def cut(self) -> None:
        """End the connection while another thread reads from it."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def send(
        self, method: str, path: str, body: bytes | object = None, headers: Mapping[str, str] | None = None
    ) -> None:
        """Send a request, with JSON as its body unless that is bytes already. A header of "" is left out."""
        content = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        fields = {"host": self._host, "accept": "*/*"}
        if body is not None:
            fields |= {"content-type": "application/json", "content-length": str(len(content))}
        fields |= headers or {}
        lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {text}" for name, text in fields.items() if text), "", ""]
        self.send_bytes("\r\n".join(lines).encode("latin-1") + content)

    def send_bytes(self, content: bytes) -> None:
        self.socket.sendall(content)

    def head(self) -> int:
        """Read up to the body and return the status."""
        while b"\r\n\r\n" not in self._received:
            self._receive()
        head, _, self._received = self._received.partition(b"\r\n\r\n")
        status, *lines = head.decode("latin-1").split("\r\n")
        self.status = int(status.split(" ")[1])
        self.headers = {name.lower(): text for name, _, text in (line.partition(": ") for line in lines)}
        self._is_chunked = self.headers.get("transfer-encoding") == "chunked"
        self._length = int(self.headers.get("content-length", 0))
        return self.status

    def chunk(self) -> bytes:
        """Return the next piece of the body, b"" at its proper end.

        Raises: EOFError if the connection ends before that.
        """
        if not self._is_chunked:
            piece, self._length = self.take(self._length), 0
            return piece
        piece = self.take(self._begin_chunk())
        self._end_chunk()
        return piece

    def _part(self) -> bytes:
        """Return what has arrived of a chunk, which may be cut off later; b"" at the proper end of the body."""
        if not self._is_chunked:
            return self.chunk()
        left = self._begin_chunk()
        if not left:
            self._end_chunk()
            return b""
        if not self._received:
            self._receive()
        part = self.take(min(left, len(self._received)))
        self._left = left - len(part)
        return part

    def _begin_chunk(self) -> int:
        """Return how many bytes of a chunk are left: of the one that was begun, or of the next one."""
        if self._left == 0:
            self._end_chunk()
        if self._left is not None:
            return self._left
        while b"\r\n" not in self._received:
            self._receive()
        size, _, self._received = self._received.partition(b"\r\n")
        return int(size, 16)

    def _end_chunk(self) -> None:
        assert self.take(2) == b"\r\n"
        self._left = None

    def body(self) -> bytes:
        """Return the rest of the body. Raises: EOFError if it is cut off."""
        body, is_complete = self.rest()
        if not is_complete:
            raise EOFError
        return body

    def rest(self) -> tuple[bytes, bool]:
        """Return the rest of the body, and whether it ended properly."""
        pieces, self._events = [self._events], b""
        try:
            while piece := self.chunk():
                pieces.append(piece)
        except (EOFError, ConnectionError):
            return b"".join(pieces), False
        return b"".join(pieces), True

    def event(self) -> bytes:
        """Return the next event with its blank line and the comments before it; b"" at the end of the body."""
        while b"\n\n" not in self._events:
            part = self._part()
            if not part:
                assert self._events == b""
                return b""
            self._events += part
        event, _, self._events = self._events.partition(b"\n\n")
        return event + b"\n\n"

    def events(self) -> Iterator[bytes]:
        while event := self.event():
            yield event

    def request(
        self, method: str, path: str, body: bytes | object = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, bytes]:
        """Send a request, and read the whole answer."""
        self.send(method, path, body, headers)
        return self.head(), self.body()

    def is_closed(self) -> bool:
        """Return whether the server has closed the connection. Waits until it sends something or closes."""
        try:
            return self.socket.recv(1) == b""
        except ConnectionError:
            return True

    def take(self, count: int) -> bytes:
        while len(self._received) < count:
            self._receive()
        piece, self._received = self._received[:count], self._received[count:]
        return piece

    def _receive(self) -> None:
        received = self.socket.recv(1 << 16)
        if not received:
            raise EOFError
        self._received += received


def sse_data(body: bytes) -> list[str]:
    """Return the `data:` of every event."""
    return [line[6:] for line in body.decode().split("\n") if line.startswith("data: ")]


def sse_ids(body: bytes) -> list[str]:
    return [line[4:] for line in body.decode().split("\n") if line.startswith("id: ")]


def as_json(body: bytes | str) -> Any:  # Any: what a server answered
    return json.loads(body)
