"""What is kept of one response with MCP tools. The server that has its lease adds to it; others read what was added."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from tailrace.errors import JournalDamaged, LeaseLost, StorageError
from tailrace.server import Table, TableLease, row_key
from tailrace_plugins.tool_loop.loop_keys import CANCELLED, OPEN, READ, step_key
from tailrace_plugins.tool_loop.loop_rows import Begun, Called, Calling, Ended, Step, TurnEnded

__all__ = ["KeptLoop", "rows_until_end"]

logger = logging.getLogger("tailrace.mcp")

_RETRY_S = 1.0
_READ_AT_ONCE = 64  # steps
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Step).decode


class KeptLoop:
    """The steps of a response. Without a `lease`, another server goes on with it."""

    def __init__(self, table: Table, begun: Begun) -> None:
        self.begun = begun
        self.lease: TableLease | None = None
        self.turns: list[TurnEnded] = []
        self.called: dict[str, Called] = {}  # by the ids of the calls' items
        self.calling = Counter[str]()  # how often each went out
        self.end: Ended | None = None
        self._table = table
        self._num_steps = 0
        self._pending: list[Step] = []  # that may be written or not: whoever wrote them was cancelled
        self._writing = asyncio.Lock()
        self._changed = asyncio.Event()
        self._looked = asyncio.Event()

    @property
    def is_ours(self) -> bool:
        return self.lease is not None

    # Reading

    async def refresh(self) -> None:
        """Read what was added. Raises: StorageError, JournalDamaged if a step is missing."""
        owner, loop_id = self.begun.sender.owner, self.begun.loop_id
        prefix = step_key(owner, loop_id, 0)[:-8]
        while True:
            after = step_key(owner, loop_id, self._num_steps - 1) if self._num_steps else None
            page = await self._table.page(prefix, after=after, most=_READ_AT_ONCE)
            for key, row in page.items():
                if row is None or key != step_key(owner, loop_id, self._num_steps):
                    raise JournalDamaged("A step of this response is damaged.")
                self._add(_decode(row))
            if not page:
                self._looked.set()
                self._looked = asyncio.Event()
                return

    def _add(self, step: Step) -> None:
        self._num_steps += 1
        match step:
            case TurnEnded():
                self.turns.append(step)
            case Called():
                self.called[step.item_id] = step
            case Calling():
                self.calling[step.item_id] += 1
            case Ended():
                self.end = step
        self._wake()

    def take(self, lease: TableLease) -> None:
        """From now on this server goes on with it. It has read all steps since it has the lease."""
        self.lease = lease
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def changed(self) -> None:
        """Return when a step was added, or this server has the lease."""
        await self._changed.wait()

    async def looked(self) -> None:
        """Return when this server has looked for new steps."""
        await self._looked.wait()

    # Writing

    async def add(self, *steps: Step, is_synced: bool = False) -> None:
        """Return when the steps are kept, with `is_synced` also after a power cut. While they cannot be written,
        nothing else happens. Raises: LeaseLost."""
        async with self._writing:
            if self.end is not None:
                return
            self._pending += steps  # the number of a step that may be written is never given to another one
            added = tuple(self._pending)
            has_ended = any(isinstance(step, Ended) for step in added)
            await self._write(self._rows(added), has_ended=has_ended, is_synced=is_synced)
            self._pending.clear()
            for step in added:
                self._add(step)

    def _rows(self, steps: Sequence[Step]) -> dict[bytes, bytes]:
        owner, loop_id = self.begun.sender.owner, self.begun.loop_id
        return {step_key(owner, loop_id, self._num_steps + index): _encode(step) for index, step in enumerate(steps)}

    async def announce(self, item_id: str, *, is_synced: bool) -> None:
        """Return when it is kept that a call goes out, and no other server can know of the response without that.

        An answer of the table may be old when it is read: this process may have been stopped meanwhile, and another
        server may have taken the response. Then it is written once more, which is refused. Raises: LeaseLost.
        """
        await self.add(Calling(item_id), is_synced=is_synced)
        owner, loop_id = self.begun.sender.owner, self.begun.loop_id
        row = {step_key(owner, loop_id, self._num_steps - 1): _encode(Calling(item_id))}
        while not self._is_certain():
            await asyncio.sleep(_RETRY_S)
            await self._write(row, has_ended=False, is_synced=False)

    def check(self) -> None:
        """Raises: LeaseLost if this server has lost the lease, as far as it knows."""
        if self.lease is not None:
            self._is_certain()

    def _is_certain(self) -> bool:
        """Raises: LeaseLost."""
        assert self.lease is not None
        try:
            return self._table.is_certain(self.lease)
        except LeaseLost:
            self.lease = None
            raise

    async def _write(self, rows: Mapping[bytes, bytes], *, has_ended: bool, is_synced: bool) -> None:
        is_written = False
        while True:
            if self.lease is None:
                raise LeaseLost("Another server goes on with this response.")
            try:
                if not is_written:
                    await self._table.change(rows, await self._gone() if has_ended else (), lease=self.lease)
                    is_written = True
                if is_synced:
                    await self._table.sync()
                return
            except LeaseLost:
                self.lease = None
                raise
            except StorageError as error:
                logger.warning("A response with MCP tools waits: %s", error.message)
                await asyncio.sleep(_RETRY_S)

    async def _gone(self) -> list[bytes]:
        """Return the rows that go with the end. Raises: StorageError."""
        return await rows_until_end(self._table, self.begun.sender.owner, self.begun.loop_id)


async def rows_until_end(table: Table, owner: str, loop_id: str) -> list[bytes]:
    """Return the keys of the rows that a response has only until its end. Raises: StorageError."""
    open_key, cancelled, read = (row_key(kind, owner, loop_id) for kind in (OPEN, CANCELLED, READ))
    return [open_key, cancelled, *await table.sizes(read + b"/", most=_READ_AT_ONCE)]
