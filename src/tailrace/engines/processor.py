"""The processor's name and features."""

from __future__ import annotations

import contextlib
import platform

__all__ = ["has_eight_bit_products", "processor", "processor_flags"]


def processor() -> str:
    """Return the processor's name."""
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def processor_flags() -> frozenset[str]:
    """Return the features by Linux's names, such as "avx2"; none on other systems."""
    return frozenset(_cpuinfo("flags", "Features").split())


def _cpuinfo(*names: str) -> str:
    """Return the first value with one of these names in Linux's description of the processor, or ""."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as lines:
        return next((line.partition(":")[2].strip() for line in lines if line.startswith(names)), "")
    return ""


def has_eight_bit_products(flags: frozenset[str]) -> bool:
    """Return whether the processor sums products of integers of eight bits (VNNI). True for other kinds than x86."""
    return "avx2" not in flags or not flags.isdisjoint(("avx512_vnni", "avx_vnni"))
