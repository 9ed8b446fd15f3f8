"""Tables of extensions: rows of bytes by row key, on one machine or in a Redis that many servers share.

A row key is `KIND/ACCOUNT/NAME`, and rows are counted by the account in it. Neither knows what the rest means.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from typing import NamedTuple, Protocol

from tailrace.errors import LeaseLost, StorageError
from tailrace.streams.notes import LocalNotes

__all__ = [
    "LEASE_GONE", "PAGE_BYTES", "LocalTable", "Table", "TableLease", "account_in", "account_of", "look_at_changes",
    "row_key",
]  # fmt: skip

PAGE_BYTES = 2**18  # a page of rows ends with the row that exceeds this
_COUNTED_AT_ONCE = 1_000
LEASE_GONE = "Another server has this row now, or it was deleted."


class TableLease(NamedTuple):
    """The right to work on what a row stands for. One server that lives has it at a time."""

    key: bytes
    holder: int


class Table(Protocol):
    """The rows of an extension. Row keys are in the order of their bytes. Used from one event loop only.

    Coroutines raise StorageError; those with a lease raise LeaseLost, and change nothing, if another server has the
    lease or its row was erased.
    """

    is_shared: bool  # whether other servers change it, too

    def used(self, account: bytes | None = None) -> int:
        """Return the bytes of an account, or of all, as this server knows them."""

    def listen(self, on_change: Callable[[], None]) -> None:
        """Call a function when rows were erased; in a shared table also every few seconds, since other servers may have
        erased some, or died."""

    async def get(self, *keys: bytes) -> list[bytes | None]:
        """Return the rows with these row keys. None: there is none, or it is damaged."""

    async def page(self, prefix: bytes, *, after: bytes | None = None, most: int) -> dict[bytes, bytes | None]:
        """Return rows whose row keys begin with `prefix`: those behind the row key `after`, at most `most` of them,
        and not many more bytes than PAGE_BYTES. It is empty only behind the last one. None is a damaged row."""

    async def sizes(self, prefix: bytes, *, after: bytes | None = None, most: int) -> dict[bytes, int]:
        """Return the bytes of rows by their row key, at most `most` of them, chosen as in `page`."""

    async def change(
        self,
        rows: Mapping[bytes, bytes],
        erased: Iterable[bytes] = (),
        *,
        lease: TableLease | None = None,
        absent: Collection[bytes] = (),
    ) -> bool:
        """Write rows, and erase others: all or none. Returns whether this was done: not if there is a row with one of
        the row keys in `absent`."""

    async def take(self, key: bytes) -> TableLease | None:
        """Take the lease of a row. None: there is no such row, or another server that lives has its lease. Whoever has
        it may take it again. It ends with the row, or with the server."""

    async def is_held(self, key: bytes) -> bool:
        """Return whether a server that lives, such as this one, has the lease of a row."""

    def is_certain(self, lease: TableLease) -> bool:
        """Return whether no other server can have taken a lease by now. False: it may be so again soon, after a change
        with the lease. Raises: LeaseLost if this server has begun again, as after it was taken for dead."""

    async def sync(self) -> None:
        """Return when all changes survive a power cut of this machine. In Redis they survive what its settings say."""


def account_of(owner: str) -> bytes:
    """Return what stands for an owner in row keys."""
    return hashlib.sha256(owner.encode()).hexdigest()[:32].encode()


def row_key(kind: bytes, owner: str, name: str = "") -> bytes:
    """Return a row key, or without a name what the row keys of an owner and a kind begin with."""
    return b"%b/%b/%b" % (kind, account_of(owner), name.encode())


async def look_at_changes(
    has_changed: asyncio.Event, look: Callable[[], Awaitable[None]], logger: logging.Logger, what: str
) -> None:
    """Look for what other servers have left, or have done, whenever something may have changed. Never returns. The log
    calls it `what`, such as "Batches"."""
    while True:
        await has_changed.wait()
        has_changed.clear()
        try:
            await look()
        except StorageError:
            continue  # it looks again soon
        except Exception:  # a defect must not end the server
            logger.exception("%s of other servers are not looked for.", what)


def account_in(key: bytes) -> bytes:
    return key.split(b"/", 2)[1]


class LocalTable:
    """Rows in the notes of this machine. `open` counts what is there. Its coroutines do not wait."""

    is_shared = False

    def __init__(self, notes: LocalNotes) -> None:
        self._notes = notes
        self._used: Counter[bytes] = Counter()
        self._on_change: Callable[[], None] = lambda: None
        self._holders: dict[bytes, int] = {}
        self._numbers = itertools.count(1)

    @classmethod
    async def open(cls, notes: LocalNotes) -> LocalTable:
        """Raises: StorageError."""
        table = cls(notes)
        after: bytes | None = None
        while sizes := notes.sizes(after=after, most=_COUNTED_AT_ONCE):
            for key, num_bytes in sizes.items():
                table._used[account_in(key)] += num_bytes
            after = next(reversed(sizes))
            await asyncio.sleep(0)
        return table

    def used(self, account: bytes | None = None) -> int:
        return self._used.total() if account is None else self._used[account]

    def listen(self, on_change: Callable[[], None]) -> None:
        self._on_change = on_change

    async def get(self, *keys: bytes) -> list[bytes | None]:
        return [self._notes.get(key) for key in keys]

    async def page(self, prefix: bytes, *, after: bytes | None = None, most: int) -> dict[bytes, bytes | None]:
        found: dict[bytes, bytes | None] = {}
        num_bytes = 0
        while len(found) < most and num_bytes < PAGE_BYTES:
            sizes = self._notes.sizes(prefix, after=after, most=1)  # the database reads whole rows for their sizes
            if not sizes:
                break
            ((after, size),) = sizes.items()
            found[after] = self._notes.get(after)
            num_bytes += size
        return found

    async def sizes(self, prefix: bytes, *, after: bytes | None = None, most: int) -> dict[bytes, int]:
        return self._notes.sizes(prefix, after=after, most=most)

    async def change(
        self,
        rows: Mapping[bytes, bytes],
        erased: Iterable[bytes] = (),
        *,
        lease: TableLease | None = None,
        absent: Collection[bytes] = (),
    ) -> bool:
        if lease is not None:
            self.is_certain(lease)
        if any(self._is_there(key) for key in absent):
            return False
        gone = list(erased)
        before = {key: self._size(key) for key in (*rows, *gone)}
        self._notes.change(rows, gone)
        for key, num_bytes in before.items():
            self._used[account_in(key)] += len(rows.get(key, b"")) - num_bytes
        for key in gone:
            self._holders.pop(key, None)
        if gone:
            self._on_change()
        return True

    async def take(self, key: bytes) -> TableLease | None:
        if not self._is_there(key):
            return None
        return TableLease(key, self._holders.setdefault(key, next(self._numbers)))

    async def is_held(self, key: bytes) -> bool:
        return key in self._holders

    def is_certain(self, lease: TableLease) -> bool:
        if self._holders.get(lease.key) != lease.holder:
            raise LeaseLost(LEASE_GONE)
        return True

    async def sync(self) -> None:
        await self._notes.sync()

    def _is_there(self, key: bytes) -> bool:
        return key in self._notes.sizes(key, most=1)

    def _size(self, key: bytes) -> int:
        return self._notes.sizes(key, most=1).get(key, 0)
