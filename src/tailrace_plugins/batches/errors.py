"""The errors of files and batches. Clients see the codes."""

from __future__ import annotations

import msgspec

from tailrace.errors import QueueFull, RequestError, TailraceError

__all__ = ["NoBatches", "SpaceFull", "TooMany", "UnknownBatch", "UnknownFile", "anthropic_error"]

_KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


def anthropic_error(error: TailraceError) -> tuple[int, bytes]:
    """Return the status and the body of an error in Anthropic's form."""
    kind = _KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return error.status, msgspec.json.encode({"type": "error", "error": {"type": kind, "message": error.message}})


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
