"""Timestamps that another process can read, and that stay correct when the system clock is set.

Until the next reboot, ages are computed from the kernel's boot clock. After a reboot they are computed from the time of
day; a negative age counts as 0.
"""

from __future__ import annotations

import time
from functools import lru_cache
from pathlib import Path

__all__ = ["age_s", "stamp"]


@lru_cache(maxsize=1)
def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"


def _since_boot_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


def stamp() -> str:
    """Return the current time as a timestamp."""
    return f"{time.time():.3f} {_boot_id()} {_since_boot_s():.3f}"


def age_s(stamped: str) -> float:
    """Return the seconds since the timestamp `stamped`, at least 0. Raises: ValueError if it is not a timestamp."""
    wall, boot_id, since_boot = stamped.split(" ")
    if boot_id == _boot_id() != "unknown":
        return max(0.0, _since_boot_s() - float(since_boot))
    return max(0.0, time.time() - float(wall))
