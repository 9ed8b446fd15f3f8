"""Topics of streams, such as chats: which streams each of them has, on all servers."""

from __future__ import annotations

from tailrace.types import Record
from tailrace_outer.redis._connection import Connection
from tailrace_outer.redis._redis_keys import DAY_MS
from tailrace_outer.redis._scripts import LIST_IN_TOPIC, UNLIST_IN_TOPIC

__all__ = ["Topics"]

_KEPT_MS = 30 * DAY_MS  # not forever: if the opening of a stream was given up, nobody unlists it
_MOST_STREAMS = 16  # of one topic; mostly all but one have ended a moment ago


class Topics:
    """A stream is listed in its topics before a client gets its id. After its end only the last stream of a topic stays
    listed, for as long as streams are kept."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._keys = connection.keys

    async def begin(self, record: Record) -> None:
        """List a stream that is stored. Raises: StorageError."""
        about = repr(record.created_s), record.stream_id, _KEPT_MS, _MOST_STREAMS
        for key in self._keys_of(record):
            await self._connection.run(LIST_IN_TOPIC, [key], *about)

    async def end(self, record: Record, lifetime_s: float) -> None:
        """The stream has ended, and is kept for this time. Raises: StorageError."""
        for key in self._keys_of(record):
            await self._connection.run(UNLIST_IN_TOPIC, [key], record.stream_id, max(1, int(1000 * lifetime_s)))

    async def listed(self, owner: str, wire: str, topic: str) -> list[str]:
        """Return the ids of the streams of a topic, the newest first. Raises: StorageError."""
        key = self._keys.topic(owner, wire, topic)
        found = await self._connection.ask(self._connection.client.zrevrange(key, 0, -1))
        return [member.decode().removeprefix("!") for member in found]  # it marks the last one, if it has ended

    def _keys_of(self, record: Record) -> list[str]:
        return [self._keys.topic(record.owner, record.wire, topic) for topic in record.topics]
