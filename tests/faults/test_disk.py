"""The journal's disk is locked, full, broken, read-only or damaged: visible events survive, and no others become
visible."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import sqlite3
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from tests.api.oracle import Answer
from tests.api.process import Server
from tests.dialects.sse import whole_events
from tests.faults.house import House, Stream
from tests.faults.laws import Kept, read_journal
from tests.http.wire import as_json, sse_data
from tests.missing import skip_missing
from tests.waiting import turn, until, wait_until

from tailrace.errors import ModelError
from tailrace.records.record_database import RecordDatabase
from tailrace.streams import StreamLog
from tailrace.streams.disk import DiskJournal
from tailrace.streams.notes import LocalNotes
from tailrace.types import Event, Record, TextDelta

PACED = "scripted:tokens_per_s=200"
PLAIN = {"content-type": "text/plain"}


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Another program locks the journal."""
    connection = sqlite3.connect(directory / "journal.sqlite", isolation_level=None, timeout=5)
    try:
        connection.execute("BEGIN EXCLUSIVE")
        yield
        connection.execute("ROLLBACK")
    finally:
        connection.close()


def _error(stream: Stream) -> str:
    return str(as_json(sse_data(stream.end)[-1])["error"]["code"])


# Locked


def test_streams_wait_for_a_lock_and_continue(tmp_path: Path) -> None:
    with House(tmp_path, PACED) as house:
        streams = [house.begin(Answer(f"Lock {seed}.", 200, seed)).seen(3) for seed in range(3)]
        with locked(tmp_path):
            before = [len(stream.followers[0].events) for stream in streams]
            house.server.wait_line("Streams are paused")
            shown = [len(stream.followers[0].events) for stream in streams]
            assert max(now - then for now, then in zip(shown, before, strict=True)) < 40, "shown and not kept"
        for stream in streams:
            stream.wait()
        house.server.wait_line("can be written again")


def test_an_engine_that_dies_while_the_journal_is_locked(tmp_path: Path) -> None:
    """What waits to be kept is forgotten, and comes again; also of a choice that had come to its end."""
    answers = [Answer("Both.", 60, seed=5), Answer("Both.", 60, seed=6)]
    with House(tmp_path, PACED) as house:
        stream = house.begin(Answer("One.", 300, seed=1)).seen(3)
        both = house.server.create({"prompt": "Both.", "max_tokens": 60, "seed": 5, "n": 2})
        with locked(tmp_path):
            house.server.wait_line("Streams are paused")
            house.kill_engine()
            until(lambda: "Starting another engine" in house.log)
        stream.wait()
        state = house.server.wait_state(both, "done")
        assert state["choices"] == [answer.text for answer in answers]


@pytest.mark.deep
def test_locked_for_too_long_streams_end(tmp_path: Path) -> None:
    """Those, too, that had come to their end without anybody's seeing it. No end is shown that is not kept: until it
    can be, readers are sent away, and come back."""
    with House(tmp_path, PACED) as house:
        running = house.begin(Answer("Running.", 3_000, seed=1)).seen(3)
        ending = house.begin(Answer("Ending.", 100, seed=2)).seen(3)
        with locked(tmp_path):
            house.server.wait_line("Streams are paused")
            refused = house.server.post("/v1/streams", {"prompt": "New.", "max_tokens": 1})
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "journal_unavailable")
            assert int(refused.headers["retry-after"]) >= 1
            for stream in (running, ending):
                stream.ends = ("error",)
                sent_away = house.server.http.get(f"{stream.path}/events")
                assert whole_events(sent_away.content)[-1].startswith(b"event: released\n")
            assert house.server.http.get("/readyz").status_code == 503
        for stream in (running, ending):
            stream.wait()
            assert _error(stream) == "journal_unavailable"
        until(lambda: house.server.http.get("/readyz").status_code == 200)
        house.begin(Answer("After.", 20, seed=3)).wait()


