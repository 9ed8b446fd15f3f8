"""The states of streams as one server sees them: one table, without I/O. A stream is in one state.

    state        meaning                                              what may come next
    none         it is only in Redis, or nowhere                      opening, unanswered, owned, mirrored, cached
    opening      Redis is asked to store it                           none, unanswered, owned, mirrored, cached
    unanswered   Redis may list it as this server's, and nobody       none, opening, recalled, owned, mirrored, cached
                 writes it
    recalled     Redis has it as this server's, and this one must     none, owned, mirrored, cached
                 go on
    owned        this server writes it                                none, recalled, cached
    mirrored     another server writes it, for readers here too       none, opening, unanswered, owned, cached
    cached       it has ended, and its log is in memory               none, owned, cached

An opening, unanswered or recalled stream may have readers here, too: whoever knows its id finds it in Redis. Then its
state has the `Mirror` that they follow. If it turns out that this server is not to write it, it is mirrored.

A finished stream that is not cached is in state none: memory is limited, so the one that was not used for the longest
time leaves. One that is cached is owned again if Redis has lost its end. *Released* is no state of a stream but of a
log that this server had of it and adds nothing more to: its readers are sent away, and find the stream in its state.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias, TypeVar, cast

from tailrace.errors import ClaimTaken
from tailrace.streams.log import Reader, StreamLog
from tailrace_outer.redis._mirror import Mirror

__all__ = [
    "TRANSITIONS", "Cached", "Mirror", "Opening", "Owned", "Recalled", "State", "StreamStates", "Unanswered",
    "Unwritten",
]  # fmt: skip


@dataclass(slots=True, eq=False)
class Unwritten:
    """Nobody writes the stream, as far as this server knows. `mirror` is what readers here follow, if it has any."""

    mirror: Mirror | None = None

    @property
    def log(self) -> StreamLog | None:
        return self.mirror.log if self.mirror is not None else None


class Opening(Unwritten):
    __slots__ = ()


class Unanswered(Unwritten):
    __slots__ = ()


@dataclass(slots=True, eq=False)
class Recalled(Unwritten):
    """`reading_epochs` are those of the other servers that have readers of it."""

    reading_epochs: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Owned:
    """`former_epoch` is that of the server that the stream was taken from, if it was, and `remote_readers` are those on
    other servers, by the epochs of these servers."""

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


@dataclass(frozen=True, slots=True, eq=False)
class Cached:
    log: StreamLog
    num_bytes: int


State: TypeAlias = Opening | Unanswered | Recalled | Owned | Mirror | Cached
_S = TypeVar("_S", bound=State)
_None = type(None)

TRANSITIONS: Mapping[type[State | None], frozenset[type[State | None]]] = {
    _None: frozenset({Opening, Unanswered, Owned, Mirror, Cached}),
    Opening: frozenset({_None, Unanswered, Owned, Mirror, Cached}),
    Unanswered: frozenset({_None, Opening, Recalled, Owned, Mirror, Cached}),
    Recalled: frozenset({_None, Owned, Mirror, Cached}),
    Owned: frozenset({_None, Recalled, Cached}),
    Mirror: frozenset({_None, Opening, Unanswered, Owned, Cached}),
    Cached: frozenset({_None, Owned, Cached}),
}


class StreamStates:
    """Has the state of each stream. All changes are made by `move`."""

    def __init__(self) -> None:
        self._states: dict[str, State] = {}
        self._of: dict[type[object], dict[str, State]] = {kind: {} for kind in TRANSITIONS}  # the same, by kind
        self.cached_bytes = 0

    def move(self, stream_id: str, state: State | None) -> None:
        """Give a stream its next state. Raises: RuntimeError if the table does not have this transition."""
        before = self._states.get(stream_id)
        if type(state) not in TRANSITIONS[type(before)]:
            names = type(before).__name__, type(state).__name__
            raise RuntimeError(f"stream {stream_id} cannot go from {names[0]} to {names[1]}")
        if before is not None:
            del self._states[stream_id], self._of[type(before)][stream_id]
        if state is not None:
            self._states[stream_id] = self._of[type(state)][stream_id] = state
        self.cached_bytes += _cached_bytes(state) - _cached_bytes(before)

    # What a stream is

    def get(self, stream_id: str) -> State | None:
        return self._states.get(stream_id)

    def of(self, kind: type[_S]) -> Mapping[str, _S]:
        """Return the streams in a state, by id: first the one that has been in it for the longest time."""
        return cast("Mapping[str, _S]", self._of[kind])

    def log(self, stream_id: str) -> StreamLog | None:
        """Return the log that readers on this server follow."""
        state = self.get(stream_id)
        return state.log if state is not None else None

    def owned(self, stream_id: str) -> Owned | None:
        state = self._states.get(stream_id)
        return state if type(state) is Owned else None

    def owns(self, log: StreamLog) -> bool:
        """Return whether this server writes the stream, and this is its log."""
        state = self._states.get(log.stream_id)
        return type(state) is Owned and state.log is log

    def is_written(self, stream_id: str) -> bool:
        """Return whether this server writes the stream, or begins to."""
        return isinstance(self.get(stream_id), Opening | Owned)

    def mirror(self, stream_id: str) -> Mirror | None:
        state = self.get(stream_id)
        if isinstance(state, Unwritten):
            return state.mirror
        return state if isinstance(state, Mirror) else None

    @property
    def mirrors(self) -> list[Mirror]:
        unwritten = (*self.of(Opening).values(), *self.of(Unanswered).values(), *self.of(Recalled).values())
        return [*self.of(Mirror).values(), *(state.mirror for state in unwritten if state.mirror is not None)]

    # Streams that nobody writes

    def begin(self, stream_id: str) -> Opening:
        """Raises: ClaimTaken if this server goes on with the stream already, or the stream has ended."""
        if isinstance(self.get(stream_id), Recalled | Owned | Cached):
            raise ClaimTaken("This server continues the stream of this Idempotency-Key.")
        opening = Opening(self.mirror(stream_id))
        self.move(stream_id, opening)
        return opening

    def doubt(self, stream_id: str) -> None:
        """Its opening failed, or Redis lists it as this server's, which does not know it."""
        if isinstance(self.get(stream_id), Opening | Mirror | None):
            self.move(stream_id, Unanswered(self.mirror(stream_id)))

    def settle(self, stream_id: str, recalled_by: int | None) -> None:
        """An unanswered stream was recalled by a server, or is not this server's."""
        if isinstance(state := self.get(stream_id), Unanswered):
            self.move(stream_id, Recalled(state.mirror, (recalled_by,)) if recalled_by is not None else state.mirror)

    def leave(self, stream_id: str, state: State) -> bool:
        """End the state of a stream, if this is its state: the stream has none then, or is mirrored. Returns whether it
        was."""
        if self.get(stream_id) is not state:
            return False
        self.move(stream_id, state.mirror if isinstance(state, Unwritten) else None)
        return True

    def follow(self, mirror: Mirror) -> None:
        state = self.get(mirror.log.stream_id)
        if isinstance(state, Unwritten):
            state.mirror = mirror
        else:
            self.move(mirror.log.stream_id, mirror)

    def unfollow(self, mirror: Mirror) -> None:
        state = self.get(mirror.log.stream_id)
        if isinstance(state, Unwritten) and state.mirror is mirror:
            state.mirror = None
        else:
            self.leave(mirror.log.stream_id, mirror)

    # Writing

    def own(self, log: StreamLog, former_epoch: int | None = None) -> None:
        state, owned = self.get(log.stream_id), Owned(log, former_epoch)
        self.move(log.stream_id, owned)
        for reading_epoch in state.reading_epochs if isinstance(state, Recalled) else ():
            owned.join(reading_epoch)

    def cache(self, log: StreamLog) -> None:
        """It has ended, also for its readers on other servers. If this server writes it, only the end of its own log
        counts."""
        owned = self.owned(log.stream_id)
        if owned is None or owned.log is log:
            self.move(log.stream_id, Cached(log, log.num_bytes))
            if owned is not None:
                owned.leave(list(owned.remote_readers))

    def stop_owning(self, log: StreamLog, *, goes_on: bool) -> bool:
        """An owned stream is another server's, which has its readers; or it `goes_on` here, from what another one has
        written more of it than this log has. Returns whether it was owned."""
        owned = self.owned(log.stream_id)
        if owned is None or owned.log is not log:
            return False
        self.move(log.stream_id, Recalled(reading_epochs=tuple(owned.remote_readers)) if goes_on else None)
        return True


def _cached_bytes(state: State | None) -> int:
    return state.num_bytes if type(state) is Cached else 0
