"""Responses on one WebSocket, while connections, engines and servers are killed: OpenAI's client comes back, says what
it has seen, and gets every event once."""

from __future__ import annotations

import contextlib
import json
import random
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI, OpenAIError
from openai.resources.responses.responses import ResponsesConnection
from tests.api.oracle import Answer, chat_ids
from tests.api.process import Server
from tests.faults.house import House
from tests.faults.team import Team, team
from tests.waiting import LONG_S, until
from websockets.exceptions import WebSocketException

pytestmark = pytest.mark.filterwarnings(r"ignore:connect\(\) must be used:DeprecationWarning")

ENDS = ("response.completed", "response.failed", "response.incomplete")


class Lane:
    """One response, as its client has seen it."""

    def __init__(self, name: str, body: dict[str, Any]) -> None:
        self.name = name
        self.body = body
        self.events: list[Any] = []  # Any: a union of half a hundred
        self._key = uuid.uuid4().hex

    @property
    def is_over(self) -> bool:
        return bool(self.events) and self.events[-1].type in ENDS

    def command(self) -> dict[str, Any]:
        """What to send on a new connection: the same request, or for what follows the last event."""
        if not self.events:
            return {"type": "response.create", "stream_id": self.name, "idempotency_key": self._key, **self.body}
        after = {"response_id": self.events[0].response.id, "starting_after": self.events[-1].sequence_number}
        return {"type": "response.retrieve", "stream_id": self.name, **after}

    def check(self) -> str:
        """Return the text, which came once, in order and whole."""
        assert [event.sequence_number for event in self.events] == list(range(len(self.events)))
        text = "".join(event.delta for event in self.events if event.type == "response.output_text.delta")
        final = self.events[-1].response
        assert final.output_text == text
        assert {event.stream_id for event in self.events} == {self.name}
        return text