# Full


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MB."""
    directory = tmp_path / "disk"
    directory.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(directory)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode:
        skip_missing("the right to mount", mounted.stderr.strip())
    yield directory
    subprocess.run(["umount", "--lazy", str(directory)], check=True)


def _fill(directory: Path) -> Path:
    """Fill the disk."""
    ballast = directory / "ballast"
    with ballast.open("ab", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass
    return ballast


def test_a_full_disk_loses_no_visible_event(small_disk: Path) -> None:
    with House(small_disk / "data", PACED) as house:
        finished = house.begin(Answer("Finished.", 9, seed=1))
        finished.wait()
        streams = [house.begin(Answer(f"Full {seed}.", 5_000, seed)).seen(3) for seed in range(3)]
        ballast = _fill(small_disk)
        house.server.wait_line("journal is full")
        refused = house.server.post("/v1/streams", {"prompt": "New.", "max_tokens": 1})
        assert (refused.status_code, refused.json()["error"]["code"]) == (507, "log_full")
        for stream in streams:
            stream.ends = ("error",)
            stream.wait()
            assert _error(stream) == "log_full"
        ballast.unlink()
        until(lambda: house.server.http.get("/readyz").status_code == 200)
        house.begin(Answer("After.", 20, seed=3)).wait()
        house.restart()
        assert house.server.http.get(f"{streams[0].path}/events").content.endswith(streams[0].end)


@pytest.mark.deep
def test_no_server_starts_on_a_full_disk(small_disk: Path) -> None:
    with House(small_disk / "data", PACED) as house:
        stream = house.begin(Answer("Before.", 200, seed=1)).seen(9)
        house.kill()
        ballast = _fill(small_disk)
        refused = house.launch()
        assert refused.wait() == 1
        refused.close()
        assert "full" in refused.log
        assert refused.log.count("\n") == 2
        ballast.unlink()
        house.start()
        stream.wait()


# Broken


@pytest.mark.deep
def test_a_disk_that_does_not_sync_is_not_trusted_again(tmp_path: Path, shim: Callable[[str], Path]) -> None:
    failing = shim("FAULT_SYNC")
    with House(tmp_path / "data", PACED) as house:
        stream = house.begin(Answer("Sync.", 5_000, seed=1)).seen(9)
        stream.ends = ("error",)
        failing.touch()
        stream.wait()
        assert _error(stream) == "journal_unavailable"
        failing.unlink()
        assert house.server.post("/v1/streams", {"prompt": "New.", "max_tokens": 1}).status_code == 503
        assert house.server.http.get("/readyz").status_code == 503
        events = house.server.http.get(f"{stream.path}/events")
        assert events.content == b"".join(stream.followers[0].events)


def _read_only(directory: Path, *, is_on: bool) -> None:
    command = ["mount", "-o", f"remount,{'ro' if is_on else 'rw'}", str(directory)]
    subprocess.run(command, check=True, capture_output=True)


@pytest.mark.deep
def test_no_server_starts_where_nothing_can_be_written(small_disk: Path) -> None:
    with House(small_disk / "data", PACED) as house:
        house.stop()
        _read_only(small_disk, is_on=True)
        refused = house.launch()
        assert refused.wait() == 1
        refused.close()
        _read_only(small_disk, is_on=False)
        assert "cannot be kept" in refused.log
        assert "Read-only" in refused.log
        house.start()


@pytest.mark.parametrize("what", ["The journal", pytest.param("The database", marks=pytest.mark.deep)])
def test_a_file_system_without_locks(what: str, tmp_path: Path, shim: Callable[[str], Path]) -> None:
    """As network file systems may be."""
    flags = ["--data-dir", str(tmp_path)]
    if what == "The database":
        flags += ["--journal", "memory", "--database", f"sqlite:///{tmp_path / 'records.sqlite'}"]
        with closing(RecordDatabase(flags[-1])) as opened:
            opened.prepare()
    shim("FAULT_LOCKS").touch()
    with closing(Server("scripted", *flags)) as refused:
        assert refused.wait() == 1
        last = refused.log.splitlines()[-1]
        assert what in last
        assert "its file system lacks the locks and the shared memory that SQLite needs" in last
        assert "Traceback" not in refused.log


# Damaged


def _damaged(directory: Path, into: Path) -> Path:
    """A copy to damage."""
    shutil.rmtree(into, ignore_errors=True)
    into.mkdir()
    for path in directory.glob("journal.sqlite*"):
        shutil.copy(path, into)
    return into


def _check_prefix(kept: Kept, oracle: dict[str, list[bytes]]) -> int:
    """The stream's events are a prefix of the answer; returns their number. A damaged stream may end as such."""
    count = 0
    for stream_id, events in oracle.items():
        if stream_id not in kept.streams:
            continue
        found = kept.wire(stream_id)
        if found and found[-1].startswith(b"event: error") and found[-1] not in events:
            assert b'"journal_damaged"' in found.pop()
        assert found == events[: len(found)], "another byte"
        count += len(found)
    return count


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[bytes]]]:
    """The files of a killed server with finished and running streams, and their expected answers."""
    directory = tmp_path_factory.mktemp("left")
    oracle: dict[str, list[bytes]] = {}
    with House(directory / "live", PACED) as house:
        for seed in range(6):
            answer = Answer(f"Damage {seed}.", 20 if seed < 3 else 400, seed)
            stream = house.begin(answer)
            oracle[stream.stream_id] = answer.native(stream.stream_id)
        for stream in house.streams[:3]:
            stream.wait()
        house.streams[-1].seen(60)
        house.kill()
        _damaged(directory / "live", directory / "left")
        house.streams.clear()  # the rest of them is of no interest
        house.start()
    return directory / "left", oracle


