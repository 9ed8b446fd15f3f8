"""A log in Redis that all servers append to: `notes.SharedLog`.

The log begins with a snapshot in several parts. Entries follow; each has the bytes of one commit. An entry has a
number and a random token. A server compares the token of its last entry with the log, to detect that Redis has lost
entries in a failover. The snapshot has the tokens of the last entries that it replaced, for the same comparison. A
server can append only after the last entry that it has applied. If the log has later entries, it gets those instead.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence

from tailrace.errors import JournalDamaged
from tailrace.streams.notes import AppendResult, Entry, EntryId, LoadedLog, LogListener
from tailrace.streams.rows import Rows
from tailrace_outer.redis._connection import Connection
from tailrace_outer.redis._follower import Entries
from tailrace_outer.redis._scripts import script

__all__ = ["RedisSharedLog"]

_TOKEN_BYTES = 8
_TURN_MS = 1_000
_WRITER_MS = 60_000

# Parts of the scripts. Where the log ends and where its snapshot ends, with the ids of these entries; the bytes of the
# list and of the snapshot.
_READ = """
local function read()
  local has = redis.call('HMGET', KEYS[1], 'last', 'last_id', 'first', 'first_id', 'bytes', 'kept')
  local log = {last = tonumber(has[1] or 0), last_id = has[2] or '', first = tonumber(has[3] or 0)}
  log.first_id, log.bytes, log.kept = has[4] or '', tonumber(has[5] or 0), tonumber(has[6] or 0)
  return log
end
local function id_of(log, number)
  if number == log.last then return log.last_id end
  if number == log.first then return log.first_id end
  if number < log.first or number > log.last then return false end
  local entry = redis.call('LINDEX', KEYS[2], number - log.last - 1)
  return entry and string.sub(entry, 1, 8)
end
local function slice(first)
  local rows, bytes = redis.call('LRANGE', KEYS[2], first, first < 0 and math.min(first + 63, -1) or first + 63), 0
  for i, row in ipairs(rows) do
    bytes = bytes + #row
    if bytes > 4000000 and i > 1 then return {unpack(rows, 1, i - 1)} end
  end
  return rows
end
"""

# Keys: ends, log, tail, turn. Arguments: number and id of the last entry that the server has; its name; an entry, or
# nothing; 1 if it asks for a turn. Returns whether the server's last entry is in the log, and the last entry of the log
# and its id; bytes of the list and of the snapshot; whether the entry was appended; the entries that the server lacks.
_APPEND = script(
    _READ
    + """
