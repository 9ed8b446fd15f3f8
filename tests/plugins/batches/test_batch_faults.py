"""Batches beside full disks, damaged files and other work: they end, are counted once, and block nothing for long."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping
from pathlib import Path

import msgspec
import pytest
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send
from tests.api.keyed import House, serving_with_keys
from tests.plugins.batches.chat_rows import CHAT, chat_file
from tests.waiting import LONG_S

from tailrace.errors import Draining, StorageError
from tailrace.http.wires import ServedWires
from tailrace.server import LocalNotes, LocalTable, Sender, Table, TableLease, row_key
from tailrace_plugins.batches.anthropic_routes import BatchRequest, write_rows
from tailrace_plugins.batches.batch_files import PIECE_BYTES, Files, FileWriter, new_id
from tailrace_plugins.batches.batch_keys import BATCHES, CANCELLED, OPEN, RESULTS, key_of_batch, result_prefix
from tailrace_plugins.batches.batch_rows import BatchRow
from tailrace_plugins.batches.batch_run import RowLimits
from tailrace_plugins.batches.batches import RowBatches, new_batch_id
from tailrace_plugins.batches.row_runner import RowRunner, RowsInProgress
from tailrace_plugins.batches.stored_batches import RowBatch, StoredFile

_MANY_BYTES = 2**30


class Rows(LocalTable):
    """A table in memory, whose results may not be writable. It counts what is read and written in a turn of the event
    loop."""

    def __init__(self) -> None:
        super().__init__(LocalNotes.in_memory("batches"))
        self.keeps_results = True
        self.keeps_pieces = False
        self.has_defect = False
        self.is_readable = True
        self.num_in_turn = 0
        self.most_in_turn = 0

    def _count(self, number: int) -> None:
        if not self.num_in_turn:
            asyncio.get_running_loop().call_soon(self._end_turn)
        self.num_in_turn += number
        self.most_in_turn = max(self.most_in_turn, self.num_in_turn)

    def _end_turn(self) -> None:
        self.num_in_turn = 0

    async def page(self, prefix: bytes, *, after: bytes | None = None, most: int) -> dict[bytes, bytes | None]:
        if self.has_defect:
            raise RuntimeError("a defect")
        found = await super().page(prefix, after=after, most=most)
        self._count(sum(len(row or b"") > PIECE_BYTES // 2 for row in found.values()))
        return found

    async def get(self, *keys: bytes) -> list[bytes | None]:
        if not self.is_readable:
            raise StorageError("The log store cannot be read.")
        return await super().get(*keys)

    async def change(
        self,
        rows: Mapping[bytes, bytes],
        erased: Iterable[bytes] = (),
        *,
        lease: TableLease | None = None,
        absent: Collection[bytes] = (),
    ) -> bool:
        erased = list(erased)
        if self.keeps_pieces and any(key.startswith((b"o/", b"p/")) for key in erased):
            raise StorageError("The disk is full.")
        if not self.keeps_results and any(key.startswith((b"o/", b"e/")) for key in rows):
            raise StorageError("The disk is full.")
        self._count(sum(len(row) > PIECE_BYTES // 2 for row in rows.values()))
        return await super().change(rows, erased, lease=lease, absent=absent)


@contextlib.asynccontextmanager
async def _opened(house: House, table: Table) -> AsyncIterator[RowBatches]:
    server = house.server()
    house.build_app(server=server)
    files = Files(table, most_bytes=_MANY_BYTES)
    rows = RowRunner(server, at_once=10, has_room=files.has_room)
    async with asyncio.TaskGroup() as group:
        batches = RowBatches(files, rows, group, RowLimits(50_000, row_bytes=100_000))
        await batches.start()
        yield batches
        batches.close()


async def _add(batches: RowBatches, content: bytes, *, has_file: bool = True) -> RowBatch:
    writer = FileWriter(batches.files, "anonymous", new_id("file-"))
    writer.add(content)
    file = await writer.close(filename="rows", purpose="batch", expires_s=None)
    return await batches.create(_batch(file, has_file=has_file))


def _batch(file: StoredFile, *, has_file: bool = True) -> RowBatch:
    now_s = int(time.time())
    return RowBatch(
        batch_id=new_batch_id(has_file=has_file),
        sender=Sender("anonymous"),
        endpoint=CHAT,
        created_s=now_s,
        order=now_s,
        expires_s=now_s + 3600,
        window="1h",
        input_file_id=file.file_id if has_file else "",
        rows=file.pieces,
        num_rows_bytes=file.num_bytes,
    )


async def _results_of(batches: RowBatches) -> dict[bytes, int]:
    return await batches.files.sizes(b"o/")


async def _now(batches: RowBatches, batch: RowBatch) -> RowBatch:
    return await batches.find("anonymous", batch.batch_id, has_file=bool(batch.input_file_id))


async def _until(batches: RowBatches, batch: RowBatch, condition: Callable[[RowBatch], bool]) -> RowBatch:
    async with asyncio.timeout(LONG_S):
        while not condition(batch := await _now(batches, batch)):
            await asyncio.sleep(0.01)
    return batch


async def _until_ended(batches: RowBatches, batch: RowBatch) -> RowBatch:
    return await _until(batches, batch, lambda batch: batch.has_ended)


async def test_a_batch_is_deleted_twice_at_once(tmp_path: Path) -> None:
    async with serving_with_keys(tmp_path) as house, _opened(house, Rows()) as batches:
        batch = await _until_ended(batches, await _add(batches, b"no row", has_file=False))
        (file,) = await batches.files.of("anonymous")
        await batches.files.delete(file)
        key = result_prefix(RESULTS, batch)
        for number in range(200):
            await batches.files.table.change({b"%b%08xs" % (key, number): b"a result"})
        await asyncio.gather(batches.delete(batch), batches.delete(batch))
        assert batches.files.table.used() == 0
        assert not await _results_of(batches)


async def test_a_deletion_beside_the_deletion_of_the_owner(tmp_path: Path) -> None:
    async with serving_with_keys(tmp_path) as house, _opened(house, Rows()) as batches:
        batch = await _until_ended(batches, await _add(batches, chat_file(3, max_tokens=2), has_file=False))
        writer = FileWriter(batches.files, "anonymous", new_id("file-"))
        writer.add(b"x" * PIECE_BYTES)
        await writer.keep_pieces()
        await asyncio.gather(batches.forget("anonymous"), batches.delete(batch), writer.undo())
        assert batches.files.table.used() == 0
        assert not await batches.files.sizes(b"f/") | await batches.files.sizes(b"p/")


async def test_what_a_death_leaves_of_a_deletion_is_deleted_later(tmp_path: Path) -> None:
    table = Rows()
    async with serving_with_keys(tmp_path) as house:
        async with _opened(house, table) as batches:
            batch = await _until_ended(batches, await _add(batches, chat_file(3, max_tokens=2)))
            table.keeps_pieces = True
            for file in await batches.files.of("anonymous"):
                with pytest.raises(StorageError):
                    await batches.delete_file(file)
            assert not await batches.files.of("anonymous")
            assert await _results_of(batches)
        table.keeps_pieces = False
        async with _opened(house, table) as batches:
            await batches.delete(batch)
            assert table.used() == 0


async def test_a_defect_ends_one_batch_and_no_server(tmp_path: Path) -> None:
    table = Rows()
    async with serving_with_keys(tmp_path) as house:
        async with _opened(house, table) as batches:
            batch = await _add(batches, chat_file(3))
            table.has_defect = True
            batch = await _until(batches, batch, lambda batch: bool(batch.errors))
            assert [error.code for error in batch.errors] == ["internal_error"]
            file = await batches.files.find("anonymous", batch.input_file_id)
            await batches.files.add(msgspec.structs.replace(file, expires_s=0))
            table.has_defect = False
        async with _opened(house, table) as batches:  # it cannot delete the file, which has expired
            table.has_defect = True
            await asyncio.sleep(0.05)
            table.has_defect = False
            other = await _until_ended(batches, await _add(batches, chat_file(3, max_tokens=2)))
            assert other.status == "completed"


async def test_rows_that_end_with_the_cancellation_are_counted(tmp_path: Path) -> None:
    table = Rows()
    async with serving_with_keys(tmp_path) as house, _opened(house, table) as batches:
        table.keeps_results = False
        batch = await _add(batches, chat_file(10, max_tokens=2))
        batch = await _until(batches, batch, lambda batch: batch.counts.get("succeeded") == 10)
        assert (await batches.cancel(batch)).status == "cancelling"
        await asyncio.sleep(0.05)
        table.keeps_results = True
        batch = await _until_ended(batches, batch)
        assert batch.counts == {"succeeded": 10}
        assert len(await _results_of(batches)) == 10


@pytest.mark.deep
async def test_a_damaged_file_leaves_what_was_done(tmp_path: Path) -> None:
    table = Rows()
    async with serving_with_keys(tmp_path) as house, _opened(house, table) as batches:
        batch = await _add(batches, chat_file(4_000, max_tokens=2))
        batch = await _until(batches, batch, lambda batch: batch.counts.get("succeeded", 0) >= 5)
        await table.change({}, list(await batches.files.sizes(batch.rows))[1:])
        batch = await _until_ended(batches, batch)
        assert batch.status == "failed"
        assert [error.code for error in batch.errors] == ["file_damaged"]
        assert sum(batch.counts.values()) == 4_000
        file = await batches.files.find("anonymous", batch.output_file_id or "")
        assert file.num_bytes == sum((await _results_of(batches)).values())
        await batches.delete_file(file)
        assert not await _results_of(batches)


async def test_results_that_are_a_file_already_count_once(tmp_path: Path) -> None:
    """A server is killed between the file of the results and the end of the batch."""
    table = Rows()
    async with serving_with_keys(tmp_path) as house:
        async with _opened(house, table) as batches:
            batch = await _until_ended(batches, await _add(batches, chat_file(3, max_tokens=2)))
            used = table.used()
        batch.status = "finalizing"
        row = {row_key(BATCHES, "anonymous", batch.batch_id): msgspec.msgpack.encode(batch)}
        await table.change({**row, row_key(OPEN, "anonymous", batch.batch_id): batch.input_file_id.encode()})
        async with _opened(house, table) as batches:
            (batch,) = await batches.of("anonymous", has_file=True)
            batch = await _until_ended(batches, batch)
            assert batch.status == "completed"
            assert batch.counts == {"succeeded": 3}
            assert table.used() == used


async def test_files_are_checked_one_after_the_other(tmp_path: Path) -> None:
    table = Rows()
    async with serving_with_keys(tmp_path) as house, _opened(house, table) as batches:
        content = b"no row".ljust(PIECE_BYTES - 1) + b"\n"
        added = [await _add(batches, content) for _ in range(30)]
        table.most_in_turn = 0
        for batch in added:
            await _until_ended(batches, batch)
        assert table.most_in_turn == 1  # a piece of a file


async def test_a_piece_is_written_in_a_turn() -> None:
    table = Rows()
    writer = FileWriter(Files(table, most_bytes=_MANY_BYTES), "anonymous", "a")
    params = msgspec.Raw(b'{"a": "' + b"x" * (5 * PIECE_BYTES) + b'"}')
    await write_rows([BatchRequest("a", params), BatchRequest("b", params)], writer)
    assert len(await table.sizes(b"p/", most=100)) == 11
    assert table.most_in_turn == 1


@pytest.mark.parametrize(("path", "kind"), [("/v1/messages", "overloaded_error"), (CHAT, "draining")])
async def test_errors_of_a_row_have_the_form_of_its_wire(path: str, kind: str, tmp_path: Path) -> None:
    async def no_json(scope: Scope, receive: Receive, send: Send) -> None:
        await PlainTextResponse("data: {}\n\ndata: [DONE]\n\n")(scope, receive, send)

    async with serving_with_keys(tmp_path) as house:
        server = house.server()
        house.build_app(server=server)
        refused = server.error_answer(path, Draining("The server is shutting down."))
        assert refused.status == 503
        error = msgspec.json.decode(refused.body)["error"]
        assert kind in (error["type"], error.get("code"))
        server.answer_with(no_json, ServedWires())
        writer = FileWriter(Files(Rows(), most_bytes=_MANY_BYTES), "anonymous", "f")
        batch = _batch(await writer.close(filename="rows", purpose="batch", expires_s=None))
        rows = RowsInProgress(RowRunner(server, at_once=1, has_room=lambda owner: True), batch)
        batch.endpoint = path
        answer = await rows.answer(BatchRow("a", b"{}"), 1, [])
        assert answer.status == 500
        assert (msgspec.json.decode(answer.body).get("type") == "error") is (path == "/v1/messages")


async def test_a_batch_that_is_kept_is_created_even_if_it_cannot_be_read_for_now(tmp_path: Path) -> None:
    table = Rows()
    async with serving_with_keys(tmp_path) as house, _opened(house, table) as batches:
        writer = FileWriter(batches.files, "anonymous", new_id("file-"))
        writer.add(chat_file(1))
        file = await writer.close(filename="rows", purpose="batch", expires_s=None)
        table.is_readable = False
        batch = await batches.create(_batch(file))
        table.is_readable = True
        assert (await _now(batches, batch)).batch_id == batch.batch_id


async def test_a_cancel_that_comes_after_the_end_leaves_nothing(tmp_path: Path) -> None:
    async with serving_with_keys(tmp_path) as house, _opened(house, Rows()) as batches:
        begun = await _add(batches, chat_file(1))
        await _until_ended(batches, begun)
        assert begun.status == "validating"
        await batches.cancel(begun)
        assert await batches.files.table.get(key_of_batch(CANCELLED, begun)) == [None]


async def test_a_batch_that_cannot_be_read_stops_no_other(tmp_path: Path) -> None:
    table = Rows()
    for kind in (BATCHES, OPEN):
        await table.change({row_key(kind, "anonymous", "batch_damaged"): b"no batch"})
    async with serving_with_keys(tmp_path) as house, _opened(house, table) as batches:
        assert (await _until_ended(batches, await _add(batches, chat_file(1)))).status == "completed"