def test_a_torn_write_ahead_log_is_read_up_to_the_tear(
    left: tuple[Path, dict[str, list[bytes]]], tmp_path: Path
) -> None:
    directory, oracle = left
    whole = (directory / "journal.sqlite-wal").read_bytes()
    page = int.from_bytes(whole[8:12], "big")
    frames = [*range(32, len(whole) + 1, 24 + page)]
    chance = random.Random(39)
    cuts = [*chance.sample(frames, 12), *(chance.randrange(len(whole)) for _ in range(12)), 0, len(whole)]
    counts = []
    for cut in sorted(cuts):
        damaged = _damaged(directory, tmp_path / "damaged")
        os.truncate(damaged / "journal.sqlite-wal", cut)
        counts.append(_check_prefix(read_journal(damaged), oracle))
    assert counts == sorted(counts), "more of the log, and less of the streams"
    assert counts[-1] > 3 * 21 + 60


@pytest.mark.parametrize("num_flips", [60, pytest.param(3_000, marks=[pytest.mark.deep, pytest.mark.timeout(600)])])
def test_a_flipped_bit_is_detected(left: tuple[Path, dict[str, list[bytes]]], tmp_path: Path, num_flips: int) -> None:
    """Anywhere in the file, when the whole journal is in the database, where SQLite has no checksums."""
    directory, oracle = left
    clean = _damaged(directory, tmp_path / "clean")
    with contextlib.closing(sqlite3.connect(clean / "journal.sqlite")) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    content = (clean / "journal.sqlite").read_bytes()
    whole = _check_prefix(read_journal(clean), oracle)
    chance = random.Random(39)
    counts = []
    for _ in range(num_flips):
        place, bit = chance.randrange(len(content)), 1 << chance.randrange(8)
        damaged = _damaged(clean, tmp_path / "damaged")
        with (damaged / "journal.sqlite").open("r+b") as file:
            file.seek(place)
            file.write(bytes([content[place] ^ bit]))
        try:
            counts.append(_check_prefix(read_journal(damaged), oracle))
        except ModelError:  # the version of the schema was hit, of all things: no server starts on a newer one
            continue
    assert len(counts) > num_flips * 0.99
    assert max(counts) <= whole
    assert min(counts) < whole, "none of them hit anything"


