"""Child processes: they end with their parent and ignore signals from the terminal; and for the parent, their memory,
how they are stopped, and how they ended."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import subprocess

__all__ = ["begin_child", "end_family_with_me", "how_it_ended", "resident_bytes", "stop"]

_PR_SET_PDEATHSIG = 1
_watchdogs: list[subprocess.Popen[bytes]] = []  # kept, so that their pipes stay open
_WATCHDOG = "import os, sys; sys.stdin.read(); os.killpg(int(sys.argv[1]), 9)"


def stop(process: subprocess.Popen[Any], *, within_s: float) -> None:  # Any: bytes or text
    """Ask a process to end, and wait for it. After `within_s` it is killed."""
    import subprocess  # which few child processes need

    process.terminate()
    try:
        process.wait(within_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def begin_child(parent_pid: int) -> None:
    """Make this process die with its parent, on Linux even during a long call, and write no core dump.

    It ignores SIGINT and SIGTERM: a signal to the whole process group would abort streams that the parent still drains.
    Start the process in its own session as well, because a Ctrl-C on the terminal may come before this call.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
            score.write("500")  # out of memory, the kernel kills the child first; the parent can start another one
    if os.getppid() != parent_pid:
        os._exit(0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core dump would contain prompts
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def end_family_with_me() -> None:
    """Make all child processes of this process end with it, however it ends. Users' code may start some.

    They are in one process group. A small watchdog process kills the group when the pipe to its stdin breaks.
    """
    import subprocess

    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    command = [sys.executable, "-I", "-S", "-c", _WATCHDOG, str(os.getpid())]
    _watchdogs.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL))


def how_it_ended(status: int) -> str:
    """Describe the exit status of a process, as `subprocess` gives it: "killed by SIGKILL", or "exit status 1"."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:  # a real-time signal has no name
        return f"killed by signal {-status}"


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process; 0 if the process is gone or the system does not report it."""
    try:
        pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    except (OSError, IndexError):
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
