"""The HTTP protocol under uvicorn, with limits: uvicorn 0.54 has none for what a client sends, or does not.

What it keeps, for each connection:

- A head, which is the request line and the headers, is there within `header_s` of the connection or, behind an answer,
  of its first byte; else 408. So is the rest of a body that nobody waited for. Where nothing is said, the connection is
  closed without a word, behind an answer after `keep_alive_s`.
- A head has a request target of up to 65,535 bytes (414), 100 headers, and 32 KiB of them (431). Trailers, which are
  thrown away, and the extensions of a chunk have 8 KiB (431).
- What is not HTTP/1.0 or 1.1, or leaves open where a body ends, is refused with 400, another version of HTTP with 505.
  The parser reads RTSP and ICE as well and does not say so: the request line itself is looked at.
- What proxies and servers could read differently is refused with 400: a second header of a name that has one value
  only, chunks in HTTP/1.0, a target of another host, the handshake of a WebSocket with a body.
- An upgrade to anything but WebSocket is ignored, as RFC 9110, 7.8 allows. The parser stops at the end of such a head
  and would leave its body unread, so it is replaced, and the next one gets the head without its `Upgrade`.
- All these refusals are JSON in the native shape and end the connection: our half is closed and what still comes is
  thrown away for a second, since a connection closed over unread bytes is reset, and the client may never see why.
- Where a refusal would stand in the middle of an answer, the connection is cut off instead.
- Requests behind one that is not answered wait their turn, 64 of them. uvicorn tells only the last of them that the
  client has left; here, the one that is running hears of it.
- A connection too many, or a client that does not take what waits for it: see `connections.py`.

A client that closes its half has left, as everywhere in uvicorn: keep it open until the answer is there.
"""

from __future__ import annotations

import asyncio
import enum
import math
import re
from typing import Any, cast

import httptools
from starlette.types import ASGIApp
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from tailrace.dialects import native
from tailrace.errors import AdmissionError, RequestError, TailraceError
from tailrace.http.connections import Connections
from tailrace.settings import Settings

__all__ = ["HttpProtocol"]

_MAX_TARGET_BYTES = 65_535  # as long as httptools can take one apart
_MAX_HEADERS = 100
_MAX_HEAD_BYTES = 32 * 2**10
_MAX_FRAMING_BYTES = 8 * 2**10  # between two pieces of a body: a chunk's extensions, or trailers
_PIECE_BYTES = 4096  # what the parser gets at once, since only between two pieces can be seen how far it has come
_VERSIONS = ("1.0", "1.1")
_MAX_PIPELINED = 64
_MAX_HANDSHAKE_LINE_BYTES = 8_000  # `websockets` takes lines of 8,192 bytes
_SINGLE = frozenset(
    b"content-encoding content-type idempotency-key last-event-id origin referer sec-fetch-site "
    b"x-tailrace-continuity x-tailrace-linger stream-ttl stream-expires-at stream-closed stream-seq "
    b"producer-id producer-epoch producer-seq".split()
)
_TARGET = re.compile(rb"(?:https?://([^/?#]+))?(/[^#]*|)|\*", re.IGNORECASE)
_LINGER_S = 1.0
_RETRY_S = 5.0


class _Part(enum.Enum):
    """What of a request is arriving."""

    NOTHING = enum.auto()
    HEAD = enum.auto()
    BODY = enum.auto()


def _refusal(status: int, message: str) -> RequestError:
    error = RequestError(message)
    error.status = status
    return error


