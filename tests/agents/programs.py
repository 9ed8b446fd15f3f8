"""Agents as users have them: each installed unmodified, by the line of docs/agents.md, into a folder of its own."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import psutil
from tests.agents.page import ADDRESS, TASK, sections
from tests.clients.installed import install_printed, node
from tests.processes import wait_ended

__all__ = ["Said", "installed", "run_agent"]

_RUN_S = 150
_PYTHONS = {"OpenHands": (3, 12)}  # the oldest that an agent runs on, if it is newer than ours
# What the agents would otherwise send to their makers, or fetch from them, at every start.
_QUIET = {
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_AUTOUPDATER": "1",
    "CI": "1",
    "NO_COLOR": "1",
    "TERM": "dumb",
}


@dataclass(frozen=True, slots=True)
class Said:
    """What an agent printed, and how it ended."""

    status: int
    out: str
    err: str


@cache
def installed(agent: str) -> Path:
    """Return the folder with the programs of an agent. Skips the test if no registry answers."""
    return install_printed(sections()[agent].install, python=_PYTHONS.get(agent))


def run_agent(
    agent: str, server_url: str, folder: Path, *, way: int = 0, changes: Mapping[str, str] | None = None
) -> Said:
    """Run the lines of the page in a folder, with a home of its own, another address, and maybe other changes."""
    programs = installed(agent)
    home = folder.with_name("home")
    home.mkdir(exist_ok=True)
    lines = sections()[agent].ways[way]
    assert TASK in lines
    for printed, wanted in {ADDRESS: server_url, **(changes or {})}.items():
        assert printed in lines
        lines = lines.replace(printed, wanted)
    try:
        done = subprocess.run(
            ["bash", "-euc", lines],
            cwd=folder, env=_environment(home, programs), stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=_RUN_S, check=False,
        )  # fmt: skip
    finally:
        _end_daemons(home)
    return Said(done.returncode, done.stdout, done.stderr)


def _end_daemons(home: Path) -> None:
    """End what an agent has left running. Its home tells it from other processes."""
    left = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("HOME") == str(home):
                left.append(process)
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    wait_ended(left)


def _environment(home: Path, programs: Path) -> dict[str, str]:
    path = os.pathsep.join([str(programs), str(node().parent), os.environ["PATH"]])
    kept = {name: os.environ[name] for name in ("LANG", "LC_ALL") if name in os.environ}
    return kept | _QUIET | {"HOME": str(home), "PATH": path, "NO_PROXY": "127.0.0.1", "SHELL": "/bin/bash"}
