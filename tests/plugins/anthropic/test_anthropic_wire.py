"""Anthropic's wire: requests and answers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.dialects.fake_server import FakeServer, parsed, view_of
from tests.dialects.sse import parse
from tests.dialects.transcripts import GOLDEN, facts
from tests.examples import examples

from tailrace.dialects import GenerateCall
from tailrace.dialects.bodies import JsonBody
from tailrace.errors import (
    BodyTooLarge,
    ContextLengthExceeded,
    EngineError,
    EngineLost,
    EngineStalled,
    Forbidden,
    QueueFull,
    RequestError,
    TailraceError,
    UnknownModel,
    UnsupportedParameter,
)
from tailrace.types import CallReading, End, Event, Message, Sampling, TextDelta, ToolCall, Usage
from tailrace_plugins.anthropic import anthropic_wire as anthropic
from tailrace_plugins.anthropic.anthropic_events import MessagesEncoder, MessagesView, encode_error

HI: JsonBody = {"model": "scripted", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}
LOOK: JsonBody = {"name": "look", "description": "d", "input_schema": {"type": "object"}}
ASK: JsonBody = {"name": "ask", "input_schema": {"type": "object", "properties": {"of": {"type": "string"}}}}


def call_of(body: JsonBody, *, server: FakeServer | None = None) -> GenerateCall:
    return anthropic.parse(parsed({**HI, **body}, server=server))


def sampling(body: JsonBody) -> Sampling:
    return call_of(body).request.sampling


def messages(*turns: JsonBody, **more: object) -> tuple[Message, ...]:
    return call_of({"messages": list(turns), **more}).request.messages


def text(words: str) -> JsonBody:
    return {"type": "text", "text": words}


def reading_of(call: GenerateCall) -> CallReading:
    view = view_of(call)
    assert isinstance(view, MessagesView)
    assert view.calls is not None
    return view.calls


def user(content: object) -> JsonBody:
    return {"role": "user", "content": content}


def assistant(content: object) -> JsonBody:
    return {"role": "assistant", "content": content}


def schema(grammar: object) -> Any:  # Any: JSON
    assert grammar is not None
    return json.loads(getattr(grammar, "source", ""))


def test_it_streams_when_stream_is_true() -> None:
    assert call_of({"stream": True}).stream
    assert not call_of({}).stream


def test_sampling() -> None:
    assert sampling({}) == Sampling(max_tokens=9)
    asks = {"temperature": 0.5, "top_p": 0.25, "top_k": 3, "stop_sequences": ["x", "yz"]}
    assert sampling(asks) == Sampling(temperature=0.5, top_p=0.25, top_k=3, stop=("x", "yz"), max_tokens=9)


def test_turns_as_texts_and_as_blocks() -> None:
    assert messages(user("Hi")) == (Message("user", "Hi"),)
    assert messages(user([text("a"), text(""), text("b")])) == (Message("user", "a\nb"),)


def test_system_prompts() -> None:
    expected = (Message("system", "Be\nbrief."), Message("user", "Hi"))
    assert messages(user("Hi"), system="Be\nbrief.") == expected
    assert messages(user("Hi"), system=[text("Be"), text("brief.")]) == expected
    assert messages(user("Hi"), system="") == messages(user("Hi"), system=None) == expected[1:]


def test_a_system_turn_stays_where_it_is() -> None:
    turns = messages(user("Hi"), assistant("Yes?"), {"role": "system", "content": "Be brief."}, user("Go."))
    assert [turn.role for turn in turns] == ["user", "assistant", "system", "user"]


def test_turns_of_one_role_become_one() -> None:
    turns = messages(user("a"), user([text("b")]), assistant("c"), assistant("d"), user("e"))
    assert turns == (Message("user", "a\nb"), Message("assistant", "c\nd"), Message("user", "e"))


def test_calls_and_their_results() -> None:
    calls = [
        text("Let me see."),
        {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": "é"}},
        {"type": "tool_use", "id": "t2", "name": "ask", "input": {}},
    ]
    results = [
        {"type": "tool_result", "tool_use_id": "t1", "content": "a"},
        {"type": "tool_result", "tool_use_id": "t2", "content": [text("b"), text("c")]},
        {"type": "tool_result", "tool_use_id": "t3"},
        text("And now?"),
    ]
    turns = messages(user("Hi"), assistant(calls), user(results), assistant([calls[1]]), assistant("So."), user("Go."))
    assert turns == (
        Message("user", "Hi"),
        Message("assistant", "Let me see.", (ToolCall("t1", "look", '{"at":"é"}'), ToolCall("t2", "ask", "{}"))),
        Message("tool", "a", (), "t1"),
        Message("tool", "b\nc", (), "t2"),
        Message("tool", "", (), "t3"),
        Message("user", "And now?"),
        Message("assistant", "", (ToolCall("t1", "look", '{"at":"é"}'),)),
        Message("assistant", "So."),
        Message("user", "Go."),
    )


def test_a_chat_that_ends_with_the_beginning_of_an_answer_is_continued() -> None:
    request = call_of({"messages": [user("Hi"), assistant("The best")]}).request
    assert request.continue_final
    assert request.messages[-1] == Message("assistant", "The best")
    assert not call_of({}).request.continue_final
    call = {"type": "tool_use", "id": "t1", "name": "look", "input": {}}
    assert not call_of({"messages": [user("Hi"), assistant([call])]}).request.continue_final


def test_an_empty_beginning_is_ignored() -> None:
    request = call_of({"messages": [user("Hi"), assistant("")]}).request
    assert not request.continue_final
    assert request.messages == (Message("user", "Hi"),)


@pytest.mark.parametrize("beginning", ["The best ", "a\n", " "])
def test_a_beginning_that_ends_in_space_is_refused(beginning: str) -> None:
    with pytest.raises(RequestError, match="trailing whitespace"):
        call_of({"messages": [user("Hi"), assistant(beginning)]})


def test_tools_are_shown_in_the_form_of_chat_templates() -> None:
    call = call_of({"tools": [LOOK, ASK]})
    assert call.request.tools == (
        {"type": "function", "function": {"name": "look", "description": "d", "parameters": LOOK["input_schema"]}},
        {"type": "function", "function": {"name": "ask", "parameters": ASK["input_schema"]}},
    )
    assert call.request.sampling.grammar is None
    assert view_of(call) == MessagesView(CallReading(tools={"look": {}, "ask": {"of": True}}))


def test_choosing_tools() -> None:
    tools = {"tools": [LOOK, ASK]}
    assert call_of({**tools, "tool_choice": {"type": "none"}}).request.tools == ()
    assert call_of({**tools, "tool_choice": {"type": "auto"}}) == call_of(tools)
    named = call_of({**tools, "tool_choice": {"type": "tool", "name": "ask"}})
    assert [tool["name"] for tool in schema(named.request.sampling.grammar)["tools"]] == ["ask"]
    assert reading_of(named) == msgspec.structs.replace(reading_of(call_of(tools)), forced=True)
    anything = schema(call_of({**tools, "tool_choice": {"type": "any"}}).request.sampling.grammar)
    assert [tool["name"] for tool in anything["tools"]] == ["look", "ask"]


def test_at_most_one_call() -> None:
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    call = call_of({"tools": [LOOK], "tool_choice": choice})
    assert reading_of(call).single
    assert call.ignored == ()
    assert call.request.sampling.single_call
    assert not sampling({"tools": [LOOK]}).single_call
    assert not sampling({"tools": [LOOK], "tool_choice": {**choice, "type": "any"}}).single_call
    assert not reading_of(
        call_of({"tools": [LOOK], "tool_choice": {**choice, "disable_parallel_tool_use": False}})
    ).single


@pytest.mark.parametrize(("length", "expected"), [(None, "tool_use"), (45, "max_tokens")])
def test_a_single_complete_call_is_not_incomplete(length: int | None, expected: str) -> None:
    text = '<tool_call>{"name": "look", "arguments": {"a": 1}}</tool_call> And then'[:length]
    events: list[Event] = [TextDelta(text, (65,), finish_reason="length"), End("done", Usage(1, 1))]
    view = MessagesView(CallReading(single=True))
    assert json.loads(view.open(facts()).whole(events))["stop_reason"] == expected
    encoder = view.open(facts())
    streamed = b"".join(encoder.encode(n, event) for n, event in enumerate(events, 1))
    assert f'"stop_reason":"{expected}"'.encode() in streamed


def test_tools_that_the_template_cannot_show_are_left_out_unless_one_must_be_called() -> None:
    bare = FakeServer(tool_format="")
    call = call_of({"tools": [LOOK]}, server=bare)
    assert (call.request.tools, call.ignored, view_of(call)) == ((), ("tools",), MessagesView())
    forced = call_of({"tools": [LOOK], "tool_choice": {"type": "any"}}, server=bare)
    assert len(forced.request.tools) == 1
    assert (forced.ignored, reading_of(forced).forced) == ((), True)
    counted = anthropic.count_tokens(
        parsed({"model": "default", "messages": [user("Hi")], "tools": [LOOK]}, server=bare)
    )
    assert counted.ignored == ("tools",)


def test_structured_output() -> None:
    wanted = {"type": "object", "properties": {"a": {"type": "integer"}}}
    asks = {"output_config": {"format": {"type": "json_schema", "schema": wanted}}}
    assert schema(sampling(asks).grammar) == wanted
    assert schema(sampling({"output_format": asks["output_config"]["format"]}).grammar) == wanted  # the older form
    both = call_of({**asks, "tools": [LOOK]}).request.sampling.grammar
    assert (schema(both)["answer"], schema(both)["answer_param"]) == (wanted, "output_config")


@pytest.mark.parametrize("body", [{"thinking": {"type": "disabled"}}, {"thinking": None}])
def test_disabled_thinking_is_accepted(body: JsonBody) -> None:
    assert call_of(body) == call_of({})


def test_fields_without_effect_are_ignored_and_named() -> None:
    kept = {"cache_control": {"type": "ephemeral"}}
    failed = {"type": "tool_result", "tool_use_id": "t1", "content": "no", "is_error": True}
    body = {
        "metadata": {"user_id": "u"},
        "service_tier": "auto",
        "messages": [user([failed, {**text("Hi"), **kept}])],
        "system": [{**text("Be kind."), **kept}],
        "tools": [{**LOOK, "defer_loading": True, "eager_input_streaming": True, **kept}],
        "tool_choice": {"type": "auto"},
        **kept,
    }
    assert call_of(body).ignored == ("messages[].content[].is_error", "metadata", "service_tier")


IMAGE = {"type": "image", "source": {"type": "url", "url": "http://a/"}}
SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
USE = {"type": "tool_use", "id": "t1", "name": "look", "input": {}}


def test_tools_of_other_kinds_are_left_out_and_named() -> None:
    tools = [SEARCH, LOOK, {"type": "bash_20250124", "name": "bash"}, {**ASK, "type": "custom"}, {**ASK, "type": None}]
    call = call_of({"tools": tools})
    assert [one["function"]["name"] for one in call.request.tools] == ["look", "ask"]
    assert call.ignored == (
        "tools[0] (web_search_20250305)", "tools[2] (bash_20250124)", "tools[4] (the same as tools[3])"
    )  # fmt: skip
    assert call_of({"tools": [SEARCH]}).request.tools == ()
    assert call_of({"tools": tools}, server=FakeServer(tool_format="")).ignored == ("tools",)


@pytest.mark.parametrize(
    ("content", "shown", "named"),
    [
        ([text("shot"), IMAGE], "shot\n[image omitted]", ["image: placeholder"]),
        (
            [{"type": "document", "source": {"type": "base64", "data": "a"}}],
            "[file omitted]",
            ["file: placeholder"],
        ),
        ([{"type": "document", "source": {"type": "text", "data": "a"}, "title": "T"}], "T\na", []),
        ([{"type": "document", "source": {"type": "content", "content": [text("a"), IMAGE]}}], "a", []),
        (
            [{"type": "search_result", "title": "T", "source": "http://a/", "content": [text("b")]}],
            "T\nhttp://a/\nb",
            [],
        ),
        ([{"type": "tool_reference", "tool_name": "ask"}], "ask", []),
        ([{"type": "dance"}], "[part omitted]", ["dance: placeholder"]),
        ("", "", []),
        (None, "", []),
    ],
    ids=str,
)
def test_the_content_of_a_tools_result(content: object, shown: str, named: list[str]) -> None:
    result = {"type": "tool_result", "tool_use_id": "t1", "content": content}
    call = call_of({"messages": [user("q"), assistant([USE]), user([result])]})
    assert call.request.messages[-1] == Message("tool", shown, (), "t1")
    where = "messages[2].content[0].content"
    assert list(call.ignored) == [f"{where}[{len(str(shown).splitlines()) - 1}] ({one})" for one in named]


def test_blocks_of_anthropics_own_servers_are_left_out_of_an_answer_and_named() -> None:
    answer = [
        {"type": "redacted_thinking", "data": "x"},
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "x"}},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
        text("So."),
    ]
    call = call_of({"messages": [user("q"), assistant(answer), user("go on")]})
    assert call.request.messages[1] == Message("assistant", "So.")
    assert call.ignored == (
        "messages[1].content[0] (redacted_thinking)",
        "messages[1].content[1] (server_tool_use)",
        "messages[1].content[2] (web_search_tool_result)",
    )
    summary = {"type": "compaction", "content": "They spoke of rivers."}
    assert messages(assistant([summary]), user("go on"))[0] == Message("assistant", "They spoke of rivers.")


def test_an_image_is_refused_where_the_user_asks_about_it() -> None:
    earlier = [user([IMAGE, text("What is this?")]), assistant("A dog."), user("Which one?")]
    call = call_of({"messages": earlier})
    assert call.request.messages[0].content == "[image omitted]\nWhat is this?"
    assert call.ignored == ("messages[0].content[0] (image: placeholder)",)
    with pytest.raises(UnsupportedParameter) as caught:
        call_of({"messages": earlier[:1]})
    assert caught.value.param == "messages[0].content[0]"
    result = {"type": "tool_result", "tool_use_id": "t1", "content": "see"}  # the document is what the tool has read
    read = [user("q"), assistant([USE]), user([result, {"type": "document", "source": {"type": "url", "url": "x"}}])]
    assert call_of({"messages": read}).request.messages[-1] == Message("user", "[file omitted]")


def test_the_text_of_claude_code_that_changes_with_every_request_is_left_out() -> None:
    system = [text("x-anthropic-billing-header: cc_version=2.1; cch=1a2b3;"), text("You are an agent.")]
    call = call_of({"system": system})
    assert call.request.messages[0] == Message("system", "You are an agent.")
    assert call.ignored == ("system[0] (x-anthropic-billing-header)",)
    assert call_of({"system": system[1:]}).request == call.request
    assert call_of({"system": list(reversed(system))}).request.messages[0].content.startswith("You are an agent.\nx-")


def test_effort_reaches_a_template_that_knows_it() -> None:
    asks = {"output_config": {"effort": "high"}, "thinking": {"type": "adaptive"}}
    assert call_of(asks).request.template_values == {"reasoning_effort": "high"}
    assert call_of(asks, server=FakeServer(template_values=frozenset())).ignored == ("output_config.effort",)


def test_a_budget_beyond_the_answer_is_no_error() -> None:
    asks = {"max_tokens": 1024, "thinking": {"type": "enabled", "budget_tokens": 31_999}}
    assert (call_of(asks).ignored, sampling(asks).max_reasoning_tokens) == ((), 31_999)


def test_an_empty_turn_is_left_out_and_named() -> None:
    call = call_of({"messages": [user("Hi"), assistant("Yes?"), user(""), user("Go on.")]})
    assert [message.content for message in call.request.messages] == ["Hi", "Yes?", "Go on."]
    assert call.ignored == ("messages[2] (empty)",)


@pytest.mark.parametrize(
    "body",
    [
        {"max_tokens": None},
        {"max_tokens": 0},
        {"model": None},
        {"temperature": 2.1},
        {"top_p": 1.1},
        {"top_k": -2},
        {"stop_sequences": "x"},
        {"stop_sequences": [5]},
        {"stream": "yes"},
        {"system": 5},
        {"messages": []},
        {"messages": [assistant("Yes?")]},
        {"messages": [user("")]},
        {"messages": [user([])]},
        {"messages": [user([IMAGE])]},
        {"messages": [{"role": "tool", "content": "Hi"}]},
        {"messages": [user([{"type": "tool_use", "id": "t", "name": "n", "input": {}}])]},
        {"messages": [assistant([{"type": "tool_result", "tool_use_id": "t"}]), user("Hi")]},
        {"tools": [{"name": "a b", "input_schema": {}}]},
        {"tools": [LOOK, {**LOOK, "description": "e"}]},
        {"tool_choice": {"type": "any"}},
        {"tools": [LOOK], "tool_choice": {"type": "tool"}},
        {"tools": [LOOK], "tool_choice": {"type": "tool", "name": ""}},
        {"tools": [LOOK], "tool_choice": {"type": "tool", "name": "<auto>"}},
        {"tools": [LOOK], "tool_choice": {"type": "tool", "name": "ask"}},
        {"tools": [SEARCH], "tool_choice": {"type": "tool", "name": "web_search"}},
        {"output_config": {"format": {"type": "json_schema", "schema": 5}}},
    ],
    ids=str,
)
def test_wrong_values_are_refused(body: JsonBody) -> None:
    with pytest.raises(RequestError):
        call_of(body)


def test_many_turns_of_one_role_are_joined_in_linear_time() -> None:
    turns = [user("x" * 180)] * 10_000
    (joined,) = messages(*turns)
    assert len(joined.content) == 10_000 * 181 - 1


def test_counting_tokens() -> None:
    body = {name: value for name, value in HI.items() if name != "max_tokens"}
    expected = FakeServer().count_tokens(call_of({}).request)
    assert json.loads(anthropic.count_tokens(parsed(body)).body) == {"input_tokens": expected}


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (RequestError("No."), 400, "invalid_request_error"),
        (Forbidden("No."), 403, "permission_error"),
        (UnknownModel("No."), 404, "not_found_error"),
        (BodyTooLarge("No."), 413, "request_too_large"),
        (QueueFull("No."), 429, "rate_limit_error"),
        (TailraceError("No."), 500, "api_error"),
        (EngineError("No."), 500, "api_error"),
        (EngineLost("No."), 503, "overloaded_error"),
        (EngineStalled("No."), 504, "timeout_error"),
    ],
)
def test_errors(error: TailraceError, status: int, kind: str) -> None:
    found, body = encode_error(error)
    assert found == status
    assert json.loads(body) == {"type": "error", "error": {"type": kind, "message": "No."}}


def test_clients_know_from_the_text_that_a_prompt_is_too_long() -> None:
    def message(error: TailraceError) -> str:
        told = json.loads(encode_error(error)[1])["error"]["message"]
        assert isinstance(told, str)
        return told

    assert message(ContextLengthExceeded(9_006, 8_192)) == "prompt is too long: 9006 tokens > 8192 maximum"
    assert message(ContextLengthExceeded(60, 100, max_tokens=41)).startswith(
        "input length and `max_tokens` exceed context limit: 60 + 41 > 100"
    )


def test_a_heartbeat_is_a_ping() -> None:
    (ping,) = parse(MessagesView().heartbeat)
    assert ping.event == json.loads(ping.text)["type"] == "ping"


@pytest.mark.parametrize(
    "path", sorted(GOLDEN.glob("anthropic*/*.txt")), ids=lambda path: f"{path.parent.name}-{path.stem}"
)
def test_events_are_in_the_order_that_clients_expect(path: Path) -> None:
    events = parse(path.read_bytes())
    assert [json.loads(event.text)["type"] for event in events] == [event.event for event in events]
    names = " ".join(re.sub("^(content_block|message)_", r"\1.", event.event) for event in events)
    block = r"content_block\.start( content_block\.delta)* content_block\.stop"
    if path.stem == "refused":
        assert names == "error"
    elif "error" in names:
        assert re.fullmatch(r"message\.start content_block\.start content_block\.delta error", names)
    else:
        assert re.fullmatch(rf"message\.start( {block})* message\.delta message\.stop", names)
    open_block = -1
    for event in events:
        fields = json.loads(event.text)
        open_block += event.event == "content_block_start"
        assert fields.get("index", open_block) == open_block


@settings(max_examples=examples(50), deadline=None)
@given(st.lists(st.text(max_size=20), max_size=8), st.booleans())
def test_events_carry_the_whole_text(texts: list[str], reads_tools: bool) -> None:
    view = MessagesView(CallReading() if reads_tools else None)
    events: list[Event] = [
        *(TextDelta(words, (97,)) for words in texts),
        TextDelta("", (256,), finish_reason="stop"),
        End("done", Usage(4, len(texts) + 1)),
    ]
    encoder = MessagesEncoder(facts(), view)
    stream = parse(b"".join(encoder.encode(seq, event) for seq, event in enumerate(events, 1)))
    deltas = [json.loads(event.text)["delta"] for event in stream if event.event == "content_block_delta"]
    assert "".join(delta["text"] for delta in deltas) == "".join(texts)
    whole = json.loads(MessagesEncoder(facts(), view).whole(events))
    assert "".join(block["text"] for block in whole["content"]) == "".join(texts)
    assert whole["usage"] == {"input_tokens": 4, "output_tokens": len(texts) + 1}
