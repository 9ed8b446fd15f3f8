"""The main law: once a client has seen a token, every reader gets it with the same bytes, whatever dies.

It is five laws, and `check` holds all of them for one stream:

1. Events are numbered from 1, with no gap and no double, for every reader and in the journal.
2. Their bytes are those of the oracle, or of its beginning where the stream did not come to its end.
3. There is one terminal event, it is the last, and nobody sees another one.
4. Nobody has seen what the journal does not hold.
5. Processes, descriptors, connections and places in the engine are given back: `Resources`.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from tests.api.oracle import Answer
from tests.api.process import Server
from tests.api.test_server_metrics import scrape
from tests.http.wire import as_json
from tests.waiting import until

from tailrace.dialects.native import RETRY_MS, event_json
from tailrace.errors import JournalDamaged
from tailrace.streams.disk import DiskJournal
from tailrace.types import End, Event

__all__ = ["Kept", "Resources", "Seen", "check", "read_journal", "seq_of", "status_of"]

_REST_S = 0.2
_ENDS = re.compile(rb"event: (done|error|cancelled|interrupted)\n")
_ID = re.compile(rb"^id: (.+)-([0-9]+)$", re.MULTILINE)
_CONTINUITY = re.compile(rb',"continuity":"([a-z]+)"')


def seq_of(event: bytes) -> int:
    """The number in an event's id."""
    found = _ID.search(event)
    assert found is not None, event
    return int(found[2])


def status_of(event: bytes) -> str | None:
    """done, error, cancelled or interrupted; None where it is not the terminal event."""
    found = _ENDS.search(event)
    return found[1].decode() if found is not None else None


@dataclass(frozen=True)
class Seen:
    """The events that one reader saw after event `after`, in order, over any number of connections."""

    events: Sequence[bytes]
    after: int = 0


@dataclass(frozen=True)
class Kept:
    """The content of a journal."""

    streams: Mapping[str, Sequence[Event]]
    expired: Sequence[str] = ()

    def wire(self, stream_id: str) -> list[bytes]:
        """A stream of it, as it stands on the wire."""
        return [_on_wire(stream_id, seq, event) for seq, event in enumerate(self.streams[stream_id], 1)]


def _on_wire(stream_id: str, seq: int, event: Event) -> bytes:
    begin = f"event: {event.status}\n" if isinstance(event, End) else f"retry: {RETRY_MS}\n" if seq == 1 else ""
    return f"{begin}data: {event_json(event)}\nid: {stream_id}-{seq}\n\n".encode()


def read_journal(directory: Path, *, key: bytes | None = None) -> Kept:
    """What the journal in a directory holds, read from a copy by the server's own code: it changes nothing there.

    No server may be writing to it.
    """
    with tempfile.TemporaryDirectory() as copy:
        for path in directory.glob("journal.sqlite*"):
            shutil.copy(path, copy)
        return asyncio.run(_read(Path(copy), key))


async def _read(directory: Path, key: bytes | None) -> Kept:
    journal = DiskJournal(directory, journal_key=key)
    try:
        streams: dict[str, Sequence[Event]] = {
            log.stream_id: [*log.events, *([end] if end is not None else [])] for log, end in journal.unfinished()
        }
        for finished in journal.finished():
            with contextlib.suppress(JournalDamaged):  # and so it is not held
                streams[finished.stream_id] = journal.load(finished.stream_id).events
        return Kept(streams, tuple(stream_id for stream_id, _ in journal.expired()))
    finally:
        journal.close()


def check(
    stream_id: str,
    answer: Answer,
    seen: Iterable[Seen],
    kept: Kept | None,
    *,
    ends: Sequence[str] = ("done",),
    continuity: Sequence[str] = ("replayed",),
) -> None:
    """Laws 1 to 4 for one stream that has ended as one of `ends`. `kept` is None where nothing is promised of a
    journal. The terminal event of a stream that outlived a fault may say so, with one of `continuity`."""
    readings = [*seen]
    if kept is not None:
        assert stream_id in kept.streams, "the journal has lost a stream"
        readings.append(Seen(kept.wire(stream_id)))
    *deltas, done = answer.native(stream_id)
    terminal: set[bytes] = set()
    for reading in readings:
        for seq, event in enumerate(reading.events, reading.after + 1):
            found = _ID.search(event)
            assert found is not None, event
            assert (found[1].decode(), int(found[2])) == (stream_id, seq), "a gap or a double"
            if status_of(event) is None:
                assert event == deltas[seq - 1], f"other bytes at {seq}"
            else:
                terminal.add(event)
                assert event is reading.events[-1], "something after the end"
    assert len(terminal) <= 1, f"two ends: {terminal}"
    for end in terminal:
        _check_end(end, done, len(deltas), ends, continuity)
    if kept is not None:
        held = len(readings[-1].events)
        for reading in readings:
            assert reading.after + len(reading.events) <= held, "seen, and not kept"
        assert terminal, f"no end in the journal, after {held} events"


def _check_end(end: bytes, done: bytes, num_deltas: int, ends: Sequence[str], continuity: Sequence[str]) -> None:
    status = status_of(end)
    assert status is not None
    assert status in ends, end
    shown = _CONTINUITY.search(end)
    assert shown is None or shown[1].decode() in continuity, end
    if status == "done":
        assert _CONTINUITY.sub(b"", end) == done
        return
    seq = seq_of(end)
    assert seq <= num_deltas + 1
    (line,) = [line for line in end.split(b"\n") if line.startswith(b"data: ")]
    fields = as_json(line[6:])
    assert fields["status"] == status
    assert fields["usage"]["completion_tokens"] == seq - 1, "usage is not what was delivered"


@dataclass(frozen=True)
class Resources:
    """The resources of an idle server."""

    num_processes: int
    num_descriptors: int
    num_connections: int
    num_running: int
    num_waiting: int
    memory_bytes: int = 0

    @classmethod
    def of(cls, server: Server) -> Resources:
        process = psutil.Process(server.process.pid)
        gauges = scrape(server)
        return cls(
            num_processes=len(process.children(recursive=True)),
            num_descriptors=process.num_fds(),
            num_connections=len(process.net_connections("tcp4")),
            num_running=int(gauges["tgi_batch_current_size"]),
            num_waiting=int(gauges["tgi_queue_size"]),
            memory_bytes=process.memory_info().rss,
        )

    @classmethod
    def at_rest(cls, server: Server) -> Resources:
        """Wait until no more resources are opened."""
        before, now = cls.of(server), cls.of(server)
        since_s = time.monotonic()
        while time.monotonic() < since_s + _REST_S:
            time.sleep(_REST_S / 4)  # asking keeps the server and this process busy
            now = cls.of(server)
            if now._held != before._held:
                before, since_s = now, time.monotonic()
        return now

    @property
    def _held(self) -> tuple[int, ...]:
        return self.num_processes, self.num_descriptors, self.num_connections, self.num_running, self.num_waiting

    def check_back(self, server: Server, *, grown_bytes: int = 64 * 2**20) -> None:
        """Law 5: within some seconds the server returns to these resources, and to its memory within `grown_bytes`.

        The kernel takes a moment to take down sockets and processes.
        """
        now = self

        def is_back() -> bool:
            nonlocal now
            now = Resources.of(server)
            return all(theirs <= ours for theirs, ours in zip(now._held, self._held, strict=True))

        try:
            until(is_back)
        except AssertionError:
            raise AssertionError(f"{now} is not {self}") from None
        assert now.memory_bytes <= self.memory_bytes + grown_bytes
