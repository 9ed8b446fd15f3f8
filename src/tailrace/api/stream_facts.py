"""Facts about streams, for the wires."""

from __future__ import annotations

from tailrace.assembly.models import Models
from tailrace.assembly.served import Served
from tailrace.dialects import StreamFacts
from tailrace.streams import StreamLog

__all__ = ["facts_of", "running_streams"]


def facts_of(served: Served, log: StreamLog) -> StreamFacts:
    """Return what an encoder needs to know about a stream of this model."""
    status = log.status
    return StreamFacts(
        log.record,
        served.generator.prompts.tokenizer,
        status=status,
        num_ahead=served.generator.num_ahead(log) if status == "queued" else None,
        progress=log.progress if not log.events else None,
        expires_in_s=log.expires_in_s,
        root_path=served.settings.root_path,
    )


def running_streams(models: Models, owner: str) -> list[tuple[StreamFacts, int]]:
    """Return an owner's unfinished streams, the oldest first, each with its number of events."""
    logs = [
        (models.of(run.log), run.log) for run in models.live if run.log.record.owner == owner and run.log.end is None
    ]
    logs.sort(key=lambda entry: entry[1].record.created_s)
    return [(facts_of(served, log), log.last_seq) for served, log in logs]
