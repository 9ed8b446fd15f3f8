"""The HTTP protocol class for uvicorn, with the limits and timeouts that uvicorn 0.54 lacks.

For each connection:

- A head (the request line and the headers) must arrive within `header_s`, counted from the connection, or from the
  head's first byte if there was a request before; else 408. The same timeout holds for the rest of a body that the
  application did not read. An idle connection is closed without a response; after a response this takes `keep_alive_s`.
- A head can have a request target of 65,535 bytes (else 414), 100 headers, and 32 KiB of headers (else 431). Trailers,
  which are dropped, and chunk extensions can have 8 KiB (else 431).
- 400 for a protocol other than HTTP/1.0 and 1.1, or an ambiguous body length; 505 for another version of HTTP. The
  parser silently accepts RTSP and ICE, so the request line is checked here.
- 400 for what proxies and servers may interpret differently: a repeated header that can have only one value, chunks in
  HTTP/1.0, a target of another host, a WebSocket handshake with a body.
- An upgrade to another protocol than WebSocket is ignored, as RFC 9110, 7.8 allows. The parser stops after such a head
  and would not read its body. So a new parser gets the head without its `Upgrade`.
- All these errors are JSON, written by `encode_error`, and end the connection. Our half is closed first, and input is
  dropped for a second: closing a connection with unread input would reset it, and the client might not see the error.
- If a response has begun already, the connection is aborted instead.
- At most 64 pipelined requests wait for the running one. uvicorn reports a disconnect only to the last of them; here
  the running one gets it.
- `connections.py` has the limits on connections and the write timeout.

As everywhere in uvicorn, a client that closes its half of the connection counts as disconnected.
"""

from __future__ import annotations

import asyncio
import enum
import math
import re
from collections.abc import Container
from typing import Any, cast

import httptools
from uvicorn.config import Config

from tailrace.compat.uvicorn import STATUS_LINE, HttpConnection, ServerState, report_disconnect
from tailrace.errors import AdmissionError, RequestError, TailraceError
from tailrace.settings import Settings
from tailrace.transport.connections import Connections, EncodeError

__all__ = ["SINGLE_HEADERS", "HttpProtocol"]

_MAX_TARGET_BYTES = 65_535  # the limit of httptools' URL parser
_MAX_HEADERS = 100
_MAX_HEAD_BYTES = 32 * 2**10
_MAX_FRAMING_BYTES = 8 * 2**10  # chunk extensions or trailers
_PIECE_BYTES = 4096  # what the parser gets at once; its progress is checked between two pieces
_VERSIONS = ("1.0", "1.1")
_MAX_PIPELINED = 64
_MAX_HANDSHAKE_LINE_BYTES = 8_000  # `websockets` allows lines of 8,192 bytes
SINGLE_HEADERS = frozenset(  # of a request to any server; extensions have others
    b"content-encoding content-type idempotency-key last-event-id origin referer sec-fetch-site "
    b"x-tailrace-continuity x-tailrace-linger".split()
)
_TARGET = re.compile(rb"(?:https?://([^/?#]+))?(/[^#]*|)|\*", re.IGNORECASE)
_DISCARD_S = 1.0
_RETRY_S = 5.0


class _Part(enum.Enum):
    """The part of a request that is being received."""

    NOTHING = enum.auto()
    HEAD = enum.auto()
    BODY = enum.auto()


def _refusal(status: int, message: str) -> RequestError:
    error = RequestError(message)
    error.status = status
    return error


