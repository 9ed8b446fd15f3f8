"""The WebSocket protocol class for uvicorn, over the sans-I/O core of the `websockets` library.

Why our own class: uvicorn 0.54 has three. `websockets` is deprecated. `websockets-sansio` fails case 7.1.5 of the
Autobahn suite, logs tracebacks for bad input, buffers empty fragments without a limit, buffers pongs without a limit
for a client that does not read, and waits for such a client's close frame without a timeout. `wsproto` passes all
cases, but has the last two problems, and takes 4.6 microseconds per frame, `websockets` 1.8. Little remains to be done
here: the core parses frames and keeps the state, and uvicorn parses the handshake.

Guarantees to the application beyond ASGI:

- `send` returns when the transport has room, so a client that does not read costs only its socket buffers. Several
  tasks that send on one socket take turns, one frame each.
- `send` raises ConnectionResetError after the client has disconnected or its connection was failed.
- Backpressure: reading pauses until the application takes the last message. Keep a `receive` pending, otherwise a
  disconnect is not noticed.
- A message must be complete within `message_s` of its first byte, otherwise the connection fails with 1008.
- `LARGER` of the scope's extensions lets messages be larger than `ws_max_size`. The memory for one is reserved as it
  arrives; the connection fails with 1013 if there is none.
- No extensions are offered: compression does not make frames of a few bytes smaller.

A client that does not answer two pings is failed with 1011. A client that does not finish the closing handshake is
disconnected after ten seconds. `connections.py` has the write timeout.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from http import HTTPStatus
from http.client import responses
from typing import Any, cast
from urllib.parse import unquote

from starlette.types import Message
from uvicorn.config import Config
from websockets.datastructures import Headers
from websockets.frames import CloseCode, Frame, Opcode
from websockets.headers import parse_subprotocol
from websockets.http11 import Request, Response
from websockets.protocol import State
from websockets.typing import Subprotocol

from tailrace.compat.uvicorn import ServerState, get_local_addr, get_remote_addr, is_ssl
from tailrace.compat.websockets import Core
from tailrace.errors import SHUTTING_DOWN, AdmissionError, RequestError
from tailrace.transport.connections import EncodeError, Slot
from tailrace.transport.websocket_parts import (
    LARGER,
    SEND_MANY,
    Deadline,
    LargeMessages,
    MessageAssembler,
    WriteTurns,
    frames_of,
)

__all__ = ["WebSocketProtocol"]

logger = logging.getLogger("tailrace.server.websocket")

_CLOSE_S = 10.0  # for a client to finish the closing handshake
_SHUTDOWN_S = 1.0  # the same, at the server's shutdown
_MAX_UNANSWERED = 2  # pings
_SLICE_BYTES = 4096
_NOTHING = memoryview(b"")
_OPEN = State.OPEN


class WebSocketProtocol(asyncio.Protocol):
    """One connection, after its handshake request was parsed. The settings are uvicorn's `ws_max_size` and
    `ws_ping_interval`, as they are then, and `message_s`, the timeout for a whole message."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        *,
        message_s: float,
        encode_error: EncodeError,
    ) -> None:
        self._config = config
        self._server_state = server_state
        self._app_state = app_state
        self._encode_error = encode_error
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._predecessor: asyncio.BaseProtocol | None = None
        self._unread = _NOTHING  # received, but not parsed yet
        self._max_size, self._ping_s = config.ws_max_size, config.ws_ping_interval
        self._core = Core(max_size=self._max_size, logger=logger)
        self._inbox: asyncio.Queue[Message] = asyncio.Queue()  # bounded: reading pauses while it is not empty
        late = partial(self._fail, CloseCode.POLICY_VIOLATION, "A message did not arrive in time.")
        self._deadline = Deadline(message_s, late)
        self._assembler = MessageAssembler()
        self._large: LargeMessages | None = None
        self._accepting: Response | None = None  # the response to a valid handshake, until the application has decided
        self._refusing: Response | None = None  # an HTTP response of the application instead
        self._offered: list[Subprotocol] = []  # of the client
        self._is_ended = False  # the application gets no more messages
        self._is_reading = True
        self._is_half_closed = False
        self._turns = WriteTurns()
        self._pong: bytes | None = None  # the latest unsent one
        self._timer: asyncio.TimerHandle | None = None  # for the next ping, or to abort the connection
        self._has_received = False
        self._num_unanswered = 0

    # Callbacks of the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are not subclasses
        self._server_state.connections.add(self)  # type: ignore[arg-type]  # a set of uvicorn's own shells
        before = self._transport.get_protocol()
        self._slot: Slot | None = getattr(before, "slot", None)  # taken over from HTTP
        cycle = getattr(before, "cycle", None)  # the latest request of uvicorn's HTTP class
        if cycle is not None and not cycle.response_complete:
            self._predecessor = before

    def data_received(self, data: bytes) -> None:
        if self._predecessor is not None:  # an upgrade that was pipelined after an unfinished request
            self._transport.abort()
            return
        self._has_received = True
        self._unread = memoryview(bytes(self._unread) + data)  # `_unread` is mostly empty
        self._parse_slice()

    def _parse_slice(self) -> None:
        """Parse received bytes, one slice per turn of the event loop. A slice can have hundreds of frames of six bytes,
        and each takes up to 20 microseconds."""
        if self._core.state is State.CLOSED:
            return
        data, self._unread = self._unread[:_SLICE_BYTES], self._unread[_SLICE_BYTES:]
        if self._unread:
            self._loop.call_soon(self._parse_slice)
        else:
            self._unread = _NOTHING  # frees the buffer of an empty view
        core = self._core
        if self._large is not None and not self._is_ended and not self._reserve(self._large, len(data)):
            return
        core.receive_data(bytes(data))
        for event in core.events_received():
            if isinstance(event, Request):
                self._on_request(event)
            elif isinstance(event, Frame):
                self._on_frame(event)
        if self._large is not None and not core.is_amid_message:
            self._large.end()
        if core.has_failed:
            close = core.sent_close
            self._end(close.code if close else CloseCode.ABNORMAL_CLOSURE, close.reason if close else "")
        if self._turns.is_full and core.state is State.OPEN:
            # Only pongs are sent in response, and sending the latest one is enough (RFC 6455, 5.5.3).
            self._pong = b"".join(core.data_to_send()[-1:]) or self._pong
        else:
            self._flush()
        self._update_reading()

    def _reserve(self, large: LargeMessages, num_bytes: int) -> bool:
        """Return whether there is memory for more of a message. If not, the connection has failed."""
        try:
            large.arrived(num_bytes, self._max_size)
        except AdmissionError as error:
            self._fail(CloseCode.TRY_AGAIN_LATER, error.message)
            return False
        return True

    def eof_received(self) -> None:
        self._end(CloseCode.ABNORMAL_CLOSURE)
        self._abort_after(_CLOSE_S)

    def connection_lost(self, exc: Exception | None) -> None:
        self._server_state.connections.discard(self)
        if isinstance(self._predecessor, asyncio.Protocol):
            self._predecessor.connection_lost(exc)
        elif self._slot is not None:
            self._slot.leave()
        if self._timer is not None:
            self._timer.cancel()
        self._core.set_closed()
        self._end(CloseCode.ABNORMAL_CLOSURE)

    def pause_writing(self) -> None:
        self._turns.is_full = True
        if self._slot is not None:
            self._slot.pause_writing()

    def resume_writing(self) -> None:
        self._turns.is_full = False
        if self._slot is not None:
            self._slot.resume_writing()
        if self._pong is not None and self._core.state is State.OPEN:
            self._transport.write(self._pong)
        self._pong = None
        self._turns.next()

    # Callbacks of uvicorn

    def shutdown(self) -> None:
        """Close the connection, because the server shuts down."""
        if self._core.state is State.OPEN:
            self._close(CloseCode.SERVICE_RESTART, SHUTTING_DOWN, within_s=_SHUTDOWN_S)
        elif self._accepting is not None:
            self._refuse_with(503, SHUTTING_DOWN)

    # The handshake

    def _on_request(self, request: Request) -> None:
        response = self._core.accept(request)
        if response.status_code != HTTPStatus.SWITCHING_PROTOCOLS:
            # The core's own message would repeat the input.
            if request.headers.get_all("sec-websocket-version") not in ([], ["13"]):
                headers = Headers({"sec-websocket-version": "13", "upgrade": "websocket"})
                self._refuse_with(426, "Only version 13 of WebSocket is supported.", headers)
            else:
                self._refuse_with(response.status_code, "This is not a valid WebSocket handshake.")
            return
        self._accepting = response
        offers = request.headers.get_all("sec-websocket-protocol")
        self._offered = [name for offer in offers for name in parse_subprotocol(offer)]  # the core has checked them
        self._inbox.put_nowait({"type": "websocket.connect"})
        # uvicorn's server waits for these tasks, as for HTTP requests.
        task = self._loop.create_task(self._run(self._scope(request)))
        self._server_state.tasks.add(task)
        task.add_done_callback(self._server_state.tasks.discard)

    def _scope(self, request: Request) -> dict[str, Any]:  # Any: as in ASGI
        raw_path, _, query = request.path.partition("?")
        return {
            "type": "websocket",
            "asgi": {"version": self._config.asgi_version, "spec_version": "2.4"},
            "http_version": "1.1",
            "scheme": "wss" if is_ssl(self._transport) else "ws",
            "server": get_local_addr(self._transport),
            "client": get_remote_addr(self._transport),
            "root_path": self._config.root_path,
            "path": self._config.root_path + unquote(raw_path),
            "raw_path": raw_path.encode("ascii", "surrogateescape"),
            "query_string": query.encode("ascii", "surrogateescape"),
            "headers": [(name.lower().encode(), text.encode("latin-1")) for name, text in request.headers.raw_items()],
            "subprotocols": self._offered,
            "state": self._app_state.copy(),
            "extensions": {"websocket.http.response": {}, SEND_MANY: {}, LARGER: self._allow_larger},
        }

    def _refuse(self, status: int, headers: Headers, body: bytes) -> None:
        """Answer the handshake with an HTTP response, and end the connection."""
        self._accepting = None
        headers.setdefault("content-length", str(len(body)))
        headers.setdefault("connection", "close")
        self._core.send_response(Response(status, responses.get(status, "Refused"), headers, body))
        self._end(CloseCode.ABNORMAL_CLOSURE)
        self._flush()

    def _refuse_with(self, status: int, message: str, headers: Headers | None = None) -> None:
        """Refuse the handshake with an error of the server."""
        error = RequestError(message)
        error.status = status
        headers = headers or Headers()
        headers["content-type"] = "application/json"
        self._refuse(status, headers, self._encode_error(error)[1])

    # Calls of the application

    async def _run(self, scope: dict[str, Any]) -> None:
        code = CloseCode.NORMAL_CLOSURE
        try:
            await self._config.loaded_app(scope, self.receive, self.send)
        except ConnectionError:
            pass  # the client has disconnected
        except Exception:
            logger.exception("a WebSocket's application failed")
            code = CloseCode.INTERNAL_ERROR
        if self._accepting is not None:
            self._refuse_with(500, "Internal server error. See the server's log.")
        elif self._core.state is State.OPEN:
            self._close(code)

    def _allow_larger(self, most_bytes: int, large: LargeMessages) -> None:
        self._large = large
        self._core.allow(most_bytes)

    async def receive(self) -> Message:
        message = await self._inbox.get()
        if self._large is not None:
            self._large.release()
        self._update_reading()
        return message

    async def send(self, message: Message) -> None:
        """Send an ASGI message. Raises: ConnectionResetError if the connection is closed."""
        kind = message["type"]
        if kind in (SEND_MANY, "websocket.send"):
            turns = self._turns
            if (turns.is_full or turns) and not self._is_ended:
                await turns.wait()
            if self._is_ended or self._core.state is not _OPEN:
                raise ConnectionResetError("The WebSocket is closed.")
            self._transport.write(frames_of(message))
            if turns:
                turns.next()
        elif kind == "websocket.close" and self._accepting is None:
            if self._core.state is State.OPEN:
                self._close(message.get("code", CloseCode.NORMAL_CLOSURE), message.get("reason") or "")
        else:
            self._decide(kind, message)

    def _decide(self, kind: str, message: Message) -> None:
        """Accept or refuse the handshake, as the application says."""
        if self._is_ended or (self._accepting is None and self._refusing is None):
            raise ConnectionResetError("The WebSocket is closed.")
        pairs = [(name.decode("latin-1"), text.decode("latin-1")) for name, text in message.get("headers", [])]
        headers = Headers(pairs)
        if kind == "websocket.accept":
            assert self._accepting is not None
            self._accepting.headers.update(headers)
            if message.get("subprotocol") in self._offered:
                self._accepting.headers["sec-websocket-protocol"] = message["subprotocol"]
            self._core.send_response(self._accepting)
            self._accepting = None
            self._flush()
            self._schedule_ping()
        elif kind == "websocket.close":
            self._refuse(403, Headers(), b"")
        elif kind == "websocket.http.response.start":
            self._refusing = Response(message["status"], "", headers, b"")
        elif kind == "websocket.http.response.body":
            assert self._refusing is not None
            self._refusing.body = (self._refusing.body or b"") + message.get("body", b"")
            if not message.get("more_body"):
                refusing, self._refusing = self._refusing, None
                self._refuse(refusing.status_code, refusing.headers, bytes(refusing.body or b""))
        else:
            raise RuntimeError(f"A WebSocket application cannot send {kind}.")

    # Frames

    def _on_frame(self, frame: Frame) -> None:
        if not self._core.is_amid_fragments:
            self._deadline.stop()  # the next message has its own timeout
        if frame.opcode is Opcode.CLOSE:
            close = self._core.received_close
            assert close is not None
            self._end(close.code, close.reason)
        elif frame.opcode in (Opcode.TEXT, Opcode.BINARY, Opcode.CONT) and not self._is_ended:
            try:
                message = self._assembler.add(frame)
            except UnicodeDecodeError:
                self._fail(CloseCode.INVALID_DATA, "This is not UTF-8.")
            else:
                if message is not None:
                    self._inbox.put_nowait(message)
                    if self._large is not None:
                        self._large.end()

    def _update_reading(self) -> None:
        """Pause or resume reading: read while the application keeps up. After the end, input is read and dropped."""
        should_read = (self._is_ended or self._inbox.empty()) and not self._unread
        if should_read != self._is_reading and not self._transport.is_closing():
            self._is_reading = should_read
            if should_read:
                self._transport.resume_reading()
            else:
                self._transport.pause_reading()
        if self._is_reading and self._core.is_amid_message and not self._is_ended:
            self._deadline.start()
        else:
            self._deadline.stop()

    def _fail(self, code: CloseCode, reason: str) -> None:
        """Close the connection because of an error of the client."""
        if self._accepting is not None:
            self._refuse_with(400, reason)
            return
        if self._core.state is State.OPEN:
            self._core.fail(code, reason)
        self._end(code)
        self._flush()

    def _flush(self) -> None:
        frames = b"".join(self._core.data_to_send())
        if frames and not self._is_half_closed and not self._transport.is_closing():
            self._transport.write(frames)
        if self._core.eof_sent:
            self._close_half()

    # Pings, and closing

    def _schedule_ping(self) -> None:
        if self._ping_s:
            self._timer = self._loop.call_later(self._ping_s, self._ping)

    def _ping(self) -> None:
        if self._core.state is not State.OPEN:
            return
        # While reading is paused because of the application, a missing pong means nothing.
        is_reading_paused = not self._is_reading and not self._turns.is_full
        self._num_unanswered = 0 if self._has_received or is_reading_paused else self._num_unanswered + 1
        self._has_received = False
        if self._num_unanswered >= _MAX_UNANSWERED:
            self._core.fail(CloseCode.INTERNAL_ERROR, "Pings were not answered.")
            self._end(CloseCode.ABNORMAL_CLOSURE)
        else:
            self._core.send_ping(b"")
            self._schedule_ping()
        self._flush()

    def _close(self, code: int, reason: str = "", *, within_s: float = _CLOSE_S) -> None:
        """Start the closing handshake."""
        self._core.send_close(code, reason)
        self._end(code, reason)
        self._flush()
        self._abort_after(within_s)

    def _end(self, code: int, reason: str = "") -> None:
        """Deliver the disconnect to the application, once; no further messages follow."""
        if self._is_ended:
            return
        self._is_ended = True
        if self._large is not None:
            self._large.end()
            self._large.release()
        if self._accepting is not None:  # the handshake has no answer, and no timeout applies to it any more
            self._accepting = None
            self._transport.abort()
        self._inbox.put_nowait({"type": "websocket.disconnect", "code": int(code), "reason": reason})
        self._turns.open()
        self._update_reading()

    def _close_half(self) -> None:
        """Close our half of the connection, and drop further input. Closing with unread input would reset the
        connection, and the client could lose our last frame."""
        if self._is_half_closed or self._transport.is_closing():
            return
        self._is_half_closed = True
        self._abort_after(_CLOSE_S)
        if self._transport.can_write_eof():
            self._transport.write_eof()
        else:
            self._transport.close()

    def _abort_after(self, delay_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(delay_s, self._transport.abort)
