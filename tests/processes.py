"""Waits for the end of processes. A zombie has ended."""

from __future__ import annotations

from collections.abc import Iterable

import psutil
from tests.waiting import until

__all__ = ["is_alive", "wait_ended"]


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_ended(processes: Iterable[psutil.Process]) -> None:
    """Raises: AssertionError if one of them does not end."""
    waiting = list(processes)
    until(lambda: not any(map(is_alive, waiting)))
