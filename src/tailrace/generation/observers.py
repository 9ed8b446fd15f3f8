"""Observers of requests, such as metrics and the request log."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tailrace.errors import TailraceError
from tailrace.streams import StreamLog
from tailrace.types import Allowance, Arrival, GenerateRequest, Image, Record, Spent

__all__ = ["ImageKeeper", "Meter", "Observer", "Observers", "Times"]

logger = logging.getLogger("tailrace.generation")


@dataclass(slots=True)
class Times:
    """When a request reached each stage, on the monotonic clock; None if it has not reached it."""

    arrived_s: float
    entered_s: float | None = None  # the queue
    admitted_s: float | None = None
    first_s: float | None = None  # the first token
    ended_s: float | None = None
    num_losses: int = 0  # how often its engine was lost
    lost_s: float | None = None  # when its engine or server was lost, until it has a new token
    num_preemptions: int = 0  # how often it left the engine to others, in the background

    def spent(self) -> Spent | None:
        """Return the durations of the stages; None without a first token and an end."""
        if self.admitted_s is None or self.first_s is None or self.ended_s is None:
            return None
        return Spent(self.ended_s - self.arrived_s, self.first_s - self.admitted_s, self.ended_s - self.first_s)


class Observer:
    """Called on the event loop for each request: it must not block. Records have their prompts. Subclasses override
    the methods they need.

    Each request calls `on_arrival`, then `on_refused` or `on_begun`. If its Idempotency-Key finds an existing stream,
    it calls neither of these two. Streams of an earlier process, and streams that end early, may call only `on_end`.
    """

    def on_arrival(self, arrival: Arrival) -> None:
        """A request for a generation has arrived."""

    def on_refused(self, arrival: Arrival, error: TailraceError) -> None:
        """The request was refused. There is no stream."""

    def on_begun(self, record: Record) -> None:
        """The stream is kept, and enters the queue next."""

    def on_admitted(self, record: Record, times: Times) -> None:
        """The stream has a slot on the engine."""

    def on_first_token(self, record: Record, times: Times) -> None:
        """The engine has generated the first token of the stream."""

    def on_ignored(self, record: Record, fields: Sequence[str]) -> None:
        """These fields of its request have no effect, or another one than asked for. Names that only the client knows
        are `other`."""

    def on_followed(self, record: Record, after: int) -> None:
        """A client reads a stream that has begun, from the event after `after`."""

    def on_read(self, record: Record, after: int, read_s: float, trace: str) -> None:
        """This client has left, or has the end. It read for so long. `trace` is as in `KeptFields`, of its request."""

    def on_taken_over(self, record: Record, num_tokens: int) -> None:
        """The stream of another server or an earlier process continues here. It has so many tokens already."""

    def on_replay(self, record: Record, num_tokens: int) -> None:
        """The stream runs again from its prompts. So many tokens of its answers are generated again."""

    def on_caught_up(self, record: Record, silent_s: float) -> None:
        """The stream has a new token, so long after its engine or server was lost."""

    def on_readmitted(self, record: Record, waited_s: float) -> None:
        """A stream in the background is on the engine again, which it had left to others for so long. `on_replay`
        is not called for this."""

    def on_end(self, record: Record, log: StreamLog, times: Times) -> None:
        """The terminal event is kept, as `log.end`. Called once."""


class Meter(Protocol):
    """Limits the usage of owners. As an `Observer`, it settles each reservation when the stream ends."""

    def allowance(self, key_id: str, owner: str) -> Allowance:
        """Return the largest usage of one request of this owner, whatever is left now."""

    def reserve(self, record: Record) -> None:
        """Reserve the largest usage of a stream. Raises: AdmissionError, RequestError, StorageError."""

    def release(self, record: Record) -> None:
        """Release the reservation of a stream that was not kept."""


class ImageKeeper(Protocol):
    """Where images are that are kept for longer than a stream runs."""

    def keeps(self, request: GenerateRequest) -> bool:
        """Return whether the images of a request are to be kept, with its turn or its response."""

    async def find_images(self, owner: str, images: tuple[Image, ...]) -> list[Image]:
        """Return images with the content of those that are kept. Raises: RequestError if one is not, StorageError."""

    async def keep_images(self, record: Record) -> None:
        """Keep the images of a stream that is about to begin. Raises: RequestError, StorageError."""

    async def forget(self, owner: str, stream_id: str) -> None:
        """Delete what is kept of a stream without a turn. Raises: StorageError."""


class Observers:
    """Calls all observers of a server. If one raises, the error is logged, and the others are still called. Two of them
    are also asked: `meter` before a request begins, and `keeper` for its images; each may be None."""

    def __init__(self) -> None:
        self.meter: Meter | None = None
        self.keeper: ImageKeeper | None = None
        self._calls: dict[str, list[Callable[..., None]]] = {name: [] for name in vars(Observer) if name[:3] == "on_"}

    def add(self, observer: Observer) -> None:
        for name, calls in self._calls.items():
            if getattr(type(observer), name) is not getattr(Observer, name):  # it has its own
                calls.append(getattr(observer, name))

    def remove(self, observer: Observer) -> None:
        for name, calls in self._calls.items():
            if getattr(observer, name) in calls:
                calls.remove(getattr(observer, name))

    @property
    def hear_of_reads(self) -> bool:
        """Whether one of them has its own `on_read`. Else nobody needs to measure how long clients read."""
        return bool(self._calls["on_read"])

    def on_arrival(self, arrival: Arrival) -> None:
        self._tell("on_arrival", arrival)

    def on_refused(self, arrival: Arrival, error: TailraceError) -> None:
        self._tell("on_refused", arrival, error)

    def on_begun(self, record: Record) -> None:
        self._tell("on_begun", record)

    def on_admitted(self, record: Record, times: Times) -> None:
        self._tell("on_admitted", record, times)

    def on_first_token(self, record: Record, times: Times) -> None:
        self._tell("on_first_token", record, times)

    def on_ignored(self, record: Record, fields: Sequence[str]) -> None:
        self._tell("on_ignored", record, fields)

    def on_followed(self, record: Record, after: int) -> None:
        self._tell("on_followed", record, after)

    def on_read(self, record: Record, after: int, read_s: float, trace: str) -> None:
        self._tell("on_read", record, after, read_s, trace)

    def on_taken_over(self, record: Record, num_tokens: int) -> None:
        self._tell("on_taken_over", record, num_tokens)

    def on_replay(self, record: Record, num_tokens: int) -> None:
        self._tell("on_replay", record, num_tokens)

    def on_caught_up(self, record: Record, silent_s: float) -> None:
        self._tell("on_caught_up", record, silent_s)

    def on_readmitted(self, record: Record, waited_s: float) -> None:
        self._tell("on_readmitted", record, waited_s)

    def on_end(self, record: Record, log: StreamLog, times: Times) -> None:
        self._tell("on_end", record, log, times)

    def _tell(self, name: str, *values: object) -> None:
        for call in self._calls[name]:
            try:
                call(*values)
            except Exception:  # a defect of an observer must not end a stream
                logger.exception("an observer of streams has failed")
