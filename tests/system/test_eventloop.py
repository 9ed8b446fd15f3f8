"""SIGHUP on the event loop."""

from __future__ import annotations

import gc
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.waiting import LONG_S, wait_until

from tailrace.system.eventloop import on_hangup


@pytest.fixture(autouse=True)
def _ignored() -> Iterator[None]:
    """Where a test has a moment without a handler, it fails, and its process goes on."""
    gc.collect()  # a loop of an earlier test that is closed now restores the handlers of its signals
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGHUP, before)


def _hang_up() -> None:
    """Send SIGHUP to this process. Where the system has no handler for it, whoever took it away, that fails."""
    if sys.platform == "linux":
        handled = re.findall(r"^Sig(?:Cgt|Ign):\t([0-9a-f]+)$", Path("/proc/self/status").read_text(), re.MULTILINE)
        assert any(int(mask, 16) >> (signal.SIGHUP - 1) & 1 for mask in handled)
    os.kill(os.getpid(), signal.SIGHUP)


@pytest.mark.parametrize("first_left", [0, 1])
async def test_several_contexts_in_any_order(first_left: int) -> None:
    """Each one hears of it until it is left; then everything is as before."""
    heard: list[int] = []
    contexts = [on_hangup(lambda number=number: heard.append(number)) for number in range(2)]  # type: ignore[misc]
    for context in contexts:
        context.__enter__()
    _hang_up()
    await wait_until(lambda: sorted(heard) == [0, 1])
    contexts.pop(first_left).__exit__(None, None, None)
    _hang_up()
    await wait_until(lambda: sorted(heard) == sorted([0, 1, 1 - first_left]))
    contexts.pop().__exit__(None, None, None)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


_EARLY = """
import asyncio, os, signal
from tailrace.system.eventloop import on_hangup, outlive_hangup

async def main() -> None:
    for is_first in (True, False):
        heard = asyncio.Event()
        with on_hangup(heard.set):
            await asyncio.sleep(0.01)
            assert heard.is_set() is is_first

signal.signal(signal.SIGHUP, signal.SIG_DFL)
outlive_hangup()
os.kill(os.getpid(), signal.SIGHUP)
asyncio.run(main())
"""


def test_the_first_context_hears_of_an_earlier_one() -> None:
    command = [sys.executable, "-c", _EARLY]
    assert subprocess.run(command, start_new_session=True, timeout=LONG_S, check=False).returncode == 0  # no terminal
