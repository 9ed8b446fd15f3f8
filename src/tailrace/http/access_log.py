"""`--access-log`: one line per finished request. It never has a query string, a header value, a prompt or an answer.

The line goes to the logger `tailrace.access`. The fields are also in the log record's attribute `fields`, for
formatters that write JSON. A stream's id gives read access to the stream, so readers of the log can read the streams.
"""

from __future__ import annotations

import logging
import time
from datetime import UTC, datetime
from typing import Any, TypeAlias

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tailrace.http.asgi_answers import ANSWERED
from tailrace.http.wires import ServedWires
from tailrace.settings import Settings
from tailrace.streams import StreamLog
from tailrace.wording import shown_path

__all__ = ["AccessLog"]

logger = logging.getLogger("tailrace.access")

_DISCONNECTS = ("http.disconnect", "websocket.disconnect")


class AccessLog:
    """ASGI middleware around the whole application. Without wires, as in `tailrace run`, a line has neither wire nor
    tokens, because a user's app has none."""

    def __init__(self, app: ASGIApp, settings: Settings, wires: ServedWires | None = None) -> None:
        self._app = app
        self._wires = wires
        self.use(settings)

    def use(self, settings: Settings) -> None:
        """Use other settings for new requests."""
        self._writes = settings.access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or not self._writes:
            await self._app(scope, receive, send)
            return
        request = _Request(scope)
        scope[ANSWERED] = request.logs  # a list, because applications copy scopes

        async def receive_and_record() -> Message:
            message = await receive()
            if message["type"] in _DISCONNECTS and not request.is_complete:
                request.client_left = True
            return message

        async def send_and_record(message: Message) -> None:
            request.record(message)
            await send(message)

        try:
            await self._app(scope, receive_and_record, send_and_record)
        except ConnectionError:
            request.client_left = True
            raise
        finally:
            self._write(request)

    def _write(self, request: _Request) -> None:
        fields = request.fields(request.logs[0] if request.logs else None, self._wires)
        shown = " ".join(f"{name}={value}" for name, value in fields.items() if name not in _UNNAMED_FIELDS)
        front = " ".join(str(fields[name]) for name in _UNNAMED_FIELDS)
        logger.info("%s %s", front, shown, extra={"fields": fields})


_Log: TypeAlias = StreamLog[Any]  # Any: of a model or of an app
_UNNAMED_FIELDS = ("time", "client", "method", "path", "status")


class _Request:
    """The state of one request."""

    def __init__(self, scope: Scope) -> None:
        self.is_complete = False
        self.client_left = False
        self.stream_id = ""
        self.logs: list[_Log] = []  # the one that answers it
        self.scope = scope
        self._path = str(scope["path"])  # the router may change the scope's
        self._begun = datetime.now(UTC)
        self._begun_s = time.monotonic()
        self._first_s: float | None = None
        self._status = 0
        self._close_code: int | None = None

    def record(self, message: Message) -> None:
        """Record a message of the response."""
        match message["type"]:
            case "http.response.body" | "websocket.http.response.body":
                if self._first_s is None and message.get("body"):
                    self._first_s = time.monotonic()
                self.is_complete = not message.get("more_body", False)
            case "http.response.start" | "websocket.http.response.start":
                self._status = message["status"]
                for name, value in message["headers"]:
                    if name == b"x-stream-id":
                        self.stream_id = value.decode("latin-1")
            case "websocket.accept":
                self._status = 101
            case "websocket.close":
                self.is_complete = True
                self._close_code = message.get("code", 1000)

    def fields(self, log: _Log | None, wires: ServedWires | None) -> dict[str, str | int | float]:
        """Return the fields of the log line, in order. Unknown fields are omitted."""
        fields: dict[str, str | int | float] = {
            "time": self._begun.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "client": _address(self.scope),
            "method": self.scope.get("method", "WEBSOCKET"),
            "path": shown_path(self._path),
            "status": self._status,
        }
        if wires is not None and self.scope["type"] == "http":
            fields["wire"] = wires.of({**self.scope, "path": self._path}).name
        if self.stream_id:
            fields["stream"] = self.stream_id
        if log is not None and wires is not None:
            fields["tokens"] = _num_tokens(log)
        first_s = self._first_s if wires is None or log is None else log.first_s
        if first_s is not None and first_s >= self._begun_s:
            fields["first_ms"] = round(1e3 * (first_s - self._begun_s), 1)
        fields["total_ms"] = round(1e3 * (time.monotonic() - self._begun_s), 1)
        if self._close_code is not None:
            fields["close"] = self._close_code
        if "tailrace_request_id" in self.scope:
            fields["request"] = self.scope["tailrace_request_id"]
        fields["end"] = self._end(log)
        return fields

    def _end(self, log: _Log | None) -> str:
        """Return how the request ended: the stream's status if its end was sent; refused or failed, by the HTTP status;
        client_left; or cut if the server aborted the response."""
        if self.scope["type"] == "websocket" and self._status == 101:
            return "done" if self._close_code is not None else "client_left"
        if not self.is_complete:
            return "client_left" if self.client_left else "cut"
        if self._status >= 400:
            return "refused" if self._status < 500 else "failed"
        if log is None or log.end is None:
            return "done"
        failure = log.end.failure
        return log.end.status if failure is None else f"{log.end.status}:{failure.code}"


def _address(scope: Scope) -> str:
    client = scope.get("client")
    if not client:
        return "-"
    host, port = client
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _num_tokens(log: _Log) -> int:
    if log.end is not None:
        return log.end.usage.num_completion_tokens
    return log.num_tokens
