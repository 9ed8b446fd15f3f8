"""Files in a table. Each owner sees only their own. Used from one event loop only."""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
import time
from collections.abc import AsyncIterator, Iterable

import msgspec

from tailrace.errors import StorageError
from tailrace.server import Table, TableLease, account_of, row_key
from tailrace_plugins.batches.batch_errors import SpaceFull, TooMany, UnknownFile
from tailrace_plugins.batches.batch_keys import FILES, PIECES, UNUSED, piece_key
from tailrace_plugins.batches.stored_batches import StoredFile

__all__ = ["PIECE_BYTES", "FileWriter", "Files", "new_id", "unused"]

PIECE_BYTES = 2**18
_FILES_OF_OWNER = 2_000
_UPLOAD_S = 86_400  # in which an upload ends, on any server
# What is done without a pause, so that the event loop is not blocked for long:
_ERASED_AT_ONCE = 64  # rows
_LISTED_AT_ONCE = 1_000  # keys
_READ_AT_ONCE = 256  # rows
_LINES_AT_ONCE = 500
_SENT_BYTES = 2**16

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(StoredFile).decode
_decode_unused = msgspec.msgpack.Decoder(tuple[bytes, float]).decode


def new_id(kind: str) -> str:
    return kind + secrets.token_hex(16)


def unused(prefix: bytes, last_s: float = 0.0) -> bytes:
    """Return the row that says that the rows whose keys begin with `prefix` are no file. Something was last added at
    `last_s`; 0: nothing will be."""
    return _encode((prefix, last_s))


class FileWriter:
    """Writes a file piece by piece. What was written of a file without `close` is removed."""

    def __init__(self, files: Files, owner: str, file_id: str) -> None:
        self.file_id = file_id
        self.prefix = row_key(PIECES, owner, f"{file_id}/")
        self.upload_key = row_key(UNUSED, owner, file_id)
        self.num_bytes = 0
        self._files = files
        self._owner = owner
        self._buffer = bytearray()
        self._num_pieces = 0

    @property
    def has_content(self) -> bool:
        return bool(self.num_bytes or self._buffer)

    def add(self, content: bytes) -> None:
        """Take content, of which `keep_pieces` keeps what fills a piece."""
        self._buffer += content

    async def keep_pieces(self) -> None:
        """Raises: SpaceFull, StorageError."""
        while len(self._buffer) >= PIECE_BYTES:
            await self._flush(PIECE_BYTES)

    async def close(self, *, filename: str, purpose: str, expires_s: int | None) -> StoredFile:
        """Keep the file. Raises: SpaceFull, StorageError."""
        await self.flush()
        file = StoredFile(
            file_id=self.file_id,
            owner=self._owner,
            filename=filename,
            purpose=purpose,
            num_bytes=self.num_bytes,
            created_s=int(time.time()),
            order=time.time_ns(),
            pieces=self.prefix,
            expires_s=expires_s,
        )
        await self._files.add(file, upload_key=self.upload_key)
        return file

    async def flush(self) -> None:
        """Keep all that was added. Raises: SpaceFull, StorageError."""
        await self.keep_pieces()
        await self._flush(len(self._buffer))

    async def undo(self) -> None:
        """Remove what was written."""
        with contextlib.suppress(StorageError):  # the next process removes it, or another server
            await self._files.discard(self.upload_key, self.prefix)

    async def _flush(self, num_bytes: int) -> None:
        if not num_bytes:
            return
        self._files.check_room(self._owner, num_bytes)
        piece = bytes(self._buffer[:num_bytes])
        del self._buffer[:num_bytes]
        rows = {piece_key(self.prefix, self._num_pieces): piece, self.upload_key: unused(self.prefix, time.time())}
        await self._files.table.change(rows)
        self._num_pieces += 1
        self.num_bytes += num_bytes
        await asyncio.sleep(0)


