"""What extensions keep in the log store: notes on one machine, or a log that all servers of a Redis append to.

Each extension has its own, by its name. Neither knows what the bytes mean.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

__all__ = [
    "AppendResult",
    "Entry",
    "EntryId",
    "LoadedLog",
    "LocalNotes",
    "LogListener",
    "Note",
    "NoteRows",
    "SharedLog",
]

_NAMED = b"\1"  # begins the row keys of every extension, except
_AFTER_NAMED = b"\2"
_WITHOUT_NAME = "durable"  # which was the only one in earlier versions; its row keys begin otherwise


class Note(NamedTuple):
    """A note that was read."""

    row: int  # rows grow in the order of writing
    key: bytes
    body: bytes | None  # None: damaged


class NoteRows(Protocol):
    """The file that has the notes of all extensions (`streams/disk.py`)."""

    def add_notes(self, notes: Iterable[tuple[bytes, bytes]]) -> None: ...
    def change_notes(self, notes: Iterable[tuple[bytes, bytes]], erased: Iterable[bytes]) -> None: ...
    def erase_notes(self, keys: Iterable[bytes]) -> None: ...
    def note_sizes(self, first: bytes, end: bytes, most: int) -> Iterable[tuple[bytes, int]]: ...
    def notes(self, first: bytes, end: bytes) -> Iterator[Note]: ...
    def cut_notes(self, cuts: Mapping[bytes, int]) -> None: ...
    def record_damage(self) -> None: ...
    async def sync_notes(self) -> None: ...


class LocalNotes:
    """The notes of one extension on this machine, in the order of writing. Without a file, nothing is kept.

    A note is committed when `add` returns: it survives a crash of this process. It survives a power cut when `sync` has
    returned. Methods that write raise StorageError, and JournalFull if the disk is full.
    """

    def __init__(
        self,
        name: str,
        rows: NoteRows | None = None,
        damaged_until_s: Callable[[], float] = lambda: -math.inf,
    ) -> None:
        self._rows = rows
        self._damaged_until_s = damaged_until_s
        self._prefix = b"" if name == _WITHOUT_NAME else b"%b%b\0" % (_NAMED, name.encode())

    @classmethod
    def in_memory(cls, name: str) -> LocalNotes:
        """Return notes that this process keeps, for extensions that have no other memory of them."""
        return cls(name, _MemoryRows())

    @property
    def is_kept(self) -> bool:
        return self._rows is not None

    def read(self, prefix: bytes = b"") -> Iterator[Note]:
        """Yield the notes whose row keys begin with `prefix`, in the order of writing. Raises: StorageError."""
        for row, key, body in self._rows.notes(*self._range(prefix)) if self._rows is not None else ():
            yield Note(row, key.removeprefix(self._prefix), body)

    def get(self, key: bytes) -> bytes | None:
        """Return the body of the newest note with this row key; None if there is none, or it is damaged. Raises:
        StorageError."""
        own = self._prefix + key
        notes = list(self._rows.notes(own, own + b"\0")) if self._rows is not None else []
        return notes[-1].body if notes else None

    def sizes(self, prefix: bytes = b"", *, after: bytes | None = None, most: int = -1) -> dict[bytes, int]:
        """Return the row keys that begin with `prefix`, in their order, each with about the bytes of its newest note:
        those behind the row key `after`, and at most `most` of them. Raises: StorageError."""
        first, end = self._range(prefix)
        if after is not None:
            first = self._prefix + after + b"\0"
        found = self._rows.note_sizes(first, end, most) if self._rows is not None else ()
        return {key.removeprefix(self._prefix): num_bytes for key, num_bytes in found}

    def add(self, key: bytes, body: bytes) -> None:
        self.add_all([(key, body)])

    def add_all(self, notes: Iterable[tuple[bytes, bytes]]) -> None:
        """Add notes, given as (row key, body): all or none."""
        if self._rows is not None:
            self._rows.add_notes([(self._prefix + key, body) for key, body in notes])

    def change(self, notes: Mapping[bytes, bytes], erased: Iterable[bytes]) -> None:
        """Add notes in place of all notes with their row keys and with those of `erased`: all or none."""
        if self._rows is not None:
            own = [(self._prefix + key, body) for key, body in notes.items()]
            self._rows.change_notes(own, [self._prefix + key for key in erased])

    def erase(self, *keys: bytes) -> None:
        """Delete all notes with these row keys."""
        if self._rows is not None:
            self._rows.erase_notes([self._prefix + key for key in keys])

    def cut(self, cuts: Mapping[bytes, int]) -> None:
        """Delete the notes of each row key from a row on, since a damaged one may not be followed by others."""
        if self._rows is not None:
            self._rows.cut_notes({self._prefix + key: row for key, row in cuts.items()})

    async def sync(self) -> None:
        """Return when all notes are on the disk. Raises: StorageError."""
        if self._rows is not None:
            await self._rows.sync_notes()

    def record_damage(self) -> None:
        """Keep that something was lost now."""
        if self._rows is not None:
            self._rows.record_damage()

    @property
    def damaged_until_s(self) -> float:
        """Until when (monotonic) something that is missing may have been lost by damage. Read first."""
        return self._damaged_until_s()

    def _range(self, prefix: bytes) -> tuple[bytes, bytes]:
        """Return the first row key with this prefix, and the first one behind all of them."""
        first = self._prefix + prefix
        if not first:
            return _AFTER_NAMED, _NAMED  # all that is not between them
        return first, first[:-1] + bytes([first[-1] + 1])


class _MemoryRows:
    """Notes in memory, as `NoteRows`."""

    def __init__(self) -> None:
        self._notes: dict[bytes, list[Note]] = {}
        self._keys: list[bytes] = []  # in their order
        self._num_rows = 0

    def add_notes(self, notes: Iterable[tuple[bytes, bytes]]) -> None:
        for key, body in notes:
            self._num_rows += 1
            if key not in self._notes:
                bisect.insort(self._keys, key)
                self._notes[key] = []
            self._notes[key].append(Note(self._num_rows, key, body))

    def change_notes(self, notes: Iterable[tuple[bytes, bytes]], erased: Iterable[bytes]) -> None:
        notes = list(notes)
        self.erase_notes([*(key for key, _ in notes), *erased])
        self.add_notes(notes)

    def erase_notes(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            if self._notes.pop(key, None) is not None:
                del self._keys[bisect.bisect_left(self._keys, key)]

    def note_sizes(self, first: bytes, end: bytes, most: int) -> list[tuple[bytes, int]]:
        begin = bisect.bisect_left(self._keys, first)
        behind = bisect.bisect_left(self._keys, end) if most < 0 else begin + most
        keys = self._keys[begin:behind]
        return [(key, len(self._notes[key][-1].body or b"")) for key in keys if key < end]

    def notes(self, first: bytes, end: bytes) -> Iterator[Note]:
        if end == first + b"\0":
            yield from self._notes.get(first, [])
        else:
            yield from sorted(note for key, notes in self._notes.items() if first <= key < end for note in notes)

    def cut_notes(self, cuts: Mapping[bytes, int]) -> None:
        for key, row in cuts.items():
            self._notes[key] = [note for note in self._notes.get(key, []) if note.row < row]

    def record_damage(self) -> None:
        """Nothing is damaged in memory."""

    async def sync_notes(self) -> None:
        """Memory has no disk."""


class EntryId(NamedTuple):
    """The number of an entry, and its random token. The default stands for the start of the log."""

    number: int = 0
    token: bytes = b""


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry to append, or one that was read. `SharedLog.body` decodes it."""

    entry_id: EntryId
    row: bytes = b""  # token and body; empty: nothing to append


