"""Changes of durable streams that are decided and not kept yet."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping

from tailrace_plugins.durable_streams.durable_changes import DurableChange
from tailrace_plugins.durable_streams.durable_store import DurableStore
from tailrace_plugins.durable_streams.durable_stream import DurableStream

__all__ = ["DraftStore"]


class DraftStore(DurableStore):
    """A store that begins with the state of another one, which it does not change until `keep`.

    It is valid as long as the other store does not change.
    """

    def __init__(self, state: DurableStore) -> None:
        super().__init__(budget_bytes=state.budget_bytes, journal=self._add, keeps_use=state.keeps_use)
        self.changes: list[tuple[bytes, DurableChange]] = []
        self.streams = self._copies = _Copies(state.streams)
        self.num_bytes = state.num_bytes
        self.swept_s = state.swept_s
        self._state = state

    def _add(self, key: bytes, change: DurableChange) -> None:
        self.changes.append((key, change))

    def _writable(self, key: bytes) -> DurableStream:
        return self._copies.writable(key)

    def keep(self) -> None:
        """Make the same changes to the other store."""
        self._state.restore(self.changes)
        self._state.swept_s = self.swept_s


class _Copies(MutableMapping[bytes, DurableStream]):
    """The streams of a store. Those that are to be changed are copied first."""

    def __init__(self, streams: MutableMapping[bytes, DurableStream]) -> None:
        self._streams = streams
        self._changed: dict[bytes, DurableStream | None] = {}  # None: deleted

    def writable(self, key: bytes) -> DurableStream:
        stream = self[key]
        if key not in self._changed:
            stream = self._changed[key] = stream.copy()
        return stream

    def __getitem__(self, key: bytes) -> DurableStream:
        stream = self._changed[key] if key in self._changed else self._streams[key]
        if stream is None:
            raise KeyError(key)
        return stream

    def __setitem__(self, key: bytes, stream: DurableStream) -> None:
        self._changed[key] = stream

    def __delitem__(self, key: bytes) -> None:
        self._changed[key] = None

    def __iter__(self) -> Iterator[bytes]:
        yield from (key for key in self._streams if self._changed.get(key, self) is not None)
        yield from (key for key, stream in self._changed.items() if stream is not None and key not in self._streams)

    def __len__(self) -> int:
        return sum(1 for _ in self)
