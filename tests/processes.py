"""Stops processes, and waits for their end. A zombie has ended."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import psutil
from tests.waiting import until

__all__ = ["freeze", "is_alive", "wait_ended"]


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def freeze(process: psutil.Process) -> None:
    """Suspend a process and wait until each of its threads has stopped.

    Until then a thread that waits for input may still read what comes in. Resume it with `process.resume`.
    """
    process.suspend()
    until(lambda: all(map(_has_stopped, Path(f"/proc/{process.pid}/task").glob("*/stat"))))


def _has_stopped(stat: Path) -> bool:
    """Whether the state of a thread is T. Its name, in parentheses before, may contain anything."""
    return stat.read_text().rpartition(")")[2].split()[0] == "T"


def wait_ended(processes: Iterable[psutil.Process]) -> None:
    """Raises: AssertionError if one of them does not end."""
    waiting = list(processes)
    until(lambda: not any(map(is_alive, waiting)))
