"""AG-UI's wire: requests."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.api.keyed import serving_with_keys
from tests.dialects.fake_server import FakeServer, parsed
from tests.dialects.transcripts import facts
from tests.plugins.front_ends.test_ai_sdk_wire import PIXEL
from tests.waiting import wait_until

from tailrace.dialects import Follow, Following, Generate, GenerateCall
from tailrace.dialects.bodies import JsonBody
from tailrace.errors import RequestError, UnknownStream, UnsupportedParameter
from tailrace.types import Failure, Released
from tailrace_plugins.front_ends import ag_ui_wire as ag_ui
from tailrace_plugins.front_ends.ag_ui_events import AgUiView
from tailrace_plugins.front_ends.chats import ChatMemo

HI: JsonBody = {"id": "1", "role": "user", "content": "Hi"}
_BODY: JsonBody = {"threadId": "t1", "runId": "r1", "messages": [HI]}
_STREAM_ID = "q83v-jRWeJCrze8SNF_4kA"
_ACTS = {one.method: one.act for one in ag_ui.WIRE.operations if one.path == "/v1/ag-ui"}


def call_of(*messages: JsonBody, server: FakeServer | None = None, **more: Any) -> GenerateCall:
    body = {
        "threadId": "t1", "runId": "r1", "messages": list(messages) or [HI], "tools": [], "context": [], "state": {},
    } | more  # fmt: skip
    return ag_ui.parse(parsed(body, server=server))


def said(*messages: JsonBody, **more: Any) -> list[tuple[str, str]]:
    return [(one.role, one.content) for one in call_of(*messages, **more).request.messages]


def test_a_run_goes_on_without_its_reader() -> None:
    call = call_of(parentRunId="r0", protocolVersion="1.0.0", resume=[])
    assert call.request.on_disconnect == "detach"
    assert call.ignored == ()
    memo = ChatMemo.of(facts(memo=call.request.memo))
    assert (memo.thread, memo.run) == ("t1", "r1")


def test_an_answer_that_broke_off_goes_on() -> None:
    """The client sends its request again, with the id of the last event that it has."""
    begun = facts(stream_id=_STREAM_ID, wire="ag_ui", memo=call_of().request.memo)
    again = replace(parsed(_BODY), headers={"last-event-id": f"{_STREAM_ID}.3.1", "x-run-id": "r1"})
    act = _ACTS["POST"]
    assert isinstance(act, Generate)
    assert act.past is not None
    assert act.past(again) == _STREAM_ID
    found = act.parse(replace(again, past=(begun, ())))
    assert isinstance(found, Following)
    assert (found.stream_id, found.after, found.view) == (_STREAM_ID, 0, AgUiView(resumes=True))
    of_another_wire = facts(stream_id=_STREAM_ID, wire="openai")
    of_another_run = facts(stream_id=_STREAM_ID, wire="ag_ui", memo=call_of(runId="r2").request.memo)
    for past in (None, (of_another_wire, ()), (of_another_run, ())):
        with pytest.raises(UnknownStream):
            act.parse(replace(again, past=past))


async def test_a_request_that_comes_again_before_the_first_event_follows_its_run(tmp_path: Path) -> None:
    async with serving_with_keys(tmp_path, "scripted:tokens_per_s=50") as house:
        mine, yours = house.key("me"), house.key("you")
        body = {**_BODY, "forwardedProps": {"max_tokens": 100}}
        async with house.client(mine) as client, house.client(yours) as other:
            again = {"x-run-id": "r1"}  # what a client sends that comes back
            first = asyncio.create_task(client.post("/v1/ag-ui", json=body, headers=again))
            await wait_until(lambda: len(house.service.generator.live) == 1)
            answers = [
                asyncio.create_task(client.post("/v1/ag-ui", json=body, headers=again)),
                asyncio.create_task(client.post("/v1/ag-ui", json={**body, "runId": "r2"}, headers=again)),
                asyncio.create_task(client.post("/v1/ag-ui", json=body)),
                asyncio.create_task(other.post("/v1/ag-ui", json=body, headers=again)),
            ]
            ids = [(await answer).headers["x-stream-id"] for answer in (first, *answers)]
            assert ids[0] == ids[1]
            assert answers[0].result().content == first.result().content
            assert len(set(ids[1:])) == 4


@pytest.mark.parametrize("last", ["7", f"{_STREAM_ID}.3", f"{_STREAM_ID}.3.1 ", "../x.1.1", f"{_STREAM_ID}.3.1\n"])
def test_ids_of_events_of_others_are_refused(last: str) -> None:
    act = _ACTS["POST"]
    assert isinstance(act, Generate)
    assert act.past is not None
    with pytest.raises(RequestError, match="Last-Event-ID"):
        act.past(replace(parsed(_BODY), headers={"last-event-id": last}))


def test_a_run_is_found_by_its_id() -> None:
    act = _ACTS["GET"]
    assert isinstance(act, Follow)
    assert act.topic is not None
    asked = replace(parsed(), query={"runId": "r1", "offset": "-1"})
    assert act.topic(asked) in call_of().request.topics
    found = act.parse(replace(asked, newest=facts(stream_id=_STREAM_ID, memo=call_of().request.memo)))
    assert isinstance(found, Following)
    assert (found.stream_id, found.after) == (_STREAM_ID, 0)
    with pytest.raises(UnknownStream):
        act.parse(asked)
    with pytest.raises(RequestError, match="runId"):
        act.topic(parsed())


def test_clients_that_come_back_are_told_nothing_when_the_server_stops() -> None:
    """The next server continues the run. Other clients get an error."""
    known = facts(memo=call_of().request.memo)
    released = Released(known.record.stream_id, 0, Failure("draining", "The server is shutting down."))
    assert AgUiView(resumes=True).open(known).encode(0, released) == b""
    assert b"RUN_ERROR" in AgUiView().open(known).encode(0, released)


def test_messages_of_all_roles() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "clock", "arguments": '{"in": "Bonn"}'}}
    found = call_of(
        {"id": "0", "role": "developer", "content": "Be brief."},
        HI,
        {"id": "2", "role": "activity", "activityType": "plan", "content": {"steps": []}},
        {"id": "3", "role": "reasoning", "content": "Look."},
        {"id": "4", "role": "assistant", "toolCalls": [call]},
        {"id": "5", "role": "tool", "toolCallId": "c1", "content": "noon"},
    ).request.messages
    assert [(one.role, one.content) for one in found] == [
        ("system", "Be brief."), ("user", "Hi"), ("assistant", ""), ("tool", "noon"),
    ]  # fmt: skip
    assert found[2].reasoning == "Look."
    assert [(one.name, one.arguments) for one in found[2].tool_calls] == [("clock", '{"in": "Bonn"}')]
    assert found[3].tool_call_id == "c1"


def test_context_is_part_of_the_system_message() -> None:
    context = [{"description": "The page", "value": "rivers"}, {"description": "Unit", "value": "m"}]
    assert said(context=context) == [("system", "The page: rivers\nUnit: m"), ("user", "Hi")]
    first = {"id": "0", "role": "system", "content": "Be brief."}
    assert said(first, HI, context=context)[0] == ("system", "Be brief.\n\nThe page: rivers\nUnit: m")


def test_a_failed_tool_says_so() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
    failed = {"id": "3", "role": "tool", "toolCallId": "c1", "content": "", "error": "no clock"}
    assert said(HI, {"id": "2", "role": "assistant", "toolCalls": [call]}, failed)[-1] == ("tool", "Error: no clock")


def test_images() -> None:
    data = PIXEL.partition(",")[2]
    image = {"type": "image", "source": {"type": "data", "value": data, "mimeType": "image/png"}}
    asked = {"id": "1", "role": "user", "content": [{"type": "text", "text": "What is this?"}, image]}
    assert len(call_of(asked, server=FakeServer(sees=True)).request.messages[0].images) == 1
    with pytest.raises(UnsupportedParameter, match="reads no image"):
        call_of(asked)
    stored = {"type": "image", "source": {"type": "file", "value": "f1"}}
    with pytest.raises(UnsupportedParameter, match="send the image itself"):
        call_of({"id": "1", "role": "user", "content": [stored]}, server=FakeServer(sees=True))


def test_forwarded_properties_are_parameters() -> None:
    call = call_of(forwardedProps={"max_tokens": 9, "temperature": 0.5, "color": "red"})
    assert (call.request.sampling.max_tokens, call.request.sampling.temperature) == (9, 0.5)
    assert call.ignored == ("forwardedProps.color",)
    with pytest.raises(UnsupportedParameter, match=r"forwardedProps\.n"):
        call_of(forwardedProps={"n": 2})


@pytest.mark.parametrize(
    "change",
    [
        {"threadId": ""},
        {"runId": None},
        {"messages": []},
        {"messages": [{"id": "1", "role": "king", "content": "Hi"}]},
        {"messages": [{"id": "1", "role": "assistant", "content": "Hi"}]},
        {"messages": [{"id": "1", "role": "user", "content": {"text": "Hi"}}]},
        {"tools": [{"description": "no name"}]},
        {"forwardedProps": {"temperature": "warm"}},
        {"resume": [{"interruptId": "i1"}]},
    ],
)
def test_bad_bodies_are_refused(change: JsonBody) -> None:
    body = {"threadId": "t1", "runId": "r1", "messages": [HI], **change}
    with pytest.raises(RequestError):
        ag_ui.parse(parsed(body))
