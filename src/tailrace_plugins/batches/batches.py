"""The batches of a server: what is kept of each, and the tasks that run them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec

from tailrace.errors import RequestError, StorageError, TailraceError
from tailrace.server import InnerAnswer, LocalNotes, StreamLog
from tailrace_plugins.batches.errors import TooMany, UnknownBatch, UnknownFile
from tailrace_plugins.batches.files import Files, new_id
from tailrace_plugins.batches.records import LineError, RowBatch, Status, StoredFile
from tailrace_plugins.batches.results import (
    ERRORS,
    RESULT_NAMES,
    RESULTS,
    Results,
    result_file_id,
    result_of,
    result_prefix,
    unrun_line,
)
from tailrace_plugins.batches.row_runner import RowRunner, RowsInProgress
from tailrace_plugins.batches.rows import Outcome, RowError, RowReader, read_row

__all__ = ["RowBatches", "new_batch_id"]

logger = logging.getLogger("tailrace.batches")

_BATCHES_OF_OWNER = 1_000
_OPEN_OF_OWNER = 100  # that have not ended
_ERRORS = 50  # that a batch names
_KEPT_S = 30 * 86_400  # how long an ended batch, and by default its results, are kept
_SWEEP_S = 60.0
_RETRY_S = 1.0
_NOTES = b"b/"

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(RowBatch).decode


@dataclass(slots=True, eq=False)
class _Running:
    """A batch that has not ended."""

    batch: RowBatch
    task: asyncio.Task[None] = field(init=False)
    deadline: asyncio.Timeout | None = None  # of the rows, while they run
    done: set[int] = field(default_factory=set)
    counts: Counter[str] = field(default_factory=Counter)


class RowBatches:
    """All batches. Used from one event loop only."""

    def __init__(
        self,
        notes: LocalNotes,
        files: Files,
        rows: RowRunner,
        group: asyncio.TaskGroup,
        *,
        most_rows: int,
        row_bytes: int,
    ) -> None:
        self.files = files
        files.on_room = rows.slots.offer
        self._notes = notes
        self._rows = rows
        self._group = group
        self._most_rows = most_rows
        self._row_bytes = row_bytes
        self._results = Results(notes, files)
        self._running: dict[str, _Running] = {}
        self._batches: dict[str, RowBatch] = {}
        for note in notes.read(_NOTES):
            if note.body is not None:
                batch = _decode(note.body)
                self._batches[batch.batch_id] = batch
        self._checking = asyncio.Lock()

    async def start(self) -> None:
        """Continue the batches of an earlier process, and delete from now on what has expired."""
        open_batches = [batch for batch in self._batches.values() if not batch.has_ended]
        await self.files.erase_unfinished(batch.rows for batch in open_batches)
        for batch in self._batches.values():
            if not batch.input_file_id:  # what is no file counts, too
                held = result_prefix(RESULTS, batch) if batch.has_ended else batch.rows
                self.files.used[batch.owner] += sum((await self.files.sizes(held)).values())
        for batch in open_batches:
            self._run(batch)
        self._sweeping = self._group.create_task(self._sweep())

    def close(self) -> None:
        """Leave everything to the next process."""
        self._rows.is_closing = True
        for task in (self._sweeping, *(one.task for one in self._running.values())):
            task.cancel()

    # What clients ask for

    def of(self, owner: str, *, has_file: bool) -> list[RowBatch]:
        """Return the batches of an owner, the newest first: OpenAI's, or Anthropic's, which have no file."""
        every = reversed(self._batches.values())
        return [one for one in every if one.owner == owner and bool(one.input_file_id) is has_file]

    def find(self, owner: str, batch_id: str, *, has_file: bool) -> RowBatch:
        """Raises: UnknownBatch."""
        batch = self._batches.get(batch_id)
        if batch is None or batch.owner != owner or bool(batch.input_file_id) is not has_file:
            raise UnknownBatch("There is no such batch.", param="batch_id")
        return batch

    def counts_of(self, batch: RowBatch) -> dict[str, int]:
        """Return how many rows have each outcome."""
        running = self._running.get(batch.batch_id)
        return dict(running.counts) if running is not None else batch.counts

    def check_number(self, owner: str) -> None:
        """Raises: TooMany."""
        batches = [batch for batch in self._batches.values() if batch.owner == owner]
        if len(batches) >= _BATCHES_OF_OWNER:
            raise TooMany(f"An owner has at most {_BATCHES_OF_OWNER} batches. They are deleted after 30 days.")
        if sum(not batch.has_ended for batch in batches) >= _OPEN_OF_OWNER:
            raise TooMany(f"An owner has at most {_OPEN_OF_OWNER} batches that have not ended. Wait for some.")

    def create(self, batch: RowBatch) -> RowBatch:
        """Keep a new batch, and run it. Raises: StorageError."""
        self._keep(batch, batch.status)
        self._run(batch)
        return batch

    def cancel(self, batch: RowBatch) -> RowBatch:
        """Cancel a batch that has not ended. Raises: StorageError."""
        if batch.status in ("validating", "in_progress"):
            self._keep(batch, "cancelling")
            deadline = self._running[batch.batch_id].deadline
            if deadline is not None and not deadline.expired():
                deadline.reschedule(asyncio.get_running_loop().time())
        return batch

    async def delete(self, batch: RowBatch) -> None:
        """Delete a batch that has ended, with its results that are no files. Raises: StorageError."""
        self._notes.erase(_NOTES + batch.batch_id.encode())
        self._batches.pop(batch.batch_id, None)  # it may be deleted twice at the same time
        if not batch.input_file_id:
            await self.files.erase(result_prefix(RESULTS, batch), batch.owner)

    async def forget(self, owner: str) -> dict[str, int]:
        """Delete all files and batches of an owner. Raises: StorageError."""
        batches = [batch for batch in self._batches.values() if batch.owner == owner]
        for batch in batches:
            running = self._running.pop(batch.batch_id, None)
            if running is not None:
                running.task.cancel()
                await asyncio.wait([running.task])
            for kind in (RESULTS, ERRORS):
                await self.files.erase(result_prefix(kind, batch), owner)
            if batch.rows and not batch.input_file_id:
                await self.files.erase(batch.rows, owner)
            self._notes.erase(_NOTES + batch.batch_id.encode())
            self._batches.pop(batch.batch_id, None)
        files = self.files.of(owner)
        for file in files:
            await self.files.delete(file)
        del self.files.used[owner]
        return {"files": len(files), "batches": len(batches)}

    async def delete_file(self, file: StoredFile) -> None:
        """Raises: RequestError if a batch needs it, StorageError."""
        if self.uses(file):
            raise RequestError("A batch in progress reads this file.", param="file_id")
        await self.files.delete(file)

    def uses(self, file: StoredFile) -> bool:
        """Return whether a batch that has not ended reads a file."""
        return any(one.batch.input_file_id == file.file_id for one in self._running.values())

    # Running

    def _run(self, batch: RowBatch) -> None:
        running = _Running(batch)
        self._running[batch.batch_id] = running
        running.task = self._group.create_task(self._process(running))

    async def _process(self, running: _Running) -> None:
        """Run a batch to its end. While the journal cannot be written or read, it waits."""
        batch, is_loaded = running.batch, False
        while not batch.has_ended:
            try:
                async with self._checking:  # one file at a time, so that the event loop is not blocked for long
                    if not is_loaded:
                        running.done, running.counts = await self._results.load(batch)
                        is_loaded = True
                    if batch.status == "validating" and not batch.errors:
                        await self._validate(batch)
                if not batch.has_ended:
                    await self._finish(running)
            except StorageError as error:
                logger.warning("A batch waits: %s", error.message)
                await asyncio.sleep(_RETRY_S)
            except UnknownFile:
                batch.errors = [LineError("file_damaged", "The file of this batch was damaged on disk.")]
            except Exception:  # a defect must end only this batch
                logger.exception("A batch failed.")
                if batch.errors:
                    return  # the next process tries again
                batch.errors = [LineError("internal_error", "Internal server error. See the server's log.")]
        self._running.pop(batch.batch_id, None)
        if not batch.input_file_id:
            with contextlib.suppress(StorageError):  # the next process erases them
                await self.files.erase(batch.rows, batch.owner)

    async def _validate(self, batch: RowBatch) -> None:
        """Check the file of a batch: then it is in progress, or has failed."""
        reader, errors, number, num_rows = RowReader(batch.endpoint), list[LineError](), 0, 0
        async for number, line in self.files.lines(batch.rows, self._row_bytes):
            num_rows += 1
            if num_rows > self._most_rows:
                error = RowError("too_many_tasks", f"A batch has at most {self._most_rows} rows.")
                errors.append(error.at(number))
                break
            try:
                reader.read(line)
            except RowError as error:
                errors.append(error.at(number))
                if len(errors) == _ERRORS:
                    break
        if not num_rows:
            errors.append(LineError("empty_file", "The file has no rows.", None, None))
        if batch.status != "validating":  # cancelled meanwhile
            return
        batch.num_rows, batch.errors = (0 if errors else num_rows), errors
        self._keep(batch, "failed" if errors else "in_progress")

    async def _finish(self, running: _Running) -> None:
        """Run all rows that have no result, and end the batch. One with errors only ends."""
        batch = running.batch
        if batch.errors:
            await self._end(running)
            return
        if batch.status == "in_progress":
            try:
                async with asyncio.timeout(max(0.0, batch.expires_s - time.time())) as running.deadline:
                    await self._run_rows(running)
            except TimeoutError:
                pass
            finally:
                running.deadline = None
            if batch.status == "in_progress":
                self._keep(batch, "finalizing")
        rest: Outcome = "canceled" if batch.status == "cancelling" else "expired"
        await self._fill_in(running, rest)
        await self._end(running)

    async def _run_rows(self, running: _Running) -> None:
        """Run rows until all have a result."""
        batch = running.batch
        async with self._rows.rows_of(batch) as rows:
            await rows.wait_slot()
            async for number, line in self.files.lines(batch.rows):
                if number not in running.done and line is not None:
                    rows.begin(partial(self._row, running, rows, number, line))
                    await rows.wait_slot()
            await rows.wait_ended()

    async def _row(
        self, running: _Running, rows: RowsInProgress, number: int, line: bytes, logs: list[StreamLog]
    ) -> None:
        batch, row = running.batch, read_row(line)
        try:
            answer: InnerAnswer | TailraceError = await rows.answer(row, number, logs)
        except Exception:  # a defect must end only this row
            logger.exception("A row of a batch failed.")
            answer = TailraceError("Internal server error. See the server's log.")
        outcome, result = result_of(batch, row.custom_id, answer)
        await self._keep_result(running, number, outcome, result)
        await rows.drop(logs)

    async def _keep_result(self, running: _Running, number: int, outcome: Outcome, line: bytes) -> None:
        if number not in running.done:
            running.done.add(number)  # now: a row that is stopped while it waits here has its result
            running.counts[outcome] += 1
            await self._results.keep(running.batch, number, outcome, line)

    async def _fill_in(self, running: _Running, outcome: Outcome) -> None:
        """Give an outcome to all rows that have none."""
        batch = running.batch
        if len(running.done) == batch.num_rows:
            return
        waiting = []
        async for number, line in self.files.lines(batch.rows):
            if number in running.done or line is None:
                continue
            result = unrun_line(batch, read_row(line).custom_id, outcome)
            waiting.append(self._keep_result(running, number, outcome, result))
            if len(waiting) == 256:
                await asyncio.gather(*waiting)
                waiting = []
        await asyncio.gather(*waiting)

    async def _end(self, running: _Running) -> None:
        """Make files of the results, and end the batch. Raises: StorageError."""
        await self._results.wait_kept()
        batch, counts = running.batch, running.counts
        if batch.input_file_id:
            batch.output_file_id = await self._add_file(batch, RESULTS)
            batch.error_file_id = await self._add_file(batch, ERRORS)
        batch.counts = dict(counts)
        status: Status = "completed"
        if batch.errors:
            status = "failed"
            batch.counts["errored"] = batch.num_rows - len(running.done) + counts["errored"]  # no row runs on
        elif batch.status == "cancelling":
            status = "cancelled"
        elif counts["expired"]:
            status = "expired"
        self._keep(batch, status)

    async def _add_file(self, batch: RowBatch, kind: bytes) -> str | None:
        """Return the id of a file of results, which an earlier process may have made; None if there are none."""
        file_id = result_file_id(kind, batch)
        if self.files.has(file_id):
            return file_id
        num_bytes = sum((await self.files.sizes(result_prefix(kind, batch))).values())
        if not num_bytes:
            return None
        now_s = int(time.time())
        self.files.add(
            StoredFile(
                file_id=file_id,
                owner=batch.owner,
                filename=f"{batch.batch_id}_{RESULT_NAMES[kind]}.jsonl",
                purpose="batch_output",
                num_bytes=num_bytes,
                created_s=now_s,
                pieces=result_prefix(kind, batch),
                expires_s=now_s + (batch.output_expires_s or _KEPT_S),
            )
        )
        return file_id

    def _keep(self, batch: RowBatch, status: Status) -> None:
        """Keep a batch in a new status. Raises: StorageError."""
        times = {**batch.times, status: int(time.time())}
        before = batch.status, batch.times
        batch.status, batch.times = status, times
        try:
            self._notes.add(_NOTES + batch.batch_id.encode(), _encode(batch))
        except StorageError:
            batch.status, batch.times = before
            raise
        self._batches[batch.batch_id] = batch

    async def _sweep(self) -> None:
        """Delete files and batches that have expired. Never returns."""
        while True:
            expired: list[StoredFile | RowBatch] = [*self.files.expired(), *self._expired()]
            for one in expired:
                try:
                    if isinstance(one, RowBatch):
                        await self.delete(one)
                    elif not self.uses(one):
                        await self.files.delete(one)
                except StorageError as error:
                    logger.warning("An expired file is not deleted: %s", error.message)
                except Exception:  # a defect must not end the server
                    logger.exception("An expired file is not deleted.")
            await asyncio.sleep(_SWEEP_S)

    def _expired(self) -> Sequence[RowBatch]:
        before_s = time.time() - _KEPT_S
        return [one for one in self._batches.values() if one.has_ended and one.times[one.status] < before_s]


def new_batch_id(*, has_file: bool) -> str:
    return new_id("batch_" if has_file else "msgbatch_")
