"""How a server uses durable streams, whether it is alone or shares them with others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from tailrace_plugins.durable_streams.durable_store import DurableStore
from tailrace_plugins.durable_streams.durable_stream import DurableStream

__all__ = ["DurableStreams"]

T = TypeVar("T")


class DurableStreams(Protocol):
    """The durable streams of a server. Used from one event loop only."""

    async def perform(self, operation: Callable[[DurableStore], T]) -> T:
        """Return what an operation returns, when all that it has changed is kept.

        The state that it sees has all changes that any server has confirmed before the call. Where servers share the
        streams, the operation may run several times, until no other server changes the state meanwhile. It must not
        wait, and the streams that it sees are valid only inside it.

        Cancellation: the changes may be kept. Raises: what the operation raises; StorageError if the state cannot be
        read, or the changes cannot be kept. They may be kept all the same if the reply of another machine was lost.
        """

    async def find(self, key: bytes) -> DurableStream:
        """Return a stream, as it is now. It grows. Raises: as `DurableStore.find`, StorageError."""

    async def use(self, key: bytes) -> DurableStream:
        """Return a stream for a reader, which restarts its TTL. Raises: as `find`."""

    def close(self) -> None:
        """Send away all followers, present and future."""
