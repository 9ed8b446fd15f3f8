"""Requests to llama.cpp's server over its socket file: nonblocking (`Exchange`) and blocking (`ask`)."""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct

import httptools
import msgspec

from tailrace.errors import ModelError

__all__ = ["Exchange", "ask"]

_CONNECT_S = 10  # longest wait in the listener's queue
_READ_BYTES = 1 << 18


class Exchange:
    """One request on its own connection: a keep-alive connection would occupy one of the server's threads.

    Raises: OSError if the server has stopped.
    """

    def __init__(self, socket_path: str, body: bytes, route: str = "POST /completion") -> None:
        head = f"{route} HTTP/1.1\r\nHost: tailrace\r\nContent-Type: application/json\r\nConnection: close\r\n"
        self._unsent = memoryview(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        self._parser = httptools.HttpResponseParser(self)
        self._is_stream = False
        self._body = b""
        self._events: list[bytes] = []
        self.is_over = False  # the server has closed the connection, and has already queued the release of the slot
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            # With Python's own timeout, `connect` would fail at once if the queue is full.
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _CONNECT_S, 0))
            self._socket.connect(socket_path)
            self._socket.setblocking(False)
            self.send()
        except OSError:
            self._socket.close()
            raise

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def is_sent(self) -> bool:
        return not self._unsent

    def send(self) -> None:
        """Send as much of the request as the socket accepts."""
        with contextlib.suppress(BlockingIOError):
            while self._unsent:
                self._unsent = self._unsent[self._socket.send(self._unsent) :]

    def receive(self) -> list[bytes]:
        """Return the received JSON texts: events of a stream, or the body of another reply."""
        try:
            read = self._socket.recv(_READ_BYTES)
            if read:
                self._parser.feed_data(read)
            else:
                self.is_over = True
        except BlockingIOError:
            pass
        except (ConnectionError, httptools.HttpParserError):
            self.is_over = True
        events, self._events = self._events, []
        return events

    def leave(self) -> None:
        """Cancel the request. The server ends the sequence and then closes the connection."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._socket.close()

    # Callbacks of httptools

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"content-type":
            self._is_stream = value.startswith(b"text/event-stream")

    def on_body(self, body: bytes) -> None:
        self._body += body
        if self._is_stream:
            *events, self._body = self._body.split(b"\n\n")
            self._events += [event.partition(b": ")[2] for event in events if not event.startswith(b":")]

    def on_message_complete(self) -> None:
        if not self._is_stream:
            self._events.append(self._body)


def ask(socket_path: str, route: str, content: object = None) -> bytes:
    """Send a request and wait for its reply.

    Raises: ModelError if the server closes the connection.
    """
    exchange = Exchange(socket_path, b"" if content is None else msgspec.json.encode(content), route)
    with selectors.DefaultSelector() as selector:
        selector.register(exchange, selectors.EVENT_READ)
        replies: list[bytes] = []
        while not exchange.is_over:
            selector.select()
            replies += exchange.receive()
    exchange.close()
    if not replies:
        raise ModelError("llama.cpp's server closed the connection.")
    return replies[0]
