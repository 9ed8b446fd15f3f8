"""What servers tell each other about streams: that one is to be stopped, or has readers on another server."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Container

from tailrace.errors import StorageError
from tailrace_outer.redis._connection import Connection
from tailrace_outer.redis._follower import Entries
from tailrace_outer.redis._members import Members
from tailrace_outer.redis._mirror import Message, Mirror
from tailrace_outer.redis._patience import RETRY_S
from tailrace_outer.redis._redis_keys import DAY_MS
from tailrace_outer.redis._scripts import STOP
from tailrace_outer.redis.stream_states import Owned, StreamStates

__all__ = ["Messages"]


class Messages:
    """Sends messages to the servers that write streams, and does what theirs say with the streams of this server."""

    def __init__(self, connection: Connection, members: Members, streams: StreamStates) -> None:
        self._connection = connection
        self._members = members
        self._streams = streams
        self._outbox: OrderedDict[tuple[Mirror, bool], Message] = OrderedDict()  # by mirror and whether it is a stop
        self._is_due = asyncio.Event()

    # Messages of this server

    def ask(self, mirror: Mirror, message: Message) -> None:
        """Tell the server that writes the stream, as soon as Redis answers. Of "join" and "leave", the last one
        counts."""
        mirror.unread_since_s = time.monotonic()
        self._outbox[mirror, message == "stop"] = message
        self._is_due.set()

    async def stop(self, stream_id: str) -> None:
        """Ask the server that writes a stream to end it; if that server is dead, the next one does. Raises:
        StorageError."""
        epoch = await self._connection.run(STOP, self._connection.keys.of_stream(stream_id))
        if epoch is not None:
            await self._tell(int(epoch), stream_id, "stop")

    async def _tell(self, epoch: int, stream_id: str, message: Message) -> None:
        """Raises: StorageError."""
        client, keys = self._connection.client, self._connection.keys
        inbox = keys.inbox(keys.shard_of(stream_id), epoch)
        entry = {"kind": message, "stream": stream_id, "from": self._members.epoch}
        await self._connection.ask(client.xadd(inbox, entry, maxlen=10_000))
        await self._connection.ask(client.pexpire(inbox, DAY_MS))

    async def run(self) -> None:
        """Send messages until cancelled."""
        while True:
            await self._is_due.wait()
            self._is_due.clear()
            while self._outbox:
                key, message = self._outbox.popitem(last=False)
                try:
                    await self._send(key[0], message)
                except StorageError:
                    self._outbox.setdefault(key, message)  # unless there is a later one
                    await asyncio.sleep(RETRY_S)

    async def _send(self, mirror: Mirror, message: Message) -> None:
        """Raises: StorageError."""
        if message == "stop":
            await self.stop(mirror.log.stream_id)
        else:
            await self._tell(mirror.epoch, mirror.log.stream_id, message)

    # Messages of others

    def take(self, entries: Entries) -> None:
        """Do what the messages say."""
        for _, message in entries:
            if message[b"kind"] == b"wake":
                continue
            stream_id, reading_epoch = message[b"stream"].decode(), int(message[b"from"])
            owned = self._streams.owned(stream_id)
            if owned is None:
                continue
            match message[b"kind"]:
                case b"stop":
                    owned.log.cancel()
                case b"join":
                    owned.join(reading_epoch)
                case b"leave":
                    owned.leave([reading_epoch])

    def keep_readers(self, alive: Container[int]) -> None:
        """Drop the readers on servers that are gone."""
        for owned in list(self._streams.of(Owned).values()):
            owned.leave([epoch for epoch in owned.remote_readers if epoch not in alive])
