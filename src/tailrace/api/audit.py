"""The audit log's lines of streams that begin."""

from __future__ import annotations

from tailrace.access.audit import note
from tailrace.errors import TailraceError
from tailrace.generation import Times
from tailrace.streams import Record, StreamLog
from tailrace.types import Asked

__all__ = ["StreamAudit"]


class StreamAudit:
    """An observer of generators."""

    def on_asked(self, asked: Asked) -> None:
        pass

    def on_refused(self, asked: Asked, error: TailraceError) -> None:
        pass

    def on_begun(self, record: Record) -> None:
        note(
            "stream.begin", "done", owner=record.owner, key=record.key_id, model=record.model, wire=record.wire,
            stream=record.stream_id,
        )  # fmt: skip

    def on_admitted(self, record: Record, times: Times) -> None:
        pass

    def on_first_token(self, record: Record, times: Times) -> None:
        pass

    def on_end(self, record: Record, log: StreamLog, times: Times) -> None:
        pass
