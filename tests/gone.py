"""Whether processes are gone. One that nobody has reaped yet is."""

from __future__ import annotations

from collections.abc import Iterable

import psutil
from tests.engines.asking import until

__all__ = ["is_alive", "wait_gone"]


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_gone(processes: Iterable[psutil.Process], *, timeout_s: float = 5.0) -> None:
    """Raises: AssertionError if one of them stays."""
    waiting = list(processes)
    until(lambda: not any(map(is_alive, waiting)), timeout_s=timeout_s)
