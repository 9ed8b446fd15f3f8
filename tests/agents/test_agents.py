"""Agents, each unmodified from its package, with the lines of docs/agents.md, to the end of their work.

A scripted model plays the agent's: it lists the folder, writes a file through a tool of the agent, and stops when it
has read the result. The packages are large, so the tests of most of them are deep.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.agents.page import TASK, sections, versions
from tests.agents.programs import run_agent
from tests.agents.scripts import Rules, scripted

pytestmark = pytest.mark.timeout(900)  # with the installation

_WRITTEN = "written by a call"
_SAID = "The file is there."


def _call(name: str, **arguments: object) -> dict[str, Any]:  # Any: JSON
    return {"name": name, "arguments": arguments}


def _steps(look: Mapping[str, Any], write: Mapping[str, Any], *, done: str = "") -> Rules:
    """Return the rules of a loop. `done` is in the result of the call that writes."""
    return [
        {"when": TASK, "say": "I list the folder.", "calls": [look]},
        {"when": r"pebble\.txt", "say": "I write the file.", "calls": [write]},
        {"when": done, "say": _SAID},
    ]


_PATH = "FOLDER/hello.txt"
_SHELL = f"echo {_WRITTEN} > hello.txt && cat hello.txt"
AGENTS: dict[str, Rules] = {
    "Codex CLI": _steps(_call("exec_command", cmd="ls"), _call("exec_command", cmd=_SHELL), done=_WRITTEN),
    "Claude Code": _steps(
        _call("Bash", command="ls", description="List the folder"),
        _call("Write", file_path=_PATH, content=f"{_WRITTEN}\n"),
        done="created successfully",
    ),
    "opencode": _steps(
        _call("bash", command="ls", description="List the folder"),
        _call("write", filePath=_PATH, content=f"{_WRITTEN}\n"),
    ),
    "Qwen Code": _steps(
        _call("run_shell_command", command="ls", is_background=False),
        _call("write_file", file_path=_PATH, content=f"{_WRITTEN}\n"),
    ),
    "Cline": _steps(_call("run_commands", commands=["ls"]), _call("editor", path=_PATH, new_text=f"{_WRITTEN}\n")),
    "Continue": _steps(_call("List", dirpath="."), _call("Write", filepath=_PATH, content=f"{_WRITTEN}\n")),
    "Goose": _steps(_call("shell", command="ls"), _call("write", path=_PATH, content=f"{_WRITTEN}\n")),
    "Aider": [{"when": TASK, "say": f"{_SAID}\n\nhello.txt\n```\n{_WRITTEN}\n```\n"}],
    "OpenHands": _steps(
        _call("terminal", command="ls", security_risk="LOW"),
        _call("file_editor", command="create", path=_PATH, file_text=f"{_WRITTEN}\n", security_risk="LOW"),
    ),
}


LIGHT = ("Continue",)  # packages of less than 100 MB


WAYS = [
    pytest.param(
        agent, way, marks=() if agent in LIGHT else (pytest.mark.deep,), id=f"{agent}, {way + 1}" if way else agent
    )
    for agent in AGENTS
    for way in range(len(sections()[agent].ways))
]


@pytest.mark.parametrize(("agent", "way"), WAYS)
def test_an_agent_works_to_the_end(agent: str, way: int, work: Path) -> None:
    with scripted(work.parent, AGENTS[agent]) as server:
        said = run_agent(agent, server.url, work, way=way)
    assert said.status == 0, said
    assert _SAID in said.out, said
    assert (work / "hello.txt").read_text() == f"{_WRITTEN}\n"


@pytest.mark.deep
def test_codex_works_on_one_websocket(work: Path) -> None:
    """Its tools' results go over the socket that it opened first; nothing is asked over HTTP."""
    wire = 'wire_api = "responses"'
    with scripted(work.parent, AGENTS["Codex CLI"], "--access-log") as server:
        said = run_agent("Codex CLI", server.url, work, changes={wire: f"{wire}\nsupports_websockets = true"})
        assert (said.status, _SAID in said.out) == (0, True), said
        assert (work / "hello.txt").read_text() == f"{_WRITTEN}\n"
    assert set(re.findall(r"(\S+) /v1/responses", server.log)) == {"WEBSOCKET"}, server.log


def test_the_table_has_the_versions_that_are_tested() -> None:
    printed = {name: section.install for name, section in sections().items()}
    assert list(printed) == list(versions()) == list(AGENTS)
    assert [name for name, version in versions().items() if not re.search(f"[@=]{version}\\b", printed[name])] == []
