"""Timestamps that another process can read, and that stay correct when the system clock is set.

Until the next reboot, ages are computed from the kernel's boot clock. After a reboot they are computed from the time of
day; a negative age counts as 0.
"""

from __future__ import annotations

import time
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

__all__ = ["Instant", "age_s", "now", "stamp"]


class Instant(NamedTuple):
    """One point in time, by both clocks."""

    wall_s: float
    since_boot_s: float


@lru_cache(maxsize=1)
def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"


def _since_boot_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


def now() -> Instant:
    """Return the current time."""
    return Instant(time.time(), _since_boot_s())


def stamp() -> str:
    """Return the current time as a timestamp. Of two timestamps of one process, the later one is not earlier."""
    at = now()
    return f"{at.wall_s:.6f} {_boot_id()} {at.since_boot_s:.6f}"


def age_s(stamped: str, at: Instant | None = None) -> float:
    """Return the seconds from the timestamp `stamped` to `at` (None: now), at least 0. Ages are in the order of the
    timestamps only where `at` is the same for all. Raises: ValueError if it is not a timestamp."""
    wall, boot_id, since_boot = stamped.split(" ")
    at = at or now()
    if boot_id == _boot_id() != "unknown":
        return max(0.0, at.since_boot_s - float(since_boot))
    return max(0.0, at.wall_s - float(wall))
