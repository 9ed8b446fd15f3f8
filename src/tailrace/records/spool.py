"""A file for rows that are not in the database yet. So a slow or unreachable database delays no request."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from tailrace.errors import StorageError
from tailrace.records.request_rows import RequestRow

__all__ = ["Spool"]

logger = logging.getLogger("tailrace.records")

_MAX_FILES = 100  # servers with the same data directory
_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(RequestRow)


class Spool:
    """A file of rows, one JSON object per line, locked by one server. A later row of a request replaces the earlier
    one. The file survives the process.

    The first row creates the file. Raises: StorageError if the disk cannot be written or read.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._path: Path | None = None
        self._file = -1
        self._is_torn = False  # the last line may be partial
        self.size = 0  # bytes

    def take_over(self) -> list[RequestRow]:
        """Return the newest row of each request of earlier servers. Their files are merged into this one."""
        rows: dict[str, RequestRow] = {}
        for path in sorted(self._directory.glob("requests*.jsonl")):
            with _as_storage_errors():
                file = _open_locked(path)
                if file < 0:
                    continue  # a running server has it
                try:
                    rows |= {row.request_id: row for row in _parse(path.read_bytes())}
                    if self._path is None:
                        self._path, self._file, file = path, file, -1
                        self.size = path.stat().st_size
                        self._is_torn = self.size > 0
                    else:
                        self.append_all(rows.values())
                        path.unlink()
                finally:
                    if file >= 0:
                        os.close(file)
        return list(rows.values())

    def append(self, row: RequestRow) -> None:
        self.append_all([row])

    def append_all(self, rows: Iterable[RequestRow]) -> None:
        text = _encoder.encode_lines(rows)
        with _as_storage_errors():
            if self._file < 0:
                self._create()
            self._write(text)

    def read(self, start: int, max_bytes: int) -> tuple[list[RequestRow], int]:
        """Return the complete rows in the next `max_bytes` after `start`, at least one, and their size in bytes."""
        with _as_storage_errors():
            text = os.pread(self._file, max_bytes, start)
            while b"\n" not in text and (more := os.pread(self._file, max_bytes, start + len(text))):
                text += more
        text = text[: text.rfind(b"\n") + 1]
        return _parse(text), len(text)

    def drop(self, before: int, keep: Iterable[RequestRow]) -> None:
        """Remove the first `before` bytes of the file, except the rows `keep`."""
        if self._file < 0:
            return
        assert self._path is not None
        with _as_storage_errors():
            text = _encoder.encode_lines(keep)
            text += os.pread(self._file, self.size - before, before)
            if not text:
                os.ftruncate(self._file, 0)
                self.size = 0
                return
            new_path = self._path.with_suffix(".new")
            new_path.unlink(missing_ok=True)
            new = _open_locked(new_path)
            try:
                while text:
                    text = text[os.write(new, text) :]
                os.rename(new_path, self._path)
            except OSError:
                os.close(new)
                raise
            os.close(self._file)
            self._file, self.size = new, os.fstat(new).st_size

    def close(self) -> None:
        """Close the file. An empty file is removed."""
        if self._file < 0:
            return
        assert self._path is not None
        if self.size == 0:
            with contextlib.suppress(OSError):
                self._path.unlink()
                self._directory.rmdir()
        os.close(self._file)
        self._file = -1

    def _create(self) -> None:
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for number in range(_MAX_FILES):
            path = self._directory / f"requests{f'-{number}' if number else ''}.jsonl"
            self._file = _open_locked(path)
            if self._file >= 0:
                self._path, self.size = path, os.fstat(self._file).st_size
                return
        raise StorageError(f"Too many servers use {self._directory}.")

    def _write(self, text: bytes) -> None:
        if self._is_torn:
            text = b"\n" + text
        while text:
            num_written = os.write(self._file, text)
            self.size += num_written
            text = text[num_written:]
            self._is_torn = bool(text)


def _parse(text: bytes) -> list[RequestRow]:
    with contextlib.suppress(msgspec.DecodeError):
        return _decoder.decode_lines(text)
    rows = []
    for line in filter(None, text.split(b"\n")):
        try:
            rows.append(_decoder.decode(line))
        except msgspec.DecodeError:
            logger.warning("a damaged line of the spool was skipped")
    return rows


def _open_locked(path: Path) -> int:
    """Open and lock a file. Returns its descriptor, or -1 if another process has the lock. Raises: OSError."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        return -1
    return file


@contextlib.contextmanager
def _as_storage_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(f"Requests cannot be recorded: {error.strerror}.") from None
