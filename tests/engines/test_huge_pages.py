"""The weights of an engine get huge pages, and the memory that it only reserves does not become resident."""

from __future__ import annotations

import mmap
import platform
import re
from pathlib import Path

import pytest

from tailrace.engines import huge_pages
from tailrace.engines.huge_pages import SETTING, move_to_huge_pages

_SIZE = 16 * 2**20


def _kb(name: str) -> int:
    found = re.search(rf"^{name}: +(\d+) kB", Path("/proc/self/smaps_rollup").read_text(), re.MULTILINE)
    assert found
    return int(found[1])


def _has_huge_pages() -> bool:
    release = re.match(r"(\d+)\.(\d+)", platform.release())
    if release is None or not SETTING.is_file() or "[never]" in SETTING.read_text():
        return False
    return tuple(map(int, release.groups())) >= (6, 1)


has_huge_pages = pytest.mark.skipif(not _has_huge_pages(), reason="the system does not move memory to huge pages")


@has_huge_pages
def test_only_resident_memory_is_moved() -> None:
    with mmap.mmap(-1, _SIZE, mmap.MAP_PRIVATE) as used, mmap.mmap(-1, 4 * _SIZE, mmap.MAP_PRIVATE) as reserved:
        used.write(b"w" * _SIZE)
        reserved.write(b"r")
        before_kb = _kb("AnonHugePages"), _kb("Rss")
        assert len(list(move_to_huge_pages())) >= _SIZE // 2**21 - 1
        assert _kb("AnonHugePages") - before_kb[0] >= (_SIZE - 2 * 2**21) // 1024
        assert _kb("Rss") - before_kb[1] < _SIZE // 1024
        assert used[:] == b"w" * _SIZE
        assert reserved[:2] == b"r\0"


@has_huge_pages
@pytest.mark.parametrize("setting", [None, "always madvise [never]\n"], ids=["a system without them", "switched off"])
def test_without_huge_pages_nothing_happens(
    setting: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "enabled"
    if setting is not None:
        file.write_text(setting)
    monkeypatch.setattr(huge_pages, "SETTING", file)
    with mmap.mmap(-1, _SIZE, mmap.MAP_PRIVATE) as used:
        used.write(b"w" * _SIZE)
        before_kb = _kb("AnonHugePages")
        assert list(move_to_huge_pages()) == []
        assert _kb("AnonHugePages") - before_kb < _SIZE // 1024 // 2