@pytest.mark.parametrize("time", ["CAST(finished AS BLOB)", "'not a time'"])
def test_a_damaged_time_loses_only_its_stream(
    left: tuple[Path, dict[str, list[bytes]]], tmp_path: Path, time: str
) -> None:
    directory, oracle = left
    damaged = _damaged(directory, tmp_path / "damaged")
    before = read_journal(damaged)
    with contextlib.closing(sqlite3.connect(damaged / "journal.sqlite")) as connection, connection:
        assert connection.execute(
            f"UPDATE streams SET finished = {time}"
            " WHERE number = (SELECT min(number) FROM streams WHERE finished NOTNULL)"
        ).rowcount
    after = read_journal(damaged)
    _check_prefix(after, oracle)
    (lost,) = before.streams.keys() - after.streams.keys()
    assert lost in after.expired


@pytest.mark.deep
def test_streams_after_a_damaged_part_of_the_log_are_reported_as_lost(tmp_path: Path) -> None:
    """SQLite stops silently at the first damaged frame."""
    with House(tmp_path / "live", PACED) as house:
        first, second = house.begin(Answer("First.", 9, seed=1)), house.begin(Answer("Second.", 400, seed=1))
        first.wait()
        second.seen(60)
        house.kill()
        damaged = _damaged(tmp_path / "live", tmp_path / "damaged")
        house.streams.clear()
    whole = (damaged / "journal.sqlite-wal").read_bytes()
    page = int.from_bytes(whole[8:12], "big")
    places = [whole.index(stream.stream_id.encode()) for stream in (first, second)]
    for place, is_first_there in [(places[0], False), (places[1], True), (8, False), (20, False)]:
        _damaged(tmp_path / "damaged", tmp_path / "one")
        with (tmp_path / "one" / "journal.sqlite-wal").open("r+b") as file:
            file.seek(place)
            file.write(bytes([whole[place] ^ 1]))
        with House(tmp_path / "one", PACED) as house:
            for stream, is_there in [(first, is_first_there), (second, False)]:
                answer = house.server.http.get(stream.path)
                assert answer.status_code == (200 if is_there else 500), (place, page)
                assert is_there or answer.json()["error"]["code"] == "journal_damaged"
            house.server.wait_line("the end of the journal was damaged")


@pytest.mark.parametrize("name", ["journal.reserve", "journal.sqlite", "journal.lock"])
def test_links_among_the_files_of_the_journal_are_not_followed(tmp_path: Path, name: str) -> None:
    victim, directory = tmp_path / "victim", tmp_path / "journal"
    directory.mkdir()
    victim.write_bytes(b"mine")
    victim.chmod(0o644)
    (directory / name).symlink_to(victim)
    with pytest.raises(ModelError):
        DiskJournal(directory)
    (directory / name).unlink(missing_ok=True)
    os.mkfifo(directory / name)
    with pytest.raises(ModelError):
        DiskJournal(directory)
    assert victim.read_bytes() == b"mine"
    assert victim.stat().st_mode & 0o777 == 0o644


@pytest.mark.deep
def test_with_a_ruined_journal_a_server_starts_a_new_one(tmp_path: Path) -> None:
    with House(tmp_path, PACED) as house:
        lost = house.begin(Answer("Lost.", 9, seed=1))
        lost.is_kept = False
        lost.wait()
        durable = "/v1/durable/lost"
        assert house.server.http.put(durable, content=b"one", headers=PLAIN).status_code == 201
        house.stop()
        with (tmp_path / "journal.sqlite").open("r+b") as file:
            file.seek(4096)
            file.write(os.urandom(8192))
        house.start()
        house.server.wait_line("a new one was created")
        assert list(tmp_path.glob("journal.damaged-*.sqlite"))
        for _ in range(2):  # also the next server knows
            for path in (lost.path, durable):
                answer = house.server.http.get(path)
                assert (answer.status_code, answer.json()["error"]["code"]) == (500, "journal_damaged")
            house.restart()
        assert house.server.http.put(durable, content=b"anew", headers=PLAIN).status_code == 201
        assert house.server.http.get(durable).content == b"anew"
        assert house.server.http.get("/v1/streams/never-was").status_code == 404
        assert (tmp_path / "journal.sqlite-wal").exists(), "what is written goes nowhere"
        stream = house.begin(Answer("Anew.", 100, seed=1)).seen(20)
        house.restart()
        stream.wait()