class Talk:
    """A client in a thread of its own, with one connection for all its lanes."""

    def __init__(self, house: House | Team[Server], lanes: list[Lane]) -> None:
        self.lanes = {lane.name: lane for lane in lanes}
        self.num_connections = 0
        self._house = house
        self._connection: ResponsesConnection | None = None
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def num_events(self) -> int:
        return sum(len(lane.events) for lane in self.lanes.values())

    def wait_more(self, num_events: int) -> None:
        """Wait for so many more events, or the end."""
        wanted = self.num_events + num_events
        until(lambda: self.num_events >= wanted or not self._thread.is_alive())

    def cut(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(OSError):
                vars(self._connection)["_connection"].socket.close()

    def wait(self) -> None:
        self._thread.join(4 * LONG_S)
        assert not self._thread.is_alive(), self._house.log
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            while open_lanes := [lane for lane in self.lanes.values() if not lane.is_over]:
                with contextlib.suppress(OSError, EOFError, OpenAIError, WebSocketException):
                    self._follow(open_lanes)
                time.sleep(0.02)
        except BaseException as error:  # shown by whoever waits
            self._failure = error

    def _follow(self, lanes: list[Lane]) -> None:
        url = f"http://127.0.0.1:{self._house.server.port}/v1"
        with OpenAI(base_url=url, api_key="unused") as client, client.responses.connect() as self._connection:
            self.num_connections += 1
            for lane in lanes:
                self._connection.send_raw(json.dumps(lane.command()))
            event: Any
            for event in self._connection:
                if event.type == "error":  # the server stops, or the stream is not taken up yet
                    assert event.status == 503, event
                    return
                if event.type != "keepalive":
                    assert event.stream_id is not None
                    self.lanes[event.stream_id].events.append(event)
                if all(lane.is_over for lane in lanes):
                    return


@contextlib.contextmanager
def talking(house: House | Team[Server], lanes: list[Lane]) -> Iterator[Talk]:
    talk = Talk(house, lanes)
    yield talk
    talk.wait()


def strike(house: House, talk: Talk, how: str) -> None:
    match how:
        case "connection":
            talk.cut()
        case "engine":
            house.kill_engine()
        case "server":
            house.restart()
        case "stop":
            house.stop()
            house.start()


@pytest.mark.parametrize(
    "num_deaths", [4, pytest.param(60, marks=[pytest.mark.deep, pytest.mark.timeout(900)])], ids=["few", "many"]
)
def test_every_event_comes_once_whatever_dies(tmp_path: Path, num_deaths: int) -> None:
    chance = random.Random(38)
    with House(tmp_path, "scripted:tokens_per_s=200") as house:
        died = 0
        while died < num_deaths:
            answers = [Answer(chat_ids(f"Round {died}."), 300, seed) for seed in range(4)]
            lanes = [
                Lane(str(seed), {"input": f"Round {died}.", "max_output_tokens": 300, "seed": seed})
                for seed in range(4)
            ]
            with talking(house, lanes) as talk:
                for how in ("connection", "engine", "server", "stop"):
                    talk.wait_more(chance.randint(1, 200))
                    strike(house, talk, how)
                    died += 1
            assert [lane.check() for lane in lanes] == [answer.text for answer in answers]
            assert talk.num_connections > 1


@pytest.mark.parametrize("num_kills", [1, pytest.param(10, marks=[pytest.mark.deep, pytest.mark.timeout(900)])])
def test_another_server_goes_on(tmp_path: Path, num_kills: int) -> None:
    """Servers that share a Redis. The client comes to any of them, also while another one writes its responses."""
    with team(tmp_path) as (servers, _):
        for kill in range(num_kills):
            question = f"Kill {kill}."
            lanes = [Lane(str(seed), {"input": question, "max_output_tokens": 300, "seed": seed}) for seed in range(3)]
            with talking(servers, lanes) as talk:
                talk.wait_more(60)
                talk.cut()
                talk.wait_more(30)
                servers.kill(servers.servers[kill % 2])
                servers.add()
            texts = [lane.check() for lane in lanes]
            assert texts == [Answer(chat_ids(question), 300, seed).text for seed in range(3)]


@pytest.mark.deep
@pytest.mark.timeout(900)
def test_the_real_model_says_what_it_would_have_said(tmp_path: Path) -> None:
    """Greedy answers on the default engine: chats, a JSON schema, a forced tool, and a chat that continues another."""
    tool = {
        "type": "function",
        "name": "look",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
    }
    schema = {"type": "object", "properties": {"rivers": {"type": "array", "items": {"type": "string"}}}}
    text = {"format": {"type": "json_schema", "name": "rivers", "schema": schema}}
    usual = {"temperature": 0, "max_output_tokens": 120}
    bodies: dict[str, dict[str, Any]] = {
        "chat": {"input": "Tell me a long story about dogs.", **usual},
        "other": {"input": "Why do rivers bend?", **usual},
        "schema": {"input": "Name three rivers as JSON.", "text": text, **usual},
        "tool": {"input": "Look at the river.", "tools": [tool], "tool_choice": "required", **usual},
    }
    with House(tmp_path, "smollm2") as house:
        undisturbed = [Lane(name, body) for name, body in bodies.items()]
        with talking(house, undisturbed):
            pass
        expected = {lane.name: lane.events[-1].response.output for lane in undisturbed}
        for how in ("connection", "engine", "server", "stop"):
            lanes = [Lane(name, body) for name, body in bodies.items()]
            for lane in lanes:
                lane.body = {**lane.body, "metadata": {"round": how}}
                lane.name = f"{lane.name}-{how}"
            with talking(house, lanes) as talk:
                talk.wait_more(40)
                strike(house, talk, how)
            for lane, (name, output) in zip(lanes, expected.items(), strict=True):
                assert [event.sequence_number for event in lane.events] == list(range(len(lane.events)))
                said = [_content(item) for item in lane.events[-1].response.output]
                assert said == [_content(item) for item in output], (how, name)


def _content(item: Any) -> object:
    """What the model wrote, without the ids of its response."""
    if item.type == "message":
        return [part.text for part in item.content]
    return item.name, item.arguments
