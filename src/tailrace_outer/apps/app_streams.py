"""Streams that apps have made with `serve.stream`, and answers that are recorded as they are: logs of the front's, fed
from a process of user code."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

import msgspec
from starlette.types import ASGIApp, Message

from tailrace.access.audit import AuditLog
from tailrace.errors import (
    AppFailed,
    AppUnavailable,
    Interrupted,
    LeaseLost,
    ModelError,
    SeqOutOfRange,
    StorageError,
    StreamTooLong,
    UnknownStream,
)
from tailrace.http.stream_actions import StreamActions
from tailrace.settings import Settings
from tailrace.streams import Ender, Lease, LogStore, Producer, StreamLog
from tailrace.streams.opening import for_apps, open_log_store
from tailrace.types import End, Event, Failure, Payload, Record, Usage, new_stream_id, parse_cursor
from tailrace_outer.apps.events import BodyPieces, ItemPieces, Memo, encoder_of
from tailrace_outer.serve.failures import Refusal
from tailrace_outer.serve.link import ChannelClosed, LinkLost
from tailrace_outer.serve.stream import StreamOffer, StreamPart

__all__ = ["AnswerBody", "AppStreams", "open_app_streams"]

logger = logging.getLogger("tailrace.apps")

_LOG_BYTES = 64 * 2**20  # limit of one stream: a generator may never end
_EVENT_BYTES = 200  # overhead of an event, besides its text
_FIRST_READER_S = 5.0
_decode = msgspec.msgpack.decode
_NO_TOKENS = Usage(0, 0)  # an app's stream has none
_INTERRUPTED = End(
    "interrupted", _NO_TOKENS, Failure(Interrupted.code, "The server was stopped before the stream had ended.")
)


class AnswerBody(Protocol):
    """The messages of an app's answer after its start, packed. A `Channel` is one."""

    async def receive(self) -> bytes:
        """Return the next message. Raises: ChannelClosed when the app's work is over."""

    def close(self) -> None:
        """Stop the app's work. Does nothing if it is over."""

    def when_over(self, callback: Callable[[], None]) -> None:
        """Register a callback for the end of the app's work."""


class _Feed(Producer):
    """Appends what a process sends to a log."""

    def __init__(
        self,
        streams: AppStreams,
        lease: Lease[Payload],
        parts: ItemPieces | BodyPieces,
        body: AnswerBody,
        on_over: Callable[[], None],
    ) -> None:
        self.lease = lease
        self._streams = streams
        self._log = lease.log
        self._body = body
        self._on_over = on_over
        self._parts = parts
        self._num_bytes = 0
        self._is_ended = False

    def cancel(self) -> None:
        self.end(End("cancelled", _NO_TOKENS))

    def unread(self) -> None:
        self._log.linger()

    def lease_lost(self) -> None:
        self._is_ended = True
        self._streams.feeds.discard(self)
        self._body.close()
        self._log.release(LeaseLost("Another server writes this stream now."))

    def end(self, end: End) -> None:
        """Append the terminal event and stop the generator. A second call does nothing."""
        if not self._is_ended:
            self._body.close()
            self._append_end(end)

    def _append_end(self, end: End) -> None:
        self._is_ended = True
        self._streams.feeds.discard(self)
        if self._append(end):
            self._streams.num_ended[self._log.record.model, end.status] += 1

    def _append(self, event: Event[Payload]) -> bool:
        """Append an event; returns False if another server has taken the stream's lease."""
        try:
            self._streams.store.append(self.lease, (event,))
        except LeaseLost:
            self.lease_lost()
            return False
        return True

    async def run(self) -> None:
        """Run until the app has ended the stream or its process is lost. Calls `on_over` when its work is over."""
        # The client may have left before it began to read: without a reader, the stream is cancelled.
        self._log.linger(_FIRST_READER_S)
        try:
            await self._receive_all()
        finally:
            self._body.close()
            self._body.when_over(self._on_over)

    async def _receive_all(self) -> None:
        failure: Failure | None = None
        try:
            while not self._is_ended:
                message: Message = _decode(await self._body.receive())
                self._append_parts(self._parts.feed(message.get("body", b"")))
                if not message.get("more_body"):
                    self._append_parts(self._parts.end())
                    break
        except LinkLost:
            failure = Failure(AppUnavailable.code, "The process of the app died.")
        except ChannelClosed as closed:
            failure = _failure(closed.failure)
        except Exception:  # malformed data of an app must not affect other streams
            logger.exception("the data of an app could not be decoded")
            failure = Failure(AppFailed.code, "The app's data could not be decoded.")
        if failure is not None:  # an incomplete event is left out
            self.end(End("error", _NO_TOKENS, failure))
        elif not self._is_ended:
            self._append_end(End("done", _NO_TOKENS))
            with contextlib.suppress(ChannelClosed):  # the app may still run background tasks
                await self._body.receive()

    def _append_parts(self, parts: Iterable[StreamPart]) -> None:
        for part in parts:
            if self._is_ended:
                return
            if isinstance(part, Failure):
                self.end(End("error", _NO_TOKENS, part))
                return
            self._num_bytes += len(part) + _EVENT_BYTES
            if self._num_bytes > _LOG_BYTES:
                reason = f"The stream is longer than {_LOG_BYTES // 2**20} MiB."
                logger.warning("%s: a stream was ended: %s", self._log.record.model, reason)
                self.end(End("error", _NO_TOKENS, Failure(StreamTooLong.code, reason)))
                return
            self._append(Payload(part))


