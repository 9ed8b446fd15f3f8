"""What a journal goes through before its disk loses power, as a program that `test_crashes.py` runs under strace.

Three servers use the journal, one after the other, each in its own process; all but the last are killed. Before and
after each step the program writes a `Mark` to a file beside the journal. So the trace shows the marks among the writes.
"""

from __future__ import annotations

import asyncio
import os
import random
import sqlite3
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
from tests.waiting import wait_until

from tailrace.streams.log_store import Lease
from tailrace.streams.sqlite_store import SqliteLogStore, open_sqlite
from tailrace.types import Claim, End, Event, Record, TextDelta, Usage

__all__ = ["MARKS", "NOTES", "OWNER", "Kind", "Mark", "Mode", "event_at", "length_of", "record_of"]

MARKS = "marks"  # the name of the file
OWNER = "somebody"
NOTES = (b"one", b"other")  # keys of notes that are always changed together
Mode = Literal["keeps", "erases", "grows"]
"""A journal that keeps finished streams, one that does not, or one whose log is large. Each moves its log into the
database in another way."""
Kind = Literal["begin", "append", "delete", "note", "sync"]
_SERVERS = 3
_STREAMS = 4  # that each server begins
_ROUNDS = 8
_LARGE_BYTES = 9 * 2**20  # with such a log, the journal moves it into the database after each sync


class Mark(NamedTuple):
    """A step that is about to be done, or that `is_done`: what it does to which stream, and up to which number."""

    is_done: bool
    kind: Kind
    stream_id: str = ""
    number: int = 0


def length_of(stream_id: str) -> int:
    """Return how many events a stream has in the end."""
    return 8 + int(stream_id[-1]) * 5


def event_at(stream_id: str, seq: int) -> Event:
    """Return an event of a stream. The sizes are those of tokens, and of more than a page of the database."""
    if seq == length_of(stream_id):
        return End("done", Usage(1, seq - 1))
    return TextDelta(f"{stream_id} {seq} " * (600 if seq % 7 == 3 else seq), (seq,))


def record_of(stream_id: str) -> Record:
    return Record(stream_id, 0.0, owner=OWNER, linger_s=60.0, claim=Claim(f"key of {stream_id}", stream_id.encode()))


class _Syncs:
    """Counts the syncs of the journal, in place of `os.fdatasync`."""

    def __init__(self) -> None:
        self.num_begun = 0
        self._sync = os.fdatasync

    def __call__(self, descriptor: int) -> None:
        self.num_begun += 1
        self._sync(descriptor)


class _Server:
    """One server: writes streams, and marks what it does."""

    def __init__(self, directory: Path, mode: Mode, store: SqliteLogStore, mark: Callable[[Mark], None], number: int):
        self._directory = directory
        self._mode = mode
        self._store = store
        self._mark = mark
        self._number = number
        self._chance = random.Random(number)
        self._syncs = _Syncs()
        os.fdatasync = self._syncs  # type: ignore[assignment]  # as monkeypatch does it in tests

    async def run(self) -> None:
        leases = await self._store.take_over()
        notes = await self._store.notes_of("crashes")
        for stream in range(_STREAMS):
            leases.append(await self._begin(f"stream-{self._number}-{stream}"))
        for round_number in range(_ROUNDS):
            num_syncs = self._syncs.num_begun
            await self._append(leases)
            version = self._number * _ROUNDS + round_number + 1
            self._mark(Mark(False, "note", "", version))
            notes.change(dict.fromkeys(NOTES, str(version).encode()), [])
            self._mark(Mark(True, "note", "", version))
            if round_number % 3 == 1:
                self._mark(Mark(False, "sync", "", version))
                await notes.sync()
                self._mark(Mark(True, "sync", "", version))
            if round_number % 3 == 2:  # it also syncs by itself
                await wait_until(lambda: self._syncs.num_begun > num_syncs)  # noqa: B023
            if round_number in (3, 6):
                await self._clean(leases)

    async def _begin(self, stream_id: str) -> Lease:
        record = record_of(stream_id)
        if self._mode == "grows" and stream_id == "stream-0-0":
            record = msgspec.structs.replace(record, attachments={"image": bytes(_LARGE_BYTES)})
        self._mark(Mark(False, "begin", stream_id))
        lease = await self._store.open(record)
        self._mark(Mark(True, "begin", stream_id))
        return lease

    async def _append(self, leases: list[Lease]) -> None:
        """Append some events to streams that have not ended, and wait until readers see them."""
        for lease in self._chance.sample(leases, self._chance.randint(1, len(leases))):
            stream_id, after = lease.stream_id, lease.log.last_seq
            number = min(length_of(stream_id), after + self._chance.randint(1, 4))
            if number > after:
                self._mark(Mark(False, "append", stream_id, number))
                self._store.append(lease, [event_at(stream_id, seq) for seq in range(after + 1, number + 1)])
                await wait_until(lambda: lease.log.last_seq == number)  # noqa: B023  # it does not outlive the turn
                self._mark(Mark(True, "append", stream_id, number))

    async def _clean(self, leases: list[Lease]) -> None:
        """Delete a stream that has ended, and have the log moved into the database."""
        ended = next((lease.stream_id for lease in leases if lease.log.end is not None), None)
        leases[:] = [lease for lease in leases if lease.stream_id != ended]
        if ended is not None:
            self._mark(Mark(False, "delete", ended))
            await self._store.delete(OWNER, ended)
            self._mark(Mark(True, "delete", ended))
        if self._mode == "keeps":  # as another program may do
            with closing(sqlite3.connect(self._directory / "journal.sqlite")) as other:
                other.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
        elif self._mode == "erases" and ended is not None:  # nothing of the stream may stay there
            await wait_until(lambda: (self._directory / "journal.sqlite-wal").stat().st_size == 0)


async def _serve(directory: Path, mode: Mode, number: int) -> None:
    marks = os.open(directory / MARKS, os.O_CREAT | os.O_WRONLY | os.O_APPEND)

    def mark(step: Mark) -> None:
        os.write(marks, msgspec.json.encode(step))

    async with open_sqlite(directory, keep_finished=mode != "erases", sync_s=0.003) as store:
        await _Server(directory, mode, store, mark, number).run()
        if number < _SERVERS - 1:
            os._exit(0)


def main() -> None:
    directory, mode = Path(sys.argv[1]), msgspec.convert(sys.argv[2], Mode)
    for number in range(_SERVERS):
        if (process := os.fork()) == 0:
            asyncio.run(_serve(directory, mode, number))
            os._exit(0)
        if os.waitpid(process, 0)[1] != 0:
            raise SystemExit("a server of the workload has failed")


if __name__ == "__main__":
    main()
