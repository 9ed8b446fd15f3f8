"""Agents as users have them: each installed unmodified, by the line of docs/agents.md, into a folder of its own."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.agents.page import ADDRESS, TASK, sections
from tests.clients.installed import install_printed, node

__all__ = ["Said", "installed", "run_agent"]

_RUN_S = 150
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
    return install_printed(sections()[agent].install)


def run_agent(agent: str, server_url: str, folder: Path, *, task: str = TASK, limit_s: float = _RUN_S) -> Said:
    """Run the lines of the page in a folder, with another address, a home of its own, and maybe another task."""
    programs = installed(agent)
    home = folder.with_name("home")
    home.mkdir(exist_ok=True)
    lines = sections()[agent].lines
    assert ADDRESS in lines
    assert TASK in lines
    lines = lines.replace(ADDRESS, server_url).replace(TASK, task)
    done = subprocess.run(
        ["bash", "-euc", lines],
        cwd=folder, env=_environment(home, programs), stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=limit_s, check=False,
    )  # fmt: skip
    return Said(done.returncode, done.stdout, done.stderr)


def _environment(home: Path, programs: Path) -> dict[str, str]:
    path = os.pathsep.join([str(programs), str(node().parent), os.environ["PATH"]])
    kept = {name: os.environ[name] for name in ("LANG", "LC_ALL") if name in os.environ}
    return kept | _QUIET | {"HOME": str(home), "PATH": path, "NO_PROXY": "127.0.0.1", "SHELL": "/bin/bash"}
