"""The processor's name and features."""

from __future__ import annotations

import contextlib
import platform
from pathlib import Path

__all__ = ["has_eight_bit_products", "processor", "processor_flags"]


def processor() -> str:
    """Return the processor's name."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as lines:
        name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), name)
    return name


def processor_flags() -> frozenset[str]:
    """Return the features by Linux's names, such as "avx2"; none on other systems."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return next((frozenset(line.split()) for line in lines if line.startswith(("flags", "Features"))), frozenset())


def has_eight_bit_products(flags: frozenset[str]) -> bool:
    """Return whether the processor sums products of integers of eight bits (VNNI). True for other kinds than x86."""
    return "avx2" not in flags or not flags.isdisjoint(("avx512_vnni", "avx_vnni"))