@dataclass(frozen=True, slots=True)
class AppendResult:
    """What came of an append."""

    is_known: bool  # whether the log has the last entry of the server; else only `last` is set
    is_appended: bool
    last: EntryId  # of the log
    entries: Sequence[Entry]  # that the server lacks, or the first of them
    needs_snapshot: bool  # whether the entries behind the snapshot take too much room


@dataclass(frozen=True, slots=True)
class LoadedLog:
    """The bodies of the snapshot and of all entries after it, and the ids of the last entries, which have numbers
    without gaps."""

    bodies: Sequence[bytes]
    ids: Sequence[EntryId]


class LogListener(Protocol):
    """What a server wants to know of a shared log. Methods return at once."""

    def on_appended(self, number: int) -> None:
        """A server has appended entries; `number` is that of the last one."""

    def on_failure(self) -> None:
        """Redis did not answer. It may come back with less than it had."""

    def on_tick(self) -> None:
        """Some seconds have passed: look for what was appended and not heard of."""


class SharedLog(Protocol):
    """A log that all servers of a Redis append to, in one order: a server can append only after the last entry that it
    has read. Methods that wait raise StorageError.

    The log begins with a snapshot, in parts; entries follow it.
    """

    give_up_after_s: float  # how long a call should be repeated while Redis is away: `--journal-wait-s`

    def listen(self, listener: LogListener) -> None:
        """Set the only listener."""

    def entry(self, after: EntryId, body: bytes) -> Entry:
        """Make the entry that follows another one. Without a body there is nothing to append."""

    def body(self, entry: Entry) -> bytes:
        """Return the body of an entry. Raises: JournalDamaged."""

    async def append(self, after: EntryId, entry: Entry, *, asks_for_turn: bool) -> AppendResult:
        """Append an entry if the log ends with `after`. Without a row only learn whether it does. `asks_for_turn`: for
        a second, the other servers let this one be the next to append.

        The same call may be repeated: an entry is not appended twice.
        """

    async def load(self) -> LoadedLog:
        """Raises: JournalDamaged, too."""

    async def replace(self, ids: Sequence[EntryId], parts: Iterable[bytes], *, lost: EntryId | None = None) -> bool:
        """Replace the entries up to the last one of `ids` by a snapshot. If the log has lost that entry, `lost` is its
        last one. Returns whether that was possible: otherwise the log has changed meanwhile, or another server writes a
        snapshot."""
