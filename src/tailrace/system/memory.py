"""The memory of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

__all__ = ["Memory", "machine_memory"]


class Memory(NamedTuple):
    """Of the machine; 0 where it is not known, as on macOS."""

    whole_bytes: int
    available_bytes: int


def machine_memory() -> Memory:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        lines = []
    pairs = (line.partition(":") for line in lines)
    numbers = {name: int(value.split()[0]) * 1024 for name, _, value in pairs if value.strip()}
    return Memory(numbers.get("MemTotal", 0), numbers.get("MemAvailable", 0))
