"""The run of a batch: its file is checked, its rows are run, and their results become files."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass, field
from functools import partial

import msgspec

from tailrace.errors import LeaseLost, StorageError
from tailrace.server import StreamLog, TableLease
from tailrace_plugins.batches.batch_errors import UnknownFile
from tailrace_plugins.batches.batch_files import Files, unused
from tailrace_plugins.batches.batch_keys import (
    BATCHES,
    CANCELLED,
    COUNTS,
    ERRORS,
    OPEN,
    RESULTS,
    UNUSED,
    key_of_batch,
    result_prefix,
)
from tailrace_plugins.batches.batch_rows import Outcome, RowError, RowReader, model_of, read_row
from tailrace_plugins.batches.results import RESULT_NAMES, Results, result_file_id, result_of, unrun_line
from tailrace_plugins.batches.row_runner import RowRunner, RowsInProgress
from tailrace_plugins.batches.stored_batches import LineError, RowBatch, Status, StoredFile

__all__ = ["KEPT_S", "RowBatchRun", "RowLimits", "encode"]

logger = logging.getLogger("tailrace.batches")

KEPT_S = 30 * 86_400  # how long an ended batch, and by default its results, are kept
_ERRORS = 50  # that a batch names
_RETRY_S = 1.0

encode = msgspec.msgpack.Encoder().encode


@dataclass
class RowLimits:
    most_rows: int
    row_bytes: int
    checking: asyncio.Lock = field(default_factory=asyncio.Lock)  # one file at a time is checked


class RowBatchRun:
    """The run of a batch whose lease this server has. `is_stuck`: it cannot end, and the next process tries again."""

    def __init__(self, files: Files, runner: RowRunner, limits: RowLimits, batch: RowBatch, lease: TableLease) -> None:
        self.batch = batch
        self.results = Results(files, batch, lease, self._lose)
        self.is_cancelled = False  # by a client
        self.is_lost = False  # another server has the lease
        self.is_stuck = False
        self.task: asyncio.Task[None]
        self._files = files
        self._runner = runner
        self._limits = limits
        self._lease = lease
        self._deadline: asyncio.Timeout | None = None  # of the rows, while they run

    def cancel(self) -> None:
        self.is_cancelled = True
        if self._deadline is not None and not self._deadline.expired():
            self._deadline.reschedule(asyncio.get_running_loop().time())

    def _lose(self) -> None:
        """Another server has the lease, or has deleted the batch. The streams of its rows go on for that server."""
        if not self.is_lost:
            self.is_lost = True
            self.task.cancel()

    async def run(self) -> None:
        """Run the batch to its end. While the log store cannot be written or read, it waits."""
        with contextlib.suppress(LeaseLost):
            await self._run_to_end()
        if self.batch.has_ended and not self.batch.input_file_id:
            with contextlib.suppress(StorageError):  # the sweep erases them
                await self._files.discard(key_of_batch(UNUSED, self.batch), self.batch.rows)

    async def _run_to_end(self) -> None:
        """Raises: LeaseLost."""
        batch, is_loaded = self.batch, False
        while not batch.has_ended:
            try:
                async with self._limits.checking:  # one file at a time, so that the event loop is not blocked for long
                    if not is_loaded:
                        await self.results.load()
                        is_loaded = True
                    if batch.status == "validating" and not batch.errors:
                        await self._validate()
                if not batch.has_ended:
                    await self._finish()
            except LeaseLost:
                raise
            except StorageError as error:
                logger.warning("A batch waits: %s", error.message)
                await asyncio.sleep(_RETRY_S)
            except UnknownFile:
                batch.errors = [LineError("file_damaged", "The file of this batch was damaged on disk.")]
            except Exception:  # a defect must end only this batch
                logger.exception("A batch failed.")
                if batch.errors:
                    self.is_stuck = True
                    return
                batch.errors = [LineError("internal_error", "Internal server error. See the server's log.")]

    async def _validate(self) -> None:
        """Check the file of a batch: then it is in progress, or has failed."""
        batch = self.batch
        reader, errors, number, num_rows = RowReader(batch.endpoint), list[LineError](), 0, 0
        models = set[str | None]()
        async for number, line in self._files.lines(batch.rows, batch.num_rows_bytes, self._limits.row_bytes):
            num_rows += 1
            if num_rows > self._limits.most_rows:
                error = RowError("too_many_tasks", f"A batch has at most {self._limits.most_rows} rows.")
                errors.append(error.at(number))
                break
            try:
                models.add(model_of(reader.read(line)))
            except RowError as error:
                errors.append(error.at(number))
                if len(errors) == _ERRORS:
                    break
        if not num_rows:
            errors.append(LineError("empty_file", "The file has no rows.", None, None))
        if models <= set(batch.models):  # another name may stand for any of them
            batch.models = [name for name in batch.models if name in models]
        batch.num_rows, batch.errors = (0 if errors else num_rows), errors
        await self._keep("failed" if errors else "in_progress")

    async def _finish(self) -> None:
        """Run all rows that have no result, and end the batch. One with errors only ends."""
        batch = self.batch
        if batch.errors:
            await self._end()
            return
        if batch.status == "in_progress" and not self.is_cancelled:
            try:
                async with asyncio.timeout(max(0.0, batch.expires_s - time.time())) as self._deadline:
                    await self._run_rows()
            except TimeoutError:
                pass
            finally:
                self._deadline = None
        if batch.status == "in_progress":
            await self._keep("cancelling" if self.is_cancelled else "finalizing")
        await self._fill_in("canceled" if batch.status == "cancelling" else "expired")
        await self._end()

    async def _run_rows(self) -> None:
        """Run rows until all have a result."""
        batch = self.batch
        async with self._runner.rows_of(batch, is_left=lambda: self.is_lost) as rows:
            await rows.wait_slot()
            async for number, line in self._files.lines(batch.rows, batch.num_rows_bytes):
                if number not in self.results.done and line is not None:
                    rows.begin(partial(self._row, rows, number, line))
                    await rows.wait_slot()
            await rows.wait_ended()

    async def _row(self, rows: RowsInProgress, number: int, line: bytes, logs: list[StreamLog]) -> None:
        batch, row = self.batch, read_row(line)
        outcome, result = result_of(batch, row.custom_id, await rows.answer(row, number, logs))
        await self.results.keep(number, outcome, result)
        await rows.drop(logs)

    async def _fill_in(self, outcome: Outcome) -> None:
        """Give an outcome to all rows that have none."""
        batch, results = self.batch, self.results
        if len(results.done) == batch.num_rows:
            return
        waiting = []
        async for number, line in self._files.lines(batch.rows, batch.num_rows_bytes):
            if number in results.done or line is None:
                continue
            waiting.append(results.keep(number, outcome, unrun_line(batch, read_row(line).custom_id, outcome)))
            if len(waiting) == 256:
                await asyncio.gather(*waiting)
                waiting = []
        await asyncio.gather(*waiting)

    async def _end(self) -> None:
        """Make files of the results, and end the batch. Raises: StorageError."""
        await self.results.wait_kept()
        batch, counts = self.batch, self.results.counts
        if batch.input_file_id:
            batch.output_file_id = await self._add_file(RESULTS)
            batch.error_file_id = await self._add_file(ERRORS)
        else:
            batch.num_result_bytes = await self._num_bytes(RESULTS)
        batch.counts = dict(counts)
        status: Status = "completed"
        if batch.errors:
            status = "failed"
            batch.counts["errored"] = batch.num_rows - len(self.results.done) + counts["errored"]  # no row runs on
        elif batch.status == "cancelling":
            status = "cancelled"
        elif counts["expired"]:
            status = "expired"
        await self._keep(status)

    async def _num_bytes(self, kind: bytes) -> int:
        return sum((await self._files.sizes(result_prefix(kind, self.batch))).values())

    async def _add_file(self, kind: bytes) -> str | None:
        """Return the id of a file of results, which an earlier process may have made; None if there are none."""
        batch = self.batch
        file_id = result_file_id(kind, batch)
        num_bytes = await self._num_bytes(kind)
        if not num_bytes:
            return None
        now_s = int(time.time())
        file = StoredFile(
            file_id=file_id,
            owner=batch.owner,
            filename=f"{batch.batch_id}_{RESULT_NAMES[kind]}.jsonl",
            purpose="batch_output",
            num_bytes=num_bytes,
            created_s=now_s,
            order=time.time_ns(),
            pieces=result_prefix(kind, batch),
            expires_s=now_s + (batch.output_expires_s or KEPT_S),
        )
        await self._files.add(file, lease=self._lease)
        return file_id

    async def _keep(self, status: Status) -> None:
        """Keep a batch in a new status. Raises: LeaseLost, StorageError."""
        batch = self.batch
        before = batch.status, batch.times
        batch.enter(status)
        gone = [key_of_batch(kind, batch) for kind in (OPEN, CANCELLED, COUNTS)] if batch.has_ended else []
        rows = {key_of_batch(BATCHES, batch): encode(batch)}
        if batch.has_ended and not batch.input_file_id:
            rows[key_of_batch(UNUSED, batch)] = unused(batch.rows)
        try:
            await self._files.table.change(rows, gone, lease=self._lease)
        except StorageError:
            batch.status, batch.times = before
            raise
