"""A PostgreSQL server that is frozen, or waits for a lock: calls end with an error, and work again afterwards."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import event, text
from sqlalchemy.exc import OperationalError
from tests.records.postgresql import OwnPostgresql
from tests.waiting import LONG_S

from tailrace.errors import ModelError, StorageError
from tailrace.records import postgresql
from tailrace.records import record_database as databases
from tailrace.records import threads as database_threads
from tailrace.records.conversation_store import ConversationStore
from tailrace.records.key_store import KeyStore
from tailrace.records.record_database import RecordDatabase
from tailrace.records.records_service import Records
from tailrace.records.request_rows import RequestRow
from tailrace.records.request_store import RequestStore
from tailrace.settings import Settings


@pytest.fixture(scope="module")
def server() -> Iterator[OwnPostgresql]:
    with OwnPostgresql() as running:
        yield running


@pytest.fixture
def database(server: OwnPostgresql, monkeypatch: pytest.MonkeyPatch) -> Iterator[RecordDatabase]:
    opened = RecordDatabase(server.url)
    opened.prepare()
    monkeypatch.setattr(databases, "STATEMENT_S", 0.4)
    monkeypatch.setattr(postgresql, "CONNECT_S", 2)  # less is not possible
    short = RecordDatabase(server.url)
    yield short
    server.thaw()
    short.close()
    opened.close()


def _row(request_id: str) -> RequestRow:
    return RequestRow(request_id, 1.0, "alice", "a-key", "a-model", "native", "done", num_completion_tokens=5)


def test_a_frozen_server_answers_again_after_it_was_thawed(server: OwnPostgresql, database: RecordDatabase) -> None:
    keys, conversations = KeyStore(database), ConversationStore(database)
    made = keys.create("alice")
    server.freeze()
    for call in (keys.list, lambda: conversations.create("alice"), lambda: keys.revoke(made.key.key_id)):
        with pytest.raises(StorageError, match=r"did not answer in time|cannot be reached"):
            call()
    server.thaw()
    assert [key.key_id for key in keys.list("alice") if key.revoked_s is None] == [made.key.key_id]
    keys.revoke(made.key.key_id)


def test_a_transaction_whose_server_is_frozen_in_the_middle(server: OwnPostgresql, database: RecordDatabase) -> None:
    with pytest.raises(StorageError, match="did not answer in time"):
        _write_half(server, database)
    server.thaw()
    with database.begin() as connection:
        assert connection.execute(text("SELECT to_regclass('halves')")).scalar() is None


def _write_half(server: OwnPostgresql, database: RecordDatabase) -> None:
    with database.begin() as connection:
        connection.execute(text("CREATE TABLE halves (n int)"))
        server.freeze()
        connection.execute(text("INSERT INTO halves VALUES (1)"))


def test_a_lock_that_another_client_holds(server: OwnPostgresql, database: RecordDatabase) -> None:
    keys, other = KeyStore(database), RecordDatabase(server.url)
    with other.engine.begin() as holding:
        holding.execute(text("LOCK TABLE keys IN ACCESS EXCLUSIVE MODE"))
        for call in (keys.list, lambda: keys.create("alice")):
            with pytest.raises(StorageError, match="did not answer in time"):
                call()
    keys.create("carol")
    other.close()


def test_a_slow_statement(database: RecordDatabase) -> None:
    with database.begin() as connection, pytest.raises(OperationalError, match="statement timeout"):
        connection.execute(text("SELECT pg_sleep(60)"))
    with database.begin(is_long=True) as connection:  # deletions and migrations may take longer
        connection.execute(text("SELECT pg_sleep(0.6)"))


def test_rows_that_are_written_again_are_counted_once(server: OwnPostgresql, database: RecordDatabase) -> None:
    """The server still runs the first attempt, whose client has given up, when the second one comes."""
    requests, first = RequestStore(database), RecordDatabase(server.url)
    commits, may_commit = threading.Event(), threading.Event()

    def hold(_: object) -> None:
        commits.set()
        assert may_commit.wait(LONG_S)

    event.listen(first.engine, "commit", hold)
    with ThreadPoolExecutor(2) as threads:
        adding = threads.submit(RequestStore(first).add, [_row("twice")])
        assert commits.wait(LONG_S)
        again = threads.submit(_until_written, requests, _row("twice"))
        with pytest.raises(TimeoutError):
            again.result(timeout=0.2)
        may_commit.set()
        adding.result(timeout=LONG_S)
        again.result(timeout=LONG_S)
    (total,) = requests.usage(owner="alice")
    assert total.num_requests == 1
    first.close()


def _until_written(requests: RequestStore, row: RequestRow) -> None:
    deadline_s = time.monotonic() + LONG_S
    while time.monotonic() < deadline_s:
        try:
            requests.add([row])
            return
        except StorageError:
            continue
    raise AssertionError


def test_a_server_does_not_start_with_a_frozen_database(server: OwnPostgresql, database: RecordDatabase) -> None:
    server.freeze()
    with pytest.raises(ModelError, match="cannot be used"):
        database.prepare()


async def test_many_clients_of_a_frozen_database_are_refused_and_none_delays_a_revocation(
    server: OwnPostgresql, database: RecordDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database_threads, "MAX_WAITING", 10)
    made = KeyStore(database).create("dave")
    records = Records(Settings(database=server.url))
    try:
        await records.read_keys()
        server.freeze()
        asking = [asyncio.create_task(records.ask(records.keys, lambda keys: keys.list())) for _ in range(40)]
        async with asyncio.timeout(LONG_S):
            results = await asyncio.gather(*asking, return_exceptions=True)
        assert {type(result) for result in results} == {StorageError}
        assert any("too many calls" in str(result) for result in results)
        server.thaw()
        await asyncio.to_thread(KeyStore(database).revoke, made.key.key_id)
        await records.read_keys()
        assert (await records.ask(records.keys, lambda keys: keys.get(made.key.key_id))).revoked_s is not None
    finally:
        server.thaw()
        records.close()


async def test_the_threads_of_clients_are_not_those_of_the_poll(
    server: OwnPostgresql, database: RecordDatabase
) -> None:
    made, revoked = KeyStore(database).create("erin"), list[str]()
    records, goes_on = Records(Settings(database=server.url)), threading.Event()
    try:
        await records.read_keys()
        records.keyring.on_revoked(revoked.append)
        holding = [asyncio.create_task(records.threads.run(goes_on.wait)) for _ in range(20)]
        await asyncio.to_thread(KeyStore(database).revoke, made.key.key_id)
        async with asyncio.timeout(LONG_S):
            await records.read_keys()
        assert revoked == [made.key.key_id]
    finally:
        goes_on.set()
        await asyncio.gather(*holding)
        records.close()
