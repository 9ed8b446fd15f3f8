"""The rows of an extension in Redis: `tables.Table`. Every change checks the lease that it needs in the same step.

Bodies are in one hash, and their keys once more in a sorted set, for their order. A third hash counts the bytes of each
account, and under the empty name those of all; a fourth has the epoch of the server with the lease of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from tailrace.errors import JournalDamaged, LeaseLost
from tailrace.streams.rows import Rows
from tailrace.streams.tables import LEASE_GONE, PAGE_BYTES, TableLease
from tailrace_outer.redis._connection import Connection
from tailrace_outer.redis._members import Members
from tailrace_outer.redis._scripts import script

__all__ = ["RedisTable"]

_SIZE = """
local function size(row) return row and #row - (string.byte(row, 1) == 1 and tonumber(ARGV[1]) or 1) or 0 end
"""

# Keys: rows, order, used, holders. Arguments: the bytes that encrypting adds; key of the lease, or nothing, and its
# epoch; how many rows may not be there, and how many are written; the keys of the former, the keys and bodies of the
# latter, then the keys to erase. Returns 0 if the lease is another server's, 1 if a row is there that may not be, or
# what is used by each account that has changed, and by all.
_CHANGE = script(
    _SIZE
    + """
if ARGV[2] ~= '' and redis.call('HGET', KEYS[4], ARGV[2]) ~= ARGV[3] then return 0 end
local written = 6 + tonumber(ARGV[4])
for i = 6, written - 1 do
  if redis.call('HEXISTS', KEYS[1], ARGV[i]) == 1 then return 1 end
end
local grown, total, first = {}, 0, written + 2 * tonumber(ARGV[5])
local function count(key, bytes)
  local account = string.match(key, '^[^/]*/([^/]*)/')
  grown[account], total = (grown[account] or 0) + bytes, total + bytes
end
for i = written, first - 1, 2 do
  count(ARGV[i], size(ARGV[i + 1]) - size(redis.call('HGET', KEYS[1], ARGV[i])))
  redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1])
  redis.call('ZADD', KEYS[2], 0, ARGV[i])
end
for i = first, #ARGV do
  count(ARGV[i], -size(redis.call('HGET', KEYS[1], ARGV[i])))
  redis.call('HDEL', KEYS[1], ARGV[i])
  redis.call('ZREM', KEYS[2], ARGV[i])
  redis.call('HDEL', KEYS[4], ARGV[i])
