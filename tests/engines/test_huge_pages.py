"""The weights of an engine get huge pages, and the memory that it only reserves does not become resident."""

from __future__ import annotations

import mmap
import platform
import re
from pathlib import Path

import pytest

from tailrace.engines import huge_pages
from tailrace.engines.huge_pages import use_huge_pages

_SIZE = 16 * 2**20


def _kb(name: str) -> int:
    found = re.search(rf"^{name}: +(\d+) kB", Path("/proc/self/smaps_rollup").read_text(), re.MULTILINE)
    assert found
    return int(found[1])


def _has_huge_pages() -> bool:
    enabled = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    release = re.match(r"(\d+)\.(\d+)", platform.release())
    if release is None or not enabled.is_file() or "[never]" in enabled.read_text():
        return False
    return tuple(map(int, release.groups())) >= (6, 1)


@pytest.mark.skipif(not _has_huge_pages(), reason="the system has no huge pages, or does not collapse pages to them")
def test_only_resident_memory_is_moved() -> None:
    with mmap.mmap(-1, _SIZE, mmap.MAP_PRIVATE) as used, mmap.mmap(-1, 4 * _SIZE, mmap.MAP_PRIVATE) as reserved:
        used.write(b"w" * _SIZE)
        reserved.write(b"r")
        before_kb = _kb("AnonHugePages"), _kb("Rss")
        use_huge_pages()
        assert _kb("AnonHugePages") - before_kb[0] >= (_SIZE - 2 * 2**21) // 1024
        assert _kb("Rss") - before_kb[1] < _SIZE // 1024
        assert used[:] == b"w" * _SIZE
        assert reserved[:2] == b"r\0"


def test_without_huge_pages_nothing_happens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(huge_pages, "_ENABLED", tmp_path / "missing")
    use_huge_pages()
    (tmp_path / "off").write_text("always madvise [never]\n")
    monkeypatch.setattr(huge_pages, "_ENABLED", tmp_path / "off")
    monkeypatch.setattr(huge_pages, "_resident", lambda: pytest.fail("they are switched off"))
    use_huge_pages()
