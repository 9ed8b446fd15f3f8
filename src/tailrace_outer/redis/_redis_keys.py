"""The names of the keys. `{0}` is the shard, in braces: in a Redis Cluster, all keys of one shard are on one node.
Servers of users' apps have PREFIX:apps in place of PREFIX: they and servers of models never see each other's streams.

    PREFIX:{0}:facts            hash: format, number of shards, a text encrypted with the journal key
    PREFIX:{0}:epoch            the last epoch that a server got
    PREFIX:{0}:servers          set: epochs of the servers that live, and of dead ones of which something may be left
    PREFIX:{0}:writers          set: epochs of the servers that have begun a stream of this shard
    PREFIX:{0}:models           hash: names of the models of each server, by epoch
    PREFIX:{0}:lease:EPOCH      its duration in ms, while that server lives; "dead" from when another server takes its
                                streams
    PREFIX:{0}:owned:EPOCH      sorted set: streams of this shard which that server writes, in the order in which it got
                                them
    PREFIX:{0}:inbox:EPOCH      stream: messages to that server about streams of this shard
    PREFIX:{0}:stream:ID        hash: epoch of the writer, owner, model, record, last event, whether it has ended,
                                epoch of a server that gave its id to a client by its idempotency key
    PREFIX:{0}:events:ID        stream: the events. The entry LAST-0 has the events up to number LAST
    PREFIX:{0}:gone:ID          the owner of a stream that is no longer kept; NUL and a position: nobody's
    PREFIX:{0}:claim:HASH       fingerprint and stream of an idempotency key; HASH is of owner and key
    PREFIX:{0}:topic:HASH       sorted set: the last streams of a topic, by the time they began; HASH is of owner,
                                wire and topic
    PREFIX:{0}:LOG              hash: ends of the log of an extension, such as `durable`, and of its snapshot
    PREFIX:{0}:LOG:log          list: that log (`shared_log.py`)
    PREFIX:{0}:LOG:tail         stream: one entry, the number of the last entry of that log
    PREFIX:{0}:LOG:turn         the server that may append to that log next, for a moment
    PREFIX:{0}:LOG:writer       the server that writes a snapshot of it, for a while
    PREFIX:{0}:LOG:new:NAME     list: the snapshot that a server writes

    PREFIX:{0}:TABLE:rows       hash: the rows of an extension, such as `batches` (`shared_table.py`)
    PREFIX:{0}:TABLE:order      sorted set: their keys
    PREFIX:{0}:TABLE:used       hash: bytes of each account, and of all
    PREFIX:{0}:TABLE:holders    hash: epoch of the server that has the lease of a row

When a stream has ended, its events move from `events` into one field of `stream`.
"""

from __future__ import annotations

import hashlib
import zlib
from dataclasses import dataclass

__all__ = ["CLUSTER_SHARDS", "DAY_MS", "Keys"]

DAY_MS = 24 * 3600 * 1000  # how long Redis keeps what only servers or clients that come late ask for
CLUSTER_SHARDS = 16


@dataclass(frozen=True, slots=True)
class Keys:
    """Makes the names. Without a cluster there is one shard."""

    prefix: str
    num_shards: int = 1

    def shard_of(self, stream_id: str) -> int:
        return zlib.crc32(stream_id.encode()) % self.num_shards

    def base(self, shard: int) -> str:
        """Return what the names of all keys of a shard begin with."""
        return f"{self.prefix}:{{{shard}}}:"

    def _of_shard(self, shard: int, name: str) -> str:
        return self.base(shard) + name

    @property
    def properties(self) -> str:
        return self._of_shard(0, "facts")

    @property
    def epoch(self) -> str:
        return self._of_shard(0, "epoch")

    @property
    def servers(self) -> str:
        return self._of_shard(0, "servers")

    def writers(self, shard: int) -> str:
        return self._of_shard(shard, "writers")

    @property
    def models(self) -> str:
        return self._of_shard(0, "models")

    def lease(self, epoch: int) -> str:
        return self._of_shard(0, f"lease:{epoch}")

    def owned(self, shard: int, epoch: int) -> str:
        return self._of_shard(shard, f"owned:{epoch}")

    def inbox(self, shard: int, epoch: int) -> str:
        return self._of_shard(shard, f"inbox:{epoch}")

    def stream(self, stream_id: str) -> str:
        return self._of_shard(self.shard_of(stream_id), f"stream:{stream_id}")

    def events(self, stream_id: str) -> str:
        return self._of_shard(self.shard_of(stream_id), f"events:{stream_id}")

    def gone(self, stream_id: str) -> str:
        return self._of_shard(self.shard_of(stream_id), f"gone:{stream_id}")

    def of_stream(self, stream_id: str) -> tuple[str, str, str]:
        """Return the keys that the scripts of `_scripts.py` take for each stream."""
        return self.stream(stream_id), self.events(stream_id), self.gone(stream_id)

    def of_owned(self, stream_id: str, epoch: int) -> tuple[str, str, str, str]:
        """Return the same, and where a server lists the stream as its own."""
        return *self.of_stream(stream_id), self.owned(self.shard_of(stream_id), epoch)

    def of_opening(self, stream_id: str, epoch: int) -> tuple[str, str, str, str, str]:
        """Return the same, and where the servers that begin streams of its shard are listed."""
        return *self.of_owned(stream_id, epoch), self.writers(self.shard_of(stream_id))

    def claim(self, owner: str, key: str) -> str:
        return self._hashed("claim", f"{len(owner)}:{owner}{key}")

    def topic(self, owner: str, wire: str, topic: str) -> str:
        return self._hashed("topic", f"{len(owner)}:{owner}{len(wire)}:{wire}{topic}")

    def _hashed(self, kind: str, text: str) -> str:
        digest = hashlib.sha256(text.encode()).hexdigest()
        return self._of_shard(self.shard_of(digest), f"{kind}:{digest}")

    def shared_log(self, name: str, part: str) -> str:
        return self._of_shard(0, f"{name}:{part}" if part else name)

    @property
    def all_streams(self) -> str:
        """Return a pattern that matches `stream` of every stream."""
        return f"{glob_escape(self.prefix)}:{{*}}:stream:*"

    def id_of(self, stream_key: bytes) -> str:
        """Return the id of the stream that a key `stream` belongs to."""
        return stream_key.decode().rpartition(":stream:")[2]


def glob_escape(text: str) -> str:
    """Return a pattern of Redis that matches this text only."""
    return "".join("\\" + letter if letter in "*?[]^\\" else letter for letter in text)
