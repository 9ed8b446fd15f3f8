"""The memory of OpenVINO's library: that of compiled grammars, and that of the model's file.

The library keeps every grammar until its process ends: 0.3 MB for `ab[a-z ]{1,30}` with a vocabulary of 49,152 tokens
(SmolLM2, 2026-11-23). So the process has to be replaced from time to time. The measure is the growth of the heap since
the model was loaded. Resident memory is not suitable: it also grows while the reserved KV cache fills.
"""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

from tailrace.engines.interface import RestartNeeded

__all__ = ["GrammarMemory", "release_mapped"]

_FIELDS = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")


class _Mallinfo(ctypes.Structure):
    """glibc's `struct mallinfo2`. The bytes in use are `hblkhd` (mapped) plus `uordblks` (heap)."""

    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS]


class GrammarMemory:
    """Create this after the model is loaded. No limit applies if it is 0 or if the C library is not glibc."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._loaded_bytes = heap_bytes()
        self._grown_bytes = 0

    def measure(self) -> None:
        """Measure the growth, after a step that may have compiled a grammar. Takes 3 to 10 ms."""
        if self._limit_bytes:
            self._grown_bytes = heap_bytes() - self._loaded_bytes

    def check(self, *, is_idle: bool) -> None:
        """Raises: RestartNeeded above the limit if the engine is idle, or above twice the limit in any case."""
        if self._limit_bytes and self._grown_bytes > self._limit_bytes * (1 if is_idle else 2):
            raise RestartNeeded(
                f"compiled grammars take {self._grown_bytes / 2**20:.0f} MiB of memory; --grammar-memory-bytes "
                f"is {self._limit_bytes / 2**20:.0f} MiB"
            )


def heap_bytes() -> int:
    """Return the allocated bytes of this process, or 0 if the C library is not glibc."""
    mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo2 is None:
        return 0
    mallinfo2.restype = _Mallinfo
    info = mallinfo2()
    return int(info.hblkhd + info.uordblks)


def release_mapped() -> None:
    """Give back the memory of a model's mapped file, after the first step has copied the weights out of it (Linux).

    The library keeps the whole file mapped for the few weights that it reads there, such as rows of the embedding.
    These are read from the file again.
    """
    maps = Path("/proc/self/maps")
    if not maps.is_file() or not hasattr(mmap, "MADV_DONTNEED"):
        return
    madvise = ctypes.CDLL(None).madvise
    for line in maps.read_text().splitlines():
        fields = line.split(maxsplit=5)
        if fields[-1].endswith("/openvino_model.bin") and "w" not in fields[1]:  # what is not written can be read again
            start, end = (int(address, 16) for address in fields[0].split("-"))
            madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED)
