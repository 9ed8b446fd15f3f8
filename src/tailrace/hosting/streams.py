"""Streams that apps have made with `serve.stream`, and answers that are recorded as they are: logs of the front's, fed
from a process of user code."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import msgspec
from starlette.responses import Response
from starlette.types import ASGIApp, Message

from tailrace.dialects.bodies import to_json
from tailrace.dialects.native import RETRY_MS, NativeView
from tailrace.errors import RequestError, SeqOutOfRange, StorageError, UnknownStream
from tailrace.frames import FrameBuffer
from tailrace.hosting.pool import Lease
from tailrace.hosting.recorded import Pieces, RecordedEncoder, RecordedView
from tailrace.serve.link import Channel, ChannelClosed, LinkLost
from tailrace.serve.stream import ItemWire, StreamOffer, StreamPart, StreamWire, item_chunk
from tailrace.server.answers import JsonAnswer, StreamAnswer
from tailrace.server.settings import Settings
from tailrace.streams import Record, StreamLog, StreamStore, event_id, new_stream_id, parse_cursor
from tailrace.types import End, Event, Failure, TextDelta, Usage

__all__ = ["AppStreams"]

logger = logging.getLogger("tailrace.hosting")

_LOG_BYTES = 64 * 2**20  # of one stream: a generator may never end
_EVENT_BYTES = 200  # of an event besides its text
_FIRST_READER_S = 5.0
_decode_message = msgspec.msgpack.decode
_decode_part = msgspec.msgpack.Decoder(str | Failure).decode


class _Memo(msgspec.Struct):
    """What is kept with the stream of how it is shown."""

    wire: StreamWire = "native"
    media_type: str = ""  # of one that is recorded


class _Frames:
    """What `serve.stream` sends."""

    def __init__(self) -> None:
        self._buffer = FrameBuffer()

    def feed(self, chunk: bytes) -> Iterator[StreamPart]:
        return map(_decode_part, self._buffer.feed(chunk))

    def end(self) -> Iterator[StreamPart]:
        return iter(())


class _Feed:
    """Takes what a process says into a log. The log's producer."""

    def __init__(
        self, streams: AppStreams, log: StreamLog, parts: _Frames | Pieces, channel: Channel, lease: Lease
    ) -> None:
        self._streams = streams
        self._log = log
        self._channel = channel
        self._lease = lease
        self._parts = parts
        self._num_bytes = 0
        self._is_ended = False
        self._linger: asyncio.TimerHandle | None = None

    @property
    def status(self) -> str:
        return "running"

    def cancel(self) -> None:
        self.end(End("cancelled", Usage(0, 0)))

    def unread(self) -> None:
        if not self._is_ended:
            self._linger = asyncio.get_running_loop().call_later(self._log.record.linger_s, self.cancel)

    def read(self) -> None:
        if self._linger is not None:
            self._linger.cancel()
            self._linger = None

    def ended(self) -> None:
        self._streams.store.finish(self._log)

    def end(self, end: End) -> None:
        """The terminal event, and the end of the generator. Does nothing the second time."""
        if not self._is_ended:
            self._channel.close()
            self._append_end(end)

    def _append_end(self, end: End) -> None:
        self._is_ended = True
        self.read()
        self._streams.feeds.discard(self)
        self._streams.num_ended[self._log.record.model, end.status] += 1
        self._streams.store.append(self._log, end)

    async def run(self) -> None:
        """Until the process has said everything, or is gone. Then the place in it is given back."""
        # Whoever asked has yet to begin to read, or may have left already.
        first_s = max(self._log.record.linger_s, _FIRST_READER_S)
        self._linger = asyncio.get_running_loop().call_later(first_s, self.cancel)
        try:
            await self._take_all()
        finally:
            self._channel.close()
            self._channel.when_over(self._lease.give_back)

    async def _take_all(self) -> None:
        failure: Failure | None = None
        try:
            while not self._is_ended:
                message: Message = _decode_message(await self._channel.receive())
                self._take(self._parts.feed(message.get("body", b"")))
                if not message.get("more_body"):
                    self._take(self._parts.end())
                    break
        except LinkLost:
            failure = Failure("app_unavailable", "The process of the app died.")
        except ChannelClosed as closed:
            failure = Failure("app_failed", _told(closed.failure))
        except Exception:  # whatever the app has sent, it is this stream's trouble and nobody else's
            logger.exception("what an app has sent could not be read")
            failure = Failure("app_failed", "What the app sent could not be read.")
        if failure is not None:  # an event that it cut short is left out
            self.end(End("error", Usage(0, 0), failure))
        elif not self._is_ended:
            self._append_end(End("done", Usage(0, 0)))
            with contextlib.suppress(ChannelClosed):  # the app may still have something to do in the background
                await self._channel.receive()

    def _take(self, parts: Iterable[StreamPart]) -> None:
        for part in parts:
            if self._is_ended:
                return
            if isinstance(part, Failure):
                self.end(End("error", Usage(0, 0), part))
                return
            self._num_bytes += len(part) + _EVENT_BYTES
            if self._num_bytes > _LOG_BYTES:
                reason = f"The stream is longer than {_LOG_BYTES // 2**20} MiB."
                logger.warning("%s: a stream was ended: %s", self._log.record.model, reason)
                self.end(End("error", Usage(0, 0), Failure("log_full", reason)))
                return
            self._streams.store.append(self._log, TextDelta(part, ()))


