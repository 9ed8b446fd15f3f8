"""A parser of server-sent events as strict as a browser's."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Message", "parse", "whole_events"]


class Message(NamedTuple):
    """One dispatched event."""

    last_event_id: str
    event: str  # "message" where none was given
    text: str
    retry_ms: int | None  # given since the event before


def parse(stream: bytes) -> list[Message]:
    """Return the events that an EventSource dispatches. Source: WHATWG HTML, 9.2.5 and 9.2.6.

    An unfinished block at the end is dropped, as the standard has it.
    """
    text = stream.decode("utf-8", "replace").removeprefix("\ufeff")
    messages: list[Message] = []
    chunks: list[str] = []
    last_id, event, retry_ms = "", "", None
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    for line in lines[:-1]:  # behind the last line end stands an unfinished line
        name, colon, value = line.partition(":")
        if not line:
            if chunks:
                messages.append(Message(last_id, event or "message", "\n".join(chunks), retry_ms))
                retry_ms = None
            chunks, event = [], ""
        elif colon and not name:
            continue  # a comment
        else:
            value = value.removeprefix(" ")
            if name == "data":
                chunks.append(value)
            elif name == "event":
                event = value
            elif name == "id" and "\0" not in value:
                last_id = value
            elif name == "retry" and value.isascii() and value.isdigit():
                retry_ms = int(value)
    return messages


def whole_events(stream: bytes) -> list[bytes]:
    """Return the events of a stream as bytes, each with the blank line at its end. The body must end with a complete
    event."""
    if not stream:
        return []
    assert stream.endswith(b"\n\n")
    return [block + b"\n\n" for block in stream.removesuffix(b"\n\n").split(b"\n\n")]
