"""Streams of extensions on a WebSocket with lanes (`dialects.wire.SocketLanes`): the extension takes a command before
the wire does."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager

from starlette.requests import HTTPConnection

from tailrace.dialects.bodies import JsonBody

__all__ = ["LaneStream", "LaneTake"]


class LaneStream(ABC):
    """A stream, as one lane follows it. `notes` name what has no effect."""

    def __init__(self, stream_id: str, notes: Sequence[str] = ()) -> None:
        self.stream_id = stream_id
        self.notes = notes

    @abstractmethod
    def reading(self) -> AbstractContextManager[None]:
        """Return the context in which the lane is a reader of the stream."""

    @abstractmethod
    async def next(self, limit_s: float) -> Sequence[bytes] | None:
        """Return the next events, each as a JSON object; those of a silence, if there are any, after `limit_s` seconds
        without one; None at the end."""

    @abstractmethod
    async def cancel(self) -> None:
        """End the stream as cancelled, if it runs. Raises: TailraceError."""


class LaneTake(ABC):
    """Takes commands of the WebSockets of one path, or leaves them to the wire. `sender` is the socket that a client
    has opened. Its key may use the operation, the wire and the model."""

    @abstractmethod
    async def create(
        self, sender: HTTPConnection, body: JsonBody, key: str | None, begun: Collection[str]
    ) -> LaneStream | None:
        """Begin a stream, or find that of the idempotency key; return None if the wire is to answer. `begun` has the
        ids of the last streams that this socket has begun. The memory of the body counts until this returns.

        Raises: TailraceError if the stream does not begin.
        """

    @abstractmethod
    async def follow(self, sender: HTTPConnection, stream_id: str, number: int) -> LaneStream | None:
        """Return a stream after the event with this number, -1 for all its events; None if it is not of this extension.

        Raises: TailraceError.
        """

    @abstractmethod
    async def leave(self, sender: HTTPConnection, stream_ids: Collection[str]) -> None:
        """The client needs nothing more of the streams that it has begun on this socket. Raises: TailraceError."""
