"""WebSocket at `/v1/ws`: several streams on one socket, as JSON text frames in both directions.

Every command has one direct answer: `created`, `following` or `ended`, `unfollowed`, `status`, `pong`, or `refused`.
After `created` and `following` come the events of the stream, one frame each, in order and without gaps, up to the
terminal event, or `released` if the stream goes on elsewhere. Before the first of them may come frames of `progress`,
which have no `seq`, if the command asked for them. A frame has `type`, `id`, `stream_id` and `seq`, and then
the fields of the same event on `/v1/streams/{id}/events`.

The socket is closed only for: 1001 idle, 1002 a protocol error, 1003 a binary frame, 1007 a frame that is not UTF-8,
1008 too many frames in a row that are not JSON objects, or a message that takes too long, 1009 a message that is too
large, 1011 pings without an answer, or a defect of the server, 1012 the server stops. Streams do not end with their
socket, unless they were created with `"on_disconnect": "cancel"`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, NamedTuple, TypeAlias

import msgspec

from tailrace.dialects.bodies import JsonBody, quote, to_json
from tailrace.dialects.facts import ServerFacts, StreamFacts
from tailrace.dialects.native import encode_error, event_json, parse_body
from tailrace.dialects.shapes import read_fields
from tailrace.dialects.wire import progress_json
from tailrace.errors import RequestError, TailraceError
from tailrace.types import Event, GenerateRequest, PromptProgress, Released, TextDelta, parse_cursor

__all__ = [
    "Cancel",
    "Close",
    "Command",
    "Create",
    "FollowCommand",
    "Frames",
    "Ping",
    "Unfollow",
    "encode_pong",
    "encode_refusal",
    "encode_status",
    "name_of",
    "parse",
    "parse_create",
]

_MAX_REASON_BYTES = 123  # RFC 6455, 5.5
_MAX_NAME_CHARACTERS = 128


class Close(NamedTuple):
    """The code and the reason of a close frame."""

    code: int
    reason: str

    @classmethod
    def with_reason(cls, code: int, reason: str) -> Close:
        """Return a close frame. A long reason is cut."""
        return cls(code, reason.encode()[:_MAX_REASON_BYTES].decode(errors="ignore"))


class Create(NamedTuple):
    name: str | None  # the client's name for the stream on this socket; None: the stream's id
    request: GenerateRequest
    return_progress: bool = False


class FollowCommand(NamedTuple):
    name: str | None
    stream_id: str
    after: int
    return_progress: bool = False


class Unfollow(NamedTuple):
    name: str


class Cancel(NamedTuple):
    """Cancel the stream `stream_id`, or the followed stream `name`."""

    name: str | None
    stream_id: str | None


class Ping(NamedTuple):
    name: str | None


Command: TypeAlias = FollowCommand | Unfollow | Cancel | Ping

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=_MAX_NAME_CHARACTERS)]
_StreamId = Annotated[str, msgspec.Meta(max_length=64)]


class _Named(msgspec.Struct):
    type: str
    id: _Name | None = None


class _Follow(_Named):
    last_event_id: Annotated[str, msgspec.Meta(max_length=128)] | None = None
    stream_id: _StreamId | None = None
    after: Annotated[int, msgspec.Meta(ge=0, le=10**15)] = 0
    return_progress: bool = False


class _Cancel(_Named):
    stream_id: _StreamId | None = None


def name_of(body: JsonBody) -> str | None:
    """Return the name of a command, which its refusal repeats."""
    name = body.get("id")
    return name if isinstance(name, str) and len(name) <= _MAX_NAME_CHARACTERS else None


def parse_create(body: JsonBody, server: ServerFacts) -> Create:
    """Parse the command that begins a stream, once its model is loaded. Raises: RequestError, also for unknown
    fields."""
    named, _ = read_fields({name: body[name] for name in ("type", "id") if name in body}, _Named)
    request = parse_body({name: body[name] for name in body if name not in ("type", "id")}, server)
    return Create(named.id, request, bool(body.get("return_progress")))


def parse(body: JsonBody) -> Command:
    """Parse another command. Raises: RequestError, also for unknown fields."""
    match body.get("type"):
        case "follow":
            return _parse_follow(read_fields(body, _Follow, strict=True)[0])
        case "unfollow":
            unfollow, _ = read_fields(body, _Named, strict=True)
            if unfollow.id is None:
                raise RequestError("Name the stream with id.", param="id")
            return Unfollow(unfollow.id)
        case "cancel":
            cancel, _ = read_fields(body, _Cancel, strict=True)
            if cancel.id is None and cancel.stream_id is None:
                raise RequestError("Name the stream with id or stream_id.", param="id")
            return Cancel(cancel.id, cancel.stream_id)
        case "ping":
            return Ping(read_fields(body, _Named, strict=True)[0].id)
    raise RequestError("type must be create, follow, unfollow, cancel or ping.", param="type")


def _parse_follow(fields: _Follow) -> FollowCommand:
    if (fields.last_event_id is None) == (fields.stream_id is None):
        raise RequestError("Give either last_event_id or stream_id.", param="stream_id")
    if fields.stream_id is not None:
        return FollowCommand(fields.id, fields.stream_id, fields.after, fields.return_progress)
    assert fields.last_event_id is not None
    if fields.after:
        raise RequestError("after needs stream_id; last_event_id already has the position.", param="after")
    return FollowCommand(fields.id, *parse_cursor(fields.last_event_id), fields.return_progress)


class Frames:
    """The frames about one followed stream."""

    __slots__ = ("_delta", "_head", "_reasoning")

    def __init__(self, name: str | None, facts: StreamFacts) -> None:
        stream_id = facts.record.stream_id
        self._head = f'"id":{quote(name or stream_id)},"stream_id":"{stream_id}"'.encode("ascii")
        self._delta = b'{"type":"delta",%b,"seq":' % self._head
        self._reasoning = b'{"type":"reasoning",%b,"seq":' % self._head

    def created(self, ignored: Sequence[str] = ()) -> bytes:
        """`ignored` is what HTTP has in X-Tailrace-Ignored."""
        return b'{"type":"created",%b%b}' % (self._head, b',"ignored":%b' % to_json(list(ignored)) if ignored else b"")

    def following(self, after: int) -> bytes:
        return b'{"type":"following",%b,"after":%d}' % (self._head, after)

    def ended(self, after: int) -> bytes:
        """The stream has ended with event `after`."""
        return b'{"type":"ended",%b,"after":%d}' % (self._head, after)

    def unfollowed(self, seq: int) -> bytes:
        """No more frames of this stream follow. The last event sent was `seq`."""
        return b'{"type":"unfollowed",%b,"seq":%d}' % (self._head, seq)

    def progress(self, progress: PromptProgress) -> bytes:
        """How much of the prompt is read. It has no number, and comes before the first event."""
        return b'{"type":"progress",%b,%b' % (self._head, to_json(progress_json(progress))[1:])

    def event(self, seq: int, event: Event | Released) -> bytes:
        """After a `Released` no more frames of this stream follow. It has the number of the last event."""
        fields = event_json(event)[1:].encode("ascii")
        if not isinstance(event, TextDelta):
            return b'{"type":"%b",%b,"seq":%d,%b' % (event.status.encode("ascii"), self._head, seq, fields)
        return b"%b%d,%b" % (self._reasoning if event.reasoning else self._delta, seq, fields)


def encode_status(name: str | None, stream_id: str, status: str) -> bytes:
    """Return the status of a stream after a `cancel`."""
    return to_json({"type": "status", "id": name or stream_id, "stream_id": stream_id, "status": status})


def encode_pong(name: str | None) -> bytes:
    return to_json({"type": "pong"} if name is None else {"type": "pong", "id": name})


def encode_refusal(name: str | None, error: TailraceError) -> bytes:
    """Refuse a command, which had no effect. The `error` is that of the HTTP routes."""
    retry = b"" if error.retry_after_s is None else b',"retry_after_s":%b' % to_json(error.retry_after_s)
    return b'{"type":"refused","id":%b,%b%b}' % (to_json(name), encode_error(error)[1][1:-1], retry)
