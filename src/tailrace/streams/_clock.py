"""When something was, in a form that another process can read after somebody has set the clock.

Within one boot of the machine the kernel's boot clock tells how long ago that is, whatever the time of day says; after
a reboot only the time of day is left, and an age that it makes negative counts as none.
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
    """Now."""
    return f"{time.time():.3f} {_boot_id()} {_since_boot_s():.3f}"


def age_s(stamped: str) -> float:
    """Seconds since `stamped`, never negative. Raises: ValueError if it is no stamp."""
    wall, boot_id, since_boot = stamped.split(" ")
    if boot_id == _boot_id() != "unknown":
        return max(0.0, _since_boot_s() - float(since_boot))
    return max(0.0, time.time() - float(wall))
