"""Measures the memory of the grammars that OpenVINO's library has compiled.

The library keeps every grammar until its process ends: 0.3 MB for `ab[a-z ]{1,30}` with a vocabulary of 49,152 tokens
(SmolLM2, 2026-11-23). So the process has to be replaced from time to time. The measure is the growth of the heap since
the model was loaded. Resident memory is not suitable: it also grows while the reserved KV cache fills.
"""

from __future__ import annotations

import ctypes

from tailrace.engines.promise import RestartNeeded

__all__ = ["GrammarMemory"]

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
