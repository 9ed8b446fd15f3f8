"""Where events go before anybody sees them.

A journal decides when an event is safe; only then does it come into its log, where readers find it. The one here keeps
nothing: what it is given is seen at once, and gone with the process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from tailrace.errors import StorageError
from tailrace.streams.durable_records import DurableRecord
from tailrace.streams.log import StreamLog
from tailrace.streams.record import Claim, Record
from tailrace.types import Event

__all__ = ["Finished", "Journal", "MemoryJournal"]


class Finished(NamedTuple):
    """A finished stream that an earlier process left."""

    stream_id: str
    age_s: float  # since its end
    num_bytes: int
    claim: Claim | None


class Journal(Protocol):
    """Keeps streams. Used from one event loop only.

    `on_trouble` is called when events could not be kept for so long that no stream can go on; it is to end them all.
    """

    is_durable: bool  # running streams are there for the next process
    keeps: bool  # finished ones too
    on_trouble: Callable[[StorageError], None]

    @property
    def trouble(self) -> StorageError | None:
        """Why nothing can be kept just now."""

    async def well(self) -> None:
        """Return when there is no trouble. Raises: StorageError if that takes too long."""

    def begin(self, record: Record) -> StreamLog:
        """Keep a new stream; when this returns, it is safe. Raises: StorageError."""

    def append(self, log: StreamLog, event: Event) -> None:
        """Keep an event, and let it be seen then: at the end of this turn of the event loop at the latest, unless the
        journal is in trouble."""

    def retract(self, log: StreamLog) -> None:
        """Forget what was appended to a log and cannot be seen yet."""

    def flush(self) -> None:
        """Let what was appended be seen now, if it can be kept now."""

    def finish(self, log: StreamLog) -> int:
        """A stream has ended. Returns the bytes that it takes from now on."""

    def forget(self, stream_ids: Sequence[str]) -> None:
        """Keep no more of these finished streams than that they were there once."""

    def delete(self, stream_id: str) -> None:
        """Forget a finished stream for good before this returns. Raises: StorageError."""

    def load(self, stream_id: str) -> StreamLog | None:
        """A finished stream, if it is kept. Raises: StorageError."""

    def finished(self) -> Sequence[Finished]:
        """The finished streams that an earlier process left, in no order."""

    def expired(self) -> Sequence[str]:
        """The ids of streams that are kept no more, oldest first."""

    def damage_age_s(self) -> float | None:
        """Seconds since streams were lost by damage, nobody knows which; None if none were."""

    def note(self, key: bytes, record: DurableRecord) -> None:
        """Keep what is about to happen to a durable stream before this returns. Raises: StorageError."""

    def notes(self) -> Iterator[tuple[bytes, DurableRecord]]:
        """What happened to the durable streams that there are, in the order in which it did."""

    def unfinished(self) -> list[StreamLog]:
        """The streams that an earlier process could not finish, in the order in which they began."""


class MemoryJournal:
    """Keeps nothing."""

    is_durable = keeps = False
    trouble: StorageError | None = None

    def __init__(self) -> None:
        self.on_trouble: Callable[[StorageError], None] = lambda error: None

    async def well(self) -> None:
        pass

    def begin(self, record: Record) -> StreamLog:
        return StreamLog(record)

    def append(self, log: StreamLog, event: Event) -> None:
        log.append(event)

    def retract(self, log: StreamLog) -> None:
        pass

    def flush(self) -> None:
        pass

    def finish(self, log: StreamLog) -> int:
        return log.num_bytes

    def forget(self, stream_ids: Sequence[str]) -> None:
        pass

    def delete(self, stream_id: str) -> None:
        pass

    def load(self, stream_id: str) -> StreamLog | None:
        return None

    def finished(self) -> Sequence[Finished]:
        return ()

    def expired(self) -> Sequence[str]:
        return ()

    def damage_age_s(self) -> float | None:
        return None

    def note(self, key: bytes, record: DurableRecord) -> None:
        pass

    def notes(self) -> Iterator[tuple[bytes, DurableRecord]]:
        return iter(())

    def unfinished(self) -> list[StreamLog]:
        return []
