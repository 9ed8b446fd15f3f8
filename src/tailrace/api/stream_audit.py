"""Writes new streams to the audit log."""

from __future__ import annotations

from tailrace.access.audit import AuditLog
from tailrace.generation import Observer
from tailrace.types import Record

__all__ = ["StreamAudit"]


class StreamAudit(Observer):
    """Writes a line when a stream begins."""

    def __init__(self, audit: AuditLog) -> None:
        self._audit = audit

    def on_begun(self, record: Record) -> None:
        self._audit.add(
            "stream.begin", "done", owner=record.owner, key=record.key_id, model=record.model, wire=record.wire,
            stream=record.stream_id,
        )  # fmt: skip
