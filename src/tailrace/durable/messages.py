"""What a body appends: its bytes, or the messages of a JSON stream."""

from __future__ import annotations

import msgspec

from tailrace.errors import RequestError
from tailrace.text.templates import is_deeper

__all__ = ["read_pieces"]

_MAX_BRACKETS = 100_000  # of lists and objects: looking through them takes about 40 ms


# Line ends to clients that split lines as Unicode does. In JSON these bytes stand in strings only, and never behind a
# backslash, so that they can be replaced as they are.
_LINE_ENDS = ((b"\xe2\x80\xa8", rb"\u2028"), (b"\xe2\x80\xa9", rb"\u2029"), (b"\xc2\x85", rb"\u0085"))


def read_pieces(body: bytes, *, json: bool) -> tuple[bytes, ...]:
    """The pieces of an append. A JSON list is flattened by one level, and what a message looks like is kept as it is,
    but for Unicode's own line ends, which are escaped.

    Raises: RequestError if it is no JSON, which never repeats what was sent.
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
