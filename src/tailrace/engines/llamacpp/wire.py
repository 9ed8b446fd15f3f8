"""Requests to llama.cpp's server over its socket file: one that is never waited for, and one that is."""

from __future__ import annotations

import contextlib
import selectors
import socket

import httptools
import msgspec

from tailrace.errors import ModelError

__all__ = ["Exchange", "ask"]

_CONNECT_S = 10.0  # for a place in the listener's queue
_READ_BYTES = 1 << 18


class Exchange:
    """A connection of its own, since one that is kept alive would hold one of the server's threads.

    Raises: OSError if the server is gone.
    """

    def __init__(self, socket_path: str, body: bytes, route: str = "POST /completion") -> None:
        head = f"{route} HTTP/1.1\r\nHost: tailrace\r\nContent-Type: application/json\r\nConnection: close\r\n"
        self._unsent = memoryview(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        self._parser = httptools.HttpResponseParser(self)
        self._is_stream = False
        self._body = b""
        self._events: list[bytes] = []
        self.is_over = False  # the server has closed it, and has posted by then whatever that means to the slot
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.settimeout(_CONNECT_S)
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
        """As much of the request as goes."""
        with contextlib.suppress(BlockingIOError):
            while self._unsent:
                self._unsent = self._unsent[self._socket.send(self._unsent) :]

    def receive(self) -> list[bytes]:
        """What arrived, or a part of it: events of a stream, or the one body of any other answer. JSON, all of them."""
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
        """Let the server know that nobody listens. It ends the sequence and then closes the connection."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._socket.close()

    # What httptools calls.

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
    """The one answer to a question, for which it waits.

    Raises: ModelError if the server has gone.
    """
    exchange = Exchange(socket_path, b"" if content is None else msgspec.json.encode(content), route)
    with selectors.DefaultSelector() as selector:
        selector.register(exchange, selectors.EVENT_READ)
        answers: list[bytes] = []
        while not exchange.is_over:
            selector.select()
            answers += exchange.receive()
    exchange.close()
    if not answers:
        raise ModelError("llama.cpp's server broke off.")
    return answers[0]
