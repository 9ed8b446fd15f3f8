"""The log of durable streams in Redis, which all servers append to.

The log begins with a snapshot in several parts. Entries follow; each has the changes of one commit. An entry has a
number and a random token. A server compares the token of its last entry with the log, to detect that Redis has lost
entries in a failover. The snapshot has the tokens of the last entries that it replaced, for the same comparison. A
server can append only after the last entry that it has applied. If the log has later entries, it gets those instead.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from tailrace.durable.records import Appended, Created, DurableRecord
from tailrace.errors import JournalDamaged
from tailrace.streams._rows import Rows
from tailrace.streams.redis._connection import Connection
from tailrace.streams.redis._scripts import script

__all__ = ["Answer", "DurableLog", "Entry", "EntryId", "LoadedLog"]

Change = tuple[bytes, DurableRecord]

_TOKEN_BYTES = 8
_TURN_MS = 1_000
_WRITER_MS = 60_000
_PART_RECORDS = 1_000  # of a snapshot; encoding them must not take long
_PART_BYTES = 2**18

_UNREADABLE = (
    "The durable streams in Redis cannot be read: they were damaged, or another version of tailrace wrote them."
)

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[Change]).decode

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

# Keys: durable, log, tail, turn. Arguments: number and id of the last entry that the server has; its name; an entry, or
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

# Keys: durable, log. Arguments: position in the list. Returns last entry and its id, end of the snapshot and its id,
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

# Keys: durable, log, tail, writer, new. Arguments: number and id of the last entry in the snapshot; its bytes; how many
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


class EntryId(NamedTuple):
    """The number of an entry, and its random token. The default stands for the start of the log."""

    number: int = 0
    token: bytes = b""


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry to append, or one that was read. `DurableLog.changes` decodes it."""

    entry_id: EntryId
    row: bytes = b""  # token and changes; empty: nothing to append


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of an append."""

    is_known: bool  # whether the log has the last entry of the server; else only `last` is set
    is_appended: bool
    last: EntryId  # of the log
    entries: Sequence[Entry]  # that the server lacks, or the first of them
    needs_snapshot: bool  # whether the entries behind the snapshot take too much room


@dataclass(frozen=True, slots=True)
class LoadedLog:
    """All changes of the log, and the ids of its last entries, which have numbers without gaps."""

    changes: Sequence[Change]
    ids: Sequence[EntryId]


class DurableLog:
    """Reads and writes the log. Each method is one round trip, except those about a snapshot."""

    def __init__(self, connection: Connection, rows: Rows, *, spare_bytes: int = 2**20) -> None:
        self._connection = connection
        self._rows = rows
        self._spare_bytes = spare_bytes  # that entries may take in any case before there is a snapshot of them
        self._name = os.urandom(_TOKEN_BYTES).hex()  # of this server
        key = connection.keys.durable
        self.tail_key = key("tail")
        self._keys = (key(), key("log"))

    def entry(self, after: EntryId, changes: Sequence[Change]) -> Entry:
        """Make the entry that follows another one."""
        if not changes:
            return Entry(after)
        number, token = after.number + 1, os.urandom(_TOKEN_BYTES)
        return Entry(EntryId(number, token), token + self._rows.encrypt(_encode(changes), f"durable {number}"))

    def changes(self, entry: Entry) -> list[Change]:
        """Raises: JournalDamaged."""
        return self._read(entry.row[_TOKEN_BYTES:], f"durable {entry.entry_id.number}")

    def _read(self, row: bytes, name: str) -> list[Change]:
        try:
            return _decode(self._rows.open(row, name))
        except (msgspec.DecodeError, JournalDamaged):
            raise JournalDamaged(_UNREADABLE) from None

    async def append(self, after: EntryId, entry: Entry, *, asks_for_turn: bool) -> Answer:
        """Append an entry if the log ends with `after`. Without a row only learn whether it does.

        The same call may be repeated: an entry is not appended twice. Raises: StorageError.
        """
        connection = self._connection
        keys = [*self._keys, self.tail_key, connection.keys.durable("turn")]
        about = after.number, after.token, self._name, entry.row, int(asks_for_turn), _TURN_MS
        known, last, last_id, num_bytes, kept, done, rows = await connection.run(_APPEND, keys, *about)
        first = after.number + 1
        return Answer(
            bool(known),
            bool(done),
            EntryId(last, last_id),
            [Entry(EntryId(first + n, row[:_TOKEN_BYTES]), row) for n, row in enumerate(rows)],
            num_bytes - kept > max(self._spare_bytes, kept),
        )

    async def load(self) -> LoadedLog:
        """Raises: StorageError, JournalDamaged."""
        while True:
            rows: list[bytes] = []
            last, last_id, first, first_id, length, some = await self._connection.run(_LOAD, self._keys, 0)
            snapshot = first, first_id
            while some and (first, first_id) == snapshot:
                rows += some
                answer = await self._connection.run(_LOAD, self._keys, len(rows))
                last, last_id, first, first_id, length, some = answer
            if length < last - first:
                raise JournalDamaged(_UNREADABLE)
            end = rows[-1][:_TOKEN_BYTES] if last > first else first_id
            if (first, first_id) == snapshot and len(rows) == length and end == last_id:
                break
        num_parts = length - (last - first)
        changes: list[Change] = []
        ids = self._read_ids(rows[0], first) if num_parts else [EntryId()]
        for position in range(1, num_parts):
            changes += self._read(rows[position], f"durable part {position} of {first}")
        for number, row in enumerate(rows[num_parts:], first + 1):
            ids.append(EntryId(number, row[:_TOKEN_BYTES]))
            changes += self.changes(Entry(ids[-1], row))
        return LoadedLog(changes, ids)

    def _read_ids(self, row: bytes, last: int) -> list[EntryId]:
        """Raises: JournalDamaged."""
        try:
            tokens = self._rows.open(row, f"durable ids {last}")
        except JournalDamaged:
            raise JournalDamaged(_UNREADABLE) from None
        first = last + 1 - len(tokens) // _TOKEN_BYTES
        return [
            EntryId(number, tokens[(number - first) * _TOKEN_BYTES :][:_TOKEN_BYTES])
            for number in range(first, last + 1)
        ]

    async def replace(self, ids: Sequence[EntryId], changes: Iterable[Change], *, lost: EntryId | None = None) -> bool:
        """Replace the entries up to the last one of `ids` by a snapshot, the changes that lead there. If the log has
        lost that entry, `lost` is its last one. Returns whether that was possible: otherwise the log has changed
        meanwhile, or another server writes a snapshot. Raises: StorageError."""
        ask, client = self._connection.ask, self._connection.client
        writer_key = self._connection.keys.durable("writer")
        if lost is None and not await ask(client.set(writer_key, self._name, nx=True, px=_WRITER_MS)):
            return False
        new_key = self._connection.keys.durable(f"new:{os.urandom(_TOKEN_BYTES).hex()}")  # of this call alone
        num_parts = num_bytes = 0
        for row in self._snapshot_rows(ids, changes):
            await self._connection.run(_ADD, [new_key], row, _WRITER_MS)
            num_parts, num_bytes = num_parts + 1, num_bytes + len(row)
        at = ids[-1]
        keys = [*self._keys, self.tail_key, writer_key, new_key]
        base = lost if lost is not None else EntryId(-1)
        return bool(await self._connection.run(_REPLACE, keys, *at, num_bytes, num_parts, *base))

    def _snapshot_rows(self, ids: Sequence[EntryId], changes: Iterable[Change]) -> Iterator[bytes]:
        last = ids[-1].number
        yield self._rows.encrypt(b"".join(entry_id.token for entry_id in ids), f"durable ids {last}")
        for position, part in enumerate(_parts(changes), 1):
            yield self._rows.encrypt(_encode(part), f"durable part {position} of {last}")


def _parts(changes: Iterable[Change]) -> Iterator[list[Change]]:
    part: list[Change] = []
    num_bytes = 0
    for key, record in changes:
        part.append((key, record))
        if isinstance(record, Created | Appended):
            num_bytes += sum(map(len, record.pieces))
        if len(part) == _PART_RECORDS or num_bytes >= _PART_BYTES:
            yield part
            part, num_bytes = [], 0
    if part:
        yield part
