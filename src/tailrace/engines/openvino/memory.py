"""How much memory the grammars take that OpenVINO's library has compiled.

The library keeps every grammar until its process ends: 0.3 MB for one like `ab[a-z ]{1,30}` with 49,152 tokens of
vocabulary (SmolLM2, 2026-11-23). So the process has to be replaced at times. What counts is how much the heap has grown
since the model was loaded. Resident memory would not do: it also grows while keys and values fill memory that
was reserved at the start.
"""

from __future__ import annotations

import ctypes

from tailrace.engines.promise import RestartNeeded

__all__ = ["GrammarMemory"]

_FIELDS = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")


class _Mallinfo(ctypes.Structure):
    """glibc's `struct mallinfo2`: `hblkhd` and `uordblks` are bytes in use, mapped apart and from the heaps."""

    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS]


class GrammarMemory:
    """Made when the model is loaded. With a limit of 0, or where the C library is not glibc, nothing is limited."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._loaded_bytes = heap_bytes()
        self._grown_bytes = 0

    def measure(self) -> None:
        """Call it after a step in which a grammar may have been compiled. Takes 3 to 10 ms."""
        if self._limit_bytes:
            self._grown_bytes = heap_bytes() - self._loaded_bytes

    def check(self, *, is_idle: bool) -> None:
        """Raises: RestartNeeded if they take more than the limit and nothing runs, or more than twice as much."""
        if self._limit_bytes and self._grown_bytes > self._limit_bytes * (1 if is_idle else 2):
            raise RestartNeeded(
                f"compiled grammars take {self._grown_bytes / 2**20:.0f} MiB of memory, and --grammar-memory-bytes "
                f"is {self._limit_bytes / 2**20:.0f} MiB"
            )


def heap_bytes() -> int:
    """What this process has allocated; 0 where the C library does not tell."""
    mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo2 is None:
        return 0
    mallinfo2.restype = _Mallinfo
    info = mallinfo2()
    return int(info.hblkhd + info.uordblks)
