"""One row per request: written to the spool file when its stream begins and ends, copied to the database later.

The row of a stream is copied after its turn of a conversation. So the streams whose rows a killed server left in its
file are those whose turns may be missing, and the next server writes them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from tailrace.access.quotas import Quotas
from tailrace.errors import ModelError, StorageError, TailraceError, UnknownStream
from tailrace.generation import Meter, Observer, Observers, Times
from tailrace.records.conversation_keeper import ConversationKeeper
from tailrace.records.request_rows import RUNNING, RequestRow, row_of_refusal, row_of_start, row_with_end
from tailrace.records.request_store import RequestStore
from tailrace.records.spool import Spool
from tailrace.records.threads import UNREACHABLE, DatabaseThreads
from tailrace.streams import LogStore, StreamLog
from tailrace.types import Allowance, Arrival, End, Failure, Record, Usage, new_stream_id

__all__ = ["RequestLog"]

logger = logging.getLogger("tailrace.records")

_MAX_BYTES = 256 * 2**20  # of rows that are not in the database yet
_TRUNCATE_BYTES = 2**20  # of rows that are in the database, before they are removed from the file
_NO_TOKENS = Usage(0, 0)
_READ_BYTES = 2**19  # of the file per transaction; parsing them takes a millisecond


class RequestLog(Observer, Meter):
    """Records all requests (generation.Observer, generation.Meter). No token waits for the database.

    New streams are refused while more than 256 MiB of rows wait for the database, or the disk takes no rows. Otherwise
    requests would not be recorded, and quotas could be exceeded.
    """

    def __init__(
        self,
        spool: Spool,
        quotas: Quotas,
        requests: Callable[[], RequestStore],
        threads: DatabaseThreads,
        conversations: ConversationKeeper,
        *,
        with_text: bool,
    ) -> None:
        self._spool = spool
        self._quotas = quotas
        self._requests = requests  # raises ModelError, StorageError
        self._threads = threads
        self._conversations = conversations
        self._with_text = with_text
        self._running: dict[str, RequestRow] = {}
        self._refused: dict[Arrival, dict[str, RequestRow]] = {}  # by code: refusals since the last drain
        self._unwritten: list[RequestRow] = []  # of this turn of the event loop, or after a write error
        self._is_failing = False  # the disk takes no rows
        self._drained = 0  # bytes of the spool that are in the database
        self._is_unreachable = False  # the database is unreachable
        self._draining = asyncio.Lock()

    async def begin(self, observers: Observers, running: Iterable[Record], store: LogStore) -> None:
        """Start recording the requests that these observers hear of, and the streams that are `running`. Completes the
        rows of earlier servers, and loads what keys and owners have spent.

        Raises: StorageError, ModelError; nothing is recorded then, and another log may `begin`.
        """
        left = self._spool.take_over()
        size = self._spool.size
        live_ids = set()
        observers.add(self)
        observers.meter = self
        for record in running:
            live_ids.add(record.stream_id)
            row = row_of_start(record, with_text=self._with_text)
            self._running[record.stream_id] = msgspec.structs.replace(row, replays=1)
            self._quotas.resume(record)
        try:  # awaits: streams may end from here on
            await self._settle([row for row in left if row.request_id not in live_ids], store)
            spent = await self._threads.run(lambda: self._requests().spent(time.time()))
        except BaseException:
            observers.remove(self)
            observers.meter = None
            self.close()
            raise
        self._spool.drop(size, self._running.values())
        self._quotas.spent_before(spent)

    async def _settle(self, left: Sequence[RequestRow], store: LogStore) -> None:
        """Copy the rows of earlier servers to the database, after their turns. Raises: StorageError, ModelError."""
        waiting = [row for row in left if not row.is_refusal]
        known = await self._threads.run(lambda: self._requests().known([row.request_id for row in waiting]))
        await self._conversations.write_all(
            (row.owner, row.request_id) for row in waiting if row.request_id not in known
        )
        complete = [row if row.status != RUNNING else await self._completed(row, store) for row in left]
        await self._threads.run(lambda: self._requests().add(complete), within_s=None)

    async def _completed(self, row: RequestRow, store: LogStore) -> RequestRow:
        if row.is_refusal:
            return row.completed()
        try:
            log = await store.read(row.owner, row.request_id)
        except TailraceError as error:
            if not isinstance(error, UnknownStream):
                logger.warning("the end of stream %s is unknown: %s", row.request_id, error)
            return row.completed()
        return row_with_end(row, log, with_text=self._with_text) if log.end is not None else row.completed()

    async def drain(self) -> None:
        """Copy the rows of ended requests to the database, if it is reachable."""
        async with self._draining:
            await self._drain()

    async def _drain(self) -> None:
        try:
            refused, self._refused = self._refused, {}
            self._unwritten += [row.completed() for by_code in refused.values() for row in by_code.values()]
            self._flush()
            size = self._spool.size  # not more: a partial last line is completed before the file grows
            await self._conversations.flush()
            while self._drained < size and (num_bytes := await self._copy_next()):
                self._drained += num_bytes
            if self._drained and (self._drained >= _TRUNCATE_BYTES or not self._running):
                self._spool.drop(self._drained, self._running.values())
                self._drained = 0
        except (StorageError, ModelError) as error:
            if not self._is_unreachable:
                logger.warning("the rows of requests stay on the disk for now: %s", error)
            self._is_unreachable = True
        else:
            if self._is_unreachable:
                logger.warning("the rows of requests are written to the database again")
            self._is_unreachable = False

    async def forget(self, owner: str) -> None:
        """Drain, so that no file has rows of this owner any more. Raises: StorageError."""
        async with self._draining:
            self._refused = {arrival: rows for arrival, rows in self._refused.items() if arrival.owner != owner}
            await self._drain()
            if self._is_unreachable:
                raise StorageError(UNREACHABLE)
            self._spool.drop(self._drained, self._running.values())
            self._drained = 0

    def close(self) -> None:
        self._flush()
        self._spool.close()

    @property
    def num_waiting_bytes(self) -> int:
        """Return how many bytes of rows are not in the database yet."""
        return self._spool.size - self._drained

    @contextlib.contextmanager
    def counted(self, arrival: Arrival) -> Iterator[None]:
        """Record a request to an app, and count it against the limits. It lasts as long as the block, and has no
        tokens. Raises: as `reserve`."""
        record = Record(
            new_stream_id(), time.time(), arrival.model, owner=arrival.owner, key_id=arrival.key_id, wire=arrival.wire
        )
        times = Times(time.monotonic())
        try:
            self.reserve(record)
        except TailraceError as error:
            self.on_refused(arrival, error)
            raise
        self.on_begun(record)
        end = End("cancelled", _NO_TOKENS)
        try:
            yield
            end = End("done", _NO_TOKENS)
        except TailraceError as error:
            end = End("error", _NO_TOKENS, Failure(error.code, error.message))
            raise
        finally:
            times.ended_s = time.monotonic()
            self.on_end(record, StreamLog(record, [end]), times)

    # generation.Meter

    def allowance(self, key_id: str, owner: str) -> Allowance:
        return self._quotas.allowance(key_id, owner)

    def reserve(self, record: Record) -> None:
        """Raises: StorageError while requests cannot be recorded; QuotaExceeded, RequestError as `Quotas.reserve`."""
        if self._is_failing or self.num_waiting_bytes > _MAX_BYTES:
            raise StorageError("Requests cannot be recorded at the moment.")
        self._quotas.reserve(record)

    def release(self, record: Record) -> None:
        self._quotas.release(record)

    # generation.Observer

    def on_refused(self, arrival: Arrival, error: TailraceError) -> None:
        """Count a refusal. The row of the first one of a kind is written now, so that a crash does not lose it, and
        again with the count at the next drain."""
        by_code = self._refused.setdefault(arrival, {})
        before = by_code.get(error.code)
        if before is None:
            row = by_code[error.code] = row_of_refusal(arrival, error, f"refused_{secrets.token_hex(12)}")
            self._write(row)
        else:
            by_code[error.code] = msgspec.structs.replace(before, num_requests=before.num_requests + 1)

    def on_begun(self, record: Record) -> None:
        row = self._running[record.stream_id] = row_of_start(record, with_text=self._with_text)
        self._write(row)

    def on_end(self, record: Record, log: StreamLog, times: Times) -> None:
        assert log.end is not None
        row = self._running.pop(record.stream_id, None) or row_of_start(record, with_text=self._with_text)
        ended = row_with_end(row, log, times, with_text=self._with_text)
        self._write(msgspec.structs.replace(ended, replays=ended.replays + row.replays))
        self._quotas.on_end(record, log.end)

    def _write(self, row: RequestRow) -> None:
        """Queue a row. The rows of one turn of the event loop are written together at its end."""
        if not self._unwritten:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unwritten.append(row)

    def _flush(self) -> None:
        """Write the queued rows. They stay queued if the write fails."""
        if not self._unwritten:
            return
        try:
            self._spool.append_all(self._unwritten)
        except StorageError as error:
            if not self._is_failing:
                logger.error("%s New streams are refused until that works.", error)
            self._is_failing = True
        else:
            self._unwritten = []
            self._is_failing = False

    async def _copy_next(self) -> int:
        """Copy the next part of the spool to the database. Returns its size in bytes. Raises: StorageError,
        ModelError."""
        # No timeout: a second attempt while the first one still runs would count sums twice.
        return await self._threads.run(lambda: self._copy(self._drained), within_s=None)

    def _copy(self, start: int) -> int:
        """Blocks."""
        rows, num_bytes = self._spool.read(start, _READ_BYTES)
        if ended := [row for row in rows if row.status != RUNNING]:
            self._requests().add(ended)
        return num_bytes
