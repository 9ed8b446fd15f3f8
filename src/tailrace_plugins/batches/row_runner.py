"""Runs rows: each is a request that the server sends to itself, behind the requests of clients.

A row has an idempotency key. So after the death of the server the same row finds its stream, wherever that stream is by
then: it runs once. What was refused for now is sent again later.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine

import msgspec

from tailrace.dialects import failure_of
from tailrace.errors import RequestError, StorageError, TailraceError
from tailrace.server import InnerAnswer, Server, StreamLog
from tailrace_plugins.batches.batch_rows import BatchRow, body_of
from tailrace_plugins.batches.slots import RowQueue, Slots
from tailrace_plugins.batches.stored_batches import RowBatch

__all__ = ["RowRunner", "RowsInProgress"]

logger = logging.getLogger("tailrace.batches")

_ATTEMPTS = 3  # of a row whose stream ended with an error that may not come again
_LONGEST_WAIT_S = 60.0
_LINGER_S = 600  # how long the stream of a row goes on while its server starts again
_FOR_NOW = (408, 429, 503, 507)  # with Retry-After

_read_json = msgspec.json.Decoder(msgspec.Raw).decode


class RowRunner:
    """Runs the rows of all batches, `at_once` at a time. `has_room` says whether the results of an owner may be
    kept."""

    def __init__(self, server: Server, *, at_once: int, has_room: Callable[[str], bool]) -> None:
        self.server = server
        self.slots = Slots(at_once, has_room)
        self.is_closing = False  # streams go on, for the next process

    @contextlib.asynccontextmanager
    async def rows_of(self, batch: RowBatch, *, is_left: Callable[[], bool]) -> AsyncIterator[RowsInProgress]:
        """Context of a batch that runs rows. Rows that are not done at its end are stopped. If the batch `is_left` to
        another server, or this one closes, their streams go on."""
        rows = RowsInProgress(self, batch)
        try:
            yield rows
        finally:
            await rows.stop(goes_on=self.is_closing or is_left())


class RowsInProgress:
    """The rows of one batch that run, each with the streams that it has had."""

    def __init__(self, runner: RowRunner, batch: RowBatch) -> None:
        self.batch = batch
        self._runner = runner
        self._queue = RowQueue(runner.slots, batch.owner, (batch.created_s, batch.batch_id))
        self._tasks: dict[asyncio.Task[None], list[StreamLog]] = {}

    async def wait_slot(self) -> None:
        """Return when there is a slot for the next row. The file is read only then."""
        await self._queue.take()

    def begin(self, work: Callable[[list[StreamLog]], Coroutine[object, object, None]]) -> None:
        """Run a row in the slot. Its work gets the list for its streams."""
        self._queue.use()
        logs: list[StreamLog] = []
        task = asyncio.create_task(work(logs))
        self._tasks[task] = logs
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task, None)
        self._queue.give_back()

    async def wait_ended(self) -> None:
        """Return when all rows have ended. No more begin."""
        self._queue.leave()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def stop(self, *, goes_on: bool) -> None:
        """End all rows. Their streams end, too, unless another server goes on with them."""
        self._queue.leave()
        left = dict(self._tasks)
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left)
        if not goes_on:
            for logs in left.values():
                await self.drop(logs)

    async def drop(self, logs: list[StreamLog]) -> None:
        """End streams and delete them: what matters of them is kept with the batch, or not wanted."""
        for log in logs:
            with contextlib.suppress(StorageError):
                await self._runner.server.drop(log)

    async def answer(self, row: BatchRow, number: int, logs: list[StreamLog]) -> InnerAnswer:
        """Return the answer to a row, once it is final. It is JSON."""
        try:
            answer = await self._final_answer(row, number, logs)
            _read_json(answer.body)
        except RequestError as error:
            return self._error(error)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return self._error(TailraceError("The answer to this row is not JSON."))
        except Exception:  # a defect must end only this row
            logger.exception("A row of a batch failed.")
            return self._error(TailraceError("Internal server error. See the server's log."))
        return answer

    def _error(self, error: TailraceError) -> InnerAnswer:
        return self._runner.server.error_answer(self.batch.endpoint, error)

    async def _final_answer(self, row: BatchRow, number: int, logs: list[StreamLog]) -> InnerAnswer:
        """Raises: RequestError, if the key of the batch is not valid any more."""
        body, attempt = body_of(row), 0
        while True:
            num_logs = len(logs)
            answer = await self._runner.server.ask(
                self.batch.sender,
                self.batch.endpoint,
                body,
                headers={
                    "idempotency-key": f"{self.batch.batch_id}-{number}-{attempt}",
                    "x-tailrace-linger": str(_LINGER_S),
                    "x-tailrace-priority": "background",
                },
                logs=logs,
            )
            end = logs[-1].end if len(logs) > num_logs else None
            if answer.status < 400 or (end is None and answer.status not in _FOR_NOW):
                return answer
            if end is not None:
                attempt += 1
                if attempt == _ATTEMPTS or not failure_of(end).cut_fields["retryable"]:
                    return answer
                continue
            wait_s = answer.headers.get("retry-after", "")
            if not wait_s.isdigit():
                return answer
            await self._queue.pause(min(float(wait_s), _LONGEST_WAIT_S))