end
local used = {'', redis.call('HINCRBY', KEYS[3], '', total)}
for account, bytes in pairs(grown) do
  local now = redis.call('HINCRBY', KEYS[3], account, bytes)
  if now == 0 then redis.call('HDEL', KEYS[3], account) end
  used[#used + 1], used[#used + 2] = account, now
end
return used
"""
)

# Keys: rows, order. Arguments: the bytes that encrypting adds; the first key as the sorted set has it; the key behind
# the last one; how many rows at most; for how many bytes, or 0 for sizes only. Returns keys, each with its row or size.
_PAGE = script(
    _SIZE
    + """
local found, bytes, most = {}, 0, tonumber(ARGV[5])
for i, key in ipairs(redis.call('ZRANGEBYLEX', KEYS[2], ARGV[2], '(' .. ARGV[3], 'LIMIT', 0, ARGV[4])) do
  local row = redis.call('HGET', KEYS[1], key)
  bytes = bytes + (row and #row or 0)
  found[#found + 1], found[#found + 2] = key, most > 0 and (row or '') or size(row)
  if most > 0 and bytes >= most then break end
end
return found
"""
)

# Keys: rows, holders, servers, lease of the server that has it. Arguments: key, epoch of this server, that of the
# server that has it, or nothing. Returns 1 if this server has it now. A server lives while it has its lease, and until
# others have declared it dead; one that is not listed any more left long ago.
_TAKE = script("""
local holder = redis.call('HGET', KEYS[2], ARGV[1]) or ''
if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0 then return 0 end
if holder == ARGV[2] then return 1 end
if holder ~= ARGV[3] then return 0 end
if holder ~= '' then
  local lease = redis.call('GET', KEYS[4])
  local is_listed = redis.call('SISMEMBER', KEYS[3], holder) == 1
  if lease and lease ~= 'dead' or not lease and is_listed then return 0 end
end
redis.call('HSET', KEYS[2], ARGV[1], ARGV[2])
return 1
""")


class RedisTable:
    """Each method is one round trip, except `take`. Used from one event loop only."""

    is_shared = True

    def __init__(self, name: str, connection: Connection, members: Members, rows: Rows) -> None:
        self._name = name
        self._connection = connection
        self._members = members
        self._rows = rows
        self._num_added = Rows.num_added(rows.encrypt(b"", ""))
        self._used: dict[bytes, int] = {}
        self._on_change: Callable[[], None] = lambda: None

    def _key(self, part: str) -> str:
        return self._connection.keys.shared_log(self._name, part)

    def used(self, account: bytes | None = None) -> int:
        return self._used.get(account or b"", 0)

    async def refresh(self) -> None:
        """Learn what other servers have changed. Raises: StorageError."""
        found = await self._connection.ask(self._connection.client.hgetall(self._key("used")))
        self._used = {account: int(num_bytes) for account, num_bytes in found.items()}
        self._on_change()

    def listen(self, on_change: Callable[[], None]) -> None:
        self._on_change = on_change

    async def get(self, *keys: bytes) -> list[bytes | None]:
        if not keys:
            return []
        found = await self._connection.ask(self._connection.client.hmget(self._key("rows"), list(keys)))
        return [self._open(key, row) for key, row in zip(keys, found, strict=True)]

    async def page(self, prefix: bytes, *, after: bytes | None = None, most: int) -> dict[bytes, bytes | None]:
        found = await self._page(prefix, after, most, PAGE_BYTES)
        return {key: self._open(key, row) for key, row in found.items()}

    async def sizes(self, prefix: bytes, *, after: bytes | None = None, most: int) -> dict[bytes, int]:
        return await self._page(prefix, after, most, 0)

    async def _page(self, prefix: bytes, after: bytes | None, most: int, most_bytes: int) -> dict[bytes, Any]:
        """Return keys with rows or sizes. Any: one of the two."""
        first = b"[" + prefix if after is None else b"(" + after
        end = prefix[:-1] + bytes([prefix[-1] + 1])
        keys = [self._key("rows"), self._key("order")]
        found = await self._connection.run(_PAGE, keys, self._num_added, first, end, most, most_bytes)
        return dict(zip(found[::2], found[1::2], strict=True))

    async def change(
        self,
        rows: Mapping[bytes, bytes],
        erased: Iterable[bytes] = (),
        *,
        lease: TableLease | None = None,
        absent: Collection[bytes] = (),
    ) -> bool:
        keys = [self._key(part) for part in ("rows", "order", "used", "holders")]
        held = (lease.key, lease.holder) if lease is not None else (b"", 0)
        written = [part for key, body in rows.items() for part in (key, self._rows.encrypt(body, self._name_of(key)))]
        gone = list(erased)
        counts = (len(absent), len(rows))
        used = await self._connection.run(_CHANGE, keys, self._num_added, *held, *counts, *absent, *written, *gone)
        if used == 0:
            raise LeaseLost(LEASE_GONE)
        if used == 1:
            return False
        self._used |= {account: int(num_bytes) for account, num_bytes in zip(used[::2], used[1::2], strict=True)}
        if gone:
            self._on_change()
        return True

    async def take(self, key: bytes) -> TableLease | None:
        epoch, client, names = self._members.epoch, self._connection.client, self._connection.keys
        holder: bytes | None = await self._connection.ask(client.hget(self._key("holders"), key))
        if holder is not None and int(holder) in self._members.alive:
            return None
        keys = [self._key("rows"), self._key("holders"), names.servers, names.lease(int(holder or epoch))]
        if not await self._connection.run(_TAKE, keys, key, epoch, holder or b""):
            return None
        return TableLease(key, epoch)

    async def is_held(self, key: bytes) -> bool:
        holder: bytes | None = await self._connection.ask(self._connection.client.hget(self._key("holders"), key))
        return holder is not None and (int(holder) == self._members.epoch or int(holder) in self._members.alive)

    def is_certain(self, lease: TableLease) -> bool:
        if lease.holder != self._members.epoch:
            raise LeaseLost(LEASE_GONE)
        return self._members.is_certain

    async def sync(self) -> None:
        """A change is in Redis when its reply is here."""

    def _open(self, key: bytes, row: bytes | None) -> bytes | None:
        try:
            return self._rows.open(row, self._name_of(key)) if row else None
        except JournalDamaged:
            return None

    def _name_of(self, key: bytes) -> str:
        return f"{self._name} {key.hex()}"
