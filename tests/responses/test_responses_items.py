"""What agents send to `/v1/responses`, and how calls of custom tools and of namespaces come back."""

from __future__ import annotations

import json

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from tests.dialects.fake_server import FakeServer, parsed
from tests.dialects.sse import parse as parse_sse
from tests.dialects.transcripts import facts

from tailrace.dialects import GenerateCall
from tailrace.dialects.bodies import JsonBody
from tailrace.errors import RequestError, UnsupportedParameter
from tailrace.types import End, Event, Failure, Message, TextDelta, ToolCall, Usage
from tailrace_outer.responses import responses_wire
from tailrace_outer.responses.responses_events import ResponsesView, answer_message

EVENT: TypeAdapter[object] = TypeAdapter(ResponseStreamEvent)
USER: JsonBody = {"role": "user", "content": "Hi"}
LOOK: JsonBody = {"type": "function", "name": "look", "parameters": {"type": "object"}}
CODEX: JsonBody = {  # in the form of Codex CLI 0.169, shortened
    "model": "default",
    "stream": True,
    "input": [
        {"type": "message", "id": "1", "role": "developer", "content": [{"type": "input_text", "text": "You code."}]},
        {"type": "message", "id": "2", "role": "user", "content": [{"type": "input_text", "text": "say hello"}]},
    ],
    "tools": [
        {"type": "function", "name": "exec_command", "strict": False, "parameters": {"type": "object"}},
        {"type": "namespace", "name": "multi_agent_v1", "description": "d", "tools": [
            {"type": "function", "name": "close_agent", "strict": False, "parameters": {"type": "object"}},
            {"type": "custom", "name": "send", "format": {"type": "text"}},
        ]},
        {"type": "custom", "name": "apply_patch", "description": "d"},
        {"type": "web_search", "external_web_access": False},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "01a2",
    "client_metadata": {"thread_id": "01a2"},
}  # fmt: skip


def call_of(body: JsonBody, *, server: FakeServer | None = None) -> GenerateCall:
    return responses_wire.parse(parsed({"input": "Hi", **body}, server=server))


def messages(*items: JsonBody, more: JsonBody | None = None) -> tuple[Message, ...]:
    return call_of({"input": [USER, *items, {"role": "user", "content": "go on"}], **(more or {})}).request.messages[
        1:-1
    ]


def ignored(*items: JsonBody) -> tuple[str, ...]:
    return call_of({"input": [USER, *items, USER]}).ignored


def test_the_first_request_of_codex() -> None:
    call = call_of(CODEX)
    assert [message.role for message in call.request.messages] == ["system", "user"]
    shown = ["exec_command", "multi_agent_v1__close_agent", "multi_agent_v1__send", "apply_patch"]
    assert [tool["function"]["name"] for tool in call.request.tools] == shown
    assert call.ignored == (
        "client_metadata", "prompt_cache_key", "reasoning.summary", "include.reasoning.encrypted_content",
        "tools[3] (web_search)",
    )  # fmt: skip


def test_a_client_may_ask_whether_the_path_is_there() -> None:
    empties: tuple[object, ...] = ("", [])
    for empty in empties:
        request = call_of({"input": empty, "max_output_tokens": 1}).request
        assert (request.messages, request.sampling.max_tokens) == ((Message("user", ""),), 1)
        with pytest.raises(RequestError, match="must not be empty"):
            call_of({"input": empty, "max_output_tokens": 2})
    with pytest.raises(RequestError, match="must not be empty"):
        call_of({"input": None, "max_output_tokens": 1})


# Histories


def test_parts_of_a_tools_result() -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,Kanarienvogel"}
    items: list[JsonBody] = [
        {"type": "function_call", "call_id": "c", "name": "view", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "ok"}, image]},
    ]
    assert messages(*items)[1] == Message("tool", "ok\n[image omitted]", (), "c")
    assert ignored(*items) == ("input[2].output[1] (image: placeholder)",)
    with pytest.raises(UnsupportedParameter) as caught:
        call_of({"input": [*items, {"role": "assistant", "content": "So."}, {"role": "user", "content": [image]}]})
    assert caught.value.param == "input[3].content[0]"
    assert "Kanarien" not in caught.value.message


