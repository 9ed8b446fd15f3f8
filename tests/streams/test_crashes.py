"""What the next server finds in the journal after a power cut at any moment, as SQLite tests itself: of the writes
that were not synced, the disk keeps any."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
from tests.missing import skip_missing
from tests.streams.crash_workload import MARKS, NOTES, OWNER, Kind, Mark, event_at, length_of, record_of
from tests.streams.traced_disk import CALLS, Loss, TracedDisk
from tests.waiting import LONG_S

from tailrace.errors import JournalDamaged, StreamExpired, UnknownStream
from tailrace.streams.sqlite_store import SqliteLogStore, open_sqlite

ROOT = Path(__file__).parent.parent.parent


@dataclass
class Promise:
    """What the next server has to have, by the marks: a stream begun is there, with the events that were shown, unless
    it was deleted; notes have the newest version. And what it may have."""

    done: dict[tuple[Kind, str], int] = field(default_factory=dict)
    begun: dict[tuple[Kind, str], int] = field(default_factory=dict)  # may be done


@dataclass(frozen=True)
class Journal:
    """A journal whose writes were traced."""

    disk: TracedDisk
    marks: list[tuple[int, int, Mark]]  # begin, end
    keeps: bool

    @property
    def promised(self) -> list[int]:
        """Return the moments from which on more is promised."""
        return [end for _, end, mark in self.marks if mark.is_done]

    def promise(self, at: int, loss: Loss) -> Promise:
        """Return what a server is promised that starts after a power cut. If the process has only died, this is all
        that was done, and otherwise what was done before the last sync."""
        until = at if loss == "nothing" else self.disk.last_sync("journal.sqlite-wal", at)
        asked = 0
        for begin, end, mark in self.marks:
            if mark.kind == "sync" and end < at:
                if mark.is_done:  # the journal says so
                    until = max(until, asked)
                asked = begin
        promise = Promise()
        for begin, end, mark in self.marks:
            step = (mark.kind, mark.stream_id)
            if mark.is_done and end < until:
                promise.done[step] = mark.number
            if not mark.is_done and begin < at:
                promise.begun[step] = mark.number
        return promise


@pytest.fixture(scope="module", params=["keeps", "erases", pytest.param("grows", marks=pytest.mark.deep)])
def journal(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Journal:
    """A journal that three servers have written, two of which were killed."""
    directory = tmp_path_factory.mktemp("traced")
    live, trace = directory / "live", directory / "trace"
    live.mkdir()
    if not shutil.which("strace"):
        skip_missing("strace")
    strace = ["strace", "-f", "--seccomp-bpf", "-y", "-xx", "-s", str(2**20), "-o", str(trace), "-e", f"trace={CALLS}"]
    try:
        subprocess.run([*strace, "true"], check=True)
    except subprocess.CalledProcessError:
        skip_missing("the right to trace processes")
    workload = [sys.executable, "-m", "tests.streams.crash_workload", str(live), request.param]
    subprocess.run([*strace, *workload], check=True, cwd=ROOT, timeout=LONG_S)
    disk = TracedDisk(live, "journal.sqlite", MARKS)
    disk.read(trace.read_text("ascii"))
    marks = [(*span, msgspec.json.decode(written, type=Mark)) for span, written in disk.marks]
    return Journal(disk, marks, keeps=request.param != "erases")


@pytest.fixture
def left() -> Iterator[Path]:
    """A directory for what is left after a power cut. In memory, if possible: there, syncs take no time."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None) as directory:
        yield Path(directory)


async def check_next_servers(directory: Path, journal: Journal, promise: Promise) -> bool:
    """Start the next server, check what it finds, and let it write the rest, which the one after it has to find.
    Returns whether they report that something is lost."""
    has_lost = False
    for _ in range(2):
        async with open_sqlite(directory, keep_finished=journal.keeps) as store:
            leases = await store.take_over()
            await _check_streams(store, journal, promise)
            notes = await store.notes_of("crashes")
            versions = {int(notes.get(key) or 0) for key in NOTES}
            assert len(versions) == 1, "a change in part"
            assert promise.done.get(("note", ""), 0) <= versions.pop() <= promise.begun.get(("note", ""), 0)
            has_lost |= store.index.damaged_until_s > 0
            for lease in leases:
                stream_id, length = lease.stream_id, length_of(lease.stream_id)
                store.append(lease, [event_at(stream_id, seq) for seq in range(lease.log.last_seq + 1, length + 1)])
                promise.done |= {("begin", stream_id): 0, ("append", stream_id): length}
                promise.begun["append", stream_id] = length
    return has_lost


async def _check_streams(store: SqliteLogStore, journal: Journal, promise: Promise) -> None:
    begun = [stream_id for kind, stream_id in promise.begun if kind == "begin"]
    assert set(await store.streams_of(OWNER)) <= set(begun)
    for stream_id in begun:
        num_shown = promise.done.get(("append", stream_id), 0)
        num_appended = promise.begun.get(("append", stream_id), 0)
        claim = record_of(stream_id).claim
        assert claim is not None
        try:
            log = await store.read(OWNER, stream_id)
        except StreamExpired:
            assert ("delete", stream_id) in promise.begun or not journal.keeps, f"{stream_id} is gone"
            assert num_appended == length_of(stream_id), f"{stream_id} is gone before its end"
            assert await store.recall(OWNER, claim) is None
        except (UnknownStream, JournalDamaged):
            assert ("begin", stream_id) not in promise.done, f"{stream_id} is lost"
            assert await store.recall(OWNER, claim) is None
        else:
            assert ("delete", stream_id) not in promise.done, f"{stream_id} is back"
            assert log.events == [event_at(stream_id, seq) for seq in range(1, log.last_seq + 1)]
            assert num_shown <= log.last_seq <= num_appended, stream_id
            assert await store.recall(OWNER, claim) is log


@pytest.mark.parametrize("count", [60, pytest.param(1_000, marks=[pytest.mark.deep, pytest.mark.timeout(900)])])
def test_a_power_cut_loses_nothing_that_was_synced(journal: Journal, left: Path, count: int) -> None:
    for number in range(count):
        chance = random.Random(f"{count} {number}")
        at = chance.choice(chance.choice((journal.disk.times, journal.promised))) + 1
        loss: Loss = chance.choices(("nothing", "all", "end", "any"), (2, 1, 2, 5))[0]
        files = left / str(number)
        files.mkdir()
        journal.disk.cut(at, loss, chance, files)
        try:
            has_lost = asyncio.run(check_next_servers(files, journal, journal.promise(at, loss)))
            assert not has_lost or loss == "any", "SQLite would have had to read it"
            assert not [*files.glob("journal.damaged-*")], "a new journal in place of this one"
        except Exception as error:
            error.add_note(f"at line {at} of {journal.disk.directory.parent / 'trace'}; lost: {loss}")
            raise
        shutil.rmtree(files)


def test_a_disk_that_loses_what_was_synced_is_noticed(journal: Journal, left: Path) -> None:
    times = journal.disk.times
    journal.disk.cut(times[len(times) // 2], "nothing", random.Random(1), left)
    with pytest.RaisesGroup(AssertionError):
        asyncio.run(check_next_servers(left, journal, journal.promise(times[-1], "all")))