@contextlib.asynccontextmanager
async def open_app_streams(
    settings: Settings, data_path: Path, audit: AuditLog | None = None
) -> AsyncIterator[AppStreams]:
    """Open the log store of the settings, and end the streams of servers that are gone, now and later.

    Raises: ModelError if the store cannot be opened or written.
    """
    async with open_log_store(settings, data_path, of_apps=True) as store, asyncio.TaskGroup() as group:
        streams = AppStreams(for_apps(store), settings, group, audit)
        try:
            await streams.recover()
            store.write_errors.check()
        except StorageError as error:
            raise ModelError(error.message) from None
        recovering = group.create_task(streams.recover_orphans())
        yield streams
        recovering.cancel()


class AppStreams:
    """All streams of apps that can still be read."""

    def __init__(
        self, store: LogStore[Payload], settings: Settings, group: asyncio.TaskGroup, audit: AuditLog | None = None
    ) -> None:
        self.store = store
        self._audit = audit or AuditLog()
        self.feeds: set[_Feed] = set()
        self.num_ended: Counter[tuple[str, str]] = Counter()  # by app and status
        self.actions = StreamActions(store, settings)
        self._settings = settings
        self._group = group
        self._tasks: set[asyncio.Task[None]] = set()  # of the feeds
        store.write_errors.on_give_up.append(self._fail_all)

    async def recover(self, *, waits: bool = False) -> None:
        """Take over the streams of servers that are gone; if it `waits`, when another one has gone. A generator cannot
        continue in another process, so that unfinished streams end as interrupted. Raises: StorageError."""
        for lease in await self.store.take_over(waits=waits):
            lease.log.producer = Ender(partial(self._on_taken_ended, lease.log))
            with contextlib.suppress(LeaseLost):  # another server ends it
                self.store.append(lease, (_INTERRUPTED,))
        await asyncio.sleep(0)  # the store commits them

    async def recover_orphans(self) -> None:
        """Do the same whenever another server dies. Never returns."""
        while True:
            with contextlib.suppress(StorageError):  # whatever is left is found again
                await self.recover(waits=True)

    def _on_taken_ended(self, log: StreamLog[Payload]) -> None:
        self.num_ended[log.record.model, log.status] += 1

    async def begin(
        self,
        offer: StreamOffer,
        owner: str,
        app: str,
        body: AnswerBody,
        headers: Sequence[tuple[str, str]],
        *,
        on_over: Callable[[], None],
    ) -> ASGIApp:
        """Begin a stream of the rest of an answer. Returns the answer that follows it, with the app's own headers
        (lowercase names, which may repeat). `on_over` is called when the app's work is over. Raises: StorageError."""
        await self.store.write_errors.wait()
        is_recorded = offer.wire == "recorded"
        media_type = dict(headers).get("content-type", "text/plain")
        parts = BodyPieces(media_type) if is_recorded else ItemPieces()
        memo = Memo(offer.wire, media_type if is_recorded else "")
        record = Record(
            stream_id=new_stream_id(),
            created_s=time.time(),
            model=app,
            owner=owner,
            memo=msgspec.json.encode(memo),
            linger_s=offer.linger_s if offer.linger_s is not None else self._settings.linger_s,
        )
        lease = await self.store.open(record)
        log = lease.log
        self._audit.add("stream.begin", "done", owner=owner, model=app, wire=offer.wire, stream=log.stream_id)
        feed = _Feed(self, lease, parts, body, on_over)
        log.producer = feed
        self.feeds.add(feed)
        task = self._group.create_task(feed.run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        shown = [(name, value) for name, value in headers if name != "content-type"]
        encoder = encoder_of(log)
        return self.actions.follow(log, encoder, encoder, headers=shown)

    async def resume(self, owner: str, cursor: str, stream_id: str | None = None, *, app: str | None = None) -> ASGIApp:
        """Return an answer with the events after an event id. With `app`, the stream has to be one of that app.

        Raises: StreamError.
        """
        found, position = parse_cursor(cursor, stream_id) if cursor else (stream_id or "", 0)
        log = await self.actions.find(owner, found)
        if app is not None and log.record.model != app:
            raise UnknownStream("There is no such stream.")
        try:
            encoder = encoder_of(log, position)
        except SeqOutOfRange:  # this server may be behind the one that the client comes from
            with contextlib.suppress(SeqOutOfRange):  # the position may be one in bytes
                await self.store.read(owner, found, position)
            encoder = encoder_of(log, position)
        after = encoder.after
        if log.end is not None and after == log.last_seq - 1 and not encoder.encode(log.last_seq, log.end):
            after = log.last_seq  # a client has all of a stream whose end it is not shown
        return self.actions.follow(log, encoder, encoder, after)

    async def wait_ended(self) -> None:
        """Return when no stream runs."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def interrupt_all(self) -> None:
        """End all running streams as interrupted, because the server stops."""
        for feed in list(self.feeds):
            feed.end(_INTERRUPTED)
        await asyncio.sleep(0)  # the store commits the ends

    def _fail_all(self, error: StorageError) -> None:
        for feed in list(self.feeds):
            feed.end(End("error", _NO_TOKENS, Failure(error.code, error.message)))


def _failure(failure: bytes | None) -> Failure:
    if failure is None:
        return Failure(AppFailed.code, "The app stopped in the middle of its stream.")
    refusal = _decode(failure, type=Refusal)
    return Failure(refusal.code, refusal.message)
