"""What a power cut may leave of files, from a trace of the system calls that wrote them.

Written and synced is what the trace says. Of the rest, which was only written, a disk keeps anything: `Loss`.
"""

from __future__ import annotations

import random
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

__all__ = ["CALLS", "Loss", "TracedDisk"]

CALLS = "openat,write,pwrite64,ftruncate,fallocate,fsync,fdatasync,?unlink,unlinkat,?rename,?renameat,renameat2"
SECTOR_BYTES = 512  # written as a whole, or not at all
Loss = Literal["nothing", "all", "end", "any"]
"""What is lost of the writes of each file that are not synced: `nothing`, as when only the process dies, or `all`; the
`end`, where the last write that is left is torn between two sectors; or `any` sectors, which have what they had before,
or garbage."""

_STRING = re.compile(r'"((?:\\x[0-9a-f]{2})*)"')
_PATH = re.compile(r"<((?:\\x[0-9a-f]{2})+)>")
_LINE = re.compile(r"(\d+) +(?:<\.\.\. (\w+) resumed>)?(.*)")
_UNFINISHED = " <unfinished ...>"
_CALL = re.compile(r"(\w+)\((.*)\)\s+= (.*)")


def _text(hexadecimal: str) -> bytes:
    return bytes.fromhex(hexadecimal.replace("\\x", ""))


class _Span(NamedTuple):
    """When a system call began and ended, as numbers of lines of the trace."""

    begin: int
    end: int


class _Write(NamedTuple):
    """Bytes that were written at a place of a file. Without bytes the file was truncated there."""

    span: _Span
    place: int
    written: bytes | None


class _Naming(NamedTuple):
    """A name that has got a file, or has lost it."""

    span: _Span
    name: str
    file: int | None


@dataclass
class TracedDisk:
    """The files in a directory whose names begin with `prefix`, and what was written to the file `marks` beside them,
    in their order. Times are numbers of lines of the trace."""

    directory: Path
    prefix: str
    marks_name: str
    marks: list[tuple[_Span, bytes]] = field(default_factory=list)
    times: list[int] = field(default_factory=list)  # at which something was done to the files
    _writes: defaultdict[int, list[_Write]] = field(default_factory=lambda: defaultdict(list))
    _namings: list[_Naming] = field(default_factory=list)
    _syncs: defaultdict[int | None, list[_Span]] = field(default_factory=lambda: defaultdict(list))  # None: directory
    _files: dict[str, int] = field(default_factory=dict)
    _num_files: int = 0

    def read(self, trace: str) -> None:
        """Read the trace of `strace -f -y -xx -e trace=CALLS`."""
        for span, call in _calls(trace):
            found = _CALL.fullmatch(call)
            assert found is not None, call[:200]
            if not found[3].startswith(("-", "?")):
                self._do(span, found[1], found[2])

    def _do(self, span: _Span, name: str, arguments: str) -> None:
        strings = [_text(found) for found in _STRING.findall(arguments)]
        paths = [Path(_text(found).decode()) for found in _PATH.findall(arguments)]
        path = Path(strings[0].decode()) if name.startswith(("open", "unlink", "rename")) else paths[0]
        if name in ("fsync", "fdatasync") and path == self.directory:
            self._syncs[None].append(span)
        if path.parent != self.directory:
            return
        if path.name == self.marks_name and name == "write":
            self.marks.append((span, strings[0]))
        if not path.name.startswith(self.prefix) or "-shm" in path.name:
            return  # what is shared between processes is in memory, and SQLite makes it anew
        file = self._files.get(path.name)
        if name == "openat":
            if "O_CREAT" not in arguments or file is not None:
                return
            self._files[path.name] = self._num_files
            self._namings.append(_Naming(span, path.name, self._num_files))
            self._num_files += 1
        elif name in ("unlink", "unlinkat"):
            del self._files[path.name]
            self._namings.append(_Naming(span, path.name, None))
        else:
            assert file is not None, (name, path)
            if name in ("fsync", "fdatasync"):
                self._syncs[file].append(span)
            else:
                assert name in ("pwrite64", "ftruncate"), (name, path)
                *_, length, place = arguments.rsplit(", ", 2)
                assert name != "pwrite64" or len(strings[0]) == int(length), "strace has shortened a write"
                self._writes[file].append(_Write(span, int(place), strings[0] if name == "pwrite64" else None))
        self.times.append(span.begin)

    def last_sync(self, name: str, at: int) -> int:
        """Return when the last sync of a file of this name began that had ended before `at`; 0 if there was none."""
        files = {naming.file for naming in self._namings if naming.name == name}
        return max((self._synced(file, at) for file in files if file is not None), default=0)

    def _synced(self, file: int | None, at: int) -> int:
        """Return until when what was done to a file is on the disk."""
        return max((span.begin for span in self._syncs[file] if span.end <= at), default=0)

    def cut(self, at: int, loss: Loss, chance: random.Random, into: Path) -> None:
        """Write the files as they are after a power cut."""
        names: dict[str, int | None] = {}
        synced = self._synced(None, at)
        for span, name, file in self._namings:
            is_there = span.end < synced or loss == "nothing" or (loss != "all" and chance.random() < 0.5)
            if span.begin < at and is_there:
                names[name] = file
        for name, file in names.items():
            if file is not None:
                (into / name).write_bytes(self._content(file, at, loss, chance))

    def _content(self, file: int, at: int, loss: Loss, chance: random.Random) -> bytes:
        synced = self._synced(file, at)
        writes = [write for write in self._writes[file] if write.span.begin < at]
        unsynced = [write for write in writes if write.span.end >= synced]
        num_left = {"all": 0, "end": chance.randint(0, len(unsynced))}.get(loss, len(unsynced))
        content = bytearray()
        for write in writes:
            if write.span.end < synced or loss == "nothing":
                _apply(write, content)
            elif loss == "any":
                if not _apply_any(write, content, chance):
                    break
            elif num_left > 0:
                num_left -= 1
                _apply(write if num_left or loss != "end" else _torn(write, chance), content)
        return bytes(content)


