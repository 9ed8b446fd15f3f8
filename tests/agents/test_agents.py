"""Agents, each unmodified from its package, with the lines of docs/agents.md, to the end of their work.

A scripted model plays the agent's: it lists the folder, writes a file through a tool of the agent, and stops when it
has read the result. The packages are large, so most of these tests are deep.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.agents.page import TASK, sections, versions
from tests.agents.programs import run_agent
from tests.api.process import Server

pytestmark = pytest.mark.timeout(900)  # with the installation

Rules = list[dict[str, Any]]  # Any: JSON

_WRITTEN = "written by a call"
_SAID = "The file is there."


def _call(name: str, **arguments: object) -> dict[str, Any]:  # Any: JSON
    return {"name": name, "arguments": arguments}


def _steps(look: Mapping[str, Any], write: Mapping[str, Any], done: str = _WRITTEN) -> Rules:
    """Return the rules of a loop. `done` is what the agent reports after the file was written."""
    return [
        {"when": TASK, "say": "I list the folder.", "calls": [look]},
        {"when": r"pebble\.txt", "say": "I write the file.", "calls": [write]},
        {"when": done, "say": _SAID},
    ]


_SHELL = f"echo {_WRITTEN} > hello.txt && cat hello.txt"
AGENTS: dict[str, Rules] = {
    "Codex CLI": _steps(_call("exec_command", cmd="ls"), _call("exec_command", cmd=_SHELL)),
    "Claude Code": _steps(
        _call("Bash", command="ls", description="List the folder"),
        _call("Write", file_path="FOLDER/hello.txt", content=f"{_WRITTEN}\n"),
        "created successfully",
    ),
}


@contextlib.contextmanager
def scripted(folder: Path, rules: Rules, *flags: str) -> Iterator[Server]:
    """Run a server whose model `coder` follows these rules. Its tokens are bytes, so its window is large."""
    script = folder / "script.json"
    script.write_text(json.dumps({"rules": rules}).replace("FOLDER", str(folder / "work")))
    window = ("--context-tokens", "1000000", "--kv-tokens", "4000000")
    with contextlib.closing(Server(f"--model=coder=scripted:script={script}", *window, *flags)) as server:
        yield server.wait_ready()


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """The folder in which an agent works."""
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "pebble.txt").write_text("A pebble.\n")
    return folder


@pytest.mark.deep
@pytest.mark.parametrize("agent", AGENTS)
def test_an_agent_works_to_the_end(agent: str, work: Path) -> None:
    with scripted(work.parent, AGENTS[agent]) as server:
        said = run_agent(agent, server.url, work)
    assert said.status == 0, said
    assert _SAID in said.out, said
    assert (work / "hello.txt").read_text() == f"{_WRITTEN}\n"


def test_the_table_has_the_versions_that_are_tested() -> None:
    printed = {name: section.install for name, section in sections().items()}
    assert list(printed) == list(versions()) == list(AGENTS)
    assert [name for name, version in versions().items() if not re.search(f"[@=]{version}\\b", printed[name])] == []
