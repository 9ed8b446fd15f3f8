"""How long a server waits for Redis, in seconds. docs/many-servers.md says what clients see while Redis is away.

What cannot be asked now is asked again after `RETRY_S`: events, messages to other servers, entries of shared logs,
and what others have written. `--journal-wait-s` says for how long. Then the streams of this server end with an error,
and it asks every `PROBE_S` whether Redis is back. New streams wait as long. What only Redis knows cannot be read
meanwhile: a reader is refused after `COMMAND_S`, and asks again itself.
"""

from __future__ import annotations

__all__ = ["CATCH_UP_S", "CLOSE_S", "COMMAND_S", "CONNECT_S", "LATE_S", "NODE_S", "PROBE_S", "RETRY_S"]

RETRY_S = 0.05
PROBE_S = 1.0
CONNECT_S = 5.0
COMMAND_S = 2.0  # after which a command has failed
NODE_S = 1.5  # longer than a blocking read, and shorter than COMMAND_S: then a cluster's nodes are asked anew
CATCH_UP_S = 2.0  # for what another server has written, or is about to write
CLOSE_S = 2.0
LATE_S = 5.0  # beyond the time that a blocking read waits, or that others need to take a stream over
