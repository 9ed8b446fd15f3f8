"""Files in notes. Each owner sees only their own. Used from one event loop only."""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence

import msgspec

from tailrace.errors import StorageError
from tailrace.server import LocalNotes
from tailrace_plugins.batches.errors import SpaceFull, TooMany, UnknownFile
from tailrace_plugins.batches.records import StoredFile

__all__ = ["PIECE_BYTES", "UPLOADS", "FileWriter", "Files", "new_id", "piece_key"]

PIECE_BYTES = 2**18
_FILES_OF_OWNER = 2_000
# What is done without a pause, so that the event loop is not blocked for long:
_ERASED_AT_ONCE = 64  # notes
_LISTED_AT_ONCE = 1_000  # keys
_LINES_AT_ONCE = 500
_SENT_BYTES = 2**16
_FILES = b"f/"
UPLOADS = b"p/"

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(StoredFile).decode


def new_id(kind: str) -> str:
    return kind + secrets.token_hex(16)


def piece_key(prefix: bytes, number: int) -> bytes:
    """Return the key of a piece. Keys are in the order of their numbers."""
    return b"%b%08x" % (prefix, number)


class FileWriter:
    """Writes a file piece by piece. What was written of a file without `close` is removed."""

    def __init__(self, files: Files, owner: str, file_id: str) -> None:
        self.file_id = file_id
        self.prefix = b"%b%b/" % (UPLOADS, file_id.encode())
        self.num_bytes = 0
        self._files = files
        self._owner = owner
        self._buffer = bytearray()
        self._num_pieces = 0

    @property
    def has_content(self) -> bool:
        return bool(self.num_bytes or self._buffer)

    def write(self, content: bytes) -> bool:
        """Return whether a piece was kept. Raises: SpaceFull, StorageError."""
        before = self._num_pieces
        self._buffer += content
        while len(self._buffer) >= PIECE_BYTES:
            self._flush(PIECE_BYTES)
        return self._num_pieces > before

    def close(self, *, filename: str, purpose: str, expires_s: int | None) -> StoredFile:
        """Keep the file. Raises: SpaceFull, StorageError."""
        self.flush()
        file = StoredFile(
            file_id=self.file_id,
            owner=self._owner,
            filename=filename,
            purpose=purpose,
            num_bytes=self.num_bytes,
            created_s=int(time.time()),
            pieces=self.prefix,
            expires_s=expires_s,
        )
        self._files.add(file)
        return file

    def flush(self) -> None:
        """Keep all that was written. Raises: SpaceFull, StorageError."""
        self._flush(len(self._buffer))

    async def undo(self) -> None:
        """Remove what was written."""
        with contextlib.suppress(StorageError):  # the next process removes it
            await self._files.erase(self.prefix, self._owner)

    def _flush(self, num_bytes: int) -> None:
        if not num_bytes:
            return
        self._files.check_room(self._owner, num_bytes)
        self._files.notes.add(piece_key(self.prefix, self._num_pieces), bytes(self._buffer[:num_bytes]))
        del self._buffer[:num_bytes]
        self._num_pieces += 1
        self.num_bytes += num_bytes
        self._files.used[self._owner] += num_bytes


