"""Each request has its row, also after failures of the database, the engine and the server."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import pytest
from tests.generation.harness import Harness, greedy
from tests.waiting import LONG_S

from tailrace.access.quota import Quota
from tailrace.access.quotas import Quotas
from tailrace.errors import EngineLost, QuotaExceeded, StorageError, UnknownModel
from tailrace.generation.observers import Observers
from tailrace.records.conversation_keeper import ConversationKeeper
from tailrace.records.conversation_store import ConversationStore
from tailrace.records.kept_images import KeptImages
from tailrace.records.kept_streams import KeptStreams
from tailrace.records.record_database import RecordDatabase
from tailrace.records.request_log import RequestLog
from tailrace.records.request_rows import RequestRow
from tailrace.records.request_store import RequestStore
from tailrace.records.spool import Spool
from tailrace.records.threads import DatabaseThreads
from tailrace.types import Arrival, GenerateRequest, Sampling

_KEY = "abcdefghjkmn"
_ASKED = Arrival("scripted", "openai", "alice", _KEY)


async def _nothing() -> None:
    """Called when the database was opened."""


class _House:
    """A generator whose requests are recorded. Each `start` is the start of another server."""

    def __init__(self, directory: Path) -> None:
        self.database = RecordDatabase(f"sqlite:///{directory / 'records.sqlite'}")
        self.database.prepare()
        self.is_away = False
        self.harness = Harness(kv_tokens=100_000)
        self._directory = directory / "spool"
        self.with_text = False
        self._conversations = ConversationKeeper(
            lambda: ConversationStore(self.database), lambda: KeptStreams(self.database),
            lambda: KeptImages(self.database, 0), lambda: False, False, _nothing,
            DatabaseThreads(1), DatabaseThreads(1),
        )  # fmt: skip
        self._conversations.observe(self.harness.generator.observers, self.harness.store)

    def store(self) -> RequestStore:
        if self.is_away:
            raise StorageError("The database cannot be reached just now.")
        return RequestStore(self.database)

    async def start(self, quota: Quota | None = None) -> RequestLog:
        quotas = Quotas()
        quotas.limit(("key", _KEY), quota or Quota())
        threads, spool = DatabaseThreads(2), Spool(self._directory)
        log = RequestLog(spool, quotas, self.store, threads, self._conversations, with_text=self.with_text)
        generator = self.harness.generator
        await log.begin(generator.observers, [run.record for run in generator.live], self.harness.store)
        return log

    def rows(self) -> list[RequestRow]:
        return list(RequestStore(self.database).rows())

    def request(self, sampling: Sampling) -> GenerateRequest:
        return GenerateRequest(prompts=("Hi",), sampling=sampling, owner="alice", key_id=_KEY, wire="openai")


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[_House]:
    made = _House(tmp_path)
    with closing(made.database):
        yield made


async def test_a_stream_has_one_complete_row(house: _House) -> None:
    log = await house.start()
    run = await house.harness.generator.create(house.request(greedy(5, stop=("never",), n=2)))
    house.harness.finish(run)
    await log.drain()
    (row,) = house.rows()
    assert (row.request_id, row.owner, row.key_id, row.wire) == (run.log.stream_id, "alice", _KEY, "openai")
    assert (row.num_prompt_tokens, row.num_completion_tokens, row.num_choices) == (2, 10, 2)
    assert (row.status, row.finish, row.replays) == ("done", "length", 0)
    assert row.queue_s is not None
    assert row.first_token_s is not None
    assert row.queue_s <= row.first_token_s <= row.total_s
    assert '"stop":1' in row.parameters  # of texts only how many
    assert "never" not in row.parameters
    assert row.prompt is row.answer is None
    assert log.num_waiting_bytes == 0


async def test_text_is_kept_only_if_configured(house: _House) -> None:
    house.with_text = True
    log = await house.start()
    run = await house.harness.generator.create(house.request(greedy(5)))
    house.harness.finish(run)
    await log.drain()
    (row,) = house.rows()
    assert (row.prompt, row.answer) == ("Hi", run.log.text())


async def test_without_the_database_rows_wait_and_none_is_lost(house: _House) -> None:
    log = await house.start()
    house.is_away = True
    ids = set()
    for _ in range(50):
        run = await house.harness.generator.create(house.request(greedy(3)))
        house.harness.finish(run)
        ids.add(run.log.stream_id)
        await log.drain()
    assert house.rows() == []
    house.is_away = False
    await log.drain()
    assert {row.request_id for row in house.rows()} == ids
    assert log.num_waiting_bytes == 0


async def test_the_next_server_takes_over_waiting_rows(house: _House) -> None:
    """A running stream gets its row at its end, also if it began without records."""
    log = await house.start()
    house.is_away = True
    ended = await house.harness.generator.create(house.request(greedy(3)))
    house.harness.finish(ended)
    running = await house.harness.generator.create(house.request(greedy(30)))
    house.harness.engine.step(4)
    log.close()  # as if killed: nothing was drained
    house.harness.generator.observers = running.observers = Observers()
    unseen = await house.harness.generator.create(house.request(greedy(4)))
    house.is_away = False
    log = await house.start()
    for run in (running, unseen):
        house.harness.finish(run)
    await log.drain()
    rows = {row.request_id: row for row in house.rows()}
    assert {name: row.num_completion_tokens for name, row in rows.items()} == {
        ended.log.stream_id: 3, running.log.stream_id: 30, unseen.log.stream_id: 4,
    }  # fmt: skip
    assert {row.status for row in rows.values()} == {"done"}


async def test_a_stream_that_ends_during_take_over_has_its_row(house: _House, monkeypatch: pytest.MonkeyPatch) -> None:
    log = await house.start()
    run = await house.harness.generator.create(house.request(greedy(7)))
    log.close()  # as if killed
    run.observers = house.harness.generator.observers = Observers()
    add = RequestStore.add

    def add_late(store: RequestStore, rows: list[RequestRow]) -> None:
        monkeypatch.setattr(RequestStore, "add", add)
        loop.call_soon_threadsafe(finish)
        assert is_finished.wait(LONG_S)
        add(store, rows)

    def finish() -> None:
        house.harness.finish(run)
        is_finished.set()

    loop, is_finished = asyncio.get_running_loop(), threading.Event()
    monkeypatch.setattr(RequestStore, "add", add_late)
    log = await house.start()
    assert run.log.end is not None
    await log.drain()
    (row,) = house.rows()
    assert (row.request_id, row.status, row.num_completion_tokens) == (run.log.stream_id, "done", 7)


async def test_an_end_after_the_last_row_is_found_in_the_log(house: _House) -> None:
    log = await house.start()
    run = await house.harness.generator.create(house.request(greedy(7)))
    log.close()  # as if killed between the end of the stream and its row
    run.observers = Observers()
    house.harness.finish(run)
    await house.start()
    (row,) = house.rows()
    assert (row.request_id, row.status, row.num_completion_tokens) == (run.log.stream_id, "done", 7)


async def test_a_stream_lost_with_its_server_counts_its_largest_usage(house: _House) -> None:
    log = await house.start(Quota(tokens_per_month=100))
    run = await house.harness.generator.create(house.request(greedy(60)))
    log.close()
    house.harness = Harness(kv_tokens=100_000)  # its streams were in memory
    log = await house.start(Quota(tokens_per_month=100))
    (row,) = house.rows()
    assert (row.request_id, row.status) == (run.log.stream_id, "lost")
    assert row.num_prompt_tokens + row.num_completion_tokens == 62
    with pytest.raises(QuotaExceeded):
        await house.harness.generator.create(house.request(greedy(60)))
    await house.harness.generator.create(house.request(greedy(36)))


async def test_replayed_tokens_are_not_counted_twice(house: _House) -> None:
    log = await house.start(Quota(tokens_per_minute=1000))
    run = await house.harness.generator.create(house.request(greedy(9)))
    for _ in range(2):
        house.harness.engine.step(3)
        house.harness.engine.fail(EngineLost("gone"))
        house.harness.engine.restart()
    house.harness.finish(run)
    await log.drain()
    (row,) = house.rows()
    assert (row.num_completion_tokens, row.replays) == (9, 2)
    await house.harness.generator.create(house.request(greedy(1000 - 11 - 2)))


async def test_without_a_reservation_no_stream_exists(house: _House) -> None:
    await house.start(Quota(streams_at_once=1))
    first = await house.harness.generator.create(house.request(greedy(5)))
    with pytest.raises(QuotaExceeded):
        await house.harness.generator.create(house.request(greedy(5)))
    assert [*house.harness.generator.live] == [first]
    house.harness.finish(first)
    await house.harness.generator.create(house.request(greedy(5)))


async def test_refusals_of_one_kind_share_a_row(house: _House) -> None:
    log = await house.start()
    for _ in range(1000):
        log.on_refused(_ASKED, UnknownModel("There is no such model here."))
    log.on_refused(_ASKED, QuotaExceeded("no"))
    await log.drain()
    log.on_refused(_ASKED, QuotaExceeded("no"))
    await log.drain()
    rows = sorted((row.finish, row.status, row.num_requests) for row in house.rows())
    assert rows == [
        ("model_not_found", "refused", 1000),
        ("rate_limit_exceeded", "refused", 1),
        ("rate_limit_exceeded", "refused", 1),
    ]
    (usage,) = RequestStore(house.database).usage()
    assert (usage.num_requests, usage.num_refused) == (0, 1002)
    assert log.num_waiting_bytes == 0


async def test_a_refusal_survives_its_server(house: _House) -> None:
    log = await house.start()
    log.on_refused(_ASKED, QuotaExceeded("no"))
    log.close()  # as if killed: nothing was drained
    log = await house.start()
    (row,) = house.rows()
    assert (row.status, row.finish, row.num_requests) == ("refused", "rate_limit_exceeded", 1)


async def test_no_stream_starts_if_rows_cannot_be_written(house: _House, monkeypatch: pytest.MonkeyPatch) -> None:
    log = await house.start()
    first = await house.harness.generator.create(house.request(greedy(5)))

    def refuse(spool: Spool, rows: object) -> None:
        raise StorageError("Requests cannot be recorded: No space left on device.")

    with monkeypatch.context() as patch:
        patch.setattr(Spool, "append_all", refuse)
        house.harness.finish(first)  # its own client notices nothing
        await log.drain()
        with pytest.raises(StorageError):
            await house.harness.generator.create(house.request(greedy(5)))
        await log.drain()
    await log.drain()
    assert [row.request_id for row in house.rows()] == [first.log.stream_id]
    await house.harness.generator.create(house.request(greedy(5)))
