"""Batches beside full disks, damaged files and other work: they end, are counted once, and block nothing for long."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path

import msgspec
from tests.api.keyed import House, serving_with_keys
from tests.plugins.batches.chat_rows import CHAT, chat_file
from tests.waiting import wait_until

from tailrace.errors import StorageError
from tailrace.server import InnerAnswer, LocalNotes, Note, Sender
from tailrace_plugins.batches.anthropic_routes import BatchRequest, write_rows
from tailrace_plugins.batches.batches import RowBatches, new_batch_id
from tailrace_plugins.batches.files import PIECE_BYTES, Files, FileWriter, new_id
from tailrace_plugins.batches.records import RowBatch
from tailrace_plugins.batches.results import result_of
from tailrace_plugins.batches.row_runner import RowRunner

_MANY_BYTES = 2**30


class Notes(LocalNotes):
    """Notes in memory, whose results may not be writable. It counts what is read and written in a turn of the event
    loop."""

    def __init__(self) -> None:
        super().__init__("batches")
        self._inner = LocalNotes.in_memory("batches")
        self.keeps_results = True
        self.has_defect = False
        self.num_in_turn = 0
        self.most_in_turn = 0

    def _count(self) -> None:
        if not self.num_in_turn:
            asyncio.get_running_loop().call_soon(self._end_turn)
        self.num_in_turn += 1
        self.most_in_turn = max(self.most_in_turn, self.num_in_turn)

    def _end_turn(self) -> None:
        self.num_in_turn = 0

    def read(self, prefix: bytes = b"") -> Iterator[Note]:
        return self._inner.read(prefix)

    def sizes(self, prefix: bytes = b"", *, after: bytes | None = None, most: int = -1) -> dict[bytes, int]:
        return self._inner.sizes(prefix, after=after, most=most)

    def get(self, key: bytes) -> bytes | None:
        self._count()
        if self.has_defect:
            raise RuntimeError("a defect")
        return self._inner.get(key)

    def erase(self, *keys: bytes) -> None:
        if self.has_defect:
            raise RuntimeError("a defect")
        self._inner.erase(*keys)

    def add_all(self, notes: Iterable[tuple[bytes, bytes]]) -> None:
        notes = list(notes)
        if not self.keeps_results and any(key.startswith((b"o/", b"e/")) for key, _ in notes):
            raise StorageError("The disk is full.")
        self._count()
        self._inner.add_all(notes)


@contextlib.asynccontextmanager
async def _opened(house: House, notes: LocalNotes) -> AsyncIterator[RowBatches]:
    server = house.server()
    house.build_app(server=server)
    files = Files(notes, most_bytes=_MANY_BYTES)
    rows = RowRunner(server, at_once=10, has_room=files.has_room)
    async with asyncio.TaskGroup() as group:
        batches = RowBatches(notes, files, rows, group, most_rows=50_000, row_bytes=100_000)
        await batches.start()
        yield batches
        batches.close()


def _add(batches: RowBatches, content: bytes) -> RowBatch:
    writer = FileWriter(batches.files, "anonymous", new_id("file-"))
    writer.write(content)
    file = writer.close(filename="rows", purpose="batch", expires_s=None)
    now_s = int(time.time())
    batch = RowBatch(
        batch_id=new_batch_id(has_file=True),
        sender=Sender("anonymous"),
        endpoint=CHAT,
        created_s=now_s,
        expires_s=now_s + 3600,
        window="1h",
        input_file_id=file.file_id,
        rows=file.pieces,
    )
    return batches.create(batch)


async def _until_ended(batch: RowBatch) -> None:
    await wait_until(lambda: batch.has_ended)


async def test_a_batch_is_deleted_twice_at_once(tmp_path: Path) -> None:
    async with serving_with_keys(tmp_path) as house, _opened(house, Notes()) as batches:
        batch = _add(batches, b"no row")
        batch.input_file_id = ""  # as of a batch whose results are no files
        await _until_ended(batch)
        for number in range(200):
            batches.files.notes.add(b"o/%b/%08xs" % (batch.batch_id.encode(), number), b"a result")
        batches.files.used["anonymous"] = 200 * len(b"a result")
        await asyncio.gather(batches.delete(batch), batches.delete(batch))
        assert batches.files.used["anonymous"] == 0
        assert not batches.files.notes.sizes(b"o/")


async def test_a_defect_ends_one_batch_and_no_server(tmp_path: Path) -> None:
    notes = Notes()
    async with serving_with_keys(tmp_path) as house:
        async with _opened(house, notes) as batches:
            batch = _add(batches, chat_file(3))
            notes.has_defect = True
            await _until_ended(batch)
            assert [error.code for error in batch.errors] == ["internal_error"]
            file = batches.files.find("anonymous", batch.input_file_id)
            batches.files.add(msgspec.structs.replace(file, expires_s=0))
        async with _opened(house, notes) as batches:  # it cannot delete the file, which has expired
            await asyncio.sleep(0.05)
            notes.has_defect = False
            other = _add(batches, chat_file(3, max_tokens=2))
            await _until_ended(other)
            assert other.status == "completed"


async def test_rows_that_end_with_the_cancellation_are_counted(tmp_path: Path) -> None:
    notes = Notes()
    async with serving_with_keys(tmp_path) as house, _opened(house, notes) as batches:
        notes.keeps_results = False
        batch = _add(batches, chat_file(10, max_tokens=2))
        await wait_until(lambda: batches.counts_of(batch).get("succeeded") == 10)
        batches.cancel(batch)
        await asyncio.sleep(0.05)
        notes.keeps_results = True
        await _until_ended(batch)
        assert batch.counts == {"succeeded": 10}
        assert len(notes.sizes(b"o/")) == 10


async def test_a_damaged_file_leaves_what_was_done(tmp_path: Path) -> None:
    notes = Notes()
    async with serving_with_keys(tmp_path) as house, _opened(house, notes) as batches:
        batch = _add(batches, chat_file(2_000, max_tokens=2))
        await wait_until(lambda: batches.counts_of(batch).get("succeeded", 0) >= 5)
        for key in list(notes.sizes(batch.rows))[1:]:
            notes.erase(key)
        await _until_ended(batch)
        assert batch.status == "failed"
        assert [error.code for error in batch.errors] == ["file_damaged"]
        assert sum(batch.counts.values()) == 2_000
        file = batches.files.find("anonymous", batch.output_file_id or "")
        assert file.num_bytes == sum(notes.sizes(b"o/").values())
        await batches.delete_file(file)
        assert not notes.sizes(b"o/")
        assert batches.files.used["anonymous"] == batches.files.find("anonymous", batch.input_file_id).num_bytes


async def test_results_that_are_a_file_already_count_once(tmp_path: Path) -> None:
    """A server is killed between the file of the results and the end of the batch."""
    notes = Notes()
    async with serving_with_keys(tmp_path) as house:
        async with _opened(house, notes) as batches:
            batch = _add(batches, chat_file(3, max_tokens=2))
            await _until_ended(batch)
            used = batches.files.used["anonymous"]
        batch.status = "finalizing"
        notes.add(b"b/" + batch.batch_id.encode(), msgspec.msgpack.encode(batch))
        async with _opened(house, notes) as batches:
            (batch,) = batches.of("anonymous", has_file=True)
            await _until_ended(batch)
            assert batch.status == "completed"
            assert batches.files.used["anonymous"] == used


async def test_files_are_checked_one_after_the_other(tmp_path: Path) -> None:
    notes = Notes()
    async with serving_with_keys(tmp_path) as house, _opened(house, notes) as batches:
        added = [_add(batches, b"no row\n" * 10) for _ in range(30)]
        notes.most_in_turn = 0
        for batch in added:
            await _until_ended(batch)
        assert notes.most_in_turn <= 3  # a piece of a file, and the end of a batch


async def test_a_piece_is_written_in_a_turn() -> None:
    notes = Notes()
    writer = FileWriter(Files(notes, most_bytes=_MANY_BYTES), "anonymous", "a")
    params = msgspec.Raw(b'{"a": "' + b"x" * (5 * PIECE_BYTES) + b'"}')
    await write_rows([BatchRequest("a", params), BatchRequest("b", params)], writer)
    assert len(notes.sizes(b"p/")) == 11
    assert notes.most_in_turn <= 2  # the last piece is not full


async def test_keys_come_in_pages(tmp_path: Path) -> None:
    async with serving_with_keys(tmp_path) as house:
        on_disk = await house.service.store.notes_of("parrot")
        assert isinstance(on_disk, LocalNotes)
        for notes in (on_disk, LocalNotes.in_memory("parrot")):
            for key in (b"a/3", b"a/1", b"a/2", b"b/1", b"a/4"):
                notes.add(key, key * 2)
            notes.erase(b"a/4")
            assert notes.sizes(b"a/", most=2) == {b"a/1": 6, b"a/2": 6}
            assert notes.sizes(b"a/", after=b"a/2", most=2) == {b"a/3": 6}
            assert not notes.sizes(b"a/", after=b"a/3", most=2)
            assert list(notes.sizes(b"a/")) == [b"a/1", b"a/2", b"a/3"]


def test_an_answer_that_is_no_json_is_an_error() -> None:
    batch = RowBatch(
        batch_id="batch_1", sender=Sender("me"), endpoint=CHAT, created_s=0, expires_s=1, window="1s", input_file_id="f"
    )
    outcome, line = result_of(batch, "a", InnerAnswer(200, {}, b"data: {}\n\ndata: [DONE]\n\n"))
    assert outcome == "errored"
    assert msgspec.json.decode(line)["response"]["status_code"] == 500
