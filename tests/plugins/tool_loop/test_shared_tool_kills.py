"""SIGKILL and SIGSTOP of servers that share a Redis, around the calls of tools that count, at all of them at once."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from openai.types.responses import Response
from tests.api.process import Server
from tests.faults.team import Team, team
from tests.plugins.tool_loop.tool_servers import Json, Tools, asks_of, calls_of, client_of
from tests.waiting import until

pytest.importorskip("mcp")

_UNKNOWN = -32000  # the code of a call whose outcome is not known
_SAFE = ("look", "put")
_NUM_CALLS = 5
DEATHS = int(os.environ.get("TAILRACE_TEST_DEATHS", "30"))


class Counted:
    """Responses of one round, which are begun one after the other, and the calls that were counted meanwhile."""

    def __init__(self, tools: Tools) -> None:
        self.tools = tools
        self.begun: dict[str, str] = {}  # the names in their texts, by the ids of responses
        self.num_unknown = self.num_done = 0

    def begin(self, server: Server, name: str) -> None:
        tool: Any = {"type": "mcp", "server_label": "count", "require_approval": "never"}  # Any: what the client takes
        with client_of(server) as client:
            response = client.responses.create(model="scripted", input=f"Go {name}.", tools=[tool], background=True)
        self.begun[response.id] = name

    def check(self, client: OpenAI) -> None:
        """Wait for all responses, and compare them with the calls."""
        for response_id in self.begun:
            until(lambda: client.responses.retrieve(response_id).status != "in_progress")  # noqa: B023
        counted = Counter(json.loads(line)[1]["text"] for line in self.lines())
        for response_id, name in self.begun.items():
            self._check(client.responses.retrieve(response_id), name, counted)
        self.begun.clear()  # an owner's older ones are not kept

    def lines(self) -> list[str]:
        return self.tools.counts.read_text().splitlines() if self.tools.counts.exists() else []

    def _check(self, response: Response, name: str, counted: Counter[str]) -> None:
        assert response.status == "completed"
        unknown: list[str] = []
        calls = calls_of(response)
        for call in calls:
            text = json.loads(call.arguments)["text"]
            if call.status == "completed":
                assert call.output == text
                assert counted[text] >= 1 if call.name in _SAFE else counted[text] == 1, text
                continue
            assert call.error is not None
            assert call.error.type == "mcp_protocol_error"
            if call.error.code == _UNKNOWN:
                unknown.append(text)
                assert call.name not in _SAFE
                assert counted[text] <= 1, text
            else:
                assert unknown, call  # the rest of that turn is not called, and says so
                assert not counted[text]
        assert [json.loads(ask.arguments)["text"] for ask in asks_of(response)] == unknown
        shown = {json.loads(call.arguments)["text"] for call in calls}
        assert {text for text in counted if text.startswith(f"{name}-")} <= shown  # none is lost in silence
        self.num_unknown += bool(unknown)
        if not unknown:
            self.num_done += 1
            assert len(calls) == _NUM_CALLS
            assert response.output_text == "The tool has answered."


def _tools(path: Path, call_s: float) -> Tools:
    """Return tools whose calls take some time, and a model that calls them with the name that the question has."""
    tools = Tools(path, [])

    def call(name: str, text: str) -> Json:
        return {"name": f"count__{name}", "arguments": {"text": f"$1-{text}", "sleep_s": call_s}}

    turns = [
        [call("append", "first"), call("look", "second")],
        [call("append", "third"), call("put", "fourth")],
        [call("append", "fifth")],
    ]
    seen = (r"Go (\w+)\.", r"<tool_response>\n(\w+)-second", r"<tool_response>\n(\w+)-fourth")
    rules: list[Json] = [{"when": when, "calls": calls} for when, calls in zip(seen, turns, strict=True)]
    rules += [{"when": "<tool_response>", "say": "The tool has answered."}, {"when": ".", "say": "Hello."}]
    (path / "script.json").write_text(json.dumps({"rules": rules}))
    return tools


def _run(path: Path, *, num_rounds: int, num_begun: int, seed: int) -> tuple[int, Counted]:
    """In each round responses begin at all three servers, and one server is killed, or frozen and later goes on.
    Returns how many faults there were."""
    chance = random.Random(seed)
    tools = _tools(path, call_s=0.05)
    counted = Counted(tools)
    flags = ("--mcp-servers", str(path / "mcp.json"), "--mcp-commands")
    num_faults = 0
    with team(path, size=3, source=tools.source, flags=flags) as (servers, _):
        for number in range(num_rounds):
            for place in range(num_begun):
                counted.begin(servers.servers[place % 3], f"r{number}n{place}")
            time.sleep(chance.uniform(0.0, 1.5))  # not to wait for something: any moment is a good one
            num_faults += _fault(servers, chance)
            with client_of(chance.choice(servers.servers)) as client:
                counted.check(client)
        appended = Counter(given["text"] for name, given in map(json.loads, counted.lines()) if name == "append")
        assert set(appended.values()) == {1}  # also by servers that came back late: no user has approved a second call
    return num_faults, counted


def _fault(servers: Team[Server], chance: random.Random) -> int:
    victim = chance.choice(servers.servers)
    if chance.random() < 0.6:
        servers.kill(victim)
        servers.add()
        return 1
    others = [server for server in servers.servers if server is not victim]
    num_lines = [server.log.count("A server does not answer any more") for server in others]
    victim.send_signal(signal.SIGSTOP)
    until(
        lambda: any(
            server.log.count("A server does not answer any more") > before
            for server, before in zip(others, num_lines, strict=True)
        )
    )
    time.sleep(chance.uniform(0.0, 1.0))  # as above
    victim.send_signal(signal.SIGCONT)
    return 1


@pytest.mark.deep
@pytest.mark.timeout(600)
def test_kills_and_stops_of_three_servers(tmp_path: Path) -> None:
    num_faults, counted = _run(tmp_path, num_rounds=3, num_begun=6, seed=1)
    assert num_faults == 3
    assert counted.num_done > 0


@pytest.mark.deep
@pytest.mark.timeout(7200)
def test_many_kills_and_stops_of_three_servers(tmp_path: Path) -> None:
    """TAILRACE_TEST_DEATHS says how many."""
    num_faults, counted = _run(tmp_path, num_rounds=DEATHS, num_begun=9, seed=2)
    assert num_faults == DEATHS
    assert counted.num_done > counted.num_unknown > 0
