"""Checks what an app sends, in the app's process, so that nothing malformed reaches a client.

The exception is raised in the app, at the line that sent the message. That message is not sent. The client gets a 500
if the answer had not begun, else an answer that is visibly cut off.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from starlette.types import Message, Scope

__all__ = ["InvalidMessage", "SentMessages"]

_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_CONTROL = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_LENGTH = re.compile(rb"[0-9]{1,18}")
_MAX_REASON_BYTES = 123
_WITHOUT_BODY = (204, 304)


class InvalidMessage(ValueError):
    """An app sent a message that ASGI or HTTP does not allow."""


class SentMessages:
    """Follows the messages of one answer."""

    def __init__(self, scope: Scope) -> None:
        self._is_websocket = scope["type"] == "websocket"
        self._is_head = scope.get("method") == "HEAD"
        self._state = "new"  # then "started" (HTTP) or "accepted" (WebSocket), and "complete"
        self._has_body = True
        self._left_bytes: int | None = None  # of the body's declared length

    def checked(self, message: Message) -> Message | None:
        """Return the message to send, or None to drop it: trailers, and messages after the end.

        Raises: InvalidMessage.
        """
        kind = str(message.get("type"))
        prefix = "websocket.http.response." if self._is_websocket else "http.response."
        if self._state == "complete" or kind == "http.response.trailers":
            return None
        if kind == prefix + "start" and self._state == "new":
            self._check_start(message)
        elif kind == prefix + "body" and self._state == "started":
            self._check_body(message)
            return message if self._has_body else {**message, "body": b""}
        elif self._is_websocket and kind == "websocket.accept" and self._state == "new":
            self._check_accept(message)
        elif self._is_websocket and kind == "websocket.send" and self._state == "accepted":
            _check_frame(message)
        elif self._is_websocket and kind == "websocket.close" and self._state in ("new", "accepted"):
            _check_close(message)
            self._state = "complete"
        else:
            raise InvalidMessage(f"the message {kind[:60]!r} cannot be sent when the answer is {self._state}.")
        return message

    def _check_start(self, message: Message) -> None:
        status = message.get("status")
        if not isinstance(status, int) or isinstance(status, bool) or not 200 <= status <= 599:
            raise InvalidMessage(f"the status of an answer is a number from 200 to 599, not {status!r}.")
        headers = _checked_headers(message.get("headers"))
        lengths = headers.get(b"content-length", [])
        encodings = headers.get(b"transfer-encoding", [])
        if len(lengths) > 1 or (lengths and not _LENGTH.fullmatch(lengths[0])):
            raise InvalidMessage("the header content-length should be one number.")
        if encodings not in ([], [b"chunked"]) or (lengths and encodings):
            raise InvalidMessage("the header transfer-encoding is set by the server, not by the app.")
        self._has_body = status not in _WITHOUT_BODY
        if lengths and self._has_body and not self._is_head:
            self._left_bytes = int(lengths[0])
        self._state = "started"

    def _check_body(self, message: Message) -> None:
        body = message.get("body", b"")
        if body is not None and not isinstance(body, (bytes, bytearray, memoryview)):
            raise InvalidMessage(f"the body of an answer is bytes, not {type(body).__name__}.")
        if self._left_bytes is not None:
            self._left_bytes -= memoryview(body or b"").nbytes
            if self._left_bytes < 0:
                raise InvalidMessage("the body of the answer is longer than its content-length says.")
            if self._left_bytes and not message.get("more_body"):
                raise InvalidMessage("the body of the answer is shorter than its content-length says.")
        if not message.get("more_body"):
            self._state = "complete"

    def _check_accept(self, message: Message) -> None:
        _checked_headers(message.get("headers"))
        protocol = message.get("subprotocol")
        if protocol is not None and not (isinstance(protocol, str) and _NAME.fullmatch(protocol.encode())):
            raise InvalidMessage(f"a subprotocol is a name without spaces, not {protocol!r}.")
        self._state = "accepted"


def _checked_headers(headers: Any) -> Mapping[bytes, list[bytes]]:  # Any: whatever the app has sent
    """Return the values by lowercase name. Raises: InvalidMessage."""
    found: dict[bytes, list[bytes]] = {}
    for header in headers or ():
        if len(header) != 2 or not all(isinstance(part, bytes) for part in header):
            raise InvalidMessage("a header is a pair of bytes, a name and a value.")
        name, value = header
        if not _NAME.fullmatch(name):
            raise InvalidMessage(f"{name!r} cannot be the name of a header.")
        if _CONTROL.search(value):
            raise InvalidMessage(f"the value of the header {name.decode()} contains a control character.")
        found.setdefault(name.lower(), []).append(value.strip())
    return found


def _check_frame(message: Message) -> None:
    text, data = message.get("text"), message.get("bytes")
    if (text is None) == (data is None):
        raise InvalidMessage("websocket.send takes either text or bytes.")
    if not isinstance(text, (str, type(None))) or not isinstance(data, (bytes, bytearray, memoryview, type(None))):
        raise InvalidMessage("websocket.send takes text as str, or bytes as bytes.")


def _check_close(message: Message) -> None:
    code, reason = message.get("code", 1000), message.get("reason") or ""
    if not isinstance(code, int) or not (1000 <= code <= 1003 or 1007 <= code <= 1014 or 3000 <= code <= 4999):
        raise InvalidMessage(f"{code!r} is not a valid close code of a WebSocket.")
    if not isinstance(reason, str) or len(reason.encode()) > _MAX_REASON_BYTES:
        raise InvalidMessage(f"the reason of websocket.close is text of at most {_MAX_REASON_BYTES} bytes.")