def _calls(trace: str) -> Iterator[tuple[_Span, str]]:
    """Yield the calls in the order of their ends: those of other threads may come between the parts of one."""
    begun: dict[str, tuple[int, str]] = {}
    for number, line in enumerate(trace.splitlines(), 1):
        found = _LINE.fullmatch(line)
        assert found is not None, line[:200]
        process, resumed, text = found.groups()
        begin, before = begun.pop(process) if resumed else (number, "")
        if text.endswith(_UNFINISHED):
            begun[process] = number, text.removesuffix(_UNFINISHED)
        elif not text.startswith(("+++", "---")):
            yield _Span(begin, number), before + text


def _apply(write: _Write, content: bytearray) -> None:
    if write.written is None:
        del content[write.place :]
        content.extend(bytes(write.place - len(content)))
        return
    content.extend(bytes(max(0, write.place - len(content))))
    content[write.place : write.place + len(write.written)] = write.written


def _sectors(write: _Write) -> Iterator[_Write]:
    """Yield the parts of a write in each sector."""
    assert write.written is not None
    first = write.place % SECTOR_BYTES
    for start in range(-first, len(write.written), SECTOR_BYTES):
        begin = max(start, 0)
        yield _Write(write.span, write.place + begin, write.written[begin : start + SECTOR_BYTES])


def _torn(write: _Write, chance: random.Random) -> _Write:
    if write.written is None:
        return write
    sectors = [part.written or b"" for part in _sectors(write)]
    return write._replace(written=b"".join(sectors[: chance.randint(0, len(sectors))]))


def _apply_any(write: _Write, content: bytearray, chance: random.Random) -> bool:
    """Apply some sectors of a write, and garbage in place of others. Returns whether later writes may be there, too:
    not if the file was not truncated."""
    if write.written is None:
        if chance.random() < 0.5:
            return False
        _apply(write, content)
        return True
    weights = chance.choice([(1, 0, 0), (0, 1, 0), (8, 1, 0), (8, 1, 1), (1, 1, 1)])
    for part in _sectors(write):
        (fate,) = chance.choices(("new", "old", "garbage"), weights)
        if fate != "old":
            assert part.written is not None
            _apply(part if fate == "new" else part._replace(written=chance.randbytes(len(part.written))), content)
    return True