class HttpProtocol(HttpToolsProtocol):
    """One connection, until it is closed or becomes a WebSocket, which takes over its slot. There is one timer,
    uvicorn's for idle connections, and it runs whenever the client owes us something."""

    # Python shares the keys of instances' dictionaries up to 30 of them, and uvicorn has 27: a kilobyte a connection.
    __slots__ = (
        "_connections",
        "_header_s",
        "_ignores_upgrade",
        "_is_refused",
        "_last_body",
        "_num_head_bytes",
        "_num_idle_bytes",
        "_part",
        "_recent",
        "_running",
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
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.timeout_keep_alive = settings.keep_alive_s
        self._header_s = settings.header_s
        self._connections = connections
        self._part = _Part.NOTHING
        self._num_head_bytes = 0  # in the headers that are complete
        self._num_idle_bytes = 0  # received since the parser last had anything to show for them
        self._recent = bytearray()  # received since the last request line, as long as a head may be in it
        self._last_body = b""  # the last piece of a body that is in `_recent`
        self._ignores_upgrade = False  # the head that is complete asks for one
        self._is_refused = False
        self._running: RequestResponseCycle | None = None  # while `cycle` is the last one that has arrived

    # What the transport says

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast(asyncio.Transport, transport))  # uvloop's are not subclasses
        self.slot = self._connections.enter(self.transport, self.client[0] if self.client else "")
        self.slot.begin()
        if not self.slot.is_refused:
            self._within(self._header_s)
        elif self.slot.gets_refusal:
            error = AdmissionError("As many connections are open as may be.", retry_after_s=_RETRY_S)
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
        """Raises: HttpParserUpgrade, with the length of what belongs to the head that asks for one."""
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
            self._refuse(_refusal(431, "A part of the request that is no body is too long."))

    def _parse_without_upgrade(self) -> None:
        """Parse the head that has just been read once more, so that its body is."""
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
        self._unset_keepalive_if_required()
        if self._running is not None:
            _tell_gone(self._running)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self.slot.pause_writing()

    def resume_writing(self) -> None:
        super().resume_writing()
        self.slot.resume_writing()

    # What the parser says

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._part = _Part.HEAD
        self._num_head_bytes = 0
        if self.cycle is not None and self.cycle.response_complete:
            self._within(self._header_s)

    def on_url(self, url: bytes) -> None:
        if len(self.url) + len(url) > _MAX_TARGET_BYTES:
            raise _refusal(414, f"The path and query are longer than {_MAX_TARGET_BYTES} bytes.")
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._part is not _Part.HEAD:
            return  # a trailer, which uvicorn would have become a header of a request that is being answered
        self._num_head_bytes += len(name) + len(value) + 4
        if self._num_head_bytes > _MAX_HEAD_BYTES:
            raise _refusal(431, f"The headers are longer than {_MAX_HEAD_BYTES} bytes.")
        if len(self.headers) == _MAX_HEADERS:
            raise _refusal(431, f"There are more than {_MAX_HEADERS} headers.")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._check_line()
        if self.parser.should_upgrade() and not self._should_upgrade():
            self._ignores_upgrade = True
            return
        self._part = _Part.BODY
        self._num_idle_bytes = 0
        self._check_headers()
        self._check_target()
        if self.parser.should_upgrade():
            self._check_handshake()
        if len(self.pipeline) == _MAX_PIPELINED:
            raise _refusal(400, "Too many requests wait behind one that is not answered.")
        self._unset_keepalive_if_required()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_idle_bytes = 0
        self._last_body = body
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._ignores_upgrade:
            return  # only the head is
        self._part = _Part.NOTHING
        self._num_idle_bytes = 0
        super().on_message_complete()

    def _should_upgrade(self) -> bool:
        return super()._should_upgrade() and self.parser.get_http_version() == "1.1"

    def _check_line(self) -> None:
        """Raises: RequestError for a request line that is not HTTP/1.0 or 1.1."""
        method, version = self.parser.get_method(), self.parser.get_http_version()
        if version not in _VERSIONS:
            raise _refusal(505, "HTTP/1.1 is spoken here.")
        line = b"%b %b HTTP/%b" % (method, self.url, version.encode())
        start = self._recent.find(line)
        while start > 0 and not self._is_beginning(start):  # it is quoted in a header
            start = self._recent.find(line, start + 1)
        if start < 0 or method == b"CONNECT":
            raise _refusal(400, "This is not a request line of HTTP/1.1.")
        del self._recent[: start + len(line)]
        self._last_body = b""

    def _is_beginning(self, start: int) -> bool:
        """Whether a request can begin at this place of `_recent`: behind the end of a line or of a body."""
        return self._recent.endswith((b"\n", self._last_body or b"\n"), 0, start)

    def _check_headers(self) -> None:
        """Raises: RequestError."""
        seen = set()
        for name, value in self.headers:
            if name == b"transfer-encoding":
                if value.lower() != b"chunked":
                    raise _refusal(400, "Of transfer codings, only chunked is understood.")
                if self.parser.get_http_version() == "1.0":
                    raise _refusal(400, "There are no chunks in HTTP/1.0.")
            if name in _SINGLE:
                if name in seen:
                    raise _refusal(400, f"There is more than one {name.decode()} header.")
                seen.add(name)

    def _check_target(self) -> None:
        """Leave the path and query. Raises: RequestError for a target with a fragment, or of another host."""
        target = _TARGET.fullmatch(self.url)
        hosts = [value.lower() for name, value in self.headers if name == b"host"]
        if target is None or (target[1] is not None and hosts != [target[1].lower()]):
            raise _refusal(400, "The target of the request is not a path of this server.")
        if target[1] is not None:
            self.url = target[2] or b"/"

    def _check_handshake(self) -> None:
        """Raises: RequestError for what `websockets` would refuse in words of its own, or not at all."""
        for name, value in self.headers:
            if name == b"transfer-encoding" or (name == b"content-length" and value.strip() != b"0"):
                raise _refusal(400, "The handshake of a WebSocket has no body.")
            if len(name) + len(value) > _MAX_HANDSHAKE_LINE_BYTES:
                raise _refusal(431, f"A header is longer than {_MAX_HANDSHAKE_LINE_BYTES} bytes.")
        if len(self.url) > _MAX_HANDSHAKE_LINE_BYTES:
            raise _refusal(414, f"The path and query are longer than {_MAX_HANDSHAKE_LINE_BYTES} bytes.")

    # What uvicorn says

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGIApp) -> None:  # type: ignore[override]
        self._running = cycle
        super()._start_asgi_task(cycle, app)  # type: ignore[arg-type]  # uvicorn has ASGI's types a second time

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.timeout_keep_alive_task is not None and self._part is not _Part.NOTHING:
            self._within(self._header_s)

    def handle_websocket_upgrade(self) -> None:
        self._unset_keepalive_if_required()
        super().handle_websocket_upgrade()

    def timeout_keep_alive_handler(self) -> None:
        """The client's time is up, whatever for."""
        self.timeout_keep_alive_task = None
        if self._is_refused:
            self.transport.abort()
        elif self._part is _Part.HEAD:
            self._refuse(_refusal(408, "The head of the request did not arrive in time."))
        else:
            self.transport.close()

    # The end

    def _within(self, delay_s: float) -> None:
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(delay_s, self.timeout_keep_alive_handler)

    def _refuse(self, error: TailraceError) -> None:
        """Answer with this, and nothing else on this connection."""
        self._is_refused = True
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            if cycle is not self._running or not cycle.more_body or cycle.response_started:
                self.transport.abort()
                return
            _tell_gone(cycle)
        status, body = native.encode_error(error)
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
        self._within(_LINGER_S)


def _tell_gone(cycle: RequestResponseCycle) -> None:
    if not cycle.response_complete:
        cycle.disconnected = True
        cycle.message_event.set()
