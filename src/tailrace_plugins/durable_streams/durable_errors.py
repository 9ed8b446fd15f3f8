"""The errors of durable streams, beside those of all streams. Clients see the codes."""

from __future__ import annotations

from tailrace.errors import StreamError

__all__ = ["SequenceGap", "StaleEpoch", "StreamClosed", "StreamConflict", "StreamsFull"]


class StreamConflict(StreamError):
    """The stream is in another state than the request needs."""

    status = 409
    code = "stream_conflict"


class StreamClosed(StreamConflict):
    """The stream is closed and takes no more appends."""

    code = "stream_closed"

    def __init__(self, next_offset: str) -> None:
        super().__init__("This stream is closed.")
        self.next_offset = next_offset


class SequenceGap(StreamConflict):
    """Batches of this producer are missing between the last one and this one."""

    code = "sequence_gap"

    def __init__(self, *, expected: int, received: int) -> None:
        super().__init__(f"The producer's next batch must have the number {expected}.", param="producer-seq")
        self.expected = expected
        self.received = received


class StaleEpoch(StreamError):
    """The producer has started a later epoch."""

    status = 403
    code = "stale_epoch"

    def __init__(self, epoch: int) -> None:
        super().__init__("This producer has started a later epoch.", param="producer-epoch")
        self.epoch = epoch


class StreamsFull(StreamError):
    """The memory for durable streams, `--durable-bytes`, is full."""

    status = 507
    code = "streams_full"
