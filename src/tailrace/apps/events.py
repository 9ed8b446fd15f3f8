"""How the streams of apps are kept as events, and shown from any point.

A `serve.stream` sends items. A recorded answer keeps its bytes, in a log of pieces. Server-sent events are cut into
single events, and each gets the id by which it can be resumed. Any other answer has no place for an id: there, a
position is the number of bytes that the client has received. An answer that is labelled `text/event-stream` and holds
no events is one of those.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator, Sequence

import msgspec

from tailrace.dialects.bodies import to_json
from tailrace.dialects.native import RETRY_MS, NativeView
from tailrace.dialects.wire import failure_of
from tailrace.errors import SeqOutOfRange
from tailrace.frames import FrameBuffer
from tailrace.serve.stream import ItemWire, StreamPart, StreamWire, item_chunk
from tailrace.streams import StreamLog, event_id
from tailrace.types import End, Event, Failure, TextDelta

__all__ = [
    "AppEncoder",
    "BodyPieces",
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
_BLANK_LINE = re.compile(rb"(?>\r\n|\r|\n)(?>\r\n|\r|\n)")  # what ends an event
_ENDS = (b"\n\n", b"\r\r", b"\n\r", b"\n\r\n", b"\r\r\n")  # all that a blank line can be
_MAX_EVENT_BYTES = 2**20
_decode_part = msgspec.msgpack.Decoder(str | Failure).decode


def is_recordable(media_type: str) -> bool:
    """Whether an answer of this type is recorded where the app has asked for all of them: text and JSON are."""
    return not media_type or _TEXTS.match(media_type.lower()) is not None


class ItemPieces:
    """What `serve.stream` sends."""

    def __init__(self) -> None:
        self._buffer = FrameBuffer()

    def feed(self, chunk: bytes) -> Iterator[StreamPart]:
        """The items that are complete now, or how the stream failed."""
        return map(_decode_part, self._buffer.feed(chunk))

    def end(self) -> Iterator[StreamPart]:
        return iter(())


class BodyPieces:
    """Cuts the body of an answer into the pieces that are recorded. One byte of it is one character of a piece.

    Of server-sent events each is a piece, unless it is longer than 1 MiB.
    """

    def __init__(self, media_type: str) -> None:
        self._has_events: bool | None = None if media_type.startswith(_EVENTS) else False  # None: not known yet
        self._rest = bytearray()
        self._num_searched = 0  # bytes of the rest in which no event ends

    def feed(self, chunk: bytes) -> Iterator[str]:
        """The pieces that are complete now."""
        self._rest += chunk
        if self._has_events is None and not _FIELD_BEGINS.fullmatch(self._rest):
            self._has_events = _FIELD.match(self._rest) is not None
        if self._has_events:
            yield from self._events()
        if self._has_events is False or len(self._rest) > _MAX_EVENT_BYTES:
            yield from self.end()

    def end(self) -> Iterator[str]:
        """What is left at the end of the body."""
        rest = self._rest.decode("latin-1")
        self._rest.clear()
        self._num_searched = 0
        if rest:
            yield rest

    def _events(self) -> Iterator[str]:
        start = 0
        while True:
            newlines = _NEWLINES.match(self._rest, start)
            start = newlines.end() if newlines is not None else start
            end = _BLANK_LINE.search(self._rest, max(start, self._num_searched))
            if end is None:
                break
            yield self._rest[start : end.end()].decode("latin-1")
            start = self._num_searched = end.end()
        del self._rest[:start]
        self._num_searched = max(0, len(self._rest) - 3)


class Memo(msgspec.Struct):
    """What is kept with the stream of how it is shown."""

    wire: StreamWire = "native"
    media_type: str = ""  # of one that is recorded


def encoder_of(log: StreamLog, position: int = 0) -> AppEncoder:
    """Raises: SeqOutOfRange for a position behind the end."""
    memo = msgspec.json.decode(log.record.memo or b"{}", type=Memo)
    if memo.wire == "recorded":
        return RecordedEncoder(log, memo.media_type, position)
    return ItemEncoder(log, memo.wire, position)


def path_of(log: StreamLog) -> str:
    return f"/v1/streams/{log.stream_id}"


class AppEncoder:
    """Shows a stream of an app from behind `after` on, and is its own view.

    Raises: SeqOutOfRange for a position behind the end.
    """

    media_type: str = NativeView.media_type
    heartbeat = NativeView.heartbeat
    farewell = NativeView.farewell

    def __init__(self, log: StreamLog, after: int) -> None:
        self.after = after  # the number of the last event that the client has completely
        self._log = log
        if after > log.last_seq:
            raise SeqOutOfRange("This stream has not come that far.", param="last-event-id")

    @property
    def position(self) -> int:
        """Behind all that there is."""
        return self._log.last_seq

    def items(self) -> Sequence[object]:
        """What the app has sent, as JSON holds it."""
        raise NotImplementedError

    def encode(self, seq: int, event: Event) -> bytes:
        raise NotImplementedError

    def whole(self, events: Sequence[Event]) -> bytes:
        return b"".join(self.encode(seq, event) for seq, event in enumerate(events, 1))

    def state(self) -> bytes:
        """The stream's state, with its items so far."""
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


