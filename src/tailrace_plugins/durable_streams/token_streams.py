"""Streams of tokens as durable streams."""

from __future__ import annotations

from collections.abc import Sequence

from tailrace.dialects import failure_of
from tailrace.errors import TailraceError
from tailrace.server import Reader, StreamLog, event_json
from tailrace.types import Released
from tailrace_plugins.durable_streams.page import offset_text

__all__ = ["DurableTokenStream"]

_TAKE_EVENTS = 512  # at once, like readers of the log


class DurableTokenStream:
    """A stream of tokens, read as a durable stream: one JSON message per event. Offsets count events."""

    content_type = "application/json"

    def __init__(self, log: StreamLog) -> None:
        self._log = log
        self.incarnation = log.stream_id

    @property
    def tail(self) -> int:
        return self._log.last_seq

    @property
    def is_closed(self) -> bool:
        return self._log.end is not None

    @property
    def released(self) -> TailraceError | None:
        taken = self.follower(self.tail).take()
        return failure_of(taken) if isinstance(taken, Released) else None

    def offset(self, position: int) -> str:
        return offset_text(position, 0)

    def take(self, position: int, limit_bytes: int) -> tuple[Sequence[bytes], int]:
        pieces: list[bytes] = []
        num_bytes = 0
        for event in self._log.events[position : position + _TAKE_EVENTS]:
            pieces.append(event_json(event, reasoning_name="reasoning").encode("ascii"))
            num_bytes += len(pieces[-1])
            if num_bytes >= limit_bytes:
                break
        return pieces, position + len(pieces)

    def follower(self, position: int) -> Reader:
        return Reader(self._log, position)
