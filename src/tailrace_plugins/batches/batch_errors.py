"""The errors of files and batches. Clients see the codes."""

from __future__ import annotations

from tailrace.errors import QueueFull, RequestError

__all__ = ["NoBatches", "SpaceFull", "TooMany", "UnknownBatch", "UnknownFile"]


class UnknownFile(RequestError):
    """There is no such file of this owner."""

    status = 404
    code = "unknown_file"


class UnknownBatch(RequestError):
    """There is no such batch of this owner."""

    status = 404
    code = "unknown_batch"


class SpaceFull(RequestError):
    """The space for files and results is used up."""

    status = 507
    code = "batch_space_full"


class TooMany(QueueFull):
    """An owner has as many files or batches as one may have."""

    code = "too_many_batches"


class NoBatches(RequestError):
    """This server takes no batches."""

    status = 501
    code = "no_batches"
