"""kill -9 of real servers around the calls of tools: by the tool itself, and at events that a client has seen."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from tests.api.process import Server
from tests.plugins.tool_loop.tool_servers import Json, Tools, asks_of, calls_of, client_of

pytest.importorskip("mcp")

pytestmark = pytest.mark.deep

NEVER: Json = {"type": "mcp", "server_label": "count", "require_approval": "never"}


class Lives:
    """Servers of one data directory, one after the other."""

    def __init__(self, tools: Tools) -> None:
        self.tools = tools
        self.server = tools.start("--stall-s", "60")

    def next(self) -> Server:
        """Return the next server. Call it when this one is dead, or about to die."""
        self.server.wait()
        self.server.close()
        self.server = self.tools.start("--stall-s", "60")
        return self.server

    def kill(self) -> Server:
        self.server.send_signal(signal.SIGKILL)
        return self.next()


@contextlib.contextmanager
def lives_of(path: Path, turns: list[list[tuple[str, Json]]], *, tokens_per_s: int = 0) -> Iterator[Lives]:
    tools = Tools(path, turns)
    tools.tokens_per_s = tokens_per_s
    lives = Lives(tools)
    try:
        yield lives
    finally:
        lives.server.close()


def _begin(server: Server, **more: Any) -> Response:  # Any: what the client takes
    tools: Any = [NEVER]
    with client_of(server) as client:
        response: Response = client.responses.create(
            model="scripted", input="Go.", tools=tools, background=True, **more
        )
        return response


def _ended(server: Server, response_id: str) -> Response:
    with client_of(server) as client:
        for _ in client.responses.retrieve(response_id, stream=True):
            pass
        return client.responses.retrieve(response_id)


@pytest.mark.parametrize(("when", "num_calls"), [("before", 0), ("after", 1)])
def test_a_server_that_its_tool_kills(tmp_path: Path, when: str, num_calls: int) -> None:
    turns = [[("count__append", {"text": "a", "kill": when})]]
    with lives_of(tmp_path, turns) as lives:
        begun = _begin(lives.server)
        response = _ended(lives.next(), begun.id)
        (call,) = calls_of(response)
        assert call.status == "failed"
        assert call.error is not None
        assert call.error.type == "mcp_protocol_error"
        assert call.error.code == -32000
        (ask,) = asks_of(response)
        assert (ask.name, ask.arguments) == (call.name, call.arguments)
        assert lives.tools.counted() == ["append"] * num_calls
        answer: Any = [{"type": "mcp_approval_response", "approval_request_id": ask.id, "approve": True}]
        tools: Any = [NEVER]
        with client_of(lives.server) as client:
            done = client.responses.create(
                model="scripted", input=answer, tools=tools, previous_response_id=response.id
            )
        (again,) = calls_of(done)
        assert (again.status, again.output) == ("completed", "a")
        assert done.output_text == "The tool has answered."
        assert lives.tools.counted() == ["append"] * (num_calls + 1)  # the user said so


def test_a_tool_that_does_no_harm_is_called_again(tmp_path: Path) -> None:
    turns = [[("count__put", {"text": "a", "kill": "after"})]]
    with lives_of(tmp_path, turns) as lives:
        begun = _begin(lives.server)
        response = _ended(lives.next(), begun.id)
        (call,) = calls_of(response)
        assert (call.status, call.output) == ("completed", "a")
        assert response.output_text == "The tool has answered."
        assert lives.tools.counted() == ["put", "put"]


def test_kills_at_events_that_a_client_has_seen(tmp_path: Path) -> None:
    turns = [
        [("count__append", {"text": "first"}), ("count__look", {"text": "second"})],
        [("count__append", {"text": "third"})],
    ]
    whole = 0
    with lives_of(tmp_path, turns) as lives:
        for number in (1, 4, 7, 12, 18, 24, 29, 34, 40, 50, 60, 70, 80):
            lives.tools.counts.unlink(missing_ok=True)
            begun = _begin(lives.server)
            with client_of(lives.server) as client, contextlib.suppress(openai.APIError):
                seen: list[ResponseStreamEvent] = []
                for event in client.responses.retrieve(begun.id, stream=True):
                    seen.append(event)
                    if len(seen) == number:
                        break
            lives.kill()
            with client_of(lives.server) as client:
                after = seen[-1].sequence_number if seen else -1
                rest = list(client.responses.retrieve(begun.id, stream=True, starting_after=after))
                response = client.responses.retrieve(begun.id)
            numbers = [event.sequence_number for event in (*seen, *rest)]
            assert numbers == list(range(len(numbers)))
            assert response.status == "completed"
            counted = lives.tools.counted()
            assert counted.count("append") <= 2
            calls = calls_of(response)
            is_unknown = any(call.status == "failed" for call in calls)
            assert bool(asks_of(response)) is is_unknown
            texts = {json.loads(call.arguments)["text"] for call in calls}
            lines = lives.tools.counts.read_text().splitlines() if counted else []
            assert {json.loads(line)[1]["text"] for line in lines} <= texts
            whole += not is_unknown
            if not is_unknown:
                assert [call.output for call in calls] == ["first", "second", "third"]
                assert response.output_text == "The tool has answered."
    assert whole > 3


def test_a_server_that_is_stopped_waits_for_a_call(tmp_path: Path) -> None:
    turns = [[("count__append", {"text": "slow", "sleep_s": 2})]]
    with lives_of(tmp_path, turns) as lives:
        with client_of(lives.server) as client:
            begun = _begin(lives.server)
            for event in client.responses.retrieve(begun.id, stream=True):
                if event.type == "response.mcp_call_arguments.done":
                    break
            lives.tools.wait_counted(1)
            lives.server.send_signal(signal.SIGTERM)
        response = _ended(lives.next(), begun.id)
        assert [call.output for call in calls_of(response)] == ["slow"]
        assert response.output_text == "The tool has answered."
        assert lives.tools.counted() == ["append"]
