"""What a child process owes its parent: to end with it, and to leave signals from the terminal to it. And what the
parent sees of it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

__all__ = ["begin_child", "end_family_with_me", "resident_bytes"]

_PR_SET_PDEATHSIG = 1
_keepers: list[subprocess.Popen[bytes]] = []  # whose pipes must stay open
_KEEPER = "import os, sys; sys.stdin.read(); os.killpg(int(sys.argv[1]), 9)"


def begin_child(parent_pid: int) -> None:
    """Have this process die with its parent, on Linux even in the middle of a long call, and leave no core.

    The parent decides when it ends: a signal to the whole group would cut streams that the parent is still draining.
    Start it in a session of its own as well: a Ctrl-C on the terminal may come before this is called.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
            score.write("500")  # out of memory takes the child before the parent, which can start another
    if os.getppid() != parent_pid:
        os._exit(0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # what it leaves behind would hold people's prompts
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def end_family_with_me() -> None:
    """See to it that whatever processes this one starts end with it, however it ends; others' code may forget that.

    They become a group, and a process of a few megabytes kills it when the pipe to its stdin breaks.
    """
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    command = [sys.executable, "-I", "-S", "-c", _KEEPER, str(os.getpid())]
    _keepers.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL))


def resident_bytes(pid: int) -> int:
    """What a process has in memory; 0 where the system does not say, or it is gone."""
    try:
        pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    except (OSError, IndexError):
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
