"""Durable streams that servers share: every server has the state, and all agree on one log of its changes.

An operation is decided on the state of this server, and appended to the log if no other server has appended anything
since. Otherwise this server applies what the others have appended, and the operation is decided again. So all rules
hold for all servers together. A read is an operation without changes: it is confirmed in the same way, and sees what
any server has confirmed before. Operations that wait at the same time are decided together, and take one round trip.

Two alternatives were worse. If servers replicated requests, all of them would have to decide alike, in every version.
If each stream had a writer, requests would have to be forwarded, and forks would need two writers.

A long log is replaced by a snapshot. If Redis has lost entries that this server has applied, it writes its state as a
snapshot. It cannot do so if another server has appended other entries first; then the lost entries are gone. So after
an error of Redis, all servers wait for `_WAIT_AFTER_ERROR_S`, so that the server with the newest state can write it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import msgspec

from tailrace.errors import JournalDamaged, JournalFull, StorageError, StreamError, UnknownStream
from tailrace.server import SHUTTING_DOWN, AppendResult, Entry, EntryId, LogListener, SharedLog
from tailrace_plugins.durable_streams.draft import DraftStore
from tailrace_plugins.durable_streams.durable_changes import Appended, Created, Dropped, DurableChange
from tailrace_plugins.durable_streams.durable_store import DurableStore
from tailrace_plugins.durable_streams.durable_stream import DurableStream
from tailrace_plugins.durable_streams.snapshot import snapshot

__all__ = ["SharedDurableStreams"]

logger = logging.getLogger("tailrace.journal")

T = TypeVar("T")
ChangeOfStream = tuple[bytes, DurableChange]

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[ChangeOfStream]).decode

_RETRY_S = 0.05  # while Redis is away
_TURN_S = 0.005  # between two tries while it is the turn of another server
_WAIT_AFTER_ERROR_S = 1.0  # longer than other servers need to find out what Redis has lost
_TRIES_BEFORE_TURN = 3  # tries after which this server asks for a turn
_ERASE_S = 60.0  # after which deleted content is removed from the log
_OPERATIONS = 128  # in one entry; they are decided without a pause
_ENTRY_BYTES = 2**20
_PART_CHANGES = 1_000  # of a snapshot
_PART_BYTES = 2**18
_IDS = 10_000  # of the last entries; to tell a log that has lost its end from one with other entries


@dataclass(eq=False, slots=True)
class _Waiting:
    """An operation, and what it has returned or raised in a draft."""

    operation: Callable[[DurableStore], Any]  # Any: each has its own result
    future: asyncio.Future[Any]
    result: Any = None
    error: Exception | None = None
    has_changes: bool = False

    def decide(self, draft: DraftStore) -> None:
        num_changes = len(draft.changes)
        self.result = self.error = None
        try:
            self.result = self.operation(draft)
        except Exception as error:
            self.error = error
        self.has_changes = len(draft.changes) > num_changes

    def settle(self) -> None:
        if self.future.done():
            return
        if self.error is not None:
            self.future.set_exception(self.error)
        else:
            self.future.set_result(self.result)

    def fail(self, error: StorageError) -> None:
        self.error = type(error)(error.message)  # each has its own traceback
        self.settle()


class SharedDurableStreams(LogListener):
    """`DurableStreams` over a log in Redis. `run` must be running. Listens to the log."""

    def __init__(self, log: SharedLog) -> None:
        self.log = log
        self._state = DurableStore(budget_bytes=0)
        self._ids: deque[EntryId] = deque([EntryId()], maxlen=_IDS)  # that the state has had; the last is the present
        self._waiting: deque[_Waiting] = deque()
        self._is_behind = False  # other servers may have appended
        self._announced = 0  # the number of the last entry, as `on_appended` has heard
        self._is_due = asyncio.Event()
        self._snapshot_due = asyncio.Event()
        self._erase_at_s = math.inf  # monotonic; there is deleted content in the log
        self._is_loaded = False
        self._is_closing = False
        self._failing_since_s: float | None = None  # monotonic
        self._wait_until_s = 0.0  # monotonic; until then other servers may have what Redis has lost

    # What a server does

    async def perform(self, operation: Callable[[DurableStore], T]) -> T:
        result: T = await self._enqueue(operation)
        return result

    def _enqueue(self, operation: Callable[[DurableStore], Any]) -> asyncio.Future[Any]:
        waiting = _Waiting(operation, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        self._is_due.set()
        return waiting.future

    async def find(self, key: bytes) -> DurableStream:
        await self.perform(lambda store: store.find(key))
        return self._present(key)

    async def use(self, key: bytes) -> DurableStream:
        await self.perform(lambda store: store.use(key))
        return self._present(key)

    def _present(self, key: bytes) -> DurableStream:
        """Return the stream that was found, outside of a draft. Raises: UnknownStream."""
        stream = self._state.streams.get(key)
        if stream is None:  # deleted in this moment
            raise UnknownStream("There is no such stream.")
        return stream

    def close(self) -> None:
        self._is_closing = True
        self._state.close()

    # What the log tells

    def on_appended(self, number: int) -> None:
        if self._is_loaded:
            self._announced = number
            self._is_due.set()

    def on_failure(self) -> None:
        self._wait_until_s = time.monotonic() + _WAIT_AFTER_ERROR_S
        self._is_behind = self._is_loaded
        self._is_due.set()

    def on_tick(self) -> None:
        """Tell the others which streams have readers, whose TTL does not run. Find out what was appended."""
        for stream in self._state.streams.values():
            if stream.num_readers and stream.is_use_due:
                self._enqueue(partial(_keep_alive, stream.key)).add_done_callback(_ignore)
        if time.monotonic() >= self._erase_at_s:
            self._snapshot_due.set()
        self._is_behind = self._is_loaded
        self._is_due.set()

    # The state

    @property
    def _last_id(self) -> EntryId:
        """Return the last entry that the state has."""
        return self._ids[-1]

    async def load(self, budget_bytes: int) -> None:
        """Raises: StorageError, JournalDamaged if it cannot be read."""
        self._state.budget_bytes = budget_bytes
        await self._load()
        self._is_loaded = True

    async def _load(self) -> None:
        """Replace the state by that of the log. Raises: StorageError, JournalDamaged."""
        loaded = await self.log.load()
        state, former = DurableStore(budget_bytes=self._state.budget_bytes, keeps_use=True), self._state
        for body in loaded.bodies:
            state.restore(_read(body))
        self._state = state
        self._ids.clear()
        self._ids.extend(loaded.ids)
        if self._is_closing:
            state.close()
        for stream in former.streams.values():
            stream.halt()  # its readers continue with the new one

    def _apply(self, entry: Entry) -> None:
        """Raises: JournalDamaged."""
        self._state.restore(_read(self.log.body(entry)))
        self._ids.append(entry.entry_id)

    # The log

    async def run(self) -> None:
        """Perform operations, and write snapshots, until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._write_snapshots())
                group.create_task(self._perform_all())
        finally:
            _fail(self._waiting, StorageError(SHUTTING_DOWN))

    async def _perform_all(self) -> None:
        while True:
            await self._is_due.wait()
            self._is_due.clear()
            while self._waiting or self._is_behind or self._announced > self._last_id.number:
                self._is_behind, self._announced = False, 0
                await self._settle(self._take_some())

    def _take_some(self) -> list[_Waiting]:
        taken: list[_Waiting] = []
        while self._waiting and len(taken) < _OPERATIONS:
            waiting = self._waiting.popleft()
            if not waiting.future.done():
                taken.append(waiting)
        return taken

    async def _settle(self, operations: list[_Waiting]) -> None:
        """Let operations return or fail. Those that may not be in one entry wait again."""
        try:
            await self._commit(operations)
        except JournalFull as error:
            _fail([waiting for waiting in operations if waiting.has_changes], error)
            self._waiting.extendleft(waiting for waiting in reversed(operations) if not waiting.has_changes)
        except StorageError as error:
            if isinstance(error, JournalDamaged):
                logger.error("%s", error.message)
            _fail(operations, error)
        except asyncio.CancelledError:
            _fail(operations, StorageError(SHUTTING_DOWN))
            raise

    async def _commit(self, operations: list[_Waiting]) -> None:
        """Return when the log has the changes of the operations, which then are settled.

        Raises: StorageError if Redis was away for too long, JournalFull, JournalDamaged.
        """
        is_fresh = False  # the state was that of the log after the operations came
        for num_tries in itertools.count():
            draft = self._decide(operations)
            entry = self.log.entry(self._last_id, _encode(draft.changes) if draft.changes else b"")
            if is_fresh and not entry.row:
                break
            reply = await self._append(
                entry, must_be_sure=bool(operations), asks_for_turn=num_tries >= _TRIES_BEFORE_TURN
            )
            if reply is None:
                is_fresh = False
                continue
            entries = list(reply.entries)
            is_kept = reply.is_appended or (bool(entry.row) and entries[:1] == [entry])
            if is_kept:  # perhaps by an earlier try, of which the reply was lost
                draft.keep()
                self._ids.append(entry.entry_id)
                if any(isinstance(change, Dropped) for _, change in draft.changes):
                    self._erase_at_s = min(self._erase_at_s, time.monotonic() + _ERASE_S)
                entries = [] if reply.is_appended else entries[1:]
            for other in entries:
                self._apply(other)
            if reply.needs_snapshot:
                self._snapshot_due.set()
            is_fresh = self._last_id == reply.last
            if is_kept or (not entries and not entry.row):
                break
            if not entries:
                await asyncio.sleep(_TURN_S)
        for waiting in operations:
            waiting.settle()

    def _decide(self, operations: list[_Waiting]) -> DraftStore:
        """Run operations on a draft. Those that are too many for one entry are removed, and wait again."""
        draft = DraftStore(self._state)
        for position, waiting in enumerate(operations):
            if draft.num_bytes - self._state.num_bytes >= _ENTRY_BYTES:
                self._waiting.extendleft(reversed(operations[position:]))
                del operations[position:]
                break
            waiting.decide(draft)
        return draft

    async def _append(self, entry: Entry, *, must_be_sure: bool, asks_for_turn: bool) -> AppendResult | None:
        """Append the entry; retry after errors. With `must_be_sure`, wait first until other servers have had time to
        restore what Redis has lost. Returns None if the state was replaced. Raises: StorageError; then the entry may
        have been appended."""
        was_sent = False
        while True:
            only_looks = must_be_sure and time.monotonic() < self._wait_until_s
            sent = Entry(self._last_id) if only_looks else entry
            try:
                reply = await self.log.append(self._last_id, sent, asks_for_turn=asks_for_turn)
                is_replaced = not reply.is_known and not await self._write_again(reply.last)
            except StorageError as error:
                if isinstance(error, JournalDamaged) or (isinstance(error, JournalFull) and sent.row):
                    raise
                was_sent = was_sent or bool(sent.row)
                await self._wait_for_retry(error)
                continue
            if is_replaced and was_sent:
                raise StorageError("The log store of this server did not say whether the change was kept.")
            if is_replaced:
                return None
            if reply.is_known:
                self._failing_since_s = None
                if reply.entries or not only_looks:
                    return reply
            await asyncio.sleep(_RETRY_S)

    async def _write_again(self, last: EntryId) -> bool:
        """Called if the log, which ends with `last`, lacks the last entry of this server. Returns True if the log has
        no other new entries: this server then writes its state as a snapshot. Otherwise loads the state from the log
        and returns False. Raises: StorageError, JournalDamaged."""
        if last == EntryId() or last in self._ids:
            if await self.log.replace(tuple(self._ids), _parts(snapshot(self._state)), lost=last):
                logger.warning("Redis had lost the last changes of durable streams. They are written again.")
            return True
        if last.number <= self._last_id.number:
            logger.warning("Redis has lost changes of durable streams, and has other ones. They are read again.")
        await self._load()
        return False

    async def _wait_for_retry(self, error: StorageError) -> None:
        """Raises: the error, if Redis has been away for too long."""
        now_s = time.monotonic()
        self._wait_until_s = now_s + _WAIT_AFTER_ERROR_S
        if self._failing_since_s is None:
            self._failing_since_s = now_s
        if now_s - self._failing_since_s >= self.log.give_up_after_s:
            raise error
        await asyncio.sleep(_RETRY_S)

    async def _write_snapshots(self) -> None:
        while True:
            await self._snapshot_due.wait()
            self._snapshot_due.clear()
            erase_at_s, self._erase_at_s = self._erase_at_s, math.inf
            is_done = False
            with contextlib.suppress(StorageError):
                is_done = await self.log.replace(tuple(self._ids), _parts(snapshot(self._state)))
            if not is_done and erase_at_s < math.inf:
                self._erase_at_s = time.monotonic() + _ERASE_S


def _read(body: bytes) -> list[ChangeOfStream]:
    """Raises: JournalDamaged."""
    try:
        return _decode(body)
    except msgspec.DecodeError:
        raise JournalDamaged("Another version of tailrace wrote the durable streams in Redis.") from None


def _parts(changes: Iterable[ChangeOfStream]) -> Iterator[bytes]:
    """Yield changes in parts of a limited size: encoding one must not take long."""
    part: list[ChangeOfStream] = []
    num_bytes = 0
    for key, change in changes:
        part.append((key, change))
        if isinstance(change, Created | Appended):
            num_bytes += sum(map(len, change.pieces))
        if len(part) == _PART_CHANGES or num_bytes >= _PART_BYTES:
            yield _encode(part)
            part, num_bytes = [], 0
    if part:
        yield _encode(part)


def _keep_alive(key: bytes, store: DurableStore) -> None:
    with contextlib.suppress(StreamError):
        store.use(key)


def _fail(operations: Iterable[_Waiting], error: StorageError) -> None:
    for waiting in operations:
        waiting.fail(error)


def _ignore(future: asyncio.Future[Any]) -> None:
    """Do not warn of an error that nobody waits for."""
    if not future.cancelled():
        future.exception()
