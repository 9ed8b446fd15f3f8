"""The shortest list of changes that restores a state."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from tailrace_plugins.durable_streams.durable_changes import Appended, Created, DurableChange, Hidden, Stamp
from tailrace_plugins.durable_streams.durable_store import DurableStore
from tailrace_plugins.durable_streams.durable_stream import Chunk, DurableStream

__all__ = ["snapshot"]


def snapshot(store: DurableStore) -> Iterator[tuple[bytes, DurableChange]]:
    """Return an iterator over keys and changes. They restore the state of the moment of the call; the store may change
    while they are made."""
    saved = [_Saved.of(stream) for stream in store.streams.values()]  # in the order of creation: sources before forks
    return itertools.chain.from_iterable(map(_Saved.changes, saved))


@dataclass(frozen=True, slots=True)
class _Saved:
    """What changes in a stream, as it was."""

    key: bytes
    created: Created
    chunks: list[Chunk]  # that `created` does not make
    producers: dict[str, tuple[int, int]]
    last: Appended
    is_gone: bool

    @classmethod
    def of(cls, stream: DurableStream) -> _Saved:
        created = stream.created
        num_created = int(bool(created.pieces))
        if created.fork is not None:
            num_created += created.fork.position + bool(created.fork.part)
        last = Appended((), stream.closed_by, stream.last_seq, stream.is_closed and not created.is_closed)
        return cls(stream.key, created, stream.chunks[num_created:], dict(stream.producers), last, stream.is_gone)

    def changes(self) -> Iterator[tuple[bytes, DurableChange]]:
        yield self.key, self.created
        for chunk in self.chunks:
            yield self.key, Appended(chunk.pieces)
        for producer, (epoch, seq) in self.producers.items():
            yield self.key, Appended((), Stamp(producer, epoch, seq))
        if self.last != Appended():
            yield self.key, self.last
        if self.is_gone:
            yield self.key, Hidden()
