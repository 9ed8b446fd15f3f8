"""What happens to Codex CLI and Claude Code in longer work: many turns, several calls at once, a conversation that is
too long, an engine or a server that dies in the middle of an answer."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.agents.page import TASK
from tests.agents.programs import Said, run_agent
from tests.agents.scripts import Rules, scripted
from tests.api.process import Server
from tests.processes import wait_ended
from tests.waiting import until

pytestmark = [pytest.mark.deep, pytest.mark.timeout(900)]

_DONE = "The work is done."
_SHELLS: dict[str, Callable[[str], dict[str, Any]]] = {  # Any: JSON
    "Codex CLI": lambda line: {"name": "exec_command", "arguments": {"cmd": line}},
    "Claude Code": lambda line: {"name": "Bash", "arguments": {"command": line, "description": "Work"}},
}
_MAY_RUN: dict[str, dict[str, str]] = {
    "Codex CLI": {},
    "Claude Code": {"--permission-mode acceptEdits": "--allowedTools Bash"},
}


@pytest.fixture(params=_SHELLS)
def agent(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def worked(agent: str, url: str, folder: Path, **changes: str) -> Said:
    said = run_agent(agent, url, folder, changes=_MAY_RUN[agent] | changes)
    assert (said.status, _DONE in said.out) == (0, True), said
    return said


def test_forty_turns(agent: str, work: Path) -> None:
    shell = _SHELLS[agent]
    steps = [shell(f"echo {number} >> hello.txt; echo STEP-{number}-DONE") for number in range(1, 41)]
    rules: Rules = [{"when": TASK, "calls": [steps[0]]}]
    rules += [{"when": f"STEP-{number}-DONE", "calls": [step]} for number, step in enumerate(steps[1:], 1)]
    with scripted(work.parent, [*rules, {"when": "STEP-40-DONE", "say": _DONE}]) as server:
        worked(agent, server.url, work)
    assert (work / "hello.txt").read_text() == "".join(f"{number}\n" for number in range(1, 41))


def test_several_calls_in_one_answer(agent: str, work: Path) -> None:
    calls = [_SHELLS[agent](f"echo {name} >> {name}.txt; echo ALL-{name}") for name in "abc"]
    rules: Rules = [{"when": TASK, "say": "At once.", "calls": calls}, {"when": "ALL-c", "say": _DONE}]
    with scripted(work.parent, rules) as server:
        worked(agent, server.url, work)
    assert {name: (work / f"{name}.txt").read_text() for name in "abc"} == {name: f"{name}\n" for name in "abc"}


def test_an_agent_shortens_a_conversation_that_is_too_long(agent: str, work: Path) -> None:
    """Codex does so in time, by the window in its configuration; Claude Code when the server refuses its prompt."""
    shell = _SHELLS[agent]
    (work / "large.txt").write_text("A line of a large file.\n" * 1100)
    look = "head -c 26000 large.txt; echo"
    rules: Rules = [
        {"when": r"next LLM seamlessly|a <summary> block\.", "say": "<summary>SHORT</summary>"},
        {"when": TASK, "calls": [shell(f"{look} FIRST")]},
        {"when": "FIRST", "calls": [shell(f"{look} SECOND")]},
        {"when": "SECOND|SHORT", "calls": [shell("echo short > hello.txt; echo WRITTEN")]},
        {"when": "WRITTEN", "say": _DONE},
    ]
    window = {"Codex CLI": 60_000, "Claude Code": 120_000}[agent]
    with scripted(work.parent, rules, "--set", f"coder.context_tokens={window}", "--access-log") as server:
        if agent == "Codex CLI":
            worked(agent, server.url, work, **{"model_context_window = 65536": f"model_context_window = {window}"})
        else:
            worked(agent, server.url, work)
            assert "POST /v1/messages 400 " in server.log
    assert (work / "hello.txt").read_text() == "short\n"


def slowly(agent: str) -> Rules:
    """Return rules for a call that makes the file `begun`, and one that takes seconds to write and adds a line."""
    shell = _SHELLS[agent]
    add = f": {'long ' * 40}; echo line >> hello.txt; echo ADDED"
    return [
        {"when": TASK, "calls": [shell("echo BEGUN > begun; cat begun")]},
        {"when": "BEGUN", "say": "Now I add a line.", "calls": [shell(add)]},
        {"when": "ADDED", "say": _DONE},
    ]


@contextlib.contextmanager
def struck(server: Server, work: Path, strike: Callable[[], object]) -> Iterator[None]:
    """Strike in the middle of the second call."""

    def run() -> None:
        until((work / "begun").exists)
        until(lambda: any("<tool_call>" in text for text in texts(server)))
        strike()

    with ThreadPoolExecutor(1) as thread:
        struck = thread.submit(run)
        yield
        struck.result()


def texts(server: Server) -> list[str]:
    """Return the texts of the running streams."""
    return [server.state(one["id"])["text"] for one in server.http.get("/v1/streams").json()["data"]]


def test_an_engine_that_dies_is_a_pause(agent: str, work: Path) -> None:
    with scripted(work.parent, slowly(agent), options="tokens_per_s=150") as server:
        with struck(server, work, lambda: server.worker().kill()):
            worked(agent, server.url, work)
        assert "The engine stopped" in server.log
    assert (work / "hello.txt").read_text() == "line\n"


def test_an_agent_repeats_its_request_to_the_next_server(agent: str, work: Path) -> None:
    keeps = ("--data-dir", str(work.with_name("data")))
    with contextlib.ExitStack() as servers:
        first = servers.enter_context(scripted(work.parent, slowly(agent), *keeps, options="tokens_per_s=150"))

        def replace() -> None:
            children = psutil.Process(first.process.pid).children(recursive=True)
            first.send_signal(signal.SIGKILL)
            first.wait()
            wait_ended(children)
            servers.enter_context(scripted(work.parent, slowly(agent), *keeps, "--port", str(first.port)))

        with struck(first, work, replace):
            worked(agent, first.url, work)
    assert (work / "hello.txt").read_text() == "line\n"
