"""Stores the streams of apps as events, and encodes them from any position.

A `serve.stream` sends items. A recorded answer is a log of pieces of its body. A body of server-sent events is split
into events, and each gets an id to resume from. In any other body, a position is the number of bytes that the client
has received. A `text/event-stream` body without events is treated as such a body.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator, Sequence

import msgspec

from tailrace.dialects.bodies import to_json
from tailrace.dialects.native import RETRY_MS, NativeView, cut_json
from tailrace.dialects.wire import Encoder, failure_of
from tailrace.errors import SeqOutOfRange
from tailrace.streams import StreamLog
from tailrace.system.frames import FrameBuffer
from tailrace.types import End, Event, Failure, Payload, Released, event_id
from tailrace_outer.serve.stream import ItemWire, StreamPart, StreamWire, item_chunk

__all__ = [
    "AppEncoder",
    "BodyPieces",
    "EmptyEncoder",
    "ItemPieces",
    "Memo",
    "RecordedEncoder",
    "encoder_of",
    "is_recordable",
    "path_of",
]

_TEXTS = re.compile(r"text/|application/([\w.+-]*\+)?(json|jsonl|ndjson|json-seq|x-ndjson|x-jsonlines)\b")
_EVENTS = "text/event-stream"
_FIELD = re.compile(rb"[\r\n]*(?:(?:data|event|id|retry)?:|(?:data|event|id|retry)[\r\n])")
_FIELD_BEGINS = re.compile(rb"[\r\n]*(?:d(?:a(?:ta?)?)?|e(?:v(?:e(?:nt?)?)?)?|id?|r(?:e(?:t(?:ry?)?)?)?)?")
_NEWLINES = re.compile(rb"[\r\n]*")
_EVENT_END = re.compile(rb"(?>\r\n|\r|\n)(?>\r\n|\r|\n)")
_EVENT_ENDS = (b"\n\n", b"\r\r", b"\n\r", b"\n\r\n", b"\r\r\n")  # every form of a blank line
_MAX_EVENT_BYTES = 2**20
_decode_part = msgspec.msgpack.Decoder(bytes | Failure).decode


def is_recordable(media_type: str) -> bool:
    """Return whether answers of this type are recorded when the app asks to record all answers: text and JSON."""
    return not media_type or _TEXTS.match(media_type.lower()) is not None


class ItemPieces:
    """Decodes the items that `serve.stream` sends."""

    def __init__(self) -> None:
        self._buffer = FrameBuffer()

    def feed(self, chunk: bytes) -> Iterator[StreamPart]:
        """Return the items that are complete now, and the failure if the stream failed."""
        return map(_decode_part, self._buffer.feed(chunk))

    def end(self) -> Iterator[StreamPart]:
        return iter(())


class BodyPieces:
    """Splits the body of an answer into pieces to record. Each server-sent event is one piece, unless it is longer than
    1 MiB."""

    def __init__(self, media_type: str) -> None:
        self._has_events: bool | None = None if media_type.startswith(_EVENTS) else False  # None: unknown
        self._rest = bytearray()
        self._num_searched = 0  # bytes of `_rest` already searched for the end of an event

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """Return the pieces that are complete now."""
        self._rest += chunk
        if self._has_events is None and not _FIELD_BEGINS.fullmatch(self._rest):
            self._has_events = _FIELD.match(self._rest) is not None
        if self._has_events:
            yield from self._events()
        if self._has_events is False or len(self._rest) > _MAX_EVENT_BYTES:
            yield from self.end()

    def end(self) -> Iterator[bytes]:
        """Return the rest at the end of the body."""
        rest = bytes(self._rest)
        self._rest.clear()
        self._num_searched = 0
        if rest:
            yield rest

    def _events(self) -> Iterator[bytes]:
        start = 0
        while True:
            newlines = _NEWLINES.match(self._rest, start)
            start = newlines.end() if newlines is not None else start
            end = _EVENT_END.search(self._rest, max(start, self._num_searched))
            if end is None:
                break
            yield bytes(self._rest[start : end.end()])
            start = self._num_searched = end.end()
        del self._rest[:start]
        self._num_searched = max(0, len(self._rest) - 3)


class Memo(msgspec.Struct):
    """Stored with the stream: how to encode it."""

    wire: StreamWire = "native"
    media_type: str = ""  # of a recorded answer


def encoder_of(log: StreamLog[Payload], position: int = 0) -> AppEncoder:
    """Return the encoder of a stream from a position on. Raises: SeqOutOfRange for a position after the end."""
    memo = msgspec.json.decode(log.record.memo or b"{}", type=Memo)
    if memo.wire == "recorded":
        return RecordedEncoder(log, memo.media_type, position)
    return ItemEncoder(log, memo.wire, position)


def path_of(log: StreamLog[Payload]) -> str:
    return f"/v1/streams/{log.stream_id}"


class AppEncoder(Encoder[Payload]):
    """Encodes a stream of an app, from the event after `after` on. Also implements the stream's view.

    Raises: SeqOutOfRange for a position after the end.
    """

    media_type: str = NativeView.media_type
    heartbeat = NativeView.heartbeat

    def __init__(self, log: StreamLog[Payload], after: int = 0) -> None:
        self.after = after  # number of the last event that the client has received completely
        self._log = log
        if after > log.last_seq:
            raise SeqOutOfRange("This stream has no event with that id yet.", param="last-event-id")

    @property
    def position(self) -> int:
        """The position after the last event."""
        return self._log.last_seq

    def items(self) -> Sequence[object]:
        """Return what the app has sent so far, as JSON values."""
        raise NotImplementedError

    def whole(self, events: Sequence[Event[Payload]]) -> bytes:
        """Return the stream's state as JSON, with its items so far."""
        log = self._log
        state = {
            "id": log.stream_id,
            "status": log.status,
            "app": log.record.model,
            "created": int(log.record.created_s),
            "last_event_id": event_id(log.stream_id, self.position),
            "events_url": path_of(log) + "/events",
            "cancel_url": path_of(log) + "/cancel",
            "items": self.items(),
        }
        return to_json(state | (_end_fields(log.end) if log.end is not None else {}))