def test_calls_of_other_kinds_are_calls_of_functions() -> None:
    items: list[JsonBody] = [
        {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": "a\n"},
        {"type": "function_call", "call_id": "c2", "namespace": "mcp__git__", "name": "log", "arguments": "{}"},
        {"type": "local_shell_call", "call_id": "c3", "action": {"type": "exec", "command": ["ls"]}},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"},
        {"type": "function_call_output", "call_id": "c2", "output": "none"},
        {"type": "local_shell_call_output", "call_id": "c3", "output": "a b"},
    ]
    assert messages(*items) == (
        Message("assistant", "", (
            ToolCall("c1", "apply_patch", '{"input":"a\\n"}'),
            ToolCall("c2", "mcp__git__log", "{}"),
            ToolCall("c3", "local_shell", '{"type":"exec","command":["ls"]}'),
        )),
        Message("tool", "done", (), "c1"),
        Message("tool", "none", (), "c2"),
        Message("tool", "a b", (), "c3"),
    )  # fmt: skip
    assert ignored(*items) == ()


@pytest.mark.parametrize(
    "item",
    [
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "x"}},
        {"type": "tool_search_call", "call_id": "c", "arguments": {}},
        {"type": "tool_search_output", "call_id": "c", "tools": []},
        {"type": "mcp_list_tools", "id": "m", "server_label": "s", "tools": []},
        {"type": "compaction", "encrypted_content": "x"},
        {"type": "Kanarien\r\nvogel"},
    ],
    ids=lambda item: item["type"],
)
def test_items_of_a_servers_own_tools_are_left_out_and_named(item: JsonBody) -> None:
    assert messages(item) == ()
    assert ignored(item) == (f"input[1] ({item['type'].replace(chr(13), '?').replace(chr(10), '?')})",)


def test_a_refusal_is_a_text_of_the_answer() -> None:
    assert messages({"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}) == (
        Message("assistant", "No."),
    )


@pytest.mark.parametrize(
    ("arguments", "kept"),
    [("", "{}"), ("null", "{}"), (None, "{}"), ({"a": 1}, '{"a":1}'), ('{"a', '{"INVALID_JSON":"{\\"a"}')],
)
def test_arguments_are_always_an_object(arguments: object, kept: str) -> None:
    (message,) = messages({"type": "function_call", "call_id": "c", "name": "look", "arguments": arguments})
    assert message.tool_calls == (ToolCall("c", "look", kept),)


# Answers


def _calls(*calls: tuple[str, JsonBody]) -> str:
    return "".join(
        f'<tool_call>{{"name": "{name}", "arguments": {json.dumps(arguments)}}}</tool_call>'
        for name, arguments in calls
    )


SAID = _calls(
    ("apply_patch", {"input": 'a "b"\n'}),
    ("multi_agent_v1__close_agent", {"x": 1}),
    ("multi_agent_v1__send", {"input": "c"}),
)


def _events(step: int) -> list[Event]:
    deltas: list[Event] = [TextDelta(SAID[at : at + step], (65,)) for at in range(0, len(SAID), step)]
    return [*deltas, TextDelta("", (66,), finish_reason="stop"), End("done", Usage(4, 9))]


@pytest.mark.parametrize("step", [1, 5, 1_000])
def test_calls_come_back_in_the_form_of_their_tools(step: int) -> None:
    seen = facts(memo=call_of(CODEX).request.memo)
    output = json.loads(ResponsesView().open(seen).whole(_events(step)))["output"]
    Response.model_validate_json(ResponsesView().open(seen).whole(_events(step)), strict=True)
    patch, close, send = output
    assert (patch["type"], patch["name"], patch["input"]) == ("custom_tool_call", "apply_patch", 'a "b"\n')
    assert (close["type"], close["namespace"], close["name"]) == ("function_call", "multi_agent_v1", "close_agent")
    assert json.loads(close["arguments"]) == {"x": 1}
    assert (send["type"], send["namespace"], send["name"], send["input"]) == (
        "custom_tool_call", "multi_agent_v1", "send", "c"
    )  # fmt: skip
    encoder = ResponsesView().open(seen)
    stream = b"".join(encoder.encode(seq, event) for seq, event in enumerate(_events(step), 1))
    events = [json.loads(event.text) for event in parse_sse(stream)]
    for event in parse_sse(stream):
        EVENT.validate_json(event.text, strict=True)
    inputs = [event for event in events if event["type"].startswith("response.custom_tool_call_input")]
    assert "".join(event.get("delta", "") for event in inputs if event["item_id"] == patch["id"]) == 'a "b"\n'
    assert [event["input"] for event in inputs if "input" in event] == ['a "b"\n', "c"]
    assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == output


def test_calls_that_come_back_are_read_as_they_were_said() -> None:
    """By the client, and by `previous_response_id`."""
    seen = facts(memo=call_of(CODEX).request.memo)
    said = answer_message(seen, _events(9))
    sent_back = messages(*json.loads(ResponsesView().open(seen).whole(_events(9)))["output"])
    assert sent_back == (said,)
    assert [call.name for call in said.tool_calls] == [
        "apply_patch",
        "multi_agent_v1__close_agent",
        "multi_agent_v1__send",
    ]


def test_only_the_tools_in_use_are_repeated() -> None:
    shown = json.loads(ResponsesView().open(facts(memo=call_of(CODEX).request.memo)).whole(_events(9)))
    assert [tool["name"] for tool in shown["tools"]] == [tool["name"] for tool in CODEX["tools"][:3]]
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "look"}]}
    memo = call_of({"tools": [LOOK], "tool_choice": choice}).request.memo
    assert json.loads(ResponsesView().open(facts(memo=memo)).whole(_events(9)))["tool_choice"] == choice


