"""A network for one test alone: a loopback of its own, which can be made to lose what it carries.

Everything that the test starts lives there, servers, clients and threads, and all of it is gone with the test.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec

import pytest

__all__ = ["apart", "mended", "network"]

P = ParamSpec("P")

_NEW_NETWORK = 0x40000000  # CLONE_NEWNET
_RULES = "table inet faults { chain input { type filter hook input priority 0; }; }"


def apart(test: Callable[P, None]) -> Callable[P, None]:
    """The test, in a thread whose network is its own. It is skipped where the system does not allow that."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        def alone() -> None:
            _leave()
            test(*args, **kwargs)

        with ThreadPoolExecutor(1) as threads:
            threads.submit(alone).result()

    return run


def _leave() -> None:
    missing = [name for name in ("ip", "nft", "tc") if shutil.which(name) is None]
    if sys.platform != "linux" or missing:
        pytest.skip(f"there is no {', '.join(missing) or 'Linux'} here, which makes networks bad")
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_NETWORK):
        pytest.skip(f"this user may not have a network apart: {os.strerror(ctypes.get_errno())}")
    network("ip link set lo mtu 1500 up")  # packets as on a wire, not of 64 KiB
    network(f"nft add {_RULES}" if mended() else "")


def network(command: str) -> None:
    """Change the network that the caller is in: `ip`, `nft` or `tc`. Raises: CalledProcessError."""
    subprocess.run(command.split(), check=True, capture_output=True, timeout=10)


def mended() -> None:
    """Everything comes through again."""
