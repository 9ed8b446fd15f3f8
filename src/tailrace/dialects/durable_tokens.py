"""A stream of tokens, to be read as a durable stream: one message of JSON for each event."""

from __future__ import annotations

from collections.abc import Sequence

from tailrace.dialects.native import event_json
from tailrace.streams import Reader, StreamLog
from tailrace.streams.durable_page import offset_text

__all__ = ["TokenStream"]

_TAKE_EVENTS = 512  # at once, as readers of the log do


class TokenStream:
    """Offsets count events: their bytes are not known before they are shown."""

    content_type = "application/json"
    is_gone = False

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
    def is_halted(self) -> bool:
        return self._log.is_parked

    def offset(self, position: int) -> str:
        return offset_text(position, 0)

    def take(self, position: int, limit_bytes: int) -> tuple[Sequence[bytes], int]:
        pieces: list[bytes] = []
        num_bytes = 0
        for event in self._log.events[position : position + _TAKE_EVENTS]:
            pieces.append(event_json(event).encode("ascii"))
            num_bytes += len(pieces[-1])
            if num_bytes >= limit_bytes:
                break
        return pieces, position + len(pieces)

    def follower(self, position: int) -> Reader:
        return Reader(self._log, position)
