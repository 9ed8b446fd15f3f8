"""Split the body of an append into messages."""

from __future__ import annotations

import msgspec

from tailrace.errors import RequestError
from tailrace.server import is_deeper

__all__ = ["read_pieces"]

_MAX_BRACKETS = 100_000  # lists and objects in a body; parsing so many takes about 40 ms


# Some clients split server-sent events at Unicode's line ends. In JSON these bytes occur only inside strings, and never
# after a backslash, so they can be replaced byte by byte.
_LINE_ENDS = ((b"\xe2\x80\xa8", rb"\u2028"), (b"\xe2\x80\xa9", rb"\u2029"), (b"\xc2\x85", rb"\u0085"))


def read_pieces(body: bytes, *, json: bool) -> tuple[bytes, ...]:
    """Return the pieces of an append: the whole body, or the messages of a JSON stream. The items of a JSON list become
    messages. The text of a message does not change, except that Unicode's line ends are escaped.

    Raises: RequestError if the body is not valid JSON. The error does not repeat the input.
    """
    if not json or not body:
        return (body,) if body else ()
    if body.count(b"[") + body.count(b"{") > _MAX_BRACKETS:
        raise RequestError("The body has too many lists and objects.")
    try:
        value = msgspec.json.decode(body)
        for line_end, escaped in _LINE_ENDS:
            body = body.replace(line_end, escaped)
        if is_deeper(value):
            raise RequestError("The body is nested too deeply.")
        if isinstance(value, list):
            return tuple(bytes(message) for message in msgspec.json.decode(body, type=list[msgspec.Raw]))
    except RecursionError:
        raise RequestError("The body is nested too deeply.") from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise RequestError("The body is not valid JSON.") from None
    return (body.strip(b" \t\r\n"),)
