"""The loop of an agent over each wire, with what happens to agents: many turns, several calls at once, an answer that
is cut off, broken arguments, a prompt that is too long, an engine or a server that dies in the middle of a call.

No package is needed. `test_agents.py` has the same loop with the agents that people use.
"""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.agents.scripts import Rules, scripted
from tests.agents.small import WIRES, Agent, Wire
from tests.api.process import Server
from tests.processes import wait_ended

DONE = "That is all."
NUM_STEPS = 40


def write(path: str, content: str = "written by a call") -> dict[str, Any]:  # Any: JSON
    return {"name": "write_file", "arguments": {"path": path, "content": content}}


def marked(call: str) -> str:
    return f"<tool_call>\n{call}\n</tool_call>"


BROKEN = marked('{"name": "write_file", "arguments": write hello.txt}')
RULES: Rules = [
    {"when": "Begin: list", "say": "I look.", "calls": [{"name": "list_folder"}]},
    {"when": r"pebble\.txt", "say": "I write.", "calls": [write("hello.txt")]},
    {"when": r"Wrote hello\.txt", "calls": [{"name": "read_file", "arguments": {"path": "hello.txt"}}]},
    {"when": "written by a call", "say": DONE},
    {"when": "Begin: forty", "say": "I begin.", "calls": [write("step-1.txt")]},
    *({"when": rf"Wrote step-{n}\.txt", "calls": [write(f"step-{n + 1}.txt")]} for n in range(1, NUM_STEPS)),
    {"when": rf"Wrote step-{NUM_STEPS}\.txt", "say": DONE},
    {"when": "Begin: three", "say": "All at once.", "calls": [write(f"{name}.txt", name * 99) for name in "abc"]},
    {"when": r"Wrote c\.txt", "say": DONE},
    {"when": "Begin: long", "say": "A long one.", "calls": [write("long.txt", "long " * 600)]},
    {"when": "Write less", "calls": [write("long.txt", "short")]},
    {"when": r"Wrote long\.txt", "say": DONE},
    {"when": "Begin: mended", "say": marked(json.dumps(write("mended.txt"))[:-2] + ",},}")},
    {"when": r"Wrote mended\.txt", "say": DONE},
    {"when": "Begin: broken", "say": BROKEN},
    {"when": "Begin: slow", "say": "I write.", "calls": [write("slow.txt", "slow")]},
    {"when": r"Wrote slow\.txt", "say": DONE},
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with scripted(tmp_path_factory.mktemp("script"), RULES) as server:
        yield server


# Streams of every wire go on in tests/faults/test_server.py. What a client does about it is deep, but for one client.
one_wire = pytest.mark.parametrize(
    "wire",
    [pytest.param(wire, marks=pytest.mark.deep if name != "chats" else (), id=name) for name, wire in WIRES.items()],
)


@pytest.fixture(params=WIRES)
def wire(request: pytest.FixtureRequest) -> type[Wire]:
    return WIRES[request.param]


@pytest.fixture
def agent(wire: type[Wire], server: Server, work: Path) -> Iterator[Agent]:
    with at_work(wire, server, work) as agent:
        yield agent


@contextlib.contextmanager
def at_work(wire: type[Wire], server: Server, folder: Path) -> Iterator[Agent]:
    with contextlib.closing(wire(server.url)) as client:
        yield Agent(client, folder)


def test_an_agent_works_to_the_end(agent: Agent) -> None:
    assert agent.work("Begin: list this folder.") == DONE
    assert [call.name for call in agent.ran] == ["list_folder", "write_file", "read_file"]
    assert (agent.folder / "hello.txt").read_text() == "written by a call"


@pytest.mark.deep
@one_wire
def test_forty_turns(wire: type[Wire], server: Server, work: Path) -> None:
    with at_work(wire, server, work) as agent:
        assert agent.work("Begin: forty steps.") == DONE
    assert [json.loads(call.arguments)["path"] for call in agent.ran] == [f"step-{n}.txt" for n in range(1, 41)]
    assert len({call.call_id for call in agent.ran}) == NUM_STEPS


def test_several_calls_in_one_answer(agent: Agent) -> None:
    assert agent.work("Begin: three files.") == DONE
    assert [len(answer.calls) for answer in agent.answers] == [3, 0]
    assert len({call.call_id for call in agent.ran}) == 3
    assert {name: (agent.folder / f"{name}.txt").read_text() for name in "abc"} == {name: name * 99 for name in "abc"}


def test_a_call_that_is_cut_off_is_known_to_be_cut_off(agent: Agent) -> None:
    """The history then has half a call, which has to be taken."""
    agent.most = 300
    assert agent.work("Begin: long text.") == DONE
    assert [answer.is_cut for answer in agent.answers] == [True, False, False]
    assert (agent.folder / "long.txt").read_text() == "short"


def test_small_mistakes_in_arguments_are_mended(agent: Agent) -> None:
    assert agent.work("Begin: mended arguments.") == DONE
    assert (agent.folder / "mended.txt").read_text() == "written by a call"


def test_broken_arguments_are_text(agent: Agent) -> None:
    assert agent.work("Begin: broken arguments.") == BROKEN
    assert agent.ran == []


@pytest.fixture(scope="module")
def short_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that a long conversation does not fit into."""
    with scripted(tmp_path_factory.mktemp("script"), RULES, "--context-tokens", "2500") as server:
        yield server


@one_wire
def test_an_agent_shortens_a_conversation_that_is_too_long(wire: type[Wire], short_server: Server, work: Path) -> None:
    with at_work(wire, short_server, work) as agent:
        assert agent.work("Begin: forty steps.") == DONE
    assert agent.num_compacted > 1
    assert [json.loads(call.arguments)["path"] for call in agent.ran] == [f"step-{n}.txt" for n in range(1, 41)]


@one_wire
def test_an_engine_that_dies_in_the_middle_of_a_call_is_a_pause(wire: type[Wire], work: Path) -> None:
    with (
        scripted(work.parent, RULES, options="tokens_per_s=100") as server,
        at_work(wire, server, work) as agent,
    ):
        agent.on_text = lambda: server.worker().kill()
        assert agent.work("Begin: slow work.") == DONE
        assert "The engine stopped" in server.log
    assert (agent.num_repeated, len(agent.ran)) == (0, 1)
    assert (work / "slow.txt").read_text() == "slow"


@one_wire
def test_a_server_that_dies_in_the_middle_of_a_call(wire: type[Wire], work: Path) -> None:
    """The agent repeats its request. The next server also continues the broken stream, which nobody reads."""
    keeps = ("--data-dir", str(work.with_name("data")))
    with contextlib.ExitStack() as servers:
        first = servers.enter_context(scripted(work.parent, RULES, *keeps, options="tokens_per_s=100"))

        def kill() -> None:
            children = psutil.Process(first.process.pid).children(recursive=True)
            first.send_signal(signal.SIGKILL)
            first.wait()
            wait_ended(children)

        def revive() -> None:
            servers.enter_context(scripted(work.parent, RULES, *keeps, "--port", str(first.port)))

        with at_work(wire, first, work) as agent:
            agent.on_text, agent.revive = kill, revive
            assert agent.work("Begin: slow work.") == DONE
    assert (agent.num_repeated, len(agent.ran)) == (1, 1)
    assert (work / "slow.txt").read_text() == "slow"
