"""How long the log store waits for Redis, in seconds. docs/many-servers.md says what clients see while Redis is away.

What cannot be asked now is asked again after `RETRY_S`: events, messages to other servers, and what others have
written. `--journal-wait-s` says for how long. Then the streams of this server end with an error, and it asks every
`PROBE_S` whether Redis is back. New streams wait as long. What only Redis knows cannot be read meanwhile: a reader is
refused after `COMMAND_S`, and asks again itself.

Elsewhere: `_members.py` has the times that are parts of `--lease-s`, and extensions that write repeat this themselves.
"""

from __future__ import annotations

__all__ = [
    "BLOCK_S",
    "CATCH_UP_S",
    "CLOSE_S",
    "COMMAND_S",
    "COMPACT_AFTER_S",
    "CONNECT_S",
    "KEYS_S",
    "LATE_S",
    "NODE_S",
    "PROBE_S",
    "RETRY_S",
    "TIDY_S",
]

RETRY_S = 0.05  # until what has failed is tried again
PROBE_S = 1.0  # the same when --journal-wait-s is over
CONNECT_S = 5.0  # for a connection, and for each question at the start of a server
COMMAND_S = 2.0  # after which a command has failed: a finished stream then answers 503
BLOCK_S = 1.0  # for which a blocking read waits in Redis for something new
NODE_S = 1.5  # longer than BLOCK_S, and shorter than COMMAND_S: then a cluster's nodes are asked anew
CATCH_UP_S = 2.0  # for what another server has written, or is about to write
LATE_S = 5.0  # beyond BLOCK_S, or beyond the time that others need to take a stream over
COMPACT_AFTER_S = 2.0  # from the end of a stream: other servers have read it by then
KEYS_S = 3600.0  # between two renewals of the idempotency keys of running streams, which are kept for a day
TIDY_S = 0.5  # between two tries to tidy up what has ended
CLOSE_S = 2.0  # for the end of a connection, or of a server's membership
