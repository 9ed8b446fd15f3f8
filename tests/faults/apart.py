"""A network for one test: its own loopback, which can lose packets.

Everything that the test starts lives there, servers, clients and threads, and all of it is gone with the test.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import ParamSpec

from tests.missing import skip_missing
from tests.waiting import LONG_S

__all__ = ["apart", "dropping", "narrow"]

P = ParamSpec("P")

_NEW_NETWORK = 0x40000000  # CLONE_NEWNET


def apart(test: Callable[P, None]) -> Callable[P, None]:
    """Run the test in a thread with its own network. Skipped if the system does not allow it."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        def alone() -> None:
            _move()
            test(*args, **kwargs)

        with ThreadPoolExecutor(1) as threads:
            threads.submit(alone).result()

    return run


def _move() -> None:
    if sys.platform != "linux":
        skip_missing("Linux", "networks are made bad with it")
    _need("ip")
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_NETWORK):
        skip_missing("the right to a network apart", os.strerror(ctypes.get_errno()))
    _run("ip link set lo mtu 1500 up")  # packets as on a wire, and not of 64 KiB


def _need(program: str) -> None:
    """Skip the test if a program is missing."""
    if shutil.which(program) is None:
        skip_missing(program, "networks are made bad with it")


def _run(command: str) -> None:
    subprocess.run(command.split(), check=True, capture_output=True, text=True, timeout=LONG_S)


@contextmanager
def dropping(packets: str = "") -> Iterator[None]:
    """Drop packets that match an expression of nft; without one, drop all."""
    _need("nft")
    try:
        _run("nft table inet faults { chain input { type filter hook input priority 0; }; }")  # perhaps once more
    except subprocess.CalledProcessError as error:
        skip_missing("a filter of packets", error.stderr)
    _run(f"nft add rule inet faults input {packets} drop")
    try:
        yield
    finally:
        _run("nft flush chain inet faults input")


@contextmanager
def narrow(rate: str) -> Iterator[None]:
    """Limit the bandwidth, in the syntax of tc: `64kbit`."""
    _need("tc")
    _run(f"tc qdisc add dev lo root tbf rate {rate} burst 3000 limit 30000")
    try:
        yield
    finally:
        _run("tc qdisc del dev lo root")