def test_the_fields_of_the_open_responses_schema_are_there() -> None:
    seen = facts(memo=call_of({"presence_penalty": 0.5}).request.memo)
    shown = json.loads(ResponsesView().open(seen).whole(_events(9)))
    fields = ("completed_at", "max_tool_calls", "prompt_cache_key", "safety_identifier", "user")
    assert [shown[name] for name in fields] == [None] * len(fields)
    assert shown["service_tier"] == "default"  # it may not be null
    assert (shown["presence_penalty"], shown["frequency_penalty"]) == (0.5, 0.0)


def test_repeated_tools_have_the_nullable_fields_of_the_schema() -> None:
    custom = {"type": "custom", "name": "patch"}
    tools = [{"type": "function", "name": "a"}, LOOK, custom]
    shown = json.loads(ResponsesView().open(facts(memo=call_of({"tools": tools}).request.memo)).whole(_events(9)))
    assert shown["tools"] == [
        {"description": None, "parameters": None, "strict": None, "type": "function", "name": "a"},
        {"description": None, "parameters": None, "strict": None} | LOOK,
        custom,
    ]


def test_a_prompt_that_is_too_long_has_its_code_in_the_stream() -> None:
    end = End("error", Usage(9, 0), Failure("context_length_exceeded", "Too long."))
    stream = ResponsesView().open(facts()).encode(1, end)
    failed = next(json.loads(event.text) for event in parse_sse(stream) if event.event == "response.failed")
    assert failed["response"]["error"] == {
        "code": "context_length_exceeded",
        "message": "Too long.",
        "retryable": False,
    }


@pytest.mark.parametrize(("length", "expected"), [(None, "completed"), (45, "incomplete")])
def test_a_single_complete_call_is_not_incomplete(length: int | None, expected: str) -> None:
    call = call_of({"tools": [LOOK], "parallel_tool_calls": False})
    seen = facts(memo=call.request.memo)
    text = '<tool_call>{"name": "look", "arguments": {"a": 1}}</tool_call> And then'[:length]
    events: list[Event] = [TextDelta(text, (65,), finish_reason="length"), End("done", Usage(1, 1))]
    assert json.loads(call.view.open(seen).whole(events))["status"] == expected
    encoder = call.view.open(seen)
    streamed = b"".join(encoder.encode(n, event) for n, event in enumerate(events, 1))
    assert f"event: response.{expected}".encode() in streamed