class HttpProtocol(HttpConnection):
    """One connection, until it is closed, or becomes a WebSocket, which takes over its slot. Its timer runs whenever
    the server waits for input."""

    __slots__ = (
        "_connections",
        "_encode_error",
        "_header_s",
        "_ignores_upgrade",
        "_is_refused",
        "_last_body",
        "_num_head_bytes",
        "_num_idle_bytes",
        "_part",
        "_recent",
        "_single_headers",
        "slot",
    )

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],  # Any: as in ASGI
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        settings: Settings,
        connections: Connections,
        encode_error: EncodeError,
        single_headers: Container[bytes],
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.timeout_keep_alive = settings.keep_alive_s
        self._header_s = settings.header_s
        self._connections = connections
        self._encode_error = encode_error
        self._single_headers = single_headers
        self._part = _Part.NOTHING
        self._num_head_bytes = 0  # of the complete headers
        self._num_idle_bytes = 0  # received since the parser's last callback with progress
        self._recent = bytearray()  # received since the last request line, while it may contain a head
        self._last_body = b""  # the last piece of a body in `_recent`
        self._ignores_upgrade = False  # the complete head has an upgrade that is ignored
        self._is_refused = False

    # Callbacks of the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast(asyncio.Transport, transport))  # uvloop's are not subclasses
        self.slot = self._connections.enter(self.transport, self.client[0] if self.client else "")
        self.slot.begin()
        if not self.slot.is_refused:
            self.start_timer(self._header_s)
        elif self.slot.gets_refusal:
            error = AdmissionError("The server has too many open connections.", retry_after_s=_RETRY_S)
            error.status = 503
            self._refuse(error)
        else:
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest and not self._is_refused:
            piece = rest[:_PIECE_BYTES]
            try:
                self._parse(piece)
            except httptools.HttpParserUpgrade as upgrade:
                piece = piece[: upgrade.args[0]]
                if not self._ignores_upgrade:
                    self.handle_websocket_upgrade()
                    if len(rest) > len(piece):
                        cast(asyncio.Protocol, self.transport.get_protocol()).data_received(bytes(rest[len(piece) :]))
                    return
                self._parse_without_upgrade()
            rest = rest[len(piece) :]

    def _parse(self, piece: bytes | memoryview) -> None:
        """Raises: HttpParserUpgrade, with the number of bytes that belong to the head."""
        self._num_idle_bytes += len(piece)
        self._recent += piece
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade:
            raise
        except httptools.HttpParserError as error:
            cause = error.__context__
            self._refuse(cause if isinstance(cause, TailraceError) else _refusal(400, "This is not valid HTTP/1.1."))
            return
        in_head = self._part is _Part.HEAD
        if not in_head:
            self._recent.clear()
            self._last_body = b""
        if self._num_idle_bytes > (_MAX_TARGET_BYTES + _MAX_HEAD_BYTES if in_head else _MAX_FRAMING_BYTES):
            self._refuse(_refusal(431, "The headers, trailers or chunk extensions are too long."))

    def _parse_without_upgrade(self) -> None:
        """Parse the current head again without its upgrade, so that the parser reads its body."""
        self._ignores_upgrade = False
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (method, self.url, version)]
        lines += [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        self._recent.clear()
        self._parse(b"\r\n".join(lines) + b"\r\n\r\n")

    def connection_lost(self, exc: Exception | None) -> None:
        self.slot.leave()
        self.stop_timer()
        if self.running is not None:
            report_disconnect(self.running)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self.slot.pause_writing()

    def resume_writing(self) -> None:
        super().resume_writing()
        self.slot.resume_writing()

    # Callbacks of the parser

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._part = _Part.HEAD
        self._num_head_bytes = 0
        self.slot.wake()
        if self.cycle is not None and self.cycle.response_complete:
            self.start_timer(self._header_s)

    def on_url(self, url: bytes) -> None:
        if len(self.url) + len(url) > _MAX_TARGET_BYTES:
            raise _refusal(414, f"The path and query are longer than {_MAX_TARGET_BYTES} bytes.")
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._part is not _Part.HEAD:
            return  # a trailer, which uvicorn would add to the headers of the running request
        self._num_head_bytes += len(name) + len(value) + 4
        if self._num_head_bytes > _MAX_HEAD_BYTES:
            raise _refusal(431, f"The headers are longer than {_MAX_HEAD_BYTES} bytes.")
        if len(self.headers) == _MAX_HEADERS:
            raise _refusal(431, f"There are more than {_MAX_HEADERS} headers.")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._check_line()
        if self.has_unknown_upgrade():
            self._ignores_upgrade = True
            return
        self._part = _Part.BODY
        self._num_idle_bytes = 0
        self._check_headers()
        self._check_target()
        if self.parser.should_upgrade():
            self._check_handshake()
        if len(self.pipeline) == _MAX_PIPELINED:
            raise _refusal(400, "Too many pipelined requests.")
        self.stop_timer()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_idle_bytes = 0
        self._last_body = body
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._ignores_upgrade:
            return  # only the head is complete
        self._part = _Part.NOTHING
        self._num_idle_bytes = 0
        super().on_message_complete()

    def _check_line(self) -> None:
        """Raises: RequestError for a request line that is not HTTP/1.0 or 1.1."""
        method, version = self.parser.get_method(), self.parser.get_http_version()
        if version not in _VERSIONS:
            raise _refusal(505, "Only HTTP/1.1 is supported.")
        line = b"%b %b HTTP/%b" % (method, self.url, version.encode())
        start = self._recent.find(line)
        while start > 0 and not self._is_beginning(start):  # this is a copy of the line inside a header
            start = self._recent.find(line, start + 1)
        if start < 0 or method == b"CONNECT":
            raise _refusal(400, "This is not a valid request line of HTTP/1.1.")
        del self._recent[: start + len(line)]
        self._last_body = b""

    def _is_beginning(self, start: int) -> bool:
        """Return whether a request can begin at this index of `_recent`: after the end of a line or of a body."""
        return self._recent.endswith((b"\n", self._last_body or b"\n"), 0, start)

    def _check_headers(self) -> None:
        """Raises: RequestError."""
        seen = set()
        for name, value in self.headers:
            if name == b"transfer-encoding":
                if value.lower() != b"chunked":
                    raise _refusal(400, "The only supported transfer coding is chunked.")
                if self.parser.get_http_version() == "1.0":
                    raise _refusal(400, "HTTP/1.0 does not have chunked bodies.")
            if name in self._single_headers:
                if name in seen:
                    raise _refusal(400, f"There is more than one {name.decode()} header.")
                seen.add(name)

    def _check_target(self) -> None:
        """Reduce the target to path and query. Raises: RequestError for a target with a fragment, or of another
        host."""
        target = _TARGET.fullmatch(self.url)
        hosts = [value.lower() for name, value in self.headers if name == b"host"]
        if target is None or (target[1] is not None and hosts != [target[1].lower()]):
            raise _refusal(400, "The request target is not a path of this server.")
        if target[1] is not None:
            self.url = target[2] or b"/"

    def _check_handshake(self) -> None:
        """Raises: RequestError for a handshake that `websockets` would refuse with its own text, or wrongly accept."""
        for name, value in self.headers:
            if name == b"transfer-encoding" or (name == b"content-length" and value.strip() != b"0"):
                raise _refusal(400, "A WebSocket handshake must not have a body.")
            if len(name) + len(value) > _MAX_HANDSHAKE_LINE_BYTES:
                raise _refusal(431, f"A header is longer than {_MAX_HANDSHAKE_LINE_BYTES} bytes.")
        if len(self.url) > _MAX_HANDSHAKE_LINE_BYTES:
            raise _refusal(414, f"The path and query are longer than {_MAX_HANDSHAKE_LINE_BYTES} bytes.")

    # Callbacks of uvicorn

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.is_timed:
            return  # the next request has arrived
        if self._part is _Part.NOTHING:
            self.slot.rest()
        else:
            self.start_timer(self._header_s)

    def handle_websocket_upgrade(self) -> None:
        self.stop_timer()
        super().handle_websocket_upgrade()

    def on_timer(self) -> None:
        """Time out a head, or close an idle or refused connection."""
        if self._is_refused:
            self.transport.abort()
        elif self._part is _Part.HEAD:
            self._refuse(_refusal(408, "The request headers did not arrive in time."))
        else:
            self.transport.close()

    # Timeouts and errors

    def _refuse(self, error: TailraceError) -> None:
        """Send an error response and end the connection. Aborts it if a response is in progress."""
        self._is_refused = True
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            if cycle is not self.running or not cycle.more_body or cycle.response_started:
                self.transport.abort()
                return
            report_disconnect(cycle)
        status, body = self._encode_error(error)
        headers = [
            *self.server_state.default_headers,
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"connection", b"close"),
        ]
        if error.retry_after_s is not None:
            headers.append((b"retry-after", b"%d" % math.ceil(error.retry_after_s)))
        lines = [name + b": " + value + b"\r\n" for name, value in headers]
        self.transport.write(b"".join([STATUS_LINE[status], *lines, b"\r\n", body]))
        self.transport.write_eof()
        self.flow.resume_reading()
        self.start_timer(_DISCARD_S)
