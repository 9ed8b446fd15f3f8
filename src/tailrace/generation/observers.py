"""Who wants to know how requests go: metrics, a request record, a trace."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from tailrace.errors import TailraceError
from tailrace.streams import Record, StreamLog
from tailrace.types import Allowance, Asked, Spent

__all__ = ["Meter", "Observer", "Observers", "Times"]

logger = logging.getLogger("tailrace.generation")


@dataclass(slots=True)
class Times:
    """When a request came to each of its stations, on the monotonic clock; None for what it has not come to."""

    asked_s: float
    entered_s: float | None = None  # the queue
    admitted_s: float | None = None
    first_s: float | None = None  # the first token
    ended_s: float | None = None
    num_losses: int = 0  # engines that were lost under it

    def spent(self) -> Spent | None:
        """Where the time went, once there was a token and an end."""
        if self.admitted_s is None or self.first_s is None or self.ended_s is None:
            return None
        return Spent(self.ended_s - self.asked_s, self.first_s - self.admitted_s, self.ended_s - self.first_s)


class Observer:
    """Told of each request, on the event loop: it must not block. The record has the prompts in each call. A class that
    inherits from this one has only what it wants to know.

    A request comes to `on_asked`, then to `on_refused` or `on_begun`. An Idempotency-Key that finds its stream again
    comes to neither. A stream of an earlier process, and one that ends early, may be told of by `on_end` alone.
    """

    def on_asked(self, asked: Asked) -> None:
        """Somebody asks for a generation."""

    def on_refused(self, asked: Asked, error: TailraceError) -> None:
        """It came to no stream."""

    def on_begun(self, record: Record) -> None:
        """Its stream is kept, and has a place in the queue next."""

    def on_admitted(self, record: Record, times: Times) -> None:
        """It has a place on the engine."""

    def on_first_token(self, record: Record, times: Times) -> None:
        """The engine has given the first token of any of its answers."""

    def on_end(self, record: Record, log: StreamLog, times: Times) -> None:
        """Its terminal event is kept, as `log.end`. Called once."""


class Meter(Protocol):
    """Whoever may refuse a stream for what its owner has used. Observers hear of its end."""

    def allowance(self, key_id: str, owner: str) -> Allowance:
        """How much a request of theirs can take at all, whatever is left just now."""

    def reserve(self, record: Record) -> None:
        """Before it is kept. Raises: AdmissionError, RequestError, StorageError."""

    def release(self, record: Record) -> None:
        """It was not kept after all."""


class Observers:
    """Tells all observers. One that raises is logged, and the others are told all the same."""

    def __init__(self) -> None:
        self._observers: list[Observer] = []

    def add(self, observer: Observer) -> None:
        self._observers.append(observer)

    def remove(self, observer: Observer) -> None:
        self._observers.remove(observer)

    def on_asked(self, asked: Asked) -> None:
        self._tell(lambda observer: observer.on_asked(asked))

    def on_refused(self, asked: Asked, error: TailraceError) -> None:
        self._tell(lambda observer: observer.on_refused(asked, error))

    def on_begun(self, record: Record) -> None:
        self._tell(lambda observer: observer.on_begun(record))

    def on_admitted(self, record: Record, times: Times) -> None:
        self._tell(lambda observer: observer.on_admitted(record, times))

    def on_first_token(self, record: Record, times: Times) -> None:
        self._tell(lambda observer: observer.on_first_token(record, times))

    def on_end(self, record: Record, log: StreamLog, times: Times) -> None:
        self._tell(lambda observer: observer.on_end(record, log, times))

    def _tell(self, call: Callable[[Observer], None]) -> None:
        for observer in self._observers:
            try:
                call(observer)
            except Exception:  # a defect of an observer must not end a stream
                logger.exception("an observer of streams has failed")
