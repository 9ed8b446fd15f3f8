"""Runs rows: each is a request that the server sends to itself, behind the requests of clients.

A row has an idempotency key. So after the death of the server the same row finds its stream, wherever that stream is by
then: it runs once. What was refused for now is sent again later.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine

from tailrace.dialects import failure_of
from tailrace.errors import RequestError, StorageError
from tailrace.server import InnerAnswer, Server, StreamLog
from tailrace_plugins.batches.records import RowBatch
from tailrace_plugins.batches.rows import BatchRow, body_of

__all__ = ["RowRunner", "RowsInProgress"]

logger = logging.getLogger("tailrace.batches")

_BATCHES_AT_ONCE = 4  # of an owner
_ATTEMPTS = 3  # of a row whose stream ended with an error that may not come again
_LONGEST_WAIT_S = 60.0
_LINGER_S = 600  # how long the stream of a row goes on while its server starts again
_FOR_NOW = (408, 429, 503, 507)  # with Retry-After


class RowRunner:
    """The rows of all batches. `at_once` run at a time, of which owners, and the batches of an owner, have equal
    shares. A few batches of an owner run at a time; the others wait. `has_room` says whether the results of an owner
    may be kept."""

    def __init__(self, server: Server, *, at_once: int, has_room: Callable[[str], bool]) -> None:
        self.server = server
        self.has_room = has_room
        self.is_closing = False  # streams go on, for the next process
        self._at_once = at_once
        self._num_rows = 0
        self._num_batches: Counter[str] = Counter()  # that have their turn, by owner
        self._changed = asyncio.Event()

    @contextlib.asynccontextmanager
    async def turn(self, batch: RowBatch) -> AsyncIterator[None]:
        """Context of a batch that has its turn. One that is cancelled does not wait for it."""
        owner = batch.owner
        await self.wait_until(lambda: batch.status == "cancelling" or self._num_batches[owner] < _BATCHES_AT_ONCE)
        self._num_batches[owner] += 1
        try:
            yield
        finally:
            self._num_batches[owner] -= 1
            if not self._num_batches[owner]:
                del self._num_batches[owner]
            self.changed()

    @contextlib.asynccontextmanager
    async def rows_of(self, batch: RowBatch) -> AsyncIterator[RowsInProgress]:
        """Context of a batch that runs rows. Rows that are not done at its end are stopped."""
        rows = RowsInProgress(self, batch)
        try:
            yield rows
        finally:
            await rows.stop()

    def begun(self) -> None:
        self._num_rows += 1

    def ended(self) -> None:
        self._num_rows -= 1
        self.changed()

    def changed(self) -> None:
        """A row has ended, a batch is cancelled, or there is more room: another row may begin."""
        self._changed.set()

    async def wait_until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            self._changed.clear()
            await self._changed.wait()

    def may_begin(self, rows: RowsInProgress) -> bool:
        """Return whether a batch may begin another row."""
        if not self.has_room(rows.batch.owner):
            rows.note_full()
            return False
        share = self._at_once // len(self._num_batches) // self._num_batches[rows.batch.owner]
        return self._num_rows < self._at_once and len(rows.tasks) < max(1, share)


class RowsInProgress:
    """The rows of one batch that run, each with the streams that it has had."""

    def __init__(self, runner: RowRunner, batch: RowBatch) -> None:
        self.batch = batch
        self.tasks: dict[asyncio.Task[None], list[StreamLog]] = {}
        self._runner = runner
        self._was_full = False

    def note_full(self) -> None:
        if not self._was_full:
            self._was_full = True
            logger.warning("Rows of a batch wait for space: files must be deleted, or --batch-bytes raised.")

    def begin(self, work: Callable[[list[StreamLog]], Coroutine[object, object, None]]) -> None:
        """Run a row. Its work gets the list for its streams."""
        logs: list[StreamLog] = []
        task = asyncio.create_task(work(logs))
        self.tasks[task] = logs
        self._runner.begun()
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self.tasks[task]
        self._runner.ended()

    async def stop(self) -> None:
        """End all rows. Their streams end, too, unless the server closes."""
        left = dict(self.tasks)
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left)
        if not self._runner.is_closing:
            for logs in left.values():
                await self.drop(logs)

    async def drop(self, logs: list[StreamLog]) -> None:
        """End streams and delete them: what matters of them is kept with the batch, or not wanted."""
        for log in logs:
            with contextlib.suppress(StorageError):
                await self._runner.server.drop(log)

    async def answer(self, row: BatchRow, number: int, logs: list[StreamLog]) -> InnerAnswer | RequestError:
        """Return the answer to a row, once it is final. An error is one of the batch itself."""
        body, attempt = body_of(row), 0
        while True:
            num_logs = len(logs)
            try:
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
            except RequestError as error:
                return error
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
            await asyncio.sleep(min(float(wait_s), _LONGEST_WAIT_S))
