"""Responses with MCP tools that end early: cancelled, refused, left, or stopped with their server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
from openai import OpenAI
from openai.types.responses import Response
from starlette.requests import Request
from starlette.types import Message
from tests.api.keyed import House, serving_with_keys
from tests.api.process import Server
from tests.plugins.tool_loop.test_hostile_servers import HOSTILE
from tests.plugins.tool_loop.test_mcp_tools import NEVER
from tests.plugins.tool_loop.test_tool_deaths import BODY, Case, MortalNotes, begin, cases, request_with
from tests.plugins.tool_loop.tool_servers import COUNTING, Json, Tools, asks_of, calls_of
from tests.waiting import LONG_S, turn, wait_until

pytest.importorskip("mcp")

import mcp_types

from tailrace.access.principal import PRINCIPAL, Principal
from tailrace.server import LocalTable
from tailrace_plugins.tool_loop.asked import ToolRequest
from tailrace_plugins.tool_loop.beginnings import RUNNING_OF_OWNER
from tailrace_plugins.tool_loop.loop_rows import Called
from tailrace_plugins.tool_loop.loops import Loops
from tailrace_plugins.tool_loop.mcp_connections import McpConnection, McpConnections
from tailrace_plugins.tool_loop.mcp_errors import LoopsFull
from tailrace_plugins.tool_loop.response_answers import begun_answer
from tailrace_plugins.tool_loop.servers_file import McpServer

_CALL_S = 3  # long enough for a cancel


class Rig:
    """A server, and the files of its tools."""

    def __init__(self, path: Path) -> None:
        self.tools = Tools(path, [])
        append, look = "count__append", "count__look"
        rules: list[Json] = [
            {
                "when": "look long",
                "calls": [
                    {"name": look, "arguments": {"text": "a", "sleep_s": _CALL_S}},
                    {"name": append, "arguments": {"text": "b"}},
                ],
            },
            {"when": "append long", "calls": [{"name": append, "arguments": {"text": "c", "sleep_s": _CALL_S}}]},
            {"when": "exit", "calls": [{"name": append, "arguments": {"text": "d", "exit": True}}]},
            {"when": "error", "calls": [{"name": append, "arguments": {"error": -32050}}]},
            {"when": "append once", "calls": [{"name": append, "arguments": {"text": "e"}}]},
            {"when": r"<tool_response>\n([^\n]*)", "say": "It said: $1"},
            {"when": ".", "say": "Hello."},
        ]
        (path / "script.json").write_text(json.dumps({"rules": rules}))
        self.server: Server = self.tools.start()


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    rig = Rig(tmp_path_factory.mktemp("ends"))
    with contextlib.closing(rig.server):
        yield rig


def _ask(client: OpenAI, text: Any, *, approval: str = "never", **more: Any) -> Response:  # Any: what the client takes
    tools: Any = [{"type": "mcp", "server_label": "count", "require_approval": approval}]
    response: Response = client.responses.create(model="scripted", input=text, tools=tools, **more)
    return response


def _approve(client: OpenAI, asked: Response, **more: Any) -> Response:  # Any: as above
    answer = {"type": "mcp_approval_response", "approval_request_id": asks_of(asked)[0].id, "approve": True}
    return _ask(client, [answer], approval="always", previous_response_id=asked.id, **more)


def test_reading_a_cancelled_response_calls_nothing(rig: Rig, client: OpenAI) -> None:
    before = len(rig.tools.counted())
    begun = _ask(client, "look long", background=True)
    rig.tools.wait_counted(before + 1)
    cancelled = client.responses.cancel(begun.id)
    assert cancelled.status == "cancelled"
    with ThreadPoolExecutor(2) as pool:
        for read in pool.map(client.responses.retrieve, [begun.id] * 2):
            assert read == cancelled
    assert [call.status for call in calls_of(cancelled)] == ["incomplete", "incomplete"]
    assert _ask(client, "Hi.", previous_response_id=begun.id).output_text == "Hello."
    client.responses.delete(begun.id)
    assert rig.tools.counted()[before:] == ["look"]


def test_an_approval_is_used_up_by_a_call_that_was_cancelled(rig: Rig, client: OpenAI) -> None:
    before = len(rig.tools.counted())
    asked = _ask(client, "append long", approval="always")
    first = _approve(client, asked, background=True)
    rig.tools.wait_counted(before + 1)
    client.responses.cancel(first.id)
    second = _approve(client, asked)
    (call,) = calls_of(second)
    assert call.error is not None
    assert call.error.type == "mcp_protocol_error"
    assert call.error.code == -32000
    assert len(asks_of(second)) == 1
    assert rig.tools.counted()[before:] == ["append"]


def test_an_unknown_call_can_be_approved_again_and_again(rig: Rig, client: OpenAI) -> None:
    before = len(rig.tools.counted())
    response = _ask(client, "exit")
    seen = set()
    for number in range(1, 4):
        assert rig.tools.counted()[before:] == ["append"] * number
        (ask,) = asks_of(response)
        assert ask.id not in seen
        seen.add(ask.id)
        response = _approve(client, response)


def test_an_idempotency_key_holds_without_store(rig: Rig, client: OpenAI) -> None:
    before = len(rig.tools.counted())
    headers = {"Idempotency-Key": "not-stored"}
    first = _ask(client, "append once", store=False, extra_headers=headers)
    assert _ask(client, "append once", store=False, extra_headers=headers) == first
    assert rig.tools.counted()[before:] == ["append"]
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    with pytest.raises(openai.NotFoundError):
        _ask(client, "Hi.", previous_response_id=first.id)


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_background_response_that_is_refused_has_failed(client: OpenAI, is_stream: bool) -> None:
    bad: Any = {"temperature": "hot", "background": True, "stream": is_stream}
    begun: Any = _ask(client, "Hi.", **bad)
    if is_stream:
        events = list(begun)
        assert events[-2].type == "response.failed"
        begun = events[-2].response
    for _ in client.responses.retrieve(begun.id, stream=True):
        pass
    failed = client.responses.retrieve(begun.id)
    assert failed.status == "failed"
    assert failed.error is not None
    assert "temperature" in failed.error.message


def test_an_error_of_the_protocol_is_a_failed_call(client: OpenAI) -> None:
    response = _ask(client, "error")
    (call,) = calls_of(response)
    assert call.error is not None
    assert call.error.type == "mcp_protocol_error"
    assert (call.status, call.error.code) == ("failed", -32050)
    assert not asks_of(response)
    assert response.output_text == "It said: Error: No."


@pytest.mark.parametrize(
    "more",
    [
        {"tools": [NEVER, "x"]},
        {"tools": [NEVER, {"type": "namespace", "name": ["x"], "tools": []}]},
        {"tools": [NEVER], "metadata": {"large": 2**64}},
        {"tools": [NEVER | {"server_label": f"count{number}"} for number in range(17)]},
        *(
            {"tools": [NEVER | {"headers": {name: "x"}}]}
            for name in ("Host", "mcp-session-id", "Content-Length", "a b")
        ),
        {"tools": [NEVER | {"authorization": "a\r\nb: c"}]},
    ],
)
def test_a_request_of_a_wrong_form(rig: Rig, more: Json) -> None:
    answer = rig.server.http.post("/v1/responses", json={"model": "scripted", "input": "Hi.", **more})
    assert answer.status_code == 400, answer.text


def test_a_response_does_not_repeat_what_is_secret() -> None:
    tool = NEVER | {"server_url": "https://mcp.example.com?token=secret", "authorization": "secret"}
    echo = ToolRequest({"tools": [tool]}).echo
    assert echo["tools"] == [NEVER | {"server_url": "https://mcp.example.com/<redacted>"}]


async def test_requests_that_wait_for_tools_are_counted(tmp_path: Path) -> None:
    async with cases(tmp_path) as case, case.life(MortalNotes()) as loops:
        case.specs["mute"] = McpServer("mute", (sys.executable, str(HOSTILE), "mute"), {})
        body = BODY | {"tools": [NEVER | {"server_label": "mute"}]}
        waiting = [asyncio.create_task(begin(loops, request_with({}), body)) for _ in range(RUNNING_OF_OWNER)]
        await turn()
        with pytest.raises(LoopsFull):
            await begin(loops, request_with({}), body)
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)


async def test_an_error_does_not_end_the_calls_of_others(tmp_path: Path) -> None:
    tools, connections = Tools(tmp_path, []), McpConnections()
    spec = McpServer("count", (sys.executable, str(COUNTING), str(tools.counts)), {})

    async def call(connection: McpConnection, arguments: Json) -> Called:
        return await connection.call("mcp_1", "append", arguments, limit_s=LONG_S, most_bytes=100)

    async with connections.of_spec(spec, "alice") as first, connections.of_spec(spec, "alice") as second:
        assert first is second
        await first.ready()
        assert (await call(second, {"error": mcp_types.INTERNAL_ERROR})).is_unknown
        async with connections.of_spec(spec, "alice") as third:
            assert third is not first
            await third.ready()
            assert (await call(first, {"text": "a"})).output == "a"
            assert (await call(third, {"exit": True})).is_unknown
        async with connections.of_spec(spec, "alice") as fourth:
            assert fourth is not third
            await fourth.ready()
            (child,) = [one for one in psutil.Process().children() if str(tools.counts) in one.cmdline()][-1:]
            child.kill()
            await wait_until(lambda: not fourth.is_open)
    await first.closed()
    await connections.close()


async def test_cancelled_responses_make_room(tmp_path: Path) -> None:
    async with cases(tmp_path) as case, case.life(MortalNotes()) as loops:
        for _ in range(RUNNING_OF_OWNER + 1):
            loop = await begin(loops, request_with({}), BODY)
            await loops.cancel(loop)
            assert loop.response()["status"] == "cancelled"


class SyncedNotes(MortalNotes):
    """Notes that count the calls so far when they are synced."""

    def __init__(self, tools: Tools) -> None:
        super().__init__()
        self.synced: list[int] = []
        self._tools = tools

    async def sync(self) -> None:
        self.synced.append(len(self._tools.counted()))


async def test_what_a_power_cut_may_not_lose_is_synced(tmp_path: Path) -> None:
    async with cases(tmp_path) as case:
        notes = SyncedNotes(case.tools)
        async with case.life(notes) as loops:
            loop = await begin(loops, request_with({}), BODY)
            await loop.ended()
        assert case.tools.counted() == ["append", "look", "append", "put", "append"]
        assert notes.synced == [0, 2, 4]  # before each call that may not be repeated


async def test_a_tool_that_may_not_be_used_any_more_is_not_called(tmp_path: Path) -> None:
    notes = MortalNotes()
    async with cases(tmp_path) as case:
        async with case.life(notes) as loops:
            loop = await begin(loops, request_with({}), BODY)
        notes.is_dead = False
        case.specs["count"] = replace(case.specs["count"], tools=frozenset({"look", "put"}))
        async with case.life(notes) as loops:
            loop = await loops.find("anonymous", loop.begun.loop_id)
            await loop.ended()
        assert set(case.tools.counted()) == {"look", "put"}


async def test_a_key_that_is_not_valid_any_more_calls_nothing(tmp_path: Path) -> None:
    async with cases(tmp_path) as case, case.life(MortalNotes()) as loops:
        asking = await begin(loops, request_with({}), BODY | {"tools": [NEVER | {"require_approval": "always"}]})
        await asking.ended()
        answer = {"type": "mcp_approval_response", "approval_request_id": asking.asked[0].asked_id, "approve": True}
        request = request_with({})
        request.scope[PRINCIPAL] = Principal("anonymous", key_id="revoked")
        loop = await begin(loops, request, BODY | {"input": [answer]})
        await loop.ended()
        assert loop.response()["status"] == "failed"
        assert not case.tools.counted()


@contextlib.asynccontextmanager
async def _slow_house(path: Path) -> AsyncIterator[tuple[House, Loops]]:
    tools = Tools(path, [])
    async with (
        serving_with_keys(path, tools.source.replace("tokens_per_s=0", "tokens_per_s=0.001")) as house,
        Case(house, tools).life(MortalNotes()) as loops,
    ):
        yield house, loops


async def test_a_row_of_a_cancelled_batch_ends(tmp_path: Path) -> None:
    async with _slow_house(tmp_path) as (_, loops):
        request = request_with({"x-tailrace-linger": "600"})
        request.scope["server"] = None
        loop = await begin(loops, request, BODY | {"background": False})
        with loop.reading():
            await loop.wait(0)
        async with asyncio.timeout(LONG_S):
            await loop.ended()
        assert loop.response()["status"] == "cancelled"


async def test_a_cancel_stops_the_model_of_a_conversation(tmp_path: Path) -> None:
    async with _slow_house(tmp_path) as (house, loops), house.client() as client:
        conversation = (await client.post("/v1/conversations", json={})).json()
        loop = await begin(loops, request_with({}), BODY | {"conversation": conversation["id"]})
        await loop.wait(0)
        async with asyncio.timeout(LONG_S):  # the memory of its body is free before its end
            await begun_answer(loop, Request({"type": "http"}, _nothing), is_stream=False, heartbeat_s=0)
        assert house.service.num_live == 1
        await loops.cancel(loop)
        await wait_until(lambda: not house.service.num_live)


async def _nothing() -> Message:
    message: Message = await asyncio.get_running_loop().create_future()
    return message


async def test_two_requests_with_one_key_are_one_response(tmp_path: Path) -> None:
    async with cases(tmp_path) as case, case.life(MortalNotes()) as loops:
        request = request_with({"idempotency-key": "go"})
        first, second = await asyncio.gather(begin(loops, request, BODY), begin(loops, request, BODY))
        assert first is second
        await first.ended()
        assert case.tools.counted() == ["append", "look", "append", "put", "append"]


async def test_a_stop_leaves_a_response_without_a_reader_to_the_next_server(tmp_path: Path) -> None:
    notes = MortalNotes()
    async with cases(tmp_path) as case:
        async with asyncio.timeout(LONG_S), case.life(notes) as loops:
            loop = await begin(loops, request_with({"x-tailrace-linger": "3600"}), BODY | {"background": False})
            with loop.reading():
                await loop.wait(0)
            loops.drain()
        assert not loop.has_ended
        notes.is_dead = False
        async with case.life(notes) as loops:
            loop = await loops.find("anonymous", loop.begun.loop_id)
            await loop.ended()
            assert loop.response()["status"] == "completed"


async def test_a_turn_is_kept_once_if_it_is_cancelled_while_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_writing, may_go_on, change = asyncio.Event(), asyncio.Event(), LocalTable.change

    async def slow(table: LocalTable, *what: Any, **how: Any) -> bool:  # Any: passed on
        is_writing.set()
        await may_go_on.wait()
        return await change(table, *what, **how)

    async with cases(tmp_path) as case, case.life(MortalNotes()) as loops:
        loop = await begin(loops, request_with({}), BODY)
        monkeypatch.setattr(LocalTable, "change", slow)
        await is_writing.wait()
        cancelling = asyncio.create_task(loop.cancel())
        await turn()
        may_go_on.set()
        await cancelling
        assert len(loop.kept.turns) == 1
        assert [event.kind for event in loop.output.events].count("response.incomplete") == 1