# Power is cut


def test_a_power_cut_takes_no_more_than_what_came_after_the_last_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the system has not been told to sync is gone, the rest is there: the log is cut where it was synced."""
    answer = Answer("Power.", 400, seed=1)
    logs: list[StreamLog] = []
    synced: list[tuple[int, int]] = [(0, 0)]  # events that could be seen, bytes that were in the file
    sync = os.fdatasync

    def watched(descriptor: int) -> None:
        before = (logs[0].last_seq, os.fstat(descriptor).st_size)
        sync(descriptor)
        synced.append(before)

    monkeypatch.setattr(os, "fdatasync", watched)

    async def live() -> int:
        journal = DiskJournal(tmp_path / "live", sync_s=0.05)
        keeping = asyncio.create_task(journal.maintain())
        log: StreamLog = journal.begin(Record("stream", 0.0, linger_s=60.0))
        logs.append(log)
        events: list[Event] = [TextDelta(answer.texts[i], (answer.token_ids[i],)) for i in range(200)]
        for event in events:
            journal.append(log, [event])
            journal.flush()
            await asyncio.sleep(0.001)
        synced_events, synced_bytes = synced[-1]
        assert 0 < synced_events < 200, "nothing to lose, or all"
        _damaged(tmp_path / "live", tmp_path / "cut")
        os.truncate(tmp_path / "cut" / "journal.sqlite-wal", synced_bytes)
        keeping.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await keeping
        journal.close()
        return synced_events

    synced_events = asyncio.run(live())
    kept = read_journal(tmp_path / "cut").wire("stream")
    assert kept == answer.native("stream")[: len(kept)]
    assert len(kept) >= synced_events


def test_a_note_that_was_synced_survives_a_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sync, synced_bytes = os.fdatasync, [0]

    def watched(descriptor: int) -> None:
        before = os.fstat(descriptor).st_size
        sync(descriptor)
        synced_bytes.append(before)

    monkeypatch.setattr(os, "fdatasync", watched)

    async def live() -> None:
        journal = DiskJournal(tmp_path / "live", sync_s=3600.0)
        keeping = asyncio.create_task(journal.maintain())
        await turn()
        notes = LocalNotes("mcp", journal)
        notes.add(b"first", b"kept")
        await notes.sync()
        notes.add(b"second", b"lost")
        _damaged(tmp_path / "live", tmp_path / "cut")
        os.truncate(tmp_path / "cut" / "journal.sqlite-wal", synced_bytes[-1])
        keeping.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await keeping
        journal.close()

    asyncio.run(live())
    journal = DiskJournal(tmp_path / "cut")
    notes = LocalNotes("mcp", journal)
    assert (notes.get(b"first"), notes.get(b"second")) == (b"kept", None)
    journal.close()


def test_commits_are_synced_while_all_threads_are_busy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long prompts and grammars are read in asyncio's threads."""
    synced, released = threading.Event(), threading.Event()
    monkeypatch.setattr(os, "fdatasync", lambda descriptor: synced.set())

    async def live() -> None:
        journal = DiskJournal(tmp_path, sync_s=0.01)
        keeping = asyncio.create_task(journal.maintain())
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        busy = asyncio.create_task(asyncio.to_thread(released.wait))
        journal.begin(Record("stream", 0.0))
        await wait_until(synced.is_set)
        released.set()
        await busy
        keeping.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await keeping
        journal.close()

    asyncio.run(live())


# Looked at


@pytest.mark.deep
def test_reading_the_journal_does_no_harm(tmp_path: Path) -> None:
    """The last connection of SQLite removes the log. A reader must not count as the last one."""
    with House(tmp_path, PACED) as house:
        stream = house.begin(Answer("Look.", 200, seed=1)).seen(9)
        with contextlib.closing(sqlite3.connect(tmp_path / "journal.sqlite")) as connection:
            assert connection.execute("SELECT count(*) FROM tail").fetchone()[0] > 0
        assert (tmp_path / "journal.sqlite-wal").exists()
        stream.seen(60)
        house.restart()
