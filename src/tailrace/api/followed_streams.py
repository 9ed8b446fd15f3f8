"""The streams that one WebSocket follows. Each has a task that reads its log with a cursor of its own."""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import assert_never

from tailrace.http.accepted_websocket import Socket
from tailrace.streams import Reader, StreamLog
from tailrace.types import End, PromptProgress, Released, TextDelta

__all__ = ["FollowedStream", "FollowedStreams", "FrameSource"]


class FrameSource(ABC):
    """Makes the frames of one stream."""

    @abstractmethod
    def of_events(self, first_seq: int, events: Sequence[TextDelta]) -> list[bytes]: ...

    @abstractmethod
    def of_ending(self, seq: int, ending: End | Released) -> list[bytes]:
        """`seq` is the number of the end, or of the last event before a `Released`."""

    def of_progress(self, progress: PromptProgress) -> list[bytes]:
        return []

    def of_silence(self) -> list[bytes]:
        return []


class FollowedStream:
    """A stream that a socket follows. After `heartbeat_s` without an event it sends the frames of a silence."""

    def __init__(self, log: StreamLog, reader: Reader, frames: FrameSource, *, heartbeat_s: float = 0.0) -> None:
        self.log = log
        self.reader = reader
        self.seq = reader.cursor  # of the last event that was sent
        self._frames = frames
        self._heartbeat_s = heartbeat_s

    async def send_all(self, socket: Socket) -> None:
        """Send all frames up to the end. Raises: ConnectionError if the client has disconnected."""
        reader, frames = self.reader, self._frames
        while True:
            match await reader.next(self._heartbeat_s):
                case list() as events:
                    if (progress := reader.take_progress()) is not None:
                        await socket.say_all(frames.of_progress(progress))
                    elif not events:
                        await socket.say_all(frames.of_silence())
                    for start in range(0, len(events), socket.max_frames):
                        some = events[start : start + socket.max_frames]
                        await socket.say_all(frames.of_events(self.seq + 1, some))
                        self.seq += len(some)
                        if self.seq < self.log.last_seq:
                            await asyncio.sleep(0)  # a client that reads fast does not keep others waiting
                case End() | Released() as ending:
                    await socket.say_all(frames.of_ending(reader.cursor, ending))
                    self.seq = reader.cursor
                    return
                case never:
                    assert_never(never)


class FollowedStreams:
    """All streams that a socket follows, by the client's names for them."""

    def __init__(self, socket: Socket) -> None:
        self._socket = socket
        self.by_name: dict[str, FollowedStream] = {}

    @contextlib.contextmanager
    def following(self, name: str, stream: FollowedStream) -> Iterator[None]:
        """Register a stream and its reader for the time of the block."""
        with stream.reader:
            self.by_name[name] = stream
            self._socket.busy()
            try:
                yield
            finally:
                del self.by_name[name]
                self._socket.free()