class Files:
    """All files."""

    def __init__(self, table: Table, *, most_bytes: int) -> None:
        self.table = table
        self._most_bytes = most_bytes

    def has_room(self, owner: str, num_bytes: int = 1) -> bool:
        """Return whether an owner may keep more bytes."""
        used, all_used = self.table.used(account_of(owner)), self.table.used()
        return used + num_bytes <= self._most_bytes // 2 and all_used + num_bytes <= self._most_bytes

    def check_room(self, owner: str, num_bytes: int) -> None:
        """Raises: SpaceFull."""
        if not self.has_room(owner, num_bytes):
            raise SpaceFull("The space for files and results of batches is full. Delete files, or raise --batch-bytes.")

    async def check_number(self, owner: str) -> None:
        """Raises: TooMany, StorageError."""
        if len(await self.table.sizes(row_key(FILES, owner), most=_FILES_OF_OWNER)) >= _FILES_OF_OWNER:
            raise TooMany(f"An owner has at most {_FILES_OF_OWNER} files. Delete some.")

    async def add(self, file: StoredFile, *, upload_key: bytes | None = None, lease: TableLease | None = None) -> None:
        """Keep the row of a file whose pieces are kept. Raises: StorageError."""
        rows = {row_key(FILES, file.owner, file.file_id): _encode(file)}
        await self.table.change(rows, [upload_key] if upload_key is not None else (), lease=lease)

    async def of(self, owner: str) -> list[StoredFile]:
        """Return the files of an owner, the newest first. Raises: StorageError."""
        files = [_decode(row) async for _, row in self.rows(row_key(FILES, owner)) if row is not None]
        return sorted(files, key=lambda file: file.order, reverse=True)

    async def find(self, owner: str, file_id: str) -> StoredFile:
        """Raises: UnknownFile, StorageError."""
        (row,) = await self.table.get(row_key(FILES, owner, file_id))
        if row is None:
            raise UnknownFile("There is no such file.", param="file_id")
        return _decode(row)

    async def delete(self, file: StoredFile) -> None:
        """Raises: StorageError."""
        key = row_key(FILES, file.owner, file.file_id)
        await self.discard(row_key(UNUSED, file.owner, file.file_id), file.pieces, [key])

    async def sizes(self, prefix: bytes) -> dict[bytes, int]:
        """Return the keys that begin with `prefix`, in their order, each with the bytes of its row. Raises:
        StorageError."""
        found: dict[bytes, int] = {}
        after: bytes | None = None
        while page := await self.table.sizes(prefix, after=after, most=_LISTED_AT_ONCE):
            found |= page
            after = next(reversed(page))
            await asyncio.sleep(0)
        return found

    async def rows(self, prefix: bytes) -> AsyncIterator[tuple[bytes, bytes | None]]:
        """Yield the rows whose keys begin with `prefix`, in the order of their keys. None: it is damaged. Raises:
        StorageError."""
        after: bytes | None = None
        while page := await self.table.page(prefix, after=after, most=_READ_AT_ONCE):
            for item in page.items():
                yield item
            after = next(reversed(page))
            await asyncio.sleep(0)

    async def erase(self, prefix: bytes) -> None:
        """Delete the rows whose keys begin with `prefix`. Raises: StorageError."""
        while page := await self.table.sizes(prefix, most=_ERASED_AT_ONCE):
            await self.table.change({}, page)
            await asyncio.sleep(0)

    async def discard(self, mark: bytes, prefix: bytes, gone: Iterable[bytes] = ()) -> None:
        """Delete the rows `gone`, and then those whose keys begin with `prefix`. By the row `mark` the sweep finds what
        is left of them after a death. Raises: StorageError."""
        await self.table.change({mark: unused(prefix)}, gone)
        await self.erase(prefix)
        await self.table.change({}, [mark])

    async def expired(self) -> list[StoredFile]:
        """Raises: StorageError."""
        now_s = time.time()
        files = [_decode(row) async for _, row in self.rows(FILES + b"/") if row is not None]
        return [file for file in files if file.expires_s is not None and file.expires_s <= now_s]

    async def erase_unfinished(self, *, after_s: float = _UPLOAD_S) -> None:
        """Delete what is no file: was discarded, or never became one and was not added to for `after_s`. Raises:
        StorageError."""
        async for key, row in self.rows(UNUSED + b"/"):
            prefix, last_s = _decode_unused(row) if row is not None else (b"", 0.0)
            if last_s <= time.time() - after_s:
                if prefix:
                    await self.erase(prefix)
                await self.table.change({}, [key])

    async def content(self, prefix: bytes, num_bytes: int) -> AsyncIterator[bytes]:
        """Yield the content of a file that has so many bytes. Raises: UnknownFile if it is deleted meanwhile."""
        parts: list[bytes] = []
        num_waiting = 0
        async for _, piece in self.rows(prefix):
            if piece is None:
                break
            parts.append(piece)
            num_waiting += len(piece)
            num_bytes -= len(piece)
            if num_waiting >= _SENT_BYTES:
                yield b"".join(parts)
                parts, num_waiting = [], 0
        yield b"".join(parts)
        if num_bytes:
            raise UnknownFile("The file was deleted or damaged.")

    async def lines(
        self, prefix: bytes, num_bytes: int, most_bytes: float = math.inf
    ) -> AsyncIterator[tuple[int, bytes | None]]:
        """Yield the lines of a file that are not blank, with their numbers from 1. A line that is longer than
        `most_bytes` is None. Raises: as `content`."""
        number, rest, is_long = 0, b"", False
        async for content in self.content(prefix, num_bytes):
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
