"""The streams that this server writes, or may have to write: one table of their states, without I/O.

    state        meaning                                                     what may come next
    opening      Redis is asked to store it                                  owned, unanswered; none: it is not to be
    unanswered   Redis may list it as this server's, and nobody writes it    opening, recalled, owned; none: deleted
    recalled     Redis has it as this server's, and this one must go on      owned; none: another server took it
    owned        this server writes it                                       none: it has ended, or was lost to another;
                                                                             recalled: another one wrote more of it

What this server does not write, it reads: a stream that another server writes has a `Mirror` here while it has readers,
and one that has ended is in the cache of `FinishedStreams`. A stream with none of these is only in Redis. Readers of a
log that this server has no longer get a `Released`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

from tailrace.errors import ClaimTaken
from tailrace.streams.log import Reader, StreamLog

__all__ = ["OwnStreams", "Owned"]


@dataclass(frozen=True, slots=True)
class Owned:
    """A stream that this server writes. `former_epoch` is that of the server that it was taken from, if it was, and
    `remote_readers` are those on other servers, by the epochs of these servers."""

    log: StreamLog
    former_epoch: int | None = None
    remote_readers: dict[int, Reader] = field(default_factory=dict)

    def join(self, reading_epoch: int) -> None:
        """The stream has a reader on this other server."""
        if reading_epoch not in self.remote_readers:
            self.remote_readers[reading_epoch] = Reader(self.log, self.log.last_seq).__enter__()

    def leave(self, reading_epochs: Iterable[int]) -> None:
        """The stream has no reader on these other servers."""
        for epoch in reading_epochs:
            if epoch in self.remote_readers:
                reader = self.remote_readers.pop(epoch)
                reader.cursor = self.log.last_seq  # that server follows all of it
                reader.__exit__()


class OwnStreams:
    """Each stream is in one state. What is asked of a stream in another state has no effect."""

    def __init__(self) -> None:
        self._opening: set[str] = set()
        self._unanswered: dict[str, None] = {}  # in order
        self._recalled: dict[str, tuple[int, ...]] = {}  # to the epochs of the servers that have readers of it
        self._owned: dict[str, Owned] = {}

    def __len__(self) -> int:
        """Return how many streams this server writes."""
        return len(self._owned)

    def __iter__(self) -> Iterator[Owned]:
        """Yield the streams that this server writes. They may change meanwhile."""
        return iter(list(self._owned.values()))

    def __contains__(self, stream_id: str) -> bool:
        """Return whether this server writes it, or may have to."""
        return (
            stream_id in self._owned
            or stream_id in self._opening
            or stream_id in self._unanswered
            or stream_id in self._recalled
        )

    # Opening

    def begin(self, stream_id: str) -> None:
        """none, unanswered → opening. Raises: ClaimTaken if this server goes on with the stream already."""
        if stream_id in self._recalled or stream_id in self._owned:
            raise ClaimTaken("This server continues the stream of this Idempotency-Key.")
        self._unanswered.pop(stream_id, None)
        self._opening.add(stream_id)

    def refuse(self, stream_id: str) -> None:
        """opening → none."""
        self._opening.discard(stream_id)

    def doubt(self, stream_id: str) -> None:
        """opening, none → unanswered: the opening failed, or Redis lists a stream that this server does not know."""
        self._opening.discard(stream_id)
        if stream_id not in self:
            self._unanswered[stream_id] = None

    @property
    def next_unanswered(self) -> str | None:
        return next(iter(self._unanswered), None)

    def settle(self, stream_id: str, recalled_by: int | None) -> None:
        """unanswered → recalled by a server, or none: it was deleted."""
        if stream_id in self._unanswered:
            del self._unanswered[stream_id]
            if recalled_by is not None:
                self._recalled[stream_id] = (recalled_by,)

    @property
    def recalled(self) -> Collection[str]:
        return self._recalled.keys()

    def forget_recalled(self, stream_id: str) -> None:
        """recalled → none."""
        self._recalled.pop(stream_id, None)

    # Writing

    def own(self, log: StreamLog, former_epoch: int | None = None) -> None:
        """none, opening, unanswered, recalled → owned."""
        stream_id = log.stream_id
        self._opening.discard(stream_id)
        self._unanswered.pop(stream_id, None)
        owned = self._owned[stream_id] = Owned(log, former_epoch)
        for reading_epoch in self._recalled.pop(stream_id, ()):
            owned.join(reading_epoch)

    def get(self, stream_id: str) -> Owned | None:
        """Return a stream that this server writes."""
        return self._owned.get(stream_id)

    def owns(self, log: StreamLog) -> bool:
        """Return whether this server writes the stream, and this is its log."""
        owned = self._owned.get(log.stream_id)
        return owned is not None and owned.log is log

    def end(self, log: StreamLog) -> bool:
        """owned → none: it has ended, also for its readers on other servers. Returns whether it was owned."""
        if not self.owns(log):
            return False
        owned = self._owned.pop(log.stream_id)
        owned.leave(list(owned.remote_readers))
        return True

    def read_again(self, log: StreamLog) -> bool:
        """owned → recalled: another server has written more of it than this log has. Returns whether it was owned."""
        if not self.owns(log):
            return False
        self._recalled[log.stream_id] = tuple(self._owned.pop(log.stream_id).remote_readers)
        return True

    def drop(self, log: StreamLog) -> bool:
        """owned → none: another server writes it, and has its readers. Returns whether it was owned."""
        return self.owns(log) and self._owned.pop(log.stream_id) is not None
