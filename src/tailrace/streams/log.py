"""One stream: its events, which are numbered from 1, and the readers that follow it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Sequence
from typing import Generic, TypeAlias, cast, final

from tailrace.errors import SeqOutOfRange, TailraceError
from tailrace.streams.producer import Ender, Producer
from tailrace.system.follower import Follower
from tailrace.types import ContentT, End, Event, Failure, Payload, PromptProgress, Record, Released, TextDelta

__all__ = [
    "Reader",
    "StreamLog",
    "Taken",
    "enqueue",
    "without_producers",
]

logger = logging.getLogger("tailrace.streams")

_TAKE_EVENTS = 512  # so that a long replay neither blocks the event loop nor fills the buffer of a slow socket
_EVENT_BYTES = 200  # memory of one event without its text (CPython 3.11, measured over 100,000 events)
_STANDSTILL_S = 2.0  # a timer that is so late says that the process was stopped, or its machine


class StreamLog(Generic[ContentT]):
    """The events of one request that readers may see: of a model (`StreamLog`), or of an app (`StreamLog[Payload]`).
    Used from one event loop only."""

    __slots__ = (
        "_ending",
        "_linger",
        "_waiting",
        "encoded",
        "end",
        "events",
        "expires_s",
        "first_s",
        "num_read",
        "number",
        "producer",
        "progress",
        "queued",
        "readers",
        "record",
        "released",
    )  # fmt: skip

    def __init__(self, record: Record, events: Sequence[Event[ContentT]] = (), *, number: int = 0) -> None:
        self.record = record
        self.number = number  # in the journal
        self.queued: Sequence[Event[ContentT]] = ()  # appended and not committed yet; they follow `events`
        self.events: list[Event[ContentT]] = list(events)  # seq n is events[n - 1]
        # `elements` of `events`, for the journal on disk, until they are in one row. At the end of a long stream its
        # events are no longer in the processor's caches: copying this takes a tenth of the time.
        self.encoded = bytearray()
        last = self.events[-1] if self.events else None
        self.end: End | None = last if isinstance(last, End) else None
        self.released: TailraceError | None = None  # why this process adds no more events, although it has not ended
        self.producer: Producer | None = None
        self.progress: PromptProgress | None = None  # before the first event, if the stream is written here
        self.first_s: float | None = None  # monotonic; time of the first token in this process
        self.expires_s: float | None = None  # monotonic; None while it runs, and after it has expired
        self._linger: asyncio.TimerHandle | None = None
        self.num_read = 0  # the most events that a reader had when it left
        self.readers: dict[Reader[ContentT], None] = {}  # those that are open
        self._waiting: dict[Reader[ContentT], None] = {}  # for the next event, in order
        self._ending: dict[Reader[ContentT], None] = {}  # for the terminal one

    @property
    def stream_id(self) -> str:
        return self.record.stream_id

    @property
    def num_waiting(self) -> int:
        """Return how many readers wait for an event."""
        return len(self._waiting) + len(self._ending)

    @property
    def num_readers(self) -> int:
        return len(self.readers)

    @property
    def num_unread_tokens(self) -> int:
        """Return how many tokens no reader has got. A reader that is open may still get all of them."""
        return 0 if self.readers else _num_tokens(self.events[self.num_read :])

    @property
    def status(self) -> str:
        """Return queued, running, or the status of the terminal event."""
        if self.end is not None:
            return self.end.status
        return self.producer.status if self.producer is not None else "running"

    @property
    def expires_in_s(self) -> float | None:
        """Return the seconds until a finished stream is dropped at the latest; None while it runs."""
        return None if self.expires_s is None else max(0.0, self.expires_s - time.monotonic())

    @property
    def last_seq(self) -> int:
        return len(self.events)

    @property
    def num_tokens(self) -> int:
        """Return how many tokens the events have."""
        return _num_tokens(self.events)

    @property
    def num_bytes(self) -> int:
        """Return about how much memory the stream takes."""
        num_content_bytes = len(self.encoded) or sum(
            len(event.text) + len(event.reasoning) if type(event) is TextDelta
            else len(event.data) if type(event) is Payload
            else 0
            for event in self.events
        )  # fmt: skip
        return num_content_bytes + _EVENT_BYTES * len(self.events) + len(self.record.memo) + len(self.record.turn)

    def extend(self, events: Sequence[Event[ContentT]]) -> None:
        """Add events, of which only the last may be terminal, and wake the readers that wait for them. Ignored after
        the terminal event.

        Only a log store calls this, after it has committed the events.
        """
        if self.queued is events:
            self.queued = ()
        if self.end is not None or not events:
            return
        self.events += events
        if self._waiting:
            waiting, self._waiting = self._waiting, {}
            for reader in waiting:
                reader.wake()
        last = events[-1]
        if type(last) is End:
            self.end = last
            self._stop_lingering()
            for reader in self._ending:
                reader.wake()
            if self.producer is not None:
                try:
                    self.producer.ended()
                except Exception:  # a bug here must not stop the events of other streams
                    logger.exception("the end of a stream could not be processed")

    def report(self, progress: PromptProgress) -> None:
        """Keep how much of the prompts is read, and wake the readers that show it. Ignored after the first event."""
        if self.events:
            return
        self.progress = progress
        for reader in self._waiting:
            if reader.shows_progress:
                reader.wake()

    def cancel(self) -> None:
        """End the stream as cancelled, if it has not ended."""
        if self.end is None and self.producer is not None:
            self.producer.cancel()

    def stop(self) -> None:
        """End the stream as cancelled, if it has not ended. Raises: the reason if it was released."""
        if self.released is not None and self.end is None:
            raise self.released.with_traceback(None)
        self.cancel()

    def is_over(self, after: int) -> bool:
        """Return whether event `after` is the terminal one."""
        return self.end is not None and after == len(self.events)

    def check_position(self, after: int) -> None:
        """Raises: SeqOutOfRange if there are fewer than `after` events."""
        if after > self.last_seq:
            raise SeqOutOfRange("This stream has fewer events.", param="last-event-id")

    def release(self, reason: TailraceError) -> None:
        """Send the readers away: the stream has not ended, but this process adds no more events to it. The message of
        `reason` says where it goes on."""
        self.released = reason
        self._stop_lingering()
        for reader in (*self._waiting, *self._ending):
            reader.wake()

    def linger(self, first_s: float = 0.0) -> None:
        """Cancel the stream if it has no reader and none comes within its linger time, or within `first_s` if it has
        none."""
        if self.readers or self.end is not None or self.released is not None:
            return
        if wait_s := self.record.linger_s or first_s:
            loop = asyncio.get_running_loop()
            self._linger = loop.call_later(wait_s, self._on_lingered, loop.time() + wait_s)
        else:
            self.cancel()

    def _on_lingered(self, due_s: float) -> None:
        loop = asyncio.get_running_loop()
        if loop.time() - due_s < _STANDSTILL_S:
            self.cancel()
        else:  # this process stood still: a reader that has come meanwhile may not be heard yet
            self._linger = loop.call_later(_STANDSTILL_S, self.cancel)

    def _stop_lingering(self) -> None:
        if self._linger is not None:
            self._linger.cancel()
            self._linger = None

    def reasoning(self, choice: int = 0) -> str:
        """Return the reasoning of a choice so far."""
        return "".join(event.reasoning for event in self.events if type(event) is TextDelta and event.choice == choice)

    def finish_reasons(self) -> list[str]:
        """Return why choices ended, in the order of these ends. Most are among the last events."""
        found: list[str] = []
        for event in reversed(self.events):
            if len(found) == self.record.num_choices:
                break
            if type(event) is TextDelta and event.finish_reason is not None:
                found.append(event.finish_reason)
        return found[::-1]

    def text(self, choice: int = 0) -> str:
        """Return the text of a choice so far."""
        return "".join(event.text for event in self.events if type(event) is TextDelta and event.choice == choice)


Taken: TypeAlias = list[ContentT] | End | Released
"""What a reader gets: the next events, the terminal event, or the reason why no more events come here."""


@final
class Reader(Follower, Generic[ContentT]):
    """Follows a log, from the event after `after`. The log counts its open readers.

    With `at_end_only`, only the terminal event wakes the reader. Answers in one piece use this. With `shows_progress`,
    `progress` wakes it too.
    """

    __slots__ = ("_log", "_shown", "at_end_only", "shows_progress")

    def __init__(
        self, log: StreamLog[ContentT], after: int = 0, *, at_end_only: bool = False, shows_progress: bool = False
    ) -> None:
        super().__init__(after)
        self._log = log
        self._shown: PromptProgress | None = None
        self.at_end_only = at_end_only
        self.shows_progress = shows_progress

    def __enter__(self) -> Reader[ContentT]:
        log = self._log
        log.readers[self] = None
        log._stop_lingering()
        if len(log.readers) == 1 and log.producer is not None:
            log.producer.read()
        return self

    def __exit__(self, *exc_info: object) -> None:
        log = self._log
        del log.readers[self]
        log.num_read = max(log.num_read, self.cursor)
        if not log.readers and log.producer is not None:
            log.producer.unread()

    def take(self) -> Taken[ContentT]:
        """Return what comes next, and advance the cursor: at most `_TAKE_EVENTS` events, or [] if there is none yet;
        after all of them how the stream ends for this reader. A reader `at_end_only` gets no events."""
        log = self._log
        end = log.end
        num_deltas = len(log.events) - (end is not None)
        if self.cursor < num_deltas and not self.at_end_only:
            deltas = log.events[self.cursor : min(self.cursor + _TAKE_EVENTS, num_deltas)]
            self.cursor += len(deltas)
            return cast("list[ContentT]", deltas)
        if end is not None:
            self.cursor = len(log.events)
            return end
        if log.released is not None:
            return Released(log.stream_id, self.cursor, Failure(log.released.code, log.released.message))
        return []

    async def next(self, at_most_s: float = 0.0) -> Taken[ContentT]:
        """Wait until there is something to take, and take it. Returns [] where `wait` returns without it.

        Cancellation: leaves the reader as it was.
        """
        if taken := self.take():
            return taken
        await self.wait(at_most_s)
        return self.take()

    def take_progress(self) -> PromptProgress | None:
        """Return how much of the prompts is read, if this has changed since the last call. Only before the first
        event."""
        progress = self._progress
        if progress is not None:
            self._shown = progress
        return progress

    @property
    def _progress(self) -> PromptProgress | None:
        log = self._log
        return log.progress if self.shows_progress and not log.events and log.progress is not self._shown else None

    def waiting(self) -> dict[Reader[ContentT], None] | None:
        log = self._log
        if log.end is not None or log.released is not None or (self.cursor < len(log.events) and not self.at_end_only):
            return None
        if self.shows_progress and self._progress is not None:
            return None
        return log._ending if self.at_end_only else log._waiting


def _num_tokens(events: Iterable[object]) -> int:
    return sum(len(event.token_ids) for event in events if type(event) is TextDelta)


def enqueue(queues: dict[StreamLog, list[Event]], log: StreamLog, events: Sequence[Event]) -> bool:
    """Queue events of a stream until they are committed. Those behind a terminal one are dropped. Returns whether any
    was queued."""
    queue = queues.get(log)
    last = queue[-1] if queue else log.end
    if type(last) is End or not events:
        return False
    if queue is None:
        log.queued = queue = queues[log] = []
    for event in events:
        queue.append(event)
        if type(event) is End:
            break
    return True


def without_producers(queues: dict[StreamLog, list[Event]]) -> dict[StreamLog, list[Event]]:
    """Return the queues that wait when a store gives up and ends all streams: the ends of streams that were taken over
    only to end them. Nobody would write these again. The others are dropped."""
    kept = {log: events for log, events in queues.items() if isinstance(log.producer, Ender)}
    for log in queues.keys() - kept.keys():
        log.queued = ()
    return kept
