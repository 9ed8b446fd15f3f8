"""The results of rows: those that come together are written together, each exactly once."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

import msgspec

from tailrace.errors import LeaseLost, StorageError
from tailrace.server import InnerAnswer, TableLease
from tailrace_plugins.batches.batch_files import Files, new_id
from tailrace_plugins.batches.batch_keys import COUNTS, ERRORS, RESULTS, key_of_batch, piece_key, result_prefix
from tailrace_plugins.batches.batch_rows import Outcome
from tailrace_plugins.batches.stored_batches import RowBatch

__all__ = ["RESULT_NAMES", "Results", "result_file_id", "result_of", "unrun_line"]

RESULT_NAMES = {RESULTS: "output", ERRORS: "error"}
_RETRY_S = 1.0
_GATHER_S = 0.003  # for which results wait for others, since a commit costs as much as a fortieth of a small row
_LETTERS: dict[Outcome, bytes] = {"succeeded": b"s", "errored": b"e", "expired": b"x", "canceled": b"c"}
_OUTCOMES = {letter: outcome for outcome, letter in _LETTERS.items()}
_MESSAGES: dict[Outcome, tuple[str, str]] = {
    "expired": ("batch_expired", "The completion window ended before this row was run."),
    "canceled": ("batch_cancelled", "The batch was cancelled before this row was run."),
}

_encode_counts = msgspec.msgpack.Encoder().encode


def result_file_id(kind: bytes, batch: RowBatch) -> str:
    """Return the id of a file of results. It is always the same for a batch, so that the file is made once."""
    return f"file-{batch.batch_id.removeprefix('batch_')}-{RESULT_NAMES[kind]}"


class Results:
    """Keeps the results of a batch's rows while this server has its lease. `done` are the numbers of the rows that have
    one, `counts` how many have each outcome. `on_lost` is called when another server has the lease."""

    def __init__(self, files: Files, batch: RowBatch, lease: TableLease, on_lost: Callable[[], None]) -> None:
        self.done: set[int] = set()
        self.counts: Counter[str] = Counter()
        self._files = files
        self._batch = batch
        self._lease = lease
        self._on_lost = on_lost
        self._waiting: dict[bytes, bytes] = {}
        self._kept: asyncio.Future[None] | None = None
        self._flushing: asyncio.Task[None] | None = None

    async def load(self) -> None:
        """Find the rows that have a result. Raises: StorageError."""
        self.done, self.counts = set(), Counter()
        for kind in (RESULTS, ERRORS):
            prefix = result_prefix(kind, self._batch)
            for key in await self._files.sizes(prefix):
                self.done.add(int(key[len(prefix) : -1], 16))
                self.counts[_OUTCOMES[key[-1:]]] += 1

    async def keep(self, number: int, outcome: Outcome, line: bytes) -> None:
        """Keep the result of a row that has none, and return when it is kept. It waits while the log store cannot be
        written, and forever if another server has the lease."""
        if number in self.done:
            return
        self.done.add(number)  # now: a row that is stopped while it waits here has its result
        self.counts[outcome] += 1
        kind = ERRORS if self._batch.input_file_id and outcome != "succeeded" else RESULTS
        self._waiting[piece_key(result_prefix(kind, self._batch), number) + _LETTERS[outcome]] = line
        if self._kept is None:
            self._kept = asyncio.get_running_loop().create_future()
        if self._flushing is None:
            self._flushing = asyncio.create_task(self._flush())
        await asyncio.shield(self._kept)

    async def wait_kept(self) -> None:
        """Return when all results are kept."""
        while self._flushing is not None:
            await asyncio.shield(self._flushing)

    async def _flush(self) -> None:
        """Keep what waits, and what comes meanwhile."""
        while self._waiting and self._kept is not None:
            await asyncio.sleep(_GATHER_S)
            rows, kept = self._waiting, self._kept
            self._waiting, self._kept = {}, None
            if self._files.table.is_shared:  # the other servers show how far it is
                rows[key_of_batch(COUNTS, self._batch)] = _encode_counts(dict(self.counts))
            while True:
                try:
                    await self._files.table.change(rows, lease=self._lease)
                    break
                except LeaseLost:
                    self._on_lost()
                    return
                except StorageError:
                    await asyncio.sleep(_RETRY_S)
            kept.set_result(None)
        self._flushing = None


def result_of(batch: RowBatch, custom_id: str, answer: InnerAnswer) -> tuple[Outcome, bytes]:
    """Return the outcome and the line of a row that has an answer, which is JSON."""
    outcome: Outcome = "succeeded" if answer.status < 400 else "errored"
    body = msgspec.Raw(answer.body)
    if not batch.input_file_id:
        name = "message" if outcome == "succeeded" else "error"
        return outcome, _line({"custom_id": custom_id, "result": {"type": outcome, name: body}})
    request_id = answer.headers.get("x-request-id", "")
    response = {"status_code": answer.status, "request_id": request_id, "body": body}
    return outcome, _line(_openai_line(custom_id, response, None))


def unrun_line(batch: RowBatch, custom_id: str, outcome: Outcome) -> bytes:
    """Return the line of a row that was not run."""
    if not batch.input_file_id:
        return _line({"custom_id": custom_id, "result": {"type": outcome}})
    code, message = _MESSAGES[outcome]
    return _line(_openai_line(custom_id, None, {"code": code, "message": message}))


def _openai_line(custom_id: str, response: object, error: object) -> dict[str, object]:
    return {"id": new_id("batch_req_"), "custom_id": custom_id, "response": response, "error": error}


def _line(value: object) -> bytes:
    return msgspec.json.encode(value) + b"\n"
