"""The keys of rows: a kind, what stands for an owner, and a name."""

from __future__ import annotations

from tailrace.server import row_key
from tailrace_plugins.batches.stored_batches import RowBatch

__all__ = [
    "BATCHES", "CANCELLED", "COUNTS", "ERRORS", "FILES", "KINDS", "OPEN", "PIECES", "RESULTS", "UNUSED",
    "key_of_batch", "piece_key", "result_prefix",
]  # fmt: skip

BATCHES = b"b"
OPEN = b"r"  # batches that have not ended, each with the id of its file
CANCELLED = b"c"  # when a client has cancelled such a batch
COUNTS = b"n"  # how many rows of such a batch have each outcome, for other servers
FILES = b"f"  # what is kept of files
UNUSED = b"u"  # what is no file yet, or not any more
PIECES = b"p"  # of files
RESULTS, ERRORS = b"o", b"e"  # of rows
KINDS = (BATCHES, OPEN, CANCELLED, COUNTS, FILES, UNUSED, PIECES, RESULTS, ERRORS)


def key_of_batch(kind: bytes, batch: RowBatch) -> bytes:
    return row_key(kind, batch.owner, batch.batch_id)


def result_prefix(kind: bytes, batch: RowBatch) -> bytes:
    """Return what the keys of a batch's results begin with."""
    return key_of_batch(kind, batch) + b"/"


def piece_key(prefix: bytes, number: int) -> bytes:
    """Return the key of a piece. Keys are in the order of their numbers."""
    return b"%b%08x" % (prefix, number)