local log, number = read(), tonumber(ARGV[1])
if id_of(log, number) ~= ARGV[2] then return {0, log.last, log.last_id, log.bytes, log.kept, 0, {}} end
local turn, done = redis.call('GET', KEYS[4]), 0
local is_free = not turn or turn == ARGV[3]
if number < log.last and ARGV[5] == '1' and is_free then redis.call('SET', KEYS[4], ARGV[3], 'PX', ARGV[6]) end
if number == log.last and turn == ARGV[3] then redis.call('DEL', KEYS[4]) end
if number == log.last and ARGV[4] ~= '' and is_free then
  redis.call('RPUSH', KEYS[2], ARGV[4])
  log.last, log.last_id = log.last + 1, string.sub(ARGV[4], 1, 8)
  log.bytes = redis.call('HINCRBY', KEYS[1], 'bytes', #ARGV[4])
  redis.call('HSET', KEYS[1], 'last', log.last, 'last_id', log.last_id)
  redis.call('XADD', KEYS[3], 'MAXLEN', 1, '*', 'n', log.last)
  done, number = 1, log.last
end
local rows = number < log.last and slice(number - log.last) or {}
return {1, log.last, log.last_id, log.bytes, log.kept, done, rows}
"""
)

# Keys: ends, log. Arguments: position in the list. Returns last entry and its id, end of the snapshot and its id,
# length of the list, and elements from this position on.
_LOAD = script(
    _READ
    + """
local log = read()
local length = redis.call('LLEN', KEYS[2])
return {log.last, log.last_id, log.first, log.first_id, length, slice(tonumber(ARGV[1]))}
"""
)

# Keys: new. Arguments: a part of a snapshot; how long in ms it waits for the next one.
_ADD = script("""
redis.call('RPUSH', KEYS[1], ARGV[1])
redis.call('PEXPIRE', KEYS[1], ARGV[2])
""")

# Keys: ends, log, tail, writer, new. Arguments: number and id of the last entry in the snapshot; its bytes; how many
# parts it has; last entry and id of the log, if the log has lost that entry, else -1. Replaces all entries up to that
# one. Returns 1 if it did.
_REPLACE = script(
    _READ
    + """
local log, number = read(), tonumber(ARGV[1])
redis.call('DEL', KEYS[4])
local is_ahead = log.last == tonumber(ARGV[5]) and log.last_id == ARGV[6]
local is_known = number >= log.first and id_of(log, number) == ARGV[2]
if not (is_ahead or is_known) or redis.call('LLEN', KEYS[5]) ~= tonumber(ARGV[4]) then
  redis.call('DEL', KEYS[5])
  return 0
end
local bytes = tonumber(ARGV[3])
if not is_ahead and number < log.last then
  for i, row in ipairs(redis.call('LRANGE', KEYS[2], number - log.last, -1)) do
    redis.call('RPUSH', KEYS[5], row)
    bytes = bytes + #row
  end
end
redis.call('RENAME', KEYS[5], KEYS[2])
redis.call('PERSIST', KEYS[2])
redis.call('HSET', KEYS[1], 'first', number, 'first_id', ARGV[2], 'bytes', bytes, 'kept', ARGV[3])
if is_ahead then
  redis.call('HSET', KEYS[1], 'last', number, 'last_id', ARGV[2])
  redis.call('XADD', KEYS[3], 'MAXLEN', 1, '*', 'n', number)
end
return 1
"""
)


class RedisSharedLog:
    """Each method is one round trip, except those about a snapshot. Used from one event loop only."""

    def __init__(
        self, name: str, connection: Connection, rows: Rows, *, give_up_after_s: float, spare_bytes: int = 2**20
    ) -> None:
        self.give_up_after_s = give_up_after_s
        self._log_name = name
        self._connection = connection
        self._rows = rows
        self._spare_bytes = spare_bytes  # that entries may take in any case before there is a snapshot of them
        self._name = os.urandom(_TOKEN_BYTES).hex()  # of this server
        self._listener: LogListener | None = None
        self.tail_key = self._key("tail")
        self._keys = (self._key(), self._key("log"))

    def _key(self, part: str = "") -> str:
        return self._connection.keys.shared_log(self._log_name, part)

    def listen(self, listener: LogListener) -> None:
        self._listener = listener

    # What the store hears of

    def take(self, entries: Entries) -> None:
        """Entries of the key `tail_key` have come: a server has appended to the log."""
        if self._listener is not None:
            self._listener.on_appended(int(entries[-1][1][b"n"]))

    def on_failure(self) -> None:
        if self._listener is not None:
            self._listener.on_failure()

    def on_tick(self) -> None:
        if self._listener is not None:
            self._listener.on_tick()

    # What an extension does

    def entry(self, after: EntryId, body: bytes) -> Entry:
        if not body:
            return Entry(after)
        number, token = after.number + 1, os.urandom(_TOKEN_BYTES)
        return Entry(EntryId(number, token), token + self._rows.encrypt(body, f"{self._log_name} {number}"))

    def body(self, entry: Entry) -> bytes:
        return self._read(entry.row[_TOKEN_BYTES:], f"{entry.entry_id.number}")

    def _read(self, row: bytes, name: str) -> bytes:
        try:
            return self._rows.open(row, f"{self._log_name} {name}")
        except JournalDamaged:
            raise self._unreadable() from None

    def _unreadable(self) -> JournalDamaged:
        return JournalDamaged(
            f"The log of {self._log_name} in Redis cannot be read: it was damaged, or another version wrote it."
        )

    async def append(self, after: EntryId, entry: Entry, *, asks_for_turn: bool) -> AppendResult:
        keys = [*self._keys, self.tail_key, self._key("turn")]
        about = after.number, after.token, self._name, entry.row, int(asks_for_turn), _TURN_MS
        known, last, last_id, num_bytes, kept, done, rows = await self._connection.run(_APPEND, keys, *about)
        first = after.number + 1
        return AppendResult(
            bool(known),
            bool(done),
            EntryId(last, last_id),
            [Entry(EntryId(first + n, row[:_TOKEN_BYTES]), row) for n, row in enumerate(rows)],
            num_bytes - kept > max(self._spare_bytes, kept),
        )

    async def load(self) -> LoadedLog:
        while True:
            rows: list[bytes] = []
            last, last_id, first, first_id, length, some = await self._connection.run(_LOAD, self._keys, 0)
            snapshot = first, first_id
            while some and (first, first_id) == snapshot:
                rows += some
                reply = await self._connection.run(_LOAD, self._keys, len(rows))
                last, last_id, first, first_id, length, some = reply
            if length < last - first:
                raise self._unreadable()
            end = rows[-1][:_TOKEN_BYTES] if last > first else first_id
            if (first, first_id) == snapshot and len(rows) == length and end == last_id:
                break
        num_parts = length - (last - first)
        ids = self._read_ids(rows[0], first) if num_parts else [EntryId()]
        bodies = [self._read(rows[position], f"part {position} of {first}") for position in range(1, num_parts)]
        for number, row in enumerate(rows[num_parts:], first + 1):
            ids.append(EntryId(number, row[:_TOKEN_BYTES]))
            bodies.append(self.body(Entry(ids[-1], row)))
        return LoadedLog(bodies, ids)

    def _read_ids(self, row: bytes, last: int) -> list[EntryId]:
        """Raises: JournalDamaged."""
        tokens = self._read(row, f"ids {last}")
        first = last + 1 - len(tokens) // _TOKEN_BYTES
        return [
            EntryId(number, tokens[(number - first) * _TOKEN_BYTES :][:_TOKEN_BYTES])
            for number in range(first, last + 1)
        ]

    async def replace(self, ids: Sequence[EntryId], parts: Iterable[bytes], *, lost: EntryId | None = None) -> bool:
        ask, client = self._connection.ask, self._connection.client
        writer_key = self._key("writer")
        if lost is None and not await ask(client.set(writer_key, self._name, nx=True, px=_WRITER_MS)):
            return False
        new_key = self._key(f"new:{os.urandom(_TOKEN_BYTES).hex()}")  # of this call alone
        num_parts = num_bytes = 0
        for row in self._snapshot_rows(ids, parts):
            await self._connection.run(_ADD, [new_key], row, _WRITER_MS)
            num_parts, num_bytes = num_parts + 1, num_bytes + len(row)
        at = ids[-1]
        keys = [*self._keys, self.tail_key, writer_key, new_key]
        base = lost if lost is not None else EntryId(-1)
        return bool(await self._connection.run(_REPLACE, keys, *at, num_bytes, num_parts, *base))

    def _snapshot_rows(self, ids: Sequence[EntryId], parts: Iterable[bytes]) -> Iterator[bytes]:
        last, name = ids[-1].number, self._log_name
        yield self._rows.encrypt(b"".join(entry_id.token for entry_id in ids), f"{name} ids {last}")
        for position, part in enumerate(parts, 1):
            yield self._rows.encrypt(part, f"{name} part {position} of {last}")
