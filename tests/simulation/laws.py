"""The laws, checked with everything that Redis keeps and everything that a client sees.

1. Events are numbered from 1, without gaps. Nothing follows the terminal event.
2. Tokens are those that the engine must give; an event does not change once it is kept.
3. A stream ends as it may: `done` with all its tokens, or for a reason that the schedule has.
4. What a reader sees is kept in Redis at that time.
5. One server writes a stream: that of its epoch in Redis. An epoch that has lost a stream never gets it back.
6. An idempotency key begins one stream. A stream whose id a client has is never unknown, unless it was deleted. One
   that was deleted is not found any more, but for its beginning at a server that was writing it, and of which Redis has
   not told it yet that it has ended.
7. A server observes the end of a stream once.
9. Each row of a batch has one result, which does not change, and is that of the engine. A batch ends with all of them.
10. No call of a tool is made twice by our doing (`tools.py`), and none by a server that does not have its response.
11. No call is lost in silence: its response shows it, with its result or as one of which nobody knows what came of it.

Where Redis itself loses what it has confirmed (`may_lose`), law 4 and those on ids cannot hold, and a stream may end in
another way than some have seen, or after fewer events. The other events that a reader has seen still do not change.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
from tests.simulation.simulated_time import Process, Violation

from tailrace.types import End, Event, TextDelta
from tailrace_outer.scripted.scripted_engine import scripted_token

__all__ = ["Expected", "Ledger"]

_decode_events = msgspec.msgpack.Decoder(list[Event[TextDelta]]).decode


@dataclass
class Expected:
    """What a client has asked for, and how the stream may end other than as `done`."""

    prompt_ids: tuple[int, ...]
    seed: int
    count: int
    may_end: set[str] = field(default_factory=set)
    stream_ids: list[str] = field(default_factory=list)  # that clients were given for this request
    is_deleted: bool = False  # or may be

    def token_id(self, index: int) -> int:
        return scripted_token(self.prompt_ids, self.seed, index)


@dataclass
class _Stream:
    """What is known of a stream. `events` are those that Redis keeps, or has kept."""

    events: list[Event] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=lambda: [0])  # up to each event
    num_seen: int = 0
    epochs: list[int] = field(default_factory=list)  # of its writers, in order
    writers: list[Process | None] = field(default_factory=list)
    former: set[tuple[int, Event]] = field(default_factory=set)  # what Redis had kept and lost, before another end
    expected: Expected | None = None
    is_deleted: bool = False  # as a client was told


class Ledger:
    """Everything that is known of all streams."""

    def __init__(self, *, may_lose: bool) -> None:
        self.may_lose = may_lose
        self.streams: dict[str, _Stream] = {}
        self._results: dict[bytes, tuple[bytes, bytes]] = {}  # of rows
        self.digest = 0  # of everything that happened, in order

    def _note(self, *what: object) -> None:
        self.digest = zlib.crc32(repr(what).encode(), self.digest)

    def of(self, stream_id: str) -> _Stream:
        return self.streams.setdefault(stream_id, _Stream())

    # What Redis keeps

    def on_writer(self, stream_id: str, epoch: int, server: Process | None) -> None:
        """The server of this epoch has the stream now."""
        self._note("writer", stream_id, epoch)
        if self.of(stream_id).is_deleted and not self.may_lose:
            raise Violation(f"law 6: Redis has {stream_id} again after it was deleted")
        self.of(stream_id).writers.append(server)
        epochs = self.of(stream_id).epochs
        if epochs and epochs[-1] == epoch:
            return
        if epoch in epochs and not self.may_lose:
            raise Violation(f"law 5: {stream_id} is written under epoch {epoch} again, after {epochs}")
        epochs.append(epoch)

    def on_kept(self, stream_id: str, last: int, row: bytes, *, epoch: int, is_writer: bool) -> None:
        """A row of events was added under an epoch."""
        events = _decode_events(row[1:])
        self._note("kept", stream_id, last, len(events), epoch)
        stream = self.of(stream_id)
        if not is_writer:
            raise Violation(f"law 5: a server that is not the writer has added event {last} of {stream_id}")
        first = last - len(events) + 1
        if first > len(stream.events) + 1:
            raise Violation(f"law 1: a gap before event {first} of {stream_id}, which has {len(stream.events)}")
        if first <= len(stream.events):
            self._on_kept_again(stream_id, stream, first, events)
            return
        for event in events:
            self._add(stream_id, stream, event)

    def _add(self, stream_id: str, stream: _Stream, event: Event) -> None:
        if stream.events and isinstance(stream.events[-1], End):
            raise Violation(f"law 1: an event of {stream_id} after its end")
        position = stream.num_tokens[-1]
        if isinstance(event, TextDelta):
            if stream.expected is not None:
                self._check_tokens(stream_id, stream.expected, position, event)
            position += len(event.token_ids)
        elif event.usage.num_completion_tokens != position:
            raise Violation(f"law 3: {event} of {stream_id} counts other tokens than {position}")
        stream.events.append(event)
        stream.num_tokens.append(position)

    def _on_kept_again(self, stream_id: str, stream: _Stream, first: int, events: Sequence[Event]) -> None:
        """Events are written again, which Redis has lost."""
        if not self.may_lose:
            raise Violation(f"law 2: event {first} of {stream_id} was added twice")
        for seq, event in enumerate(events, first):
            if seq > len(stream.events):
                self._add(stream_id, stream, event)
            elif _known(event) != _known(stream.events[seq - 1]):
                if seq <= stream.num_seen and not _may_replace(event, stream, seq):
                    raise Violation(
                        f"law 2: event {seq} of {stream_id} has changed: {event} was {stream.events[seq - 1]}"
                    )
                stream.former |= {
                    (at, _known(former))
                    for at, former in enumerate(stream.events[seq - 1 :], seq)
                    if isinstance(event, End) or isinstance(former, End)
                }
                del stream.events[seq - 1 :], stream.num_tokens[seq:]
                self._add(stream_id, stream, event)

    def _check_tokens(self, stream_id: str, expected: Expected, position: int, event: TextDelta) -> None:
        for offset, token_id in enumerate(event.token_ids, position):
            if token_id != expected.token_id(offset):
                raise Violation(f"law 2: token {offset} of {stream_id} is {token_id}")

    # What clients see

    def on_begun(self, stream_id: str, expected: Expected) -> None:
        """A client was given the id of its stream."""
        self._note("begun", stream_id)
        stream = self.of(stream_id)
        if stream.expected is None:
            stream.expected = expected
            position = 0
            for event in stream.events:
                if isinstance(event, TextDelta):
                    self._check_tokens(stream_id, expected, position, event)
                    position += len(event.token_ids)
        if stream_id not in expected.stream_ids:
            expected.stream_ids.append(stream_id)
        if len(expected.stream_ids) > 1 and not (self.may_lose or expected.is_deleted):
            raise Violation(f"law 6: one idempotency key has begun the streams {expected.stream_ids}")

    def on_seen(self, stream_id: str, seq: int, event: Event) -> None:
        self._note("seen", stream_id, seq)
        stream = self.of(stream_id)
        if (seq, _known(event)) not in stream.former:
            self._check_kept(stream_id, stream, seq, event)
        stream.num_seen = max(stream.num_seen, seq)
        if isinstance(event, End):
            self._check_end(stream_id, stream, event)

    def _check_kept(self, stream_id: str, stream: _Stream, seq: int, event: Event) -> None:
        if seq > len(stream.events):
            raise Violation(
                f"law 4: a reader has seen event {seq} of {stream_id}, of which {len(stream.events)} are kept"
            )
        kept = stream.events[seq - 1]
        if event != kept and not (self.may_lose and _known(event) == _known(kept)):
            raise Violation(f"law 2: a reader has seen {event} as event {seq} of {stream_id}, and kept is {kept}")

    def _check_end(self, stream_id: str, stream: _Stream, end: End) -> None:
        expected = stream.expected
        assert expected is not None
        num_tokens = stream.num_tokens[stream.events.index(end)] if end in stream.events else -1
        if end.status == "done" and num_tokens not in (-1, expected.count):
            raise Violation(f"law 3: {stream_id} is done after {num_tokens} tokens of {expected.count}")
        if end.status != "done" and end.status not in expected.may_end:
            raise Violation(f"law 3: {stream_id} has ended as {end}, and not as {sorted(expected.may_end | {'done'})}")

    def on_deleted(self, stream_id: str) -> None:
        """A client was told that its stream is deleted."""
        self._note("deleted", stream_id)
        self.of(stream_id).is_deleted = True

    def on_shown(self, stream_id: str, server: Process) -> None:
        """A server shows a stream that was deleted."""
        if server not in self.of(stream_id).writers:
            raise Violation(f"law 6: {stream_id} can be read after it was deleted, at {server.name}")

    def on_row(self, rows: Mapping[bytes, bytes]) -> None:
        """Rows of the table of batches are written. A write that got no answer may come again."""
        for key, row in rows.items():
            if key[:2] in (b"o/", b"e/"):
                self._note("result", key)
                before = self._results.setdefault(key[2:-1], (key, row))
                if before != (key, row) and not self.may_lose:
                    raise Violation(f"law 9: {key.decode()} has the result {row!r}, and had {before}")

    # At the end

    def check_ends(self, num_observed: Mapping[str, int]) -> None:
        for stream_id, count in num_observed.items():
            if count > 1 and not self.may_lose:
                raise Violation(f"law 7: the end of {stream_id} was observed {count} times")


def _may_replace(event: Event, stream: _Stream, seq: int) -> bool:
    """Return whether an event may take the place of one that somebody has seen and Redis has lost: another end, or the
    end of a stream that nobody continues."""
    may_end = stream.expected.may_end if stream.expected is not None else set()
    return isinstance(stream.events[seq - 1], End) or (isinstance(event, End) and event.status in may_end)


def _known(event: Event) -> Event:
    """Return an event without what differs when it is generated again: durations."""
    return msgspec.structs.replace(event, spent=None, continuity=None) if isinstance(event, End) else event