class ItemEncoder(AppEncoder):
    """The events of a `serve.stream` as they stand on the wire that the app has chosen."""

    def __init__(self, log: StreamLog, wire: ItemWire, after: int) -> None:
        super().__init__(log, after)
        self._wire = wire

    def items(self) -> Sequence[object]:
        return [msgspec.Raw(event.text.encode()) for event in self._log.events if isinstance(event, TextDelta)]

    def encode(self, seq: int, event: Event) -> bytes:
        given = event_id(self._log.stream_id, seq)
        if isinstance(event, TextDelta):
            retry = f"retry: {RETRY_MS}\n".encode() if seq == 1 else b""
            return retry + item_chunk(event.text, self._wire, given)
        if self._wire == "native":
            return f"event: {event.status}\ndata: {to_json(_end_fields(event)).decode()}\nid: {given}\n\n".encode()
        if event.status == "done":
            return b""  # Triton's clients know the end by the end
        failure = event.failure if event.status == "error" else None
        return item_chunk(failure or _failure_by_status(event), self._wire, given)


class RecordedEncoder(AppEncoder):
    """A recorded answer. A position is an event's number, or a number of bytes."""

    heartbeat = b""  # whether a comment may stand in the body is known only when it has begun
    farewell = b""

    def __init__(self, log: StreamLog, media_type: str, position: int = 0) -> None:
        self.media_type = media_type
        self._log = log
        self._has_events = media_type.startswith(_EVENTS)
        self._known_cut: bool | None = None if self._has_events else False  # None: there is no piece yet
        after, self._skipped = position, 0  # bytes of the first piece
        if position and not self._is_cut:
            after, self._skipped = _found(log.events, position)
        super().__init__(log, after)

    @property
    def _is_cut(self) -> bool:
        """Whether the body is cut into events. It is as soon as there is a piece of it."""
        if self._known_cut is None and self._log.events:
            first = self._log.events[0]
            self._known_cut = not isinstance(first, TextDelta) or _is_event(first.text.encode("latin-1"))
        return self._has_events if self._known_cut is None else self._known_cut

    @property
    def position(self) -> int:
        if self._is_cut:
            return super().position
        return sum(len(event.text) for event in self._log.events if isinstance(event, TextDelta))

    def encode(self, seq: int, event: Event) -> bytes:
        """Raises: TailraceError at the end of an answer that is not complete and has no place for an error."""
        if isinstance(event, TextDelta):
            piece = event.text.encode("latin-1")
            if seq == self.after + 1:
                piece = piece[self._skipped :]
            return self._with_id(piece, seq) if self._is_cut else piece
        if event.status == "done":
            return b""
        if not self._is_cut:
            raise failure_of(event)
        failure = event.failure or _failure_by_status(event)
        # An event of more than 1 MiB may have been cut short: then its last line, and the event, have to end first.
        before = self._log.events[seq - 2] if seq > 1 else None
        is_open = isinstance(before, TextDelta) and not before.text.encode("latin-1").endswith(_ENDS)
        return b"\n\n" * is_open + item_chunk(failure, "native", event_id(self._log.stream_id, seq))

    def items(self) -> Sequence[object]:
        """The pieces as text; a character that is spread over several comes with the last of them."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        pieces = [event.text.encode("latin-1") for event in self._log.events if isinstance(event, TextDelta)]
        return [decoder.decode(piece) for piece in pieces]

    def _with_id(self, piece: bytes, seq: int) -> bytes:
        """The event with our id in the place of its own, by which nobody here could resume it.

        Comments and times to wait are no events, and have no id. Nor have they a blank line, at which some clients
        would see an event without data.
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
    return _FIELD.match(piece) is not None and piece.endswith(_ENDS)


def _found(events: Sequence[Event], num_bytes: int) -> tuple[int, int]:
    """How many pieces so many bytes fill, and how many bytes of the next one. Raises: SeqOutOfRange."""
    seq = 0
    for event in events:
        if not isinstance(event, TextDelta) or len(event.text) > num_bytes:
            break
        num_bytes -= len(event.text)
        seq += 1
    if num_bytes and not (seq < len(events) and isinstance(events[seq], TextDelta)):
        raise SeqOutOfRange("This stream has not come that far.", param="last-event-id")
    return seq, num_bytes


def _end_fields(end: End) -> dict[str, object]:
    fields: dict[str, object] = {"status": end.status}
    if end.failure is not None:
        fields["error"] = {"code": end.failure.code, "message": end.failure.message}
    return fields


def _failure_by_status(end: End) -> Failure:
    return Failure(end.status, f"The stream was {end.status}.")
