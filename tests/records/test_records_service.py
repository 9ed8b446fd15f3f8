"""When a server's requests are recorded."""

from __future__ import annotations

import asyncio
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.records.databases import with_tables

from tailrace.assembly.service import Service, start_service
from tailrace.assembly.source import find_source
from tailrace.errors import ModelError, StorageError
from tailrace.models import NoProgress
from tailrace.records import conversation_keeper
from tailrace.records.records_service import Records
from tailrace.records.threads import DatabaseThreads
from tailrace.settings import Settings
from tailrace.types import Record


async def test_the_first_conversation_begins_the_recording(tmp_path: Path) -> None:
    """The conversation creates the database. Its first answer may end before the keys are read again."""
    source = find_source("scripted", NoProgress())

    def is_recorded(service: Service) -> bool:
        return service.models.observers.meter is not None

    settings = Settings(database=f"sqlite:///{tmp_path / 'records.sqlite'}", load_s=60.0)
    with closing(Records(settings)) as records:
        async with (
            start_service(source, settings, data_path=tmp_path) as service,
            records.recording(service.models.observers, lambda: (), service.store, tmp_path),
            asyncio.TaskGroup() as group,
        ):
            keeping = group.create_task(records.conversations.write_until_cancelled())
            assert not is_recorded(service)
            await records.conversations.ask(lambda store: store.create("me"))
            assert is_recorded(service)
            keeping.cancel()


def lets_anybody_in(records: Records) -> bool:
    return records.keyring.is_empty


async def test_a_database_that_cannot_be_opened_lets_nobody_in(tmp_path: Path) -> None:
    """A server without a database is open. One that appears may have keys, also where it cannot be read yet."""
    path = tmp_path / "records.sqlite"
    with closing(Records(Settings(database=f"sqlite:///{path}"))) as records:
        await records.read_keys()
        assert lets_anybody_in(records)
        path.write_bytes(b"no database " * 1000)
        for _ in range(2):
            with pytest.raises((ModelError, StorageError)):
                await records.read_keys()
            assert not lets_anybody_in(records)
            assert records.keyring.principal_of("") is None
        path.unlink()
        with_tables(path)
        await records.read_keys()
        assert lets_anybody_in(records)  # it has no keys
        made = records.keys().create("ann")
        await records.read_keys()
        assert records.keyring.principal_of("") is None
        assert records.keyring.principal_with(made.token) is not None


async def test_reads_that_time_out_do_not_displace_turns(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """While the database is unreachable, the queue keeps all turns, however often somebody reads."""
    monkeypatch.setattr(conversation_keeper, "FLUSH_TIMEOUT_S", 0.001)
    monkeypatch.setattr(conversation_keeper, "MAX_QUEUED", 2)

    def never() -> Any:
        raise AssertionError

    async def nothing() -> None: ...

    threads = DatabaseThreads(1)
    turns = conversation_keeper.ConversationKeeper(
        never, never, never, lambda: True, False, nothing, threads, threads
    )  # and nothing writes
    turns.on_begun(Record("first", 1.0, "scripted", turn=b"turn"))
    for _ in range(10):
        with pytest.raises(StorageError):
            await turns.ask(lambda store: store.create("me"))
    turns.on_begun(Record("second", 1.0, "scripted", turn=b"turn"))
    assert caplog.text == ""
    turns.on_begun(Record("third", 1.0, "scripted", turn=b"turn"))
    assert "stream third is not written to its conversation" in caplog.text
