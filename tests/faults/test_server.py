"""The server dies or stops: the next one with the same directory has every stream, and continues the unfinished
ones."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.api.oracle import Answer, chat_ids
from tests.faults.house import House
from tests.http.wire import as_json, sse_data
from tests.processes import freeze
from tests.waiting import until

from tailrace.errors import ModelError, StreamExpired
from tailrace.streams import Reader, open_sqlite, read_journal_key
from tailrace.streams.disk import DiskJournal
from tailrace.types import ANONYMOUS, Claim, End, Prompt, Record, Sampling, TextDelta, Usage

PACED = "scripted:tokens_per_s=200"
SSE = {"accept": "text/event-stream"}


def _one_line(house: House, *flags: str) -> str:
    """Return the error of a server that does not start."""
    refused = house.launch(*flags)
    assert refused.wait() == 1
    refused.close()
    lines = [line for line in refused.log.splitlines() if not line.startswith("Loading")]
    assert len(lines) == 1, refused.log
    return lines[0]


# It dies


@pytest.mark.parametrize("num_kills", [2, pytest.param(50, marks=[pytest.mark.deep, pytest.mark.timeout(600)])])
def test_killed_at_any_time(tmp_path: Path, num_kills: int) -> None:
    chance = random.Random(25)
    with House(tmp_path, PACED) as house:
        for kill in range(num_kills):
            streams = [house.begin(Answer(f"Kill {kill} {seed}.", 150, seed), num_readers=2) for seed in range(4)]
            streams[0].seen(chance.randint(1, 140))
            for stream in house.streams[:-8]:
                stream.wait()  # so that none is in vain too often
            house.restart()
        for stream in house.streams:
            stream.wait()
            assert not any(follower.refusals for follower in stream.followers)


def test_killed_when_a_reader_has_just_seen_something(tmp_path: Path) -> None:
    with House(tmp_path, "scripted:tokens_per_s=1000") as house:
        stream = house.begin(Answer("Just.", 600, seed=1), num_readers=3)
        stream.followers[0].wait_events(200)
        house.restart()


@pytest.mark.parametrize("num_kills", [3, pytest.param(12, marks=pytest.mark.deep)])
def test_killed_during_take_over(tmp_path: Path, num_kills: int) -> None:
    chance = random.Random(26)
    with House(tmp_path, PACED) as house:
        streams = [house.begin(Answer(f"Take up {seed}.", 60, seed)) for seed in range(8)]
        for stream in streams:
            stream.seen(5)
        house.kill()
        for kill in range(num_kills):
            server = house.launch()
            server.wait_line("Loading" if kill % 2 else "Listening")
            time.sleep(chance.uniform(0, 0.2))  # any moment will do: that is what is under test
            server.process.kill()
            server.close()
        house.start()
        for stream in streams:
            stream.ends = ("done", "interrupted")  # the latter where it has been in vain too often
            stream.wait()
        if num_kills < 4:
            assert all(b"event: done\n" in stream.end for stream in streams)


async def test_a_stream_with_progress_is_taken_over_any_number_of_times(tmp_path: Path) -> None:
    """A server may be replaced every day. A stream without progress may be what kills servers."""
    journal = DiskJournal(tmp_path)
    for name in ("gets on", "does not"):
        journal.begin(Record(name, 0.0, linger_s=60.0))
    for number in range(30):
        journal.close()
        journal = DiskJournal(tmp_path)
        unfinished = journal.unfinished()
        logs = {log.stream_id: log for log, _ in unfinished}
        ends = {log.stream_id: end for log, end in unfinished}
        if ends["does not"] is not None:
            break
        journal.append(logs["gets on"], [TextDelta("a", (97,))])
        journal.flush()
        assert logs["gets on"].last_seq == number + 1
    end = ends["does not"]
    assert end is not None
    assert end.status == "interrupted"
    assert ends["gets on"] is None
    assert logs["gets on"].last_seq > 4
    journal.close()


@pytest.mark.deep
def test_ended_streams_stay_ended(tmp_path: Path) -> None:
    with House(tmp_path, PACED) as house:
        done = house.begin(Answer("Done.", 9, seed=1))
        cancelled = house.begin(Answer("Cancelled.", 900, seed=1)).seen(3)
        cancelled.ends = ("cancelled",)
        deleted = house.begin(Answer("Deleted.", 900, seed=1)).seen(3)
        deleted.ends, deleted.is_kept = ("cancelled",), False
        gone = house.begin(Answer("Gone.", 5, seed=1))
        gone.is_kept = False
        gone.wait()
        assert house.server.http.post(f"{cancelled.path}/cancel").status_code == 200
        assert house.server.http.delete(deleted.path).status_code == 204
        assert house.server.http.delete(gone.path).status_code == 204
        for stream in house.streams:
            stream.wait()
        house.restart()
        for _ in range(2):
            for stream in (done, cancelled):
                answer = house.server.http.get(f"{stream.path}/events")
                assert answer.content == b"".join(stream.followers[0].events)
            for stream in (deleted, gone):
                assert house.server.http.get(stream.path).status_code == 410
                assert house.server.http.get(f"{stream.path}/events").status_code == 410
            house.stop()
            house.start()


def test_a_stream_without_linger_time_is_interrupted(tmp_path: Path) -> None:
    with House(tmp_path, PACED) as house:
        stream = house.begin(Answer("Nobody.", 900, seed=1), on_disconnect="cancel").seen(5)
        stream.ends = ("interrupted",)
        house.restart()
        stream.wait()
        assert as_json(sse_data(stream.end)[0])["error"]["code"] == "interrupted"


async def _leave(directory: Path, record: Record, *events: TextDelta) -> None:
    """As another server leaves a stream behind."""
    journal = DiskJournal(directory)
    log = journal.begin(record)
    for event in events:
        journal.append(log, [event])
    journal.flush()
    journal.close()


def test_a_stream_of_another_model_is_interrupted(tmp_path: Path) -> None:
    answer = Answer("Other.", 20, seed=1)
    record = Record(
        "other", 0.0, model="another", prompts=(Prompt("Other.", (answer.prompt_ids,)),), linger_s=60.0,
        sampling=Sampling(seed=1, max_tokens=20), num_prompt_tokens=6, claim=Claim("k", b"f"),
    )  # fmt: skip
    asyncio.run(_leave(tmp_path, record, TextDelta(answer.texts[0], (answer.token_ids[0],))))
    with House(tmp_path, PACED) as house, house.server.wire() as wire:
        status, body = wire.request("GET", "/v1/streams/other/events")
    assert status == 200
    assert body.startswith(answer.native("other")[0])
    assert [as_json(line).get("status") for line in sse_data(body)] == [None, "interrupted"]


def test_choices_continue_independently(tmp_path: Path) -> None:
    answers = [Answer("Two.", 80, seed=5), Answer("Two.", 80, seed=6)]
    with House(tmp_path, PACED) as house:
        stream_id = house.server.create({"prompt": "Two.", "max_tokens": 80, "seed": 5, "n": 2})
        until(lambda: not house.server.state(stream_id)["last_event_id"].endswith("-0"))
        house.restart()
        house.kill_engine()
        state = house.server.wait_state(stream_id, "done")
        assert state["choices"] == [answer.text for answer in answers]
        assert state["usage"]["completion_tokens"] == 160
        events = [as_json(line) for line in sse_data(house.server.http.get(f"/v1/streams/{stream_id}/events").content)]
        for choice, answer in enumerate(answers):
            mine = [event for event in events if "token_ids" in event and event.get("choice", 0) == choice]
            assert [i for event in mine for i in event["token_ids"]] == answer.token_ids
            assert [event["finish_reason"] for event in mine if "finish_reason" in event] == ["length"]


# Who asks twice


def test_an_idempotency_key_survives_a_crash(tmp_path: Path) -> None:
    answer = Answer("Key.", 200, seed=1)
    body = {"prompt": "Key.", "max_tokens": 200, "seed": 1}
    with House(tmp_path, PACED) as house:
        stream = house.begin(answer, key="one")
        finished = house.begin(Answer("Ready.", 3, seed=1), key="two")
        finished.wait()
        stream.seen(20)
        house.restart()

        def ask(_: int) -> str:
            with house.server.wire() as wire:
                status, content = wire.request("POST", "/v1/streams", body, {"idempotency-key": "one"})
                assert status == 201
                return str(as_json(content)["id"])

        with ThreadPoolExecutor(10) as pool:
            assert set(pool.map(ask, range(20))) == {stream.stream_id}
        again = house.server.post(
            "/v1/streams", {"prompt": "Ready.", "max_tokens": 3, "seed": 1}, idempotency_key="two"
        )
        assert again.json()["id"] == finished.stream_id
        other = house.server.post("/v1/streams", {"prompt": "Other.", "max_tokens": 3}, idempotency_key="one")
        assert other.status_code == 409
        assert house.num_streams == 3  # with the one that warmed it up


_CHAT = {"messages": [{"role": "user", "content": "Own."}], "max_tokens": 60, "seed": 1, "stream": True}
_TEXT = {"prompt": "Own.", "max_tokens": 60, "seed": 1, "stream": True}
_TGI = {"inputs": "Own.", "parameters": {"max_new_tokens": 60, "seed": 1}, "stream": True}


def _own(path: str, first: dict[str, Any]) -> bytes:
    """What a wire has to say from beginning to end; its first chunk has the names that the server gave."""
    if path == "/v1/chat/completions":
        return Answer(chat_ids("Own."), 60, seed=1).openai_chat(first["id"], first["created"])
    answer = Answer("Own.", 60, seed=1)
    return answer.tgi() if path == "/generate_stream" else answer.openai_text(first["id"], first["created"])


def test_streams_of_other_wires_continue(tmp_path: Path) -> None:
    asked: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": _CHAT,
        "/v1/completions": _TEXT,
        "/generate_stream": _TGI,
    }
    seen: dict[str, bytes] = {}
    stream_ids: dict[str, str] = {}
    with House(tmp_path, PACED) as house:
        for path, body in asked.items():
            with house.server.wire() as wire:
                wire.send("POST", path, body, {"idempotency-key": path, "x-tailrace-linger": "60"})
                assert wire.head() == 200
                stream_ids[path] = wire.headers["x-stream-id"]
                seen[path] = b"".join(wire.event() for _ in range(9))
        house.restart()
        for path, body in asked.items():
            with house.server.wire() as wire:
                headers = {"idempotency-key": path, "x-tailrace-linger": "60"}
                status, whole = wire.request("POST", path, body, headers)
                assert (status, wire.headers["x-stream-id"]) == (200, stream_ids[path])
            assert whole.startswith(seen[path])
            assert whole == _own(path, as_json(sse_data(whole)[0]))
            native = house.server.http.get(f"/v1/streams/{stream_ids[path]}/events").content
            assert as_json(sse_data(native)[-1])["continuity"] == "replayed"


# It leaves


def test_a_stopped_server_hands_over_its_streams(tmp_path: Path) -> None:
    with House(tmp_path, PACED, "--drain-s", "1.5") as house:
        streams = [house.begin(Answer(f"Leave {seed}.", 2000, seed), key=f"key-{seed}") for seed in range(10)]
        for stream in streams:
            stream.seen(3)
        engine = house.server.worker()
        freeze(engine)  # so that the short one has not ended before the signal is there
        short = house.begin(Answer("Short.", 60, seed=1))
        house.server.send_signal(signal.SIGTERM)
        house.server.wait_line("Stopping; 11 streams")
        engine.resume()
        with house.server.wire() as wire:
            status, _ = wire.request("POST", "/v1/streams", {"prompt": "New.", "max_tokens": 1})
            assert status == 503
            assert int(wire.headers["retry-after"]) >= 1
        short.wait()
        assert b"continuity" not in short.end
        assert house.server.wait() == 0
        assert house.server.log.rstrip().endswith("Stopped.")
        house.server.close()
        house.start()
        house.server.wait_line("10 streams go on")
        for stream in streams:
            stream.wait()
            assert all(follower.num_releases for follower in stream.followers)
            assert b'"continuity":"replayed"' in stream.end


def test_a_second_signal_loses_nothing(tmp_path: Path) -> None:
    with House(tmp_path, PACED, "--drain-s", "60") as house:
        stream = house.begin(Answer("Hurry.", 300, seed=1), num_readers=3).seen(9)
        house.server.send_signal(signal.SIGTERM)
        house.server.wait_line("Stopping; 1 stream has")
        assert house.stop(signal.SIGINT) == 0
        house.start()
        stream.wait()


# What is kept, and for how long


@pytest.mark.deep
def test_retention_continues_after_a_restart(tmp_path: Path) -> None:
    with House(tmp_path, PACED, "--retention-s", "600") as house:
        stream = house.begin(Answer("Kept.", 5, seed=1))
        stream.wait()

        def left_s() -> float:
            return float(house.server.state(stream.stream_id)["expires_in_s"])

        until(lambda: left_s() < 598)
        house.restart()
        assert left_s() < 599
        stream.is_kept = False
        house.stop()
        house.start("--retention-s", "1")
        until(lambda: house.server.http.get(stream.path).status_code == 410)
        house.stop()
        assert stream.stream_id in house.kept().expired


@pytest.mark.deep
async def test_a_later_end_extends_no_other_retention(tmp_path: Path) -> None:
    """Streams that began in one order, ended in the other, and were taken over."""
    async with open_sqlite(tmp_path, sync_s=0.01, retention_s=6.0) as store:
        late, early = [await store.open(Record(name, 0.0)) for name in ("late", "early")]
        for lease in (early, late):
            store.append(lease, (End("done", Usage(1, 0)),))
            await asyncio.sleep(3)  # time itself is under test
    async with open_sqlite(tmp_path, retention_s=6.0) as store:
        await store.take_over()
        await asyncio.sleep(0.1)
        with pytest.raises(StreamExpired):
            await store.read(ANONYMOUS, "early")
        assert (await store.read(ANONYMOUS, "late")).stream_id == "late"


async def test_streams_that_ended_together_stay_in_their_order_after_a_restart(tmp_path: Path) -> None:
    """All are compacted within a millisecond or two. A budget drops the oldest."""
    names = [f"stream {number:02}" for number in range(40)]
    async with open_sqlite(tmp_path, sync_s=0.01) as store:
        for lease in [await store.open(Record(name, 0.0)) for name in names]:
            store.append(lease, (End("done", Usage(1, 0)),))
            await Reader(lease.log, at_end_only=True).wait()
        num_bytes = sum(store.index.get(name).num_bytes for name in names)
    async with open_sqlite(tmp_path, budget_bytes=num_bytes // 2) as store:
        await store.take_over()
        kept = [name for name in names if store.index.is_finished(name)]
        assert 0 < len(kept) < len(names)
        assert kept == names[-len(kept) :]


@pytest.mark.deep
def test_the_budget_of_finished_streams_holds_after_a_restart(tmp_path: Path) -> None:
    with House(tmp_path, PACED) as house:
        streams = [house.begin(Answer(f"Room {seed}.", 50, seed)) for seed in range(6)]
        for stream in streams:
            stream.wait()
        house.kill()
        house.start("--retention-bytes", "5000")
        statuses = [house.server.http.get(stream.path).status_code for stream in streams]
        assert statuses == sorted(statuses, reverse=True), "the oldest go first"
        assert set(statuses) == {200, 410}
        for stream, status in zip(streams, statuses, strict=True):
            stream.is_kept = status == 200


def _num_unused(path: Path) -> int:
    """Pages of an SQLite file with nothing in them."""
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
        return int(connection.execute("PRAGMA freelist_count").fetchone()[0])


@pytest.mark.deep
def test_space_on_disk_is_freed(tmp_path: Path) -> None:
    with House(tmp_path, PACED, "--retention-s", "1") as house:
        for number in range(40):
            prompt = f"Space {number}." + "x" * 40_000
            house.server.create({"prompt": prompt, "max_tokens": 2, "seed": 1})
        until(lambda: house.num_streams == 0)
        until(lambda: _num_unused(tmp_path / "journal.sqlite") == 0)
        house.stop()
        assert (tmp_path / "journal.sqlite").stat().st_size < 200_000


def test_without_a_journal_nothing_is_written(tmp_path: Path) -> None:
    with House(tmp_path / "data", PACED, "--journal", "memory") as house:
        stream_id = house.server.create({"prompt": "Memory.", "max_tokens": 500, "seed": 1})
        house.restart()
        assert house.server.http.get(f"/v1/streams/{stream_id}").status_code == 404
        house.stop()
        assert not (tmp_path / "data").exists()


SECRET = "a prompt that nobody else should see"
LONG_SECRET = SECRET + "".join(f", {number}" for number in range(4_000))  # longer than a page of the file


def _found(directory: Path, *texts: str) -> list[str]:
    """In which files these can be read."""
    contents = {path.name: path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    return [name for name, content in contents.items() if any(text.encode() in content for text in texts)]


@pytest.mark.parametrize("prompt", [pytest.param(SECRET, marks=pytest.mark.deep), LONG_SECRET], ids=["short", "long"])
def test_finished_streams_leave_no_text_behind(tmp_path: Path, prompt: str) -> None:
    answer = Answer(prompt, 120, seed=1)
    texts = (SECRET, "3998, 3999", answer.text[-40:], *answer.texts[8:10])
    with House(tmp_path, PACED, "--no-keep-finished") as house:
        house.server.create({"prompt": prompt, "max_tokens": 120, "seed": 1})
        stream = house.begin(answer)
        stream.is_kept = False
        stream.seen(5)
        assert _found(tmp_path, SECRET)  # as long as it runs
        stream.wait()
        assert house.server.http.get(f"{stream.path}/events").status_code == 200
        house.stop()
        assert not _found(tmp_path, *texts)
        house.start()
        assert house.server.http.get(stream.path).status_code == 410


@pytest.mark.deep
def test_an_encrypted_journal_has_no_plain_text(tmp_path: Path) -> None:
    key_file, other = tmp_path / "key", tmp_path / "other"
    key_file.write_text("k" * 44)
    other.write_text("o" * 44)
    data = tmp_path / "data"
    answer = Answer(LONG_SECRET, 100, seed=1)
    texts = [SECRET, "3998, 3999", "the-key-of-a-client", *{text for text in answer.texts if len(text) > 4}]
    with House(data, PACED, "--journal-key-file", str(key_file)) as house:
        house.key = read_journal_key(key_file)
        stream = house.begin(answer, key="the-key-of-a-client")
        stream.seen(20)
        assert not _found(data, *texts)
        house.restart()
        stream.wait()
        assert not _found(data, *texts)
        house.stop()
        assert not _found(data, *texts)
        assert "--journal-key-file" in _one_line(house, "--journal-key-file", str(other))
        assert "--journal-key-file" in _one_line(house, "--journal-key-file", "")
        house.start()
        assert house.server.http.get(f"{stream.path}/events").content == b"".join(stream.followers[0].events)


def test_a_key_has_to_be_there_and_long_enough(tmp_path: Path) -> None:
    (tmp_path / "short").write_text("k" * 31)
    with pytest.raises(ModelError, match="too short"):
        read_journal_key(tmp_path / "short")
    with pytest.raises(ModelError, match="Cannot read"):
        read_journal_key(tmp_path / "nowhere")


# Whose directory it is


def test_two_servers_do_not_share_a_directory(tmp_path: Path) -> None:
    with House(tmp_path, PACED) as house:
        stream = house.begin(Answer("Mine.", 100, seed=1)).seen(3)
        assert "Another server" in _one_line(house)
        stream.wait()


async def test_a_newer_journal_is_left_alone(tmp_path: Path) -> None:
    DiskJournal(tmp_path).close()
    with contextlib.closing(sqlite3.connect(tmp_path / "journal.sqlite")) as connection:
        connection.execute("PRAGMA user_version = 1000")
    with pytest.raises(ModelError, match="newer version"):
        DiskJournal(tmp_path)
    with contextlib.closing(sqlite3.connect(tmp_path / "journal.sqlite")) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (1000,)


# Time


@pytest.mark.deep
def test_setting_the_clock_affects_no_stream(tmp_path: Path, shim: Callable[[str], Path]) -> None:
    offset = shim("FAULT_CLOCK")
    offset.write_text("0")
    with House(tmp_path / "data", PACED, "--retention-s", "60") as house:
        finished = house.begin(Answer("Clock.", 5, seed=1))
        finished.wait()
        stream = house.begin(Answer("Running.", 250, seed=1)).seen(5)
        for number, seconds in enumerate((86_400, -86_400), 1):
            offset.write_text(str(seconds))
            stream.seen(40 * number)
            assert house.server.http.get(finished.path).status_code == 200
            house.restart()
            state = house.server.state(finished.stream_id)
            assert 30 < state["expires_in_s"] <= 60
        stream.wait()


@pytest.mark.deep
def test_a_suspended_server_continues(tmp_path: Path) -> None:
    """Its engine waited for it, and was not taken for a hanging one."""
    with House(tmp_path, PACED, "--stall-s", "1.5", "--retention-s", "60") as house:
        finished = house.begin(Answer("Finished.", 5, seed=1))
        finished.wait()
        stream = house.begin(Answer("Stopped.", 900, seed=1)).seen(9)
        house.server.send_signal(signal.SIGSTOP)
        time.sleep(3)  # time itself is what it is to miss
        house.server.send_signal(signal.SIGCONT)
        stream.wait()
        assert b"continuity" not in stream.end
        assert house.server.http.get(finished.path).status_code == 200


@pytest.mark.deep
def test_a_reader_of_an_expiring_stream_reads_it_to_the_end(tmp_path: Path) -> None:
    with House(tmp_path, "scripted", "--retention-s", "2") as house:
        answer = Answer("Expires.", 30_000, seed=1)
        stream_id = house.server.create({"prompt": "Expires.", "max_tokens": 30_000, "seed": 1})
        with house.server.wire(receive_bytes=4096) as wire:
            wire.send("GET", f"/v1/streams/{stream_id}/events")
            assert wire.head() == 200
            until(lambda: house.server.http.get(f"/v1/streams/{stream_id}").status_code == 410)
            assert wire.body() == b"".join(answer.native(stream_id))
        house.restart()
        assert house.server.http.get(f"/v1/streams/{stream_id}/events").status_code == 410