class AppStreams:
    """All streams that apps have made and that can still be read."""

    def __init__(self, store: StreamStore, settings: Settings, group: asyncio.TaskGroup) -> None:
        self.store = store
        self.feeds: set[_Feed] = set()
        self.num_ended: Counter[tuple[str, str]] = Counter()  # by app and status
        self._settings = settings
        self._group = group
        store.journal.on_trouble = self._fail_all

    def recover(self) -> None:
        """Take over what an earlier process left. A generator cannot be taken up again: what had not ended is
        interrupted."""
        for log in self.store.recover():
            failure = Failure("interrupted", "The server was stopped before the stream had ended.")
            log.append(End("interrupted", Usage(0, 0), failure))
            self.num_ended[log.record.model, "interrupted"] += 1
            self.store.finish(log)

    async def begin(
        self, offer: StreamOffer, app: str, channel: Channel, lease: Lease, headers: Sequence[tuple[str, str]]
    ) -> ASGIApp:
        """A stream of what comes over a channel, and the answer that follows it, with the app's own headers (lowercase
        names, which may repeat). Raises: StorageError."""
        await self.store.journal.well()
        is_recorded = offer.wire == "recorded"
        media_type = dict(headers).get("content-type", "text/plain")
        parts = Pieces(media_type) if is_recorded else _Frames()
        memo = _Memo(offer.wire, media_type if is_recorded else "")
        record = Record(
            stream_id=new_stream_id(),
            created_s=time.time(),
            model=app,
            memo=msgspec.json.encode(memo),
            linger_s=offer.linger_s if offer.linger_s is not None else self._settings.linger_s,
        )
        log = self.store.create(record)
        feed = _Feed(self, log, parts, channel, lease)
        log.producer = feed
        self.feeds.add(feed)
        self._group.create_task(feed.run())
        return self._follow(log, _encoder_of(log), headers)

    def resume(
        self, cursor: str, stream_id: str | None = None, *, app: str | None = None, ignored: Sequence[str] = ()
    ) -> ASGIApp:
        """The events behind an event id; those of one app, where a route of that app is asked for them. `ignored` are
        query parameters that nobody knows, which the answer names.

        Raises: StreamError in one of its kinds.
        """
        found, after = parse_cursor(cursor, stream_id) if cursor else (stream_id or "", 0)
        log = self.store.get(found)
        if app is not None and log.record.model != app:
            raise UnknownStream("There is no such stream.")
        encoder = _encoder_of(log, after)
        naming = {"x-tailrace-ignored": ", ".join(ignored)} if ignored else {}
        rest = log.events[encoder.after : encoder.after + 1]
        if log.end is not None and not (rest and encoder.encode(encoder.after + 1, rest[0])):
            return Response(status_code=204, headers={**_names(log), **naming})  # what makes an EventSource stop
        return self._follow(log, encoder, naming.items())

    def on_stream(self, method: str, stream_id: str, verb: str) -> ASGIApp:
        """Tell of a stream, after cancelling or deleting it. Raises: StreamError, RequestError, StorageError."""
        log = self.store.get(stream_id)
        match method, verb:
            case ("GET" | "HEAD", ""):
                pass
            case ("POST", "cancel"):
                self.store.cancel(log)
            case ("DELETE", ""):
                self.store.cancel(log)
                self.store.delete(log)
                return Response(status_code=204, headers=_names(log))
            case _:
                error = RequestError("This method is not allowed here.")
                error.status, error.code = 405, "method_not_allowed"
                raise error
        return JsonAnswer(_state_json(log), 200, _names(log))

    def interrupt_all(self) -> None:
        """The server leaves, and what feeds the streams with it."""
        failure = Failure("interrupted", "The server was stopped before the stream had ended.")
        for feed in list(self.feeds):
            feed.end(End("interrupted", Usage(0, 0), failure))
        self.store.journal.flush()

    def _follow(
        self, log: StreamLog, encoder: _Encoder | RecordedEncoder, headers: Iterable[tuple[str, str]]
    ) -> ASGIApp:
        ours = {**_names(log), "location": _path(log) + "/events", "content-location": _path(log)}
        kept = [(name, value) for name, value in headers if name not in ours and name != "content-type"]
        memo = _memo_of(log)
        view = RecordedView(memo.media_type) if memo.wire == "recorded" else NativeView()
        return StreamAnswer(
            log,
            encoder,
            view,
            after=encoder.after,
            headers=[*kept, *ours.items()],
            heartbeat_s=self._settings.heartbeat_s,
        )

    def _fail_all(self, error: StorageError) -> None:
        for feed in list(self.feeds):
            self.store.journal.retract(feed._log)
            feed.end(End("error", Usage(0, 0), Failure(error.code, error.message)))