class Files:
    """All files. `used` counts the bytes of each owner: those of files, and of results that are no file yet. `on_room`
    is called when there is more room."""

    def __init__(self, notes: LocalNotes, *, most_bytes: int) -> None:
        self.notes = notes
        self.on_room: Callable[[], object] = lambda: None
        self.used: Counter[str] = Counter()
        self._most_bytes = most_bytes
        self._files: dict[str, StoredFile] = {}
        for note in notes.read(_FILES):
            if note.body is not None:
                file = _decode(note.body)
                self._files[file.file_id] = file
                self.used[file.owner] += file.num_bytes

    def has_room(self, owner: str, num_bytes: int = 1) -> bool:
        """Return whether an owner may keep more bytes."""
        return (
            self.used[owner] + num_bytes <= self._most_bytes // 2 and self.used.total() + num_bytes <= self._most_bytes
        )

    def check_room(self, owner: str, num_bytes: int) -> None:
        """Raises: SpaceFull."""
        if not self.has_room(owner, num_bytes):
            raise SpaceFull("The space for files and results of batches is full. Delete files, or raise --batch-bytes.")

    def check_number(self, owner: str) -> None:
        """Raises: TooMany."""
        if sum(file.owner == owner for file in self._files.values()) >= _FILES_OF_OWNER:
            raise TooMany(f"An owner has at most {_FILES_OF_OWNER} files. Delete some.")

    def add(self, file: StoredFile) -> None:
        """Keep the facts of a file whose pieces are kept. Raises: StorageError."""
        self.notes.add(_FILES + file.file_id.encode(), _encode(file))
        self._files[file.file_id] = file

    def of(self, owner: str) -> list[StoredFile]:
        """Return the files of an owner, the newest first."""
        return [file for file in reversed(self._files.values()) if file.owner == owner]

    def has(self, file_id: str) -> bool:
        return file_id in self._files

    def find(self, owner: str, file_id: str) -> StoredFile:
        """Raises: UnknownFile."""
        file = self._files.get(file_id)
        if file is None or file.owner != owner:
            raise UnknownFile("There is no such file.", param="file_id")
        return file

    async def delete(self, file: StoredFile) -> None:
        """Raises: StorageError."""
        self.notes.erase(_FILES + file.file_id.encode())
        self._files.pop(file.file_id, None)
        await self.erase(file.pieces, file.owner)

    async def sizes(self, prefix: bytes) -> dict[bytes, int]:
        """Return the keys that begin with `prefix`, in their order, each with the bytes of its note. Raises:
        StorageError."""
        found: dict[bytes, int] = {}
        after: bytes | None = None
        while page := self.notes.sizes(prefix, after=after, most=_LISTED_AT_ONCE):
            found |= page
            after = next(reversed(page))
            await asyncio.sleep(0)
        return found

    async def erase(self, prefix: bytes, owner: str | None = None) -> None:
        """Delete the notes whose keys begin with `prefix`, which were counted as the owner's. Raises: StorageError."""
        while page := self.notes.sizes(prefix, most=_ERASED_AT_ONCE):
            self.notes.erase(*page)
            if owner is not None:
                self.used[owner] -= sum(page.values())
                self.on_room()
            await asyncio.sleep(0)

    def expired(self) -> Sequence[StoredFile]:
        now_s = time.time()
        return [one for one in self._files.values() if one.expires_s is not None and one.expires_s <= now_s]

    async def erase_unfinished(self, others: Iterable[bytes]) -> None:
        """Delete what was written of files that never became one; `others` are prefixes in use. Raises:
        StorageError."""
        known = {file.pieces for file in self._files.values()} | set(others)
        found = {key.rpartition(b"/")[0] + b"/" for key in await self.sizes(UPLOADS)}
        for prefix in found - known:
            await self.erase(prefix)

    async def content(self, prefix: bytes) -> AsyncIterator[bytes]:
        """Yield the content of a file. Raises: UnknownFile if it is deleted meanwhile."""
        parts: list[bytes] = []
        num_bytes = 0
        for key in await self.sizes(prefix):
            piece = self.notes.get(key)
            if piece is None:
                raise UnknownFile("The file was deleted or damaged.")
            parts.append(piece)
            num_bytes += len(piece)
            if num_bytes >= _SENT_BYTES:
                yield b"".join(parts)
                parts, num_bytes = [], 0
                await asyncio.sleep(0)
        yield b"".join(parts)

    async def lines(self, prefix: bytes, most_bytes: float = math.inf) -> AsyncIterator[tuple[int, bytes | None]]:
        """Yield the lines of a file that are not blank, with their numbers from 1. A line that is longer than
        `most_bytes` is None. Raises: as `content`."""
        number, rest, is_long = 0, b"", False
        async for content in self.content(prefix):
            *whole, rest = (rest + content).split(b"\n")
            for line in whole:
                number += 1
                if number % _LINES_AT_ONCE == 0:
                    await asyncio.sleep(0)
                if is_long or len(line) > most_bytes:
                    yield number, None
                elif line.strip():
                    yield number, line
                is_long = False
            if len(rest) > most_bytes:
                rest, is_long = b"", True
        if is_long or rest.strip():
            yield number + 1, None if is_long or len(rest) > most_bytes else rest
