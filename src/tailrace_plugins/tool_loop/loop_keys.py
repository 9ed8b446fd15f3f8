"""The keys of rows: a kind, what stands for an owner, and a name."""

from __future__ import annotations

from tailrace.server import row_key

__all__ = ["BEGUN", "CANCELLED", "CLAIMS", "KINDS", "OPEN", "READ", "STEPS", "USED", "step_key"]

BEGUN = b"b"  # how a response began; whoever goes on with it has the lease of this row
STEPS = b"s"  # what followed, in order
OPEN = b"r"  # responses that have not ended, with what a server needs to go on
CANCELLED = b"c"  # such responses that a client has cancelled
READ = b"w"  # such responses that are read at another server
USED = b"u"  # approvals that a response has used
CLAIMS = b"i"  # Idempotency-Keys
KINDS = (BEGUN, OPEN, CANCELLED, READ, STEPS, USED, CLAIMS)


def step_key(owner: str, loop_id: str, number: int) -> bytes:
    """Return the key of a step, from 0. Keys are in the order of their numbers."""
    return b"%b/%08x" % (row_key(STEPS, owner, loop_id), number)