class EmptyEncoder(AppEncoder):
    """Shows nothing of a stream that is deleted."""

    def encode(self, seq: int, event: Event[Payload] | Released) -> bytes:
        return b""

    def whole(self, events: Sequence[Event[Payload]]) -> bytes:
        return b""


class ItemEncoder(AppEncoder):
    """Encodes the events of a `serve.stream` for the wire that the app has chosen."""

    def __init__(self, log: StreamLog[Payload], wire: ItemWire, after: int) -> None:
        super().__init__(log, after)
        self._wire = wire

    def items(self) -> Sequence[object]:
        return [msgspec.Raw(event.data) for event in self._log.events if isinstance(event, Payload)]

    def encode(self, seq: int, event: Event[Payload] | Released) -> bytes:
        given = event_id(self._log.stream_id, seq)
        if isinstance(event, Payload):
            retry = f"retry: {RETRY_MS}\n".encode() if seq == 1 else b""
            return retry + item_chunk(event.data, self._wire, given)
        if self._wire == "native":
            return _end_chunk(event, given)
        if event.status == "done":
            return b""  # Triton's clients see the end of the body
        return item_chunk(cut_json(event), self._wire, given)


class RecordedEncoder(AppEncoder):
    """Encodes a recorded answer. A position is an event's number, or a number of bytes."""

    heartbeat = b""  # before the body has begun, it is unknown whether it may contain comments

    def __init__(self, log: StreamLog[Payload], media_type: str, position: int = 0) -> None:
        self.media_type = media_type
        self._log = log
        self._has_events = media_type.startswith(_EVENTS)
        self._known_events: bool | None = None if self._has_events else False  # None: no piece yet
        after, self._skipped = position, 0  # bytes of the first piece
        if position and not self._has_event_pieces:
            after, self._skipped = _locate(log.events, position)
        super().__init__(log, after)

    @property
    def _has_event_pieces(self) -> bool:
        """Whether the pieces are events. The first piece decides."""
        if self._known_events is None and self._log.events:
            first = self._log.events[0]
            self._known_events = not isinstance(first, Payload) or _is_event(first.data)
        return self._has_events if self._known_events is None else self._known_events

    @property
    def position(self) -> int:
        if self._has_event_pieces:
            return super().position
        return sum(len(event.data) for event in self._log.events if isinstance(event, Payload))

    def encode(self, seq: int, event: Event[Payload] | Released) -> bytes:
        """Raises: TailraceError at the end of an incomplete answer whose format cannot carry an error."""
        if isinstance(event, Payload):
            piece = event.data[self._skipped :] if seq == self.after + 1 else event.data
            return self._with_id(piece, seq) if self._has_event_pieces else piece
        if event.status == "done":
            return b""
        if not self._has_event_pieces:
            raise failure_of(event)
        given = event_id(self._log.stream_id, seq)
        last_seq = seq if isinstance(event, Released) else seq - 1
        before = self._log.events[last_seq - 1] if last_seq else None
        # An event of more than 1 MiB may be incomplete.
        is_open = isinstance(before, Payload) and not before.data.endswith(_EVENT_ENDS)
        if isinstance(event, Released):
            if is_open:
                raise failure_of(event)  # its rest comes when the client resumes
            return _end_chunk(event, given)
        # Otherwise its last line and the event have to end first.
        return b"\n\n" * is_open + item_chunk(cut_json(event), "native", given)

    def items(self) -> Sequence[object]:
        """Return the pieces as text. A character that is split over pieces is in the last of them."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        return [decoder.decode(event.data) for event in self._log.events if isinstance(event, Payload)]

    def _with_id(self, piece: bytes, seq: int) -> bytes:
        """Replace the app's id of an event with ours, from which the stream can be resumed.

        A piece with only comments or `retry` gets no id. It also gets no blank line, because some clients would take
        that for an event without data.
        """
        if not _is_event(piece):
            return piece
        lines = piece.rstrip(b"\r\n").splitlines()
        names = {line.partition(b":")[0] for line in lines}
        if names <= {b"", b"retry"}:
            return b"\n".join([*lines, b""])
        given = [b"id: " + event_id(self._log.stream_id, seq).encode()] if b"data" in names else []
        kept = [line for line in lines if line.partition(b":")[0] != b"id"]
        return b"\n".join([*kept, *given, b"", b""])


def _is_event(piece: bytes) -> bool:
    return _FIELD.match(piece) is not None and piece.endswith(_EVENT_ENDS)


def _locate(events: Sequence[Event[Payload]], num_bytes: int) -> tuple[int, int]:
    """Return how many whole pieces `num_bytes` covers, and how many bytes of the next piece. Raises: SeqOutOfRange."""
    seq = 0
    for event in events:
        if not isinstance(event, Payload) or len(event.data) > num_bytes:
            break
        num_bytes -= len(event.data)
        seq += 1
    if num_bytes and not (seq < len(events) and isinstance(events[seq], Payload)):
        raise SeqOutOfRange("This stream has no event with that id yet.", param="last-event-id")
    return seq, num_bytes


def _end_fields(end: End | Released) -> dict[str, object]:
    fields: dict[str, object] = {"status": end.status}
    if end.failure is not None:
        fields["error"] = cut_json(end)
    return fields


def _end_chunk(end: End | Released, given: str) -> bytes:
    return f"event: {end.status}\ndata: {to_json(_end_fields(end)).decode()}\nid: {given}\n\n".encode()
