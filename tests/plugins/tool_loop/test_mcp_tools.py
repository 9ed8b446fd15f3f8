"""OpenAI's client uses the tools of MCP servers through Responses."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI
from openai.types.responses import Response, ResponseFunctionToolCall
from openai.types.responses.response_output_item import McpListTools
from tests.plugins.tool_loop.tool_servers import Json, Tools, asks_of, calls_of, client_of

pytest.importorskip("mcp")

NEVER: Json = {"type": "mcp", "server_label": "count", "require_approval": "never"}
ASK: Json = {"type": "mcp", "server_label": "count"}


class Rig:
    """A server whose model calls tools as the question says: `append {"text": "a"}; look {}`."""

    def __init__(self, path: Path) -> None:
        self.tools = Tools(path, [])
        self.go = path / "go"  # ends a call that waits
        calls = [
            {"name": "count__$1", "arguments": {"text": "$2"}},
            {"name": "count__$3", "arguments": {"text": "$4"}},
        ]
        rules: list[Json] = [
            {"when": r"both (\w+) (\w+) (\w+) (\w+)", "calls": calls},
            {"when": r"one (\w+) (\w+)", "calls": calls[:1]},
            {"when": r"fail", "calls": [{"name": "count__append", "arguments": {"fails": True, "text": "no room"}}]},
            {"when": r"wait", "calls": [{"name": "count__look", "arguments": {"text": "late", "until": str(self.go)}}]},
            {"when": r"mine", "calls": [{"name": "mine", "arguments": {}}, calls[0] | {"name": "count__look"}]},
            {
                "when": r"<tool_response>\n(again[^\n]*)",
                "calls": [{"name": "count__look", "arguments": {"text": "$1"}}],
            },
            {"when": r"<tool_response>\n([^\n]*)", "say": "It said: $1"},
            {"when": ".", "say": "Hello."},
        ]
        (path / "script.json").write_text(json.dumps({"rules": rules}))
        self.server = self.tools.start("--mcp-calls", "4")


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    rig = Rig(tmp_path_factory.mktemp("tools"))
    with contextlib.closing(rig.server):
        yield rig


def _ask(client: OpenAI, text: Any, tool: Json = NEVER, **more: Any) -> Response:  # Any: what the client takes
    return client.responses.create(model="scripted", input=text, tools=[tool], **more)  # type: ignore[list-item]


def test_a_tool_is_called_and_the_model_goes_on(rig: Rig, client: OpenAI) -> None:
    before = len(rig.tools.counted())
    response = _ask(client, "one append hello")
    assert [item.type for item in response.output] == ["mcp_list_tools", "mcp_call", "message"]
    listed = response.output[0]
    assert isinstance(listed, McpListTools)
    assert [tool.name for tool in listed.tools] == ["append", "look", "put"]
    assert listed.tools[1].annotations == {"readOnlyHint": True}
    (call,) = calls_of(response)
    assert (call.name, call.server_label, call.status) == ("append", "count", "completed")
    assert (json.loads(call.arguments), call.output, call.error) == ({"text": "hello"}, "hello", None)
    assert response.output_text == "It said: hello"
    assert response.status == "completed"
    assert rig.tools.counted()[before:] == ["append"]
    assert response.usage is not None
    assert response.usage.output_tokens > len("It said: hello")  # the tokens of both turns
    assert client.responses.retrieve(response.id) == response
    client.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)


def test_the_events_are_openai_s(client: OpenAI) -> None:
    tools: Any = [NEVER]  # Any: what the client takes
    events = list(client.responses.create(model="scripted", input="one look a", tools=tools, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = list(dict.fromkeys(event.type for event in events))
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.mcp_list_tools.in_progress",
        "response.mcp_list_tools.completed",
        "response.output_item.done",
        "response.mcp_call.in_progress",
        "response.mcp_call_arguments.delta",
        "response.mcp_call_arguments.done",
        "response.mcp_call.completed",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.completed",
    ]
    final = events[-1]
    assert final.type == "response.completed"
    later = list(client.responses.retrieve(final.response.id, stream=True, starting_after=9))
    assert later == events[10:]
    built = client.responses.retrieve(final.response.id)
    assert built == final.response


def test_a_failed_tool_is_told_to_the_model(client: OpenAI) -> None:
    response = _ask(client, "fail")
    (call,) = calls_of(response)
    assert call.status == "failed"
    assert call.error is not None
    assert call.error.type == "mcp_tool_execution_error"
    assert response.output_text == "It said: Error: no room"


def test_calls_of_one_turn_are_made_in_order(rig: Rig, client: OpenAI) -> None:
    before = len(rig.tools.counted())
    response = _ask(client, "both append one look two")
    assert [(call.name, call.output) for call in calls_of(response)] == [("append", "one"), ("look", "two")]
    assert rig.tools.counted()[before:] == ["append", "look"]


def test_a_response_makes_a_limited_number_of_calls(rig: Rig, client: OpenAI) -> None:
    before = len(rig.tools.counted())
    response = _ask(client, "one look again")
    assert len(calls_of(response)) == 4
    assert response.status == "completed"
    assert len(rig.tools.counted()) == before + 4
    assert len(calls_of(_ask(client, "one look again", max_tool_calls=2))) == 2
    both = calls_of(_ask(client, "both look one look two", max_tool_calls=1))
    assert [call.status for call in both] == ["completed", "failed"]


def test_a_call_waits_for_its_approval(rig: Rig, client: OpenAI) -> None:
    before = len(rig.tools.counted())
    asked = _ask(client, "one append yes", ASK)
    (ask,) = asks_of(asked)
    assert (ask.name, ask.server_label, json.loads(ask.arguments)) == ("append", "count", {"text": "yes"})
    assert not calls_of(asked)
    assert len(rig.tools.counted()) == before
    answer = {"type": "mcp_approval_response", "approval_request_id": ask.id, "approve": True}
    done = _ask(client, [answer], ASK, previous_response_id=asked.id)
    (call,) = calls_of(done)
    assert (call.approval_request_id, call.output) == (ask.id, "yes")
    assert done.output_text == "It said: yes"
    assert rig.tools.counted()[before:] == ["append"]
    again = _ask(client, [answer], ASK, previous_response_id=asked.id)  # a client that sends it twice
    assert calls_of(again)[0].output == "yes"
    assert rig.tools.counted()[before:] == ["append"]


def test_a_call_that_is_not_allowed_is_not_made(rig: Rig, client: OpenAI) -> None:
    before = len(rig.tools.counted())
    asked = _ask(client, "one append no", ASK)
    (ask,) = asks_of(asked)
    answer = {"type": "mcp_approval_response", "approval_request_id": ask.id, "approve": False, "reason": "Not now."}
    done = _ask(client, [answer], ASK, previous_response_id=asked.id)
    assert done.output_text == "It said: The user did not allow this call: Not now."
    assert not calls_of(done)
    assert len(rig.tools.counted()) == before


def test_a_client_may_keep_the_conversation_itself(rig: Rig, client: OpenAI) -> None:
    before = len(rig.tools.counted())
    history: list[Any] = [{"role": "user", "content": "one append yours"}]  # Any: what the client takes
    asked = _ask(client, history, ASK, store=False)
    (ask,) = asks_of(asked)
    history += [item.model_dump(exclude_none=True) for item in asked.output]
    history.append({"type": "mcp_approval_response", "approval_request_id": ask.id, "approve": True})
    done = _ask(client, history, ASK, store=False)
    assert done.output_text == "It said: yours"
    assert "mcp_list_tools" not in [item.type for item in done.output]  # the client has it
    history += [item.model_dump(exclude_none=True) for item in done.output]
    history.append({"role": "user", "content": "Thank you."})
    assert _ask(client, history, ASK, store=False).output_text == "Hello."
    assert rig.tools.counted()[before:] == ["append"]


def test_approvals_are_asked_as_the_request_says(client: OpenAI) -> None:
    only_writes = NEVER | {"require_approval": {"never": {"read_only": True}}}
    assert calls_of(_ask(client, "one look a", only_writes))
    assert asks_of(_ask(client, "one append a", only_writes))
    named = NEVER | {"require_approval": {"always": {"tool_names": ["look"]}}}
    assert asks_of(_ask(client, "one look a", named))
    assert calls_of(_ask(client, "one append a", named))


def test_only_allowed_tools_are_offered(client: OpenAI) -> None:
    for allowed in (["look"], {"read_only": True}, {"tool_names": ["look"]}):
        response = _ask(client, "Hi.", NEVER | {"allowed_tools": allowed})
        (listed,) = response.output[:1]
        assert isinstance(listed, McpListTools)
        assert [tool.name for tool in listed.tools] == ["look"]


def test_functions_of_the_client_are_left_to_it(client: OpenAI) -> None:
    mine = {"type": "function", "name": "mine", "parameters": {"type": "object"}}
    response = client.responses.create(model="scripted", input="mine", tools=[NEVER, mine])  # type: ignore[list-item]
    assert [item.type for item in response.output] == ["mcp_list_tools", "function_call", "mcp_call"]
    call = response.output[1]
    assert isinstance(call, ResponseFunctionToolCall)
    result: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "my result"}]
    done = client.responses.create(model="scripted", input=result, previous_response_id=response.id)
    assert done.output_text  # also without the tools


def test_a_response_in_a_conversation(client: OpenAI) -> None:
    conversation = client.conversations.create()
    _ask(client, "one look first", conversation=conversation.id)
    items = client.conversations.items.list(conversation.id, order="asc").data
    assert [item.type for item in items] == ["message", "function_call", "function_call_output", "message"]
    asked = _ask(client, "one append second", ASK, conversation=conversation.id)
    (ask,) = asks_of(asked)
    answer = [{"type": "mcp_approval_response", "approval_request_id": ask.id, "approve": True}]
    with pytest.raises(openai.BadRequestError):
        _ask(client, answer, ASK, conversation=conversation.id, previous_response_id=asked.id)
    assert _ask(client, answer, ASK, conversation=conversation.id).output_text == "It said: second"
    items = client.conversations.items.list(conversation.id, order="asc").data
    mixed = NEVER | {"require_approval": {"always": {"tool_names": ["append"]}}}
    (ask,) = asks_of(_ask(client, "both look seen append kept", mixed, conversation=conversation.id))
    left = client.conversations.items.list(conversation.id, order="asc").data[len(items) :]
    kinds = ["message", "function_call", "function_call", "function_call_output"]
    assert [item.type for item in left] == kinds  # the result that the model has not read yet is there, too
    answer = [{"type": "mcp_approval_response", "approval_request_id": ask.id, "approve": True}]
    _ask(client, answer, mixed, conversation=conversation.id)
    left = client.conversations.items.list(conversation.id, order="asc").data[len(items) :]
    assert [item.type for item in left] == [*kinds, "function_call_output", "message"]
    assert [item.type for item in items[4:]] == ["message", "function_call", "function_call_output", "message"]


def test_an_idempotency_key_makes_no_second_response(rig: Rig, client: OpenAI) -> None:
    before = len(rig.tools.counted())
    headers = {"Idempotency-Key": "the-same"}
    first = _ask(client, "one append once", extra_headers=headers)
    assert _ask(client, "one append once", extra_headers=headers) == first
    assert rig.tools.counted()[before:] == ["append"]
    with pytest.raises(openai.ConflictError) as failed:
        _ask(client, "one append twice", extra_headers=headers)
    assert failed.value.code == "idempotency_conflict"


def test_requests_that_are_sent_twice_at_once_make_one_call(rig: Rig, client: OpenAI) -> None:
    """A client that hears nothing sends its request again, while the first one still runs."""
    before = len(rig.tools.counted())
    headers = {"Idempotency-Key": "at-once"}
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda _: _ask(client, "one append together", extra_headers=headers), range(8)))
    assert len({one.id for one in found}) == 1
    assert rig.tools.counted()[before:] == ["append"]
    asked = _ask(client, "one append allowed", ASK)
    answer = {"type": "mcp_approval_response", "approval_request_id": asks_of(asked)[0].id, "approve": True}

    def allow(number: int) -> str:
        try:
            return calls_of(_ask(client, [answer], ASK, previous_response_id=asked.id))[0].output or ""
        except openai.ConflictError:
            return "conflict"

    with ThreadPoolExecutor(8) as threads:
        outcomes = set(threads.map(allow, range(8)))
    assert "allowed" in outcomes
    assert outcomes <= {"allowed", "conflict"}
    assert rig.tools.counted()[before:] == ["append", "append"]


def test_a_response_in_the_background(client: OpenAI) -> None:
    response = _ask(client, "one look later", background=True)
    assert response.status == "in_progress"
    events = list(client.responses.retrieve(response.id, stream=True))
    assert events[-1].type == "response.completed"
    assert client.responses.retrieve(response.id).output_text == "It said: later"


@pytest.mark.parametrize(
    ("more", "status", "param"),
    [
        ({"tools": [{"type": "mcp"}]}, 400, "tools[0]"),
        ({"tools": [NEVER, NEVER]}, 400, "tools[1].server_label"),
        ({"tools": [NEVER | {"server_label": "../up"}]}, 400, "tools[0].server_label"),
        ({"tools": [NEVER | {"server_label": "other"}]}, 403, "tools"),
        ({"tools": [NEVER | {"server_url": "https://example.com/mcp"}]}, 403, "tools"),
        ({"tools": [NEVER | {"connector_id": "connector_gmail"}]}, 400, "tools[0]"),
        ({"tools": [NEVER | {"require_approval": 7}]}, 400, "tools[0].require_approval"),
        ({"tools": [NEVER], "max_tool_calls": 0}, 400, "max_tool_calls"),
        ({"tools": [NEVER], "tool_choice": {"type": "mcp", "server_label": "count", "name": "no"}}, 400, "tool_choice"),
        ({"tools": [NEVER], "temperature": "hot"}, 400, "temperature"),
        ({"tools": [NEVER], "previous_response_id": "resp_mcp_" + "0" * 32}, 404, "response_id"),
        (
            {
                "tools": [NEVER],
                "input": [
                    {"type": "mcp_approval_response", "approval_request_id": f"mcpr_{'0' * 32}_0_0", "approve": True}
                ],
            },
            404,
            "input[0].approval_request_id",
        ),
    ],
)
def test_what_is_wrong_is_named(rig: Rig, more: Json, status: int, param: str) -> None:
    body = {"model": "scripted", "input": "Hi.", "stream": True, **more}
    answer = rig.server.http.post("/v1/responses", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


def test_other_responses_stay_with_the_wire(client: OpenAI) -> None:
    response = client.responses.create(model="scripted", input="Hi.")
    assert not response.id.startswith("resp_mcp_")
    follows = _ask(client, "one look after", previous_response_id=response.id)
    assert follows.output_text == "It said: after"
    last = client.responses.create(model="scripted", input="And?", previous_response_id=follows.id)
    assert last.output_text == "Hello."
    assert last.previous_response_id == follows.id


def test_the_reference_server_for_the_time(tmp_path: Path) -> None:
    pytest.importorskip("mcp_server_time")
    tools = Tools(tmp_path, [[("time__get_current_time", {"timezone": "UTC"})]])
    tools.servers = {"time": {"command": tools.servers["count"]["command"], "args": ["-m", "mcp_server_time"]}}
    tools.write()
    with contextlib.closing(tools.start()) as server, client_of(server) as client:
        response = _ask(client, "What time is it?", NEVER | {"server_label": "time"})
        (call,) = calls_of(response)
        assert json.loads(call.output or "")["timezone"] == "UTC"
        assert response.output_text == "The tool has answered."
