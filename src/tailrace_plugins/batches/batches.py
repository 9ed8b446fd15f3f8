"""The batches of a server: what is kept of each, and the tasks that run them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Coroutine
from typing import TypeVar

import msgspec

from tailrace.errors import RequestError, StorageError
from tailrace.server import look_at_changes, row_key
from tailrace_plugins.batches.batch_errors import TooMany, UnknownBatch
from tailrace_plugins.batches.batch_files import Files, new_id
from tailrace_plugins.batches.batch_keys import (
    BATCHES,
    CANCELLED,
    COUNTS,
    FILES,
    KINDS,
    OPEN,
    RESULTS,
    UNUSED,
    key_of_batch,
    result_prefix,
)
from tailrace_plugins.batches.batch_run import KEPT_S, RowBatchRun, RowLimits, encode
from tailrace_plugins.batches.row_runner import RowRunner
from tailrace_plugins.batches.stored_batches import RowBatch, StoredFile

__all__ = ["RowBatches", "new_batch_id"]

logger = logging.getLogger("tailrace.batches")

_BATCHES_OF_OWNER = 1_000
_OPEN_OF_OWNER = 100  # that have not ended
_SWEEP_S = 60.0
_CAN_BE_CANCELLED = ("validating", "in_progress")

_T = TypeVar("_T")

_decode_counts = msgspec.msgpack.Decoder(dict[str, int]).decode
_decode = msgspec.msgpack.Decoder(RowBatch).decode


class RowBatches:
    """All batches. Each is run by the server that has the lease of its row: the one that created it, and after its
    death another one. Used from one event loop only."""

    def __init__(self, files: Files, runner: RowRunner, group: asyncio.TaskGroup, limits: RowLimits) -> None:
        self.files = files
        self._table = files.table
        self._runner = runner
        self._group = group
        self._limits = limits
        self._runs: dict[str, RowBatchRun] = {}
        self._has_changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._table.listen(self._on_change)

    async def start(self) -> None:
        """Continue the batches of an earlier process, and of other servers when they die; delete from now on what has
        expired. Raises: StorageError."""
        if not self._table.is_shared:
            await self.files.erase_unfinished(after_s=0)
        await self._look()
        self._tasks = [self._group.create_task(self._sweep())]
        if self._table.is_shared:
            self._tasks.append(
                self._group.create_task(look_at_changes(self._has_changed, self._look, logger, "Batches"))
            )

    def close(self) -> None:
        """Leave everything to the next process, or to other servers."""
        self._runner.is_closing = True
        for task in (*self._tasks, *(one.task for one in self._runs.values())):
            task.cancel()

    # What clients ask for

    async def of(self, owner: str, *, has_file: bool) -> list[RowBatch]:
        """Return the batches of an owner, the newest first: OpenAI's, or Anthropic's, which have no file. Raises:
        StorageError."""
        rows = [row async for _, row in self.files.rows(row_key(BATCHES, owner)) if row is not None]
        batches = [batch for batch in map(_decode, rows) if bool(batch.input_file_id) is has_file]
        batches.sort(key=lambda batch: batch.order, reverse=True)
        await self._add_progress(*batches)
        return batches

    async def find(self, owner: str, batch_id: str, *, has_file: bool) -> RowBatch:
        """Raises: UnknownBatch, StorageError."""
        (row,) = await self._table.get(row_key(BATCHES, owner, batch_id))
        batch = _decode(row) if row is not None else None
        if batch is None or bool(batch.input_file_id) is not has_file:
            raise UnknownBatch("There is no such batch.", param="batch_id")
        await self._add_progress(batch)
        return batch

    async def _add_progress(self, *batches: RowBatch) -> None:
        """Add to batches that have not ended what is kept apart: that a client has cancelled them, and their counts.
        Raises: StorageError."""
        under_way = [batch for batch in batches if not batch.has_ended]
        keys = [key_of_batch(kind, batch) for batch in under_way for kind in (CANCELLED, COUNTS)]
        rows = await self._table.get(*keys)
        for batch, cancelled, counts in zip(under_way, rows[::2], rows[1::2], strict=True):
            run = self._runs.get(batch.batch_id)
            if run is not None:
                batch.counts = dict(run.results.counts)
            elif counts is not None:
                batch.counts = _decode_counts(counts)
            if cancelled is not None and batch.status in _CAN_BE_CANCELLED:
                batch.status, batch.times = "cancelling", {**batch.times, "cancelling": int(cancelled)}

    async def check_number(self, owner: str) -> None:
        """Raises: TooMany, StorageError."""
        if len(await self._table.sizes(row_key(BATCHES, owner), most=_BATCHES_OF_OWNER)) >= _BATCHES_OF_OWNER:
            raise TooMany(f"An owner has at most {_BATCHES_OF_OWNER} batches. They are deleted after 30 days.")
        if len(await self._table.sizes(row_key(OPEN, owner), most=_OPEN_OF_OWNER)) >= _OPEN_OF_OWNER:
            raise TooMany(f"An owner has at most {_OPEN_OF_OWNER} batches that have not ended. Wait for some.")

    async def create(self, batch: RowBatch, *, upload_key: bytes | None = None) -> RowBatch:
        """Keep a new batch, and run it. Its rows are no upload any more. Raises: StorageError."""
        batch.enter(batch.status)
        batch.models = sorted(self._runner.server.model_names)
        rows = {key_of_batch(BATCHES, batch): encode(batch), key_of_batch(OPEN, batch): batch.input_file_id.encode()}
        await self._table.change(rows, [upload_key] if upload_key is not None else ())
        with contextlib.suppress(StorageError):  # it is taken later, or by another server
            await self._run(key_of_batch(b"", batch))
        with contextlib.suppress(StorageError):  # the batch is kept, whatever is known of its progress
            await self._add_progress(batch)
        return batch

    async def cancel(self, batch: RowBatch) -> RowBatch:
        """Cancel a batch that has not ended. Raises: StorageError."""
        if batch.status in _CAN_BE_CANCELLED:
            cancelled = key_of_batch(CANCELLED, batch)
            await self._table.change({cancelled: b"%d" % time.time()})
            (row,) = await self._table.get(key_of_batch(BATCHES, batch))
            if row is None or _decode(row).has_ended:  # meanwhile, so nothing else erases it
                await self._table.change({}, [cancelled])
            run = self._runs.get(batch.batch_id)
            if run is not None:
                run.cancel()
        await self._add_progress(batch)
        return batch

    async def delete(self, batch: RowBatch) -> None:
        """Delete a batch that has ended, with its results that are no files. Raises: StorageError."""
        key, results = key_of_batch(BATCHES, batch), result_prefix(RESULTS, batch)
        if batch.input_file_id:
            await self._table.change({}, [key])
        else:
            await self.files.discard(row_key(UNUSED, batch.owner, f"{batch.batch_id}-results"), results, [key])

    async def forget(self, owner: str) -> dict[str, int]:
        """Delete all files and batches of an owner. Other servers stop their batches when they write the next result.
        Raises: StorageError."""
        batches, files = await self.files.sizes(row_key(BATCHES, owner)), await self.files.sizes(row_key(FILES, owner))
        for run in [one for one in self._runs.values() if one.batch.owner == owner]:
            run.task.cancel()
            await asyncio.wait([run.task])
        for kind in KINDS:  # first what other servers need to write the rest
            await self.files.erase(row_key(kind, owner))
        return {"files": len(files), "batches": len(batches)}

    async def delete_file(self, file: StoredFile) -> None:
        """Raises: RequestError if a batch needs it, StorageError."""
        if await self._uses(file):
            raise RequestError("A batch in progress reads this file.", param="file_id")
        await self.files.delete(file)

    async def _uses(self, file: StoredFile) -> bool:
        """Return whether a batch that has not ended reads a file. Raises: StorageError."""
        used = [row async for _, row in self.files.rows(row_key(OPEN, file.owner))]
        return file.file_id.encode() in used

    # Running

    def _on_change(self) -> None:
        self._runner.slots.offer()
        self._has_changed.set()

    async def _look(self) -> None:
        """Run the batches that no other server runs, and learn which of its own are cancelled. Raises: StorageError."""
        own: list[RowBatchRun] = []
        others: list[bytes] = []
        for key in await self.files.sizes(OPEN + b"/"):
            run = self._runs.get(key.rpartition(b"/")[2].decode())
            if run is None:
                others.append(key.removeprefix(OPEN))
            elif not run.is_cancelled:
                own.append(run)
        rows = await self._table.get(*(BATCHES + name for name in others))
        for name, row in zip(others, rows, strict=True):
            if row is not None and self._may_run(row):
                await self._run(name)
        cancelled = await self._table.get(*(key_of_batch(CANCELLED, run.batch) for run in own))
        for run, row in zip(own, cancelled, strict=True):
            if row is not None:
                run.cancel()

    def _may_run(self, row: bytes) -> bool:
        """Return whether this server has the models of a batch. One that has expired needs none."""
        try:
            batch = _decode(row)
        except (msgspec.DecodeError, UnicodeDecodeError):
            logger.warning("A batch cannot be read: a newer version may have kept it.")
            return False
        names = self._runner.server.model_names
        return not self._table.is_shared or names >= set(batch.models) or batch.expires_s <= time.time()

    async def _run(self, name: bytes) -> None:
        """Run a batch, by its key without the kind, if no other server does. Raises: StorageError."""
        lease = await self._table.take(BATCHES + name)
        if lease is None:
            return
        row, cancelled = await self._table.get(BATCHES + name, CANCELLED + name)  # as its last server has left it
        batch = _decode(row) if row is not None else None
        if batch is None or batch.batch_id in self._runs or self._runner.is_closing:
            return
        run = RowBatchRun(self.files, self._runner, self._limits, batch, lease)
        run.is_cancelled = cancelled is not None
        self._runs[batch.batch_id] = run
        run.task = self._group.create_task(run.run())
        run.task.add_done_callback(lambda _: self._runs.pop(batch.batch_id) if not run.is_stuck else None)

    async def _sweep(self) -> None:
        """Delete files and batches that have expired. Never returns."""
        while True:
            for file in await _tried(self.files.expired()) or ():
                await _tried(self._delete_expired(file))
            for batch in await _tried(self._expired()) or ():
                await _tried(self.delete(batch))
            await _tried(self.files.erase_unfinished())
            self._has_changed.set()  # a batch that no server has the models of may have expired
            await asyncio.sleep(_SWEEP_S)

    async def _delete_expired(self, file: StoredFile) -> None:
        if not await self._uses(file):
            await self.files.delete(file)

    async def _expired(self) -> list[RowBatch]:
        """Raises: StorageError."""
        before_s = time.time() - KEPT_S
        batches = [_decode(row) async for _, row in self.files.rows(BATCHES + b"/") if row is not None]
        return [one for one in batches if one.has_ended and one.times[one.status] < before_s]


async def _tried(work: Coroutine[object, object, _T]) -> _T | None:
    """Do a part of the sweep. A failure, also a defect, ends neither the rest of it nor the server."""
    try:
        return await work
    except StorageError as error:
        logger.warning("What has expired is not deleted: %s", error.message)
    except Exception:
        logger.exception("What has expired is not deleted.")
    return None


def new_batch_id(*, has_file: bool) -> str:
    return new_id("batch_" if has_file else "msgbatch_")
