"""Moves an engine's memory to huge pages (Linux 6.1 and later).

Each step of an engine reads all weights once. With pages of 4 KiB, the processor looks up 256 pages per MiB. With huge
pages of 2 MiB, a step took 4 to 18 % less time on a virtual machine (AMD EPYC, Zen 4, 2 cores, 2026-11-25). Resident
memory stays the same, because only what is resident is moved: the KV cache is reserved, and fills later.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import re
from collections.abc import Iterator
from pathlib import Path

__all__ = ["SETTING", "move_to_huge_pages"]

_MADV_COLLAPSE = 25
_HUGE_BYTES = 2**21
_PRESENT = 0x80  # in the last byte of a page's entry in `pagemap`
_MAPPING = re.compile(r"(?P<start>[0-9a-f]+)-(?P<end>[0-9a-f]+) rw-p \S+ \S+ 0 ")  # private, without a file
SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")  # the system's: always, madvise or never


def move_to_huge_pages() -> Iterator[int]:
    """Move the resident private memory of this process to huge pages. Yields the address of each, 1 to 4 ms after the
    one before. Yields nothing where the system has none, or where they are switched off."""
    with contextlib.suppress(OSError):  # a system without these files; an engine also runs with small pages
        if "[never]" in SETTING.read_text():
            return
        madvise = ctypes.CDLL(None).madvise
        for address in _resident():  # where the kernel has no huge page left, the small ones stay
            madvise(ctypes.c_void_p(address), ctypes.c_size_t(_HUGE_BYTES), _MADV_COLLAPSE)
            yield address


def _resident() -> Iterator[int]:
    """Yield each address where a huge page can take over: all the small pages there are resident."""
    entry_bytes = 8
    num_entries = _HUGE_BYTES // mmap.PAGESIZE
    with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
        for line in Path("/proc/self/maps").read_text().splitlines():
            mapping = _MAPPING.match(line)
            if mapping is None:
                continue
            start, end = -(-int(mapping["start"], 16) // _HUGE_BYTES) * _HUGE_BYTES, int(mapping["end"], 16)
            for address in range(start, end - _HUGE_BYTES + 1, _HUGE_BYTES):
                offset = address // mmap.PAGESIZE * entry_bytes
                entries = os.pread(pagemap.fileno(), num_entries * entry_bytes, offset)
                if min(entries[entry_bytes - 1 :: entry_bytes], default=0) >= _PRESENT:
                    yield address
