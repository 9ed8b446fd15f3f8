"""A store on disk that cannot write for too long gives up, and what an earlier server left is ended all the same."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from tests.waiting import wait_until

from tailrace.errors import ModelError
from tailrace.streams import open_sqlite
from tailrace.types import ANONYMOUS, Record, TextDelta, new_stream_id

_TOO_OFTEN = 25  # a stream that so many servers could not end is not continued


async def _leave_unfinished(directory: Path) -> str:
    async with open_sqlite(directory) as store:
        await store.take_over()
        lease = await store.open(Record(new_stream_id(), 1.5))
        store.append(lease, [TextDelta("a", (1,))])
        await wait_until(lambda: bool(lease.log.events))
    return lease.log.stream_id


async def test_a_stream_that_is_only_to_be_ended_gets_its_end_later(tmp_path: Path) -> None:
    stream_id = await _leave_unfinished(tmp_path)
    with closing(sqlite3.connect(tmp_path / "journal.sqlite", isolation_level=None)) as journal:
        journal.execute("UPDATE streams SET recoveries = ?", (_TOO_OFTEN,))
        journal.execute("INSERT OR REPLACE INTO facts VALUES ('recovered', 1000)")  # no event since the last recovery
        async with open_sqlite(tmp_path, give_up_after_s=0.05) as store:
            journal.execute("CREATE TRIGGER full BEFORE INSERT ON tail BEGIN SELECT RAISE(FAIL, 'full'); END")
            assert await store.take_over() == []
            log = await store.read(ANONYMOUS, stream_id)
            await wait_until(lambda: store.write_errors.has_given_up)
            assert log.end is None
            journal.execute("DROP TRIGGER full")
            await wait_until(lambda: log.end is not None)
    async with open_sqlite(tmp_path) as store:
        await store.take_over()
        assert (await store.read(ANONYMOUS, stream_id)).end is not None


async def test_a_directory_has_the_streams_of_models_or_of_apps(tmp_path: Path) -> None:
    await _leave_unfinished(tmp_path)
    with pytest.raises(ModelError, match=r"has the streams of models.*apps\. Choose another --data-dir\."):
        async with open_sqlite(tmp_path, of_apps=True):
            pass
    async with open_sqlite(tmp_path) as store:
        assert len(await store.take_over()) == 1
