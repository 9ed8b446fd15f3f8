"""The AI SDK's wire: requests, and answers that are found again by the id of their chat."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.dialects.fake_server import FakeServer, parsed
from tests.dialects.transcripts import facts

from tailrace.dialects import Follow, Following, GenerateCall, OnStream
from tailrace.dialects.bodies import JsonBody
from tailrace.dialects.wire import Reply
from tailrace.errors import RequestError, UnknownStream, UnsupportedParameter
from tailrace.types import GenerateRequest
from tailrace_plugins.front_ends import ai_sdk_wire as ai_sdk
from tailrace_plugins.front_ends.chats import ChatMemo

PIXEL = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAA"
    "AABJRU5ErkJggg=="
)


def text(words: str) -> JsonBody:
    return {"type": "text", "text": words, "state": "done"}


def message(role: str, *parts: JsonBody, name: str = "m1") -> JsonBody:
    return {"id": name, "role": role, "parts": list(parts)}


def call_of(*messages: JsonBody, server: FakeServer | None = None, **more: Any) -> GenerateCall:
    said = list(messages) or [message("user", text("Hi"))]
    return ai_sdk.parse(parsed({"id": "chat-1", "messages": said, **more}, server=server))


def request_of(*messages: JsonBody, **more: Any) -> GenerateRequest:
    return call_of(*messages, **more).request


def act_of(method: str) -> Any:
    return next(one.act for one in ai_sdk.WIRE.operations if one.method == method)


def test_a_question_goes_on_without_its_reader() -> None:
    call = call_of(trigger="submit-message", messageId=None)
    assert [(one.role, one.content) for one in call.request.messages] == [("user", "Hi")]
    assert call.request.on_disconnect == "detach"
    assert call.stream
    assert call.ignored == ()


def test_an_answer_of_several_steps_becomes_several_messages() -> None:
    tool = {
        "type": "tool-weather", "toolCallId": "c1", "state": "output-available",
        "input": {"city": "Bonn"}, "output": {"degrees": 21},
    }  # fmt: skip
    failed = {
        "type": "dynamic-tool", "toolName": "clock", "toolCallId": "c2", "state": "output-error", "input": {},
        "errorText": "no clock",
    }  # fmt: skip
    found = request_of(
        message("user", text("How warm is it?")),
        message("assistant", {"type": "step-start"}, {"type": "reasoning", "text": "Ask."}, tool, failed,
                {"type": "step-start"}, text("It is "), text("21 degrees.")),
        message("user", text("And now?")),
    )  # fmt: skip
    roles = [(one.role, one.content, one.tool_call_id) for one in found.messages]
    assert roles == [
        ("user", "How warm is it?", ""),
        ("assistant", "", ""),
        ("tool", '{"degrees":21}', "c1"),
        ("tool", "Error: no clock", "c2"),
        ("assistant", "It is 21 degrees.", ""),
        ("user", "And now?", ""),
    ]
    first = found.messages[1]
    assert [(call.call_id, call.name, call.arguments) for call in first.tool_calls] == [
        ("c1", "weather", '{"city":"Bonn"}'),
        ("c2", "clock", "{}"),
    ]
    assert first.reasoning == "Ask."


def test_an_answer_after_results_of_tools_continues_its_message() -> None:
    tool = {"type": "tool-clock", "toolCallId": "c1", "state": "output-available", "input": {}, "output": "noon"}
    memo = request_of(message("user", text("When?")), message("assistant", tool, name="a7")).memo
    assert ChatMemo.of(facts(memo=memo)).message == "a7"
    assert ChatMemo.of(facts(memo=request_of().memo)).message == ""


def test_images_of_questions_are_read() -> None:
    file = {"type": "file", "mediaType": "image/png", "url": PIXEL}
    found = request_of(message("user", text("What is this?"), file), server=FakeServer(sees=True))
    assert len(found.messages[0].images) == 1
    with pytest.raises(UnsupportedParameter, match="reads no image"):
        request_of(message("user", file))
    with pytest.raises(UnsupportedParameter, match="reads no file"):
        request_of(message("user", {"type": "file", "mediaType": "application/pdf", "url": "data:,"}))


def test_what_an_app_defines_is_named() -> None:
    call = call_of(message("user", text("Hi"), {"type": "data-mood", "data": {"is": "good"}}), theme="dark")
    assert call.ignored == ("theme", "messages[0].parts[1] (not shown to the model)")


def test_parameters_have_the_names_of_the_ai_sdk() -> None:
    sampling = request_of(
        maxOutputTokens=9, temperature=0.5, topP=0.9, topK=5, seed=7, stopSequences=["\n"], presencePenalty=1
    ).sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (9, 0.5, 0.9, 5)
    assert (sampling.seed, sampling.stop, sampling.presence_penalty) == (7, ("\n",), 1)


def test_tools_are_shown_and_may_be_required() -> None:
    tools = {"weather": {"description": "d", "inputSchema": {"type": "object"}}}
    found = request_of(tools=tools)
    assert [one["function"]["name"] for one in found.tools] == ["weather"]
    assert found.sampling.grammar is None
    forced = request_of(tools=tools, toolChoice={"type": "tool", "toolName": "weather"})
    assert forced.sampling.grammar is not None
    theirs = {"weather": {"description": "d", "parameters": {"type": "object", "maxProperties": 1}}}  # assistant-ui's
    assert request_of(tools=theirs).tools[0]["function"]["parameters"]["maxProperties"] == 1
    with pytest.raises(RequestError, match="tool_choice"):
        request_of(tools=tools, toolChoice={"type": "tool", "toolName": "clock"})


@pytest.mark.parametrize(
    "body",
    [
        {"id": "c"},
        {"id": "c", "messages": []},
        {"id": "", "messages": [message("user", text("Hi"))]},
        {"id": "c" * 257, "messages": [message("user", text("Hi"))]},
        {"messages": [message("user", text("Hi"))]},
        {"id": "c", "messages": [{"id": "1", "role": "user", "content": "Hi"}]},
        {"id": "c", "messages": [message("user", {"type": "text", "text": 5})]},
        {"id": "c", "messages": [message("tool", text("Hi"))]},
        {"id": "c", "messages": [message("assistant", text("Hi"))]},
    ],
)
def test_bad_bodies_are_refused(body: JsonBody) -> None:
    with pytest.raises(RequestError):
        ai_sdk.parse(parsed(body))


def test_a_page_finds_the_answer_of_its_chat() -> None:
    follow, stop = act_of("GET"), act_of("DELETE")
    assert isinstance(follow, Follow)
    assert isinstance(stop, OnStream)
    asked = parsed(path={"chat": "chat-1"})
    for act in (follow, stop):
        assert act.topic is not None
        assert (act.topic(asked),) == request_of().topics
    request = replace(asked, newest=facts(stream_id="b", memo=request_of().memo))
    found = follow.parse(request)
    assert isinstance(found, Following)
    assert (found.stream_id, found.after) == ("b", 0)
    assert stop.verb == "cancel"
    assert stop.find(request)[0] == "b"


def test_a_page_that_names_its_question_gets_an_answer_that_has_ended() -> None:
    follow = act_of("GET")
    assert isinstance(follow, Follow)
    tool = {"type": "tool-clock", "toolCallId": "c1", "state": "output-available", "input": {}, "output": "noon"}
    called = request_of(message("user", text("When?"), name="q2"), message("assistant", tool, name="a7"))
    for answered, asked, is_found in ((request_of().memo, "m1", True), (request_of().memo, "m2", False),
                                      (called.memo, "q2", True), (called.memo, "a7", False)):  # fmt: skip
        request = replace(parsed(path={"chat": "chat-1"}), query={"messageId": asked})
        assert follow.may_have_ended(request)
        found = follow.parse(replace(request, newest=facts(memo=answered)))
        assert isinstance(found, Following) == is_found
    assert not follow.may_have_ended(parsed(path={"chat": "chat-1"}))


def test_without_an_answer_there_is_nothing_to_follow() -> None:
    nothing = act_of("GET").parse(parsed(path={"chat": "chat-1"}))
    assert isinstance(nothing, Reply)
    assert (nothing.status, nothing.body) == (204, b"")
    with pytest.raises(UnknownStream):
        act_of("DELETE").find(parsed(path={"chat": "chat-1"}))