class _Encoder:
    """The events of a `serve.stream` as they stand on the wire that the app has chosen.

    Raises: SeqOutOfRange for a position behind the end.
    """

    def __init__(self, log: StreamLog, wire: ItemWire, after: int = 0) -> None:
        if after > log.last_seq:
            raise SeqOutOfRange("This stream has not come that far.", param="last-event-id")
        self.after = after
        self._log = log
        self._wire = wire

    def encode(self, seq: int, event: Event) -> bytes:
        given = event_id(self._log.stream_id, seq)
        if isinstance(event, TextDelta):
            retry = f"retry: {RETRY_MS}\n".encode() if seq == 1 else b""
            return retry + item_chunk(event.text, self._wire, given)
        if event.status == "done" and self._wire == "triton":
            return b""  # whose clients know the end by the end
        if event.failure is not None and event.status == "error":
            return item_chunk(event.failure, self._wire, given)
        if self._wire == "triton":
            return item_chunk(Failure(event.status, f"The stream was {event.status}."), self._wire, given)
        return f"event: {event.status}\ndata: {_end_json(event)}\nid: {given}\n\n".encode()

    def whole(self, events: Sequence[Event]) -> bytes:
        return b"".join(self.encode(seq, event) for seq, event in enumerate(events, 1))


def _encoder_of(log: StreamLog, after: int = 0) -> _Encoder | RecordedEncoder:
    """Raises: SeqOutOfRange for a position behind the end."""
    memo = _memo_of(log)
    if memo.wire == "recorded":
        return RecordedEncoder(log, memo.media_type, after)
    return _Encoder(log, memo.wire, after)


def _memo_of(log: StreamLog) -> _Memo:
    return msgspec.json.decode(log.record.memo or b"{}", type=_Memo)


def _state_json(log: StreamLog) -> bytes:
    """The stream's state, with its items so far."""
    position = log.last_seq
    items: Sequence[object] = [msgspec.Raw(event.text.encode()) for event in log.events if isinstance(event, TextDelta)]
    memo = _memo_of(log)
    if memo.wire == "recorded":
        recorded = RecordedEncoder(log, memo.media_type)
        position, items = recorded.position, recorded.texts()
    state = {
        "id": log.stream_id,
        "status": log.status,
        "app": log.record.model,
        "created": int(log.record.created_s),
        "last_event_id": event_id(log.stream_id, position),
        "events_url": _path(log) + "/events",
        "cancel_url": _path(log) + "/cancel",
        "items": items,
    }
    if log.end is not None and log.end.failure is not None:
        state["error"] = {"code": log.end.failure.code, "message": log.end.failure.message}
    return to_json(state)


def _end_json(end: End) -> str:
    fields: dict[str, object] = {"status": end.status}
    if end.failure is not None:
        fields["error"] = {"code": end.failure.code, "message": end.failure.message}
    return to_json(fields).decode()


def _told(failure: bytes | None) -> str:
    if failure is None:
        return "The app stopped in the middle of its stream."
    return str(_decode_message(failure)[1])


def _names(log: StreamLog) -> dict[str, str]:
    return {"x-stream-id": log.stream_id}


def _path(log: StreamLog) -> str:
    return f"/v1/streams/{log.stream_id}"
