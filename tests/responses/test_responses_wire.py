"""OpenAI's responses: requests, and events that the official library accepts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from tests.dialects.fake_server import FakeServer, parsed
from tests.dialects.sse import parse as parse_sse
from tests.dialects.transcripts import (
    GOLDEN,
    MEMOS,
    STREAMS,
    facts,
    facts_for,
    released_transcript,
    transcript,
)
from tests.examples import examples

from tailrace.dialects import Following, GenerateCall, ParsedRequest, StreamFacts, View
from tailrace.dialects.bodies import JsonBody
from tailrace.errors import (
    EngineError,
    RequestError,
    SeqOutOfRange,
    TailraceError,
    UnknownResponse,
    UnknownStream,
    UnsupportedParameter,
)
from tailrace.types import End, Event, GenerateRequest, Message, Sampling, TextDelta, ToolCall, Usage
from tailrace_outer.responses import responses_wire
from tailrace_outer.responses.responses_events import ResponsesEncoder, ResponsesView, answer_message

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)  # Any: a union of half a hundred
LOOK: JsonBody = {"type": "function", "name": "look", "parameters": {"type": "object"}}
WAIT: JsonBody = {"type": "function", "name": "wait", "description": "d"}
SCHEMA: JsonBody = {"type": "object", "properties": {"a": {"type": "integer"}}}
CALL = '<tool_call>{"name": "look", "arguments": {"a": 1}}</tool_call>'
TOKEN = (97,)


def each(*values: object) -> tuple[object, ...]:
    """Return values of all types as one tuple, for tests that mix them."""
    return values


def call_of(body: JsonBody, *, server: FakeServer | None = None) -> GenerateCall:
    return responses_wire.parse(parsed({"input": "Hi", **body}, server=server))


def request_of(body: JsonBody) -> GenerateRequest:
    return call_of(body).request


def messages(given: object, **more: object) -> tuple[Message, ...]:
    return request_of({"input": given, **more}).messages


def refused(body: JsonBody, *, server: FakeServer | None = None) -> TailraceError:
    with pytest.raises(TailraceError) as error:
        call_of(body, server=server)
    return error.value


def facts_of(body: JsonBody) -> StreamFacts:
    return facts(memo=request_of(body).memo)


def events_of(*texts: str, end: bool = True) -> list[Event]:
    events: list[Event] = [TextDelta(text, TOKEN) for text in texts]
    if end:
        events += [TextDelta("", (256,), finish_reason="stop"), End("done", Usage(4, len(texts) + 1))]
    return events


def shown(body: JsonBody, events: list[Event], view: ResponsesView | None = None) -> list[JsonBody]:
    """Return the events of a stream as its reader gets them. OpenAI's library has to know each of them."""
    encoder = ResponsesEncoder(facts_of(body), view or ResponsesView())
    return read(b"".join(encoder.encode(seq, event) for seq, event in enumerate(events, 1)))


def read(stream: bytes) -> list[JsonBody]:
    found = []
    for event in parse_sse(stream):
        known = EVENT.validate_json(event.text, strict=True)
        fields = json.loads(event.text)
        assert known.type == fields["type"] == event.event
        found.append(fields)
    return found


def whole(body: JsonBody, events: list[Event]) -> Response:
    found = ResponsesEncoder(facts_of(body), ResponsesView()).whole(events)
    return Response.model_validate_json(found, strict=True)


# What is asked


def test_an_input_is_a_message() -> None:
    assert messages("Hi") == (Message("user", "Hi"),)
    assert request_of({}).sampling == Sampling()
    assert not call_of({}).stream
    assert call_of({"stream": True}).stream


def test_sampling() -> None:
    asks = {"temperature": 0.5, "top_p": 0.25, "max_output_tokens": 9, "seed": 3}
    assert request_of(asks).sampling == Sampling(temperature=0.5, top_p=0.25, max_tokens=9, seed=3)
    wanted = request_of({"include": ["message.output_text.logprobs"], "top_logprobs": 2}).sampling
    assert (wanted.logprobs, wanted.top_logprobs) == (True, 2)
    assert not request_of({"include": []}).sampling.logprobs


def test_instructions_come_first() -> None:
    assert messages("Hi", instructions="Be brief.") == (Message("system", "Be brief."), Message("user", "Hi"))
    assert messages("Hi", instructions="") == messages("Hi", instructions=None) == (Message("user", "Hi"),)


def test_items() -> None:
    turns = messages(
        [
            {"role": "developer", "content": "Be brief."},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": t} for t in "ab"]},
            {"role": "assistant", "content": [{"type": "output_text", "text": "So.", "annotations": []}]},
            {"type": "function_call", "id": "i", "call_id": "c1", "name": "look", "arguments": "{}"},
            {"type": "function_call", "call_id": "c2", "name": "wait", "arguments": '{"s": 1}'},
            {"type": "function_call_output", "call_id": "c1", "output": "a river"},
            {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "ok"}]},
            {"type": "function_call", "call_id": "c3", "name": "look", "arguments": "{}"},
            {"role": "system", "content": "Go."},
        ]
    )
    assert turns == (
        Message("system", "Be brief."),
        Message("user", "ab"),
        Message("assistant", "So.", (ToolCall("c1", "look", "{}"), ToolCall("c2", "wait", '{"s": 1}'))),
        Message("tool", "a river", (), "c1"),
        Message("tool", "ok", (), "c2"),
        Message("assistant", "", (ToolCall("c3", "look", "{}"),)),
        Message("system", "Go."),
    )


def test_an_input_has_as_many_items_as_other_chats_have_messages() -> None:
    item = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
    _, turn = messages([{"role": "user", "content": "Look."}] + [item] * 9_999)
    assert len(turn.tool_calls) == 9_999
    for first in (item, {"type": "item_reference"}):  # which would be refused, if it were looked at
        error = refused({"input": [first] + [item] * 10_000})
        assert (error.param, error.message) == ("input", "input has more than 10000 entries.")


def test_unknown_fields_in_items_are_named() -> None:
    part = {"type": "input_text", "text": "Hi", "detail": "low"}
    items: list[JsonBody] = [
        {"role": "user", "content": [part], "name": "Ann"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a", "refusal": "b"}]},
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}", "async": True},
        {"type": "function_call_output", "call_id": "c", "output": [part], "caller": {"type": "direct"}},
    ]
    assert call_of({"input": items, "service_tier": "auto"}).ignored == (
        "input[].async",
        "input[].caller",
        "input[].content[].detail",
        "input[].content[].refusal",
        "input[].name",
        "input[].output[].detail",
        "service_tier",
    )


def test_an_answer_may_be_sent_back_unchanged() -> None:
    """A server that refuses unknown fields accepts it, too."""
    body: JsonBody = {"tools": [LOOK], "include": ["message.output_text.logprobs"]}
    events: list[Event] = [TextDelta(text, TOKEN, logprobs=(-0.5,)) for text in ("So: ", CALL)]
    output = whole(body, [*events, *events_of()]).output
    assert [item.type for item in output] == ["message", "function_call"]
    question = {"role": "user", "content": "Look."}
    call = call_of({"input": [question, *(item.model_dump(exclude_unset=True) for item in output)]})
    assert call.ignored == ()
    _, turn = call.request.messages
    assert (turn.content, len(turn.tool_calls)) == ("So: ", 1)


def test_tools_are_shown_in_the_form_of_chat_templates() -> None:
    tools = request_of({"tools": [LOOK, WAIT]}).tools
    assert tools == (
        {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}},
        {"type": "function", "function": {"name": "wait", "description": "d"}},
    )
    assert request_of({"tools": [LOOK], "tool_choice": "none"}).tools == ()
    for choice in ("required", {"type": "function", "name": "look"}):
        forced = request_of({"tools": [LOOK, WAIT], "tool_choice": choice})
        assert forced.sampling.grammar is not None
        assert '"name":"look"' in forced.sampling.grammar.source
        assert ('"name":"wait"' in forced.sampling.grammar.source) == (choice == "required")


@pytest.mark.parametrize("how", ["as openai has it", "as in chats"])
def test_structured_output(how: str) -> None:
    schema: JsonBody = {"schema": SCHEMA} if how == "as openai has it" else {"json_schema": {"schema": SCHEMA}}
    grammar = request_of({"text": {"format": {"type": "json_schema", "name": "n", **schema}}}).sampling.grammar
    assert grammar is not None
    assert json.loads(grammar.source) == SCHEMA
    assert request_of({"text": {"format": {"type": "text"}}}).sampling.grammar is None


def test_background_answers_continue_without_readers() -> None:
    call = call_of({"background": True})
    assert call.at_once
    assert (call.request.on_disconnect, call.request.linger_s) == ("detach", 3600)
    assert (request_of({}).on_disconnect, request_of({}).linger_s) == ("cancel", None)
    assert not call_of({}).at_once


def test_tools_of_other_kinds_are_left_out_and_named() -> None:
    others: list[JsonBody] = [{"type": "local_shell"}, {"type": "web_search", "external_web_access": False}]
    call = call_of({"tools": [others[0], LOOK, others[1]]})
    assert [one["function"]["name"] for one in call.request.tools] == ["look"]
    assert call.ignored == ("tools[0] (local_shell)", "tools[2] (web_search)")
    assert not call_of({"tools": others}).request.tools


def test_other_values_of_include_are_named() -> None:
    include = ["reasoning.encrypted_content", "message.output_text.logprobs", "web search\r\n"]
    assert call_of({"include": include}).ignored == ("include.reasoning.encrypted_content", "include.web?search??")


def test_an_answer_has_one_of_the_names_for_its_length() -> None:
    for name in ("max_output_tokens", "max_tokens", "max_completion_tokens"):
        assert request_of({name: 5}).sampling.max_tokens == 5


def test_unknown_fields_are_ignored_and_named() -> None:
    assert call_of({"service_tier": "auto", "safety_identifier": "a"}).ignored == ("safety_identifier", "service_tier")


@pytest.mark.parametrize(
    ("body", "param", "kind"),
    [
        *(({name: value}, name, UnsupportedParameter) for name, value in
          {"prompt": {"id": "p"}}.items()),
        *(({"input": value}, "input", RequestError) for value in
          each(None, 5, {}, [], [{"type": "reasoning", "summary": []}],
           [{"type": "function_call", "call_id": "c", "name": "n"}])),
        ({"input": [{}]}, "input[0]", RequestError),
        ({"input": [{"type": None, "content": "Hi"}]}, "input[0]", RequestError),
        ({"input": [{"type": ["message"]}]}, "input[0].type", RequestError),
        ({"input": [{"role": "tool", "content": "Hi"}]}, "input[0].role", RequestError),
        ({"input": [{"type": "item_reference", "id": "i"}]}, "input[0]", RequestError),
        ({"input": [{"type": "function_call_output", "output": "o"}]}, "input[0]", RequestError),
        ({"input": ["Hi"]}, "input[0]", RequestError),
        ({"reasoning": "high"}, "reasoning", RequestError),
        ({"reasoning": {"effort": "kanarienvogel"}}, "reasoning.effort", RequestError),
        ({"input": [{"type": "reasoning", "content": "a"}]}, "input[0].content", RequestError),
        ({"include": [5]}, "include[0]", RequestError),
        ({"instructions": []}, "instructions", RequestError),
        ({"max_output_tokens": 0}, "max_output_tokens", RequestError),
        ({"temperature": 2.5}, "temperature", RequestError),
        ({"top_p": 1.1}, "top_p", RequestError),
        ({"top_logprobs": 21}, "top_logprobs", RequestError),
        ({"stream": "yes"}, "stream", RequestError),
        ({"background": 1}, "background", RequestError),
        ({"background": True, "store": False}, "store", RequestError),
        ({"metadata": {"a": 1}}, "metadata[...]", RequestError),
        ({"text": {"format": {"type": "xml"}}}, "text.format", RequestError),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format", RequestError),
        ({"tools": [LOOK, {**LOOK, "description": "d"}]}, "tools[1]", RequestError),
        ({"tool_choice": "required"}, "tool_choice", RequestError),
        ({"tools": [LOOK], "tool_choice": "wait"}, "tool_choice", RequestError),
        ({"tools": [LOOK], "tool_choice": {"type": "function", "name": "wait"}}, "tool_choice", RequestError),
        ({"tools": [LOOK], "tool_choice": {"type": "function", "name": "<auto>"}}, "tool_choice", RequestError),
        ({"tools": [LOOK], "tool_choice": {"type": "file_search"}}, "tool_choice", RequestError),
        ({"previous_response_id": 5}, "previous_response_id", RequestError),
    ],
    ids=str,
)  # fmt: skip
def test_refused_fields_are_named(body: JsonBody, param: str, kind: type[RequestError]) -> None:
    error = refused(body)
    assert (error.param, type(error)) == (param, kind)
    assert "kanarienvogel" not in error.message


@pytest.mark.parametrize("name", ["conversation", "n", "prompt", "truncation"])
def test_neutral_values_are_accepted(name: str) -> None:
    harmless = {"n": 1, "truncation": "disabled"}
    assert call_of({name: harmless.get(name)}) == call_of({})


@pytest.mark.parametrize("parallel", [None, True, False])
def test_parallel_calls_can_be_disabled(parallel: bool | None) -> None:
    call = call_of({"tools": [LOOK], "parallel_tool_calls": parallel})
    assert call.ignored == ()
    seen = facts(memo=call.request.memo)
    shown = json.loads(call.view.open(seen).whole(events_of(CALL, CALL, " Done.")))
    kinds = [item["type"] for item in shown["output"]]
    assert kinds == (["function_call"] if parallel is False else ["function_call", "function_call", "message"])
    assert shown["parallel_tool_calls"] is (parallel is not False)
    assert call.request.sampling.single_call is (parallel is False)


def test_tools_that_the_template_cannot_show_are_left_out_unless_one_must_be_called() -> None:
    bare = FakeServer(tool_format="")
    call = call_of({"tools": [LOOK]}, server=bare)
    assert (call.request.tools, call.ignored) == ((), ("tools",))
    forced = call_of({"tools": [LOOK], "tool_choice": "required"}, server=bare)
    assert (len(forced.request.tools), forced.ignored) == (1, ())


# Conversations


@dataclass(frozen=True)
class Remembering(FakeServer):
    """A server that stores one stream."""

    memo: bytes = b""
    events: list[Event] = field(default_factory=list)

    def past(self, stream_id: str) -> tuple[StreamFacts, list[Event]]:
        if stream_id != "s":
            raise UnknownStream("There is no such stream.")
        return facts(stream_id="s", memo=self.memo), self.events


def test_a_response_continues_another() -> None:
    before = {"input": "Look!", "instructions": "Be brief.", "tools": [LOOK]}
    server = Remembering(memo=request_of(before).memo, events=events_of("So: ", CALL))
    result = {"type": "function_call_output", "call_id": "call_s_1", "output": "a river"}
    second = call_of({"previous_response_id": "resp_s", "input": [result]}, server=server).request
    conversation = (
        Message("user", "Look!"),  # the instructions were for that response only
        Message("assistant", "So: ", (ToolCall("call_s_1", "look", '{"a": 1}'),)),
        Message("tool", "a river", (), "call_s_1"),
    )
    assert second.messages == conversation
    server = Remembering(memo=second.memo, events=events_of("A river."))
    third = call_of({"previous_response_id": "resp_s", "instructions": "Now!"}, server=server).request
    assert third.messages == (
        Message("system", "Now!"), *conversation, Message("assistant", "A river."), Message("user", "Hi")
    )  # fmt: skip


def test_a_conversation_cannot_grow_beyond_the_bound() -> None:
    before: list[JsonBody] = [{"role": "user", "content": "Hi"}] * 9_998
    server = Remembering(memo=request_of({"input": before}).memo, events=events_of("a"))
    going_on: JsonBody = {"previous_response_id": "resp_s"}
    assert len(call_of({**going_on, "input": before[:1]}, server=server).request.messages) == 10_000
    error = refused({**going_on, "input": before[:2]}, server=server)
    assert (type(error), error.param) == (RequestError, "previous_response_id")


def test_responses_that_were_not_stored_cannot_be_continued() -> None:
    for memo in (request_of({"store": False}).memo, b""):
        error = refused({"previous_response_id": "resp_s"}, server=Remembering(memo=memo, events=events_of("a")))
        assert (error.status, error.code) == (400, "previous_response_not_found")  # which clients look for
        assert error.param == "previous_response_id"
    assert type(refused({"previous_response_id": "resp_x"}, server=Remembering())) is UnknownResponse


def test_incomplete_responses_cannot_be_continued() -> None:
    whole = events_of("A river.")
    end = whole[-1]
    assert isinstance(end, End)
    for events in ([], whole[:-1], [*whole[:-1], msgspec.structs.replace(end, status="cancelled")]):
        server = Remembering(memo=request_of({}).memo, events=events)
        error = refused({"previous_response_id": "resp_s"}, server=server)
        assert type(error) is RequestError
        assert error.param == "previous_response_id"


def test_messages_are_kept_only_with_store() -> None:
    assert b"secret" in request_of({"input": "secret"}).memo
    assert b"secret" not in request_of({"input": "secret", "store": False}).memo


# Ways back


@pytest.mark.parametrize("find", [responses_wire.find, responses_wire.find_to_delete, responses_wire.parse_following])
def test_a_response_that_was_not_to_be_stored_is_not_found(
    find: Callable[[ParsedRequest], Following | tuple[str, View]],
) -> None:
    found = find(parsed(path={"response_id": "resp_s"}))
    view = found.view if isinstance(found, Following) else found[1]
    view.open(facts_of({}))
    with pytest.raises(UnknownStream):
        view.open(facts_of({"store": False}))
    assert shown({"store": False}, events_of("a"))[-1]["response"]["store"] is False  # the POST itself has its answer


def test_following_goes_by_sequence_numbers() -> None:
    def view(**query: str) -> ResponsesView:
        following = responses_wire.parse_following(parsed(query=query, path={"response_id": "resp_s"}))
        assert (following.stream_id, following.after) == ("s", 0)
        assert isinstance(following.view, ResponsesView)
        return following.view

    assert view().starting_after == view(starting_after="").starting_after == -1
    assert view(starting_after="7").starting_after == 7
    for wrong in ("-1", "1.5", "x", "\u0663", "1" * 16, " 1"):
        with pytest.raises(SeqOutOfRange) as error:
            view(starting_after=wrong)
        assert error.value.param == "starting_after"


_TRANSCRIPTS = [path for path in sorted(GOLDEN.glob("responses*/*.txt")) if path.stem != "released"]


@pytest.mark.parametrize("path", _TRANSCRIPTS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_reader_can_resume_after_every_event(path: Path) -> None:
    stream = path.read_bytes()
    blocks = [block + b"\n\n" for block in stream.removesuffix(b"\n\n").split(b"\n\n")]
    events = STREAMS[path.stem]
    known = facts_for(events, memo=MEMOS[path.parent.name])
    for number in range(-1, len(blocks) + 1):
        encoder = ResponsesEncoder(known, ResponsesView(starting_after=number))
        rest = b"".join(encoder.encode(seq, event) for seq, event in enumerate(events, 1))
        assert rest == b"".join(blocks[number + 1 :])


def test_states_name_their_stream() -> None:
    for find in (responses_wire.find, responses_wire.find_to_delete):
        assert find(parsed(path={"response_id": "resp_s"}))[0] == "s"
    _, view = responses_wire.find_to_delete(parsed(path={"response_id": "resp_s"}))
    found = json.loads(view.open(facts()).whole(events_of("a", end=False)))
    assert found == {"id": f"resp_{facts().record.stream_id}", "object": "response", "deleted": True}


# What is shown

MESSAGE = r"output_item\.added content_part\.added( output_text\.delta)* output_text\.done "
MESSAGE += r"content_part\.done output_item\.done"
FUNCTION = r"output_item\.added( function_call_arguments\.delta)* function_call_arguments\.done output_item\.done"
REASONING = MESSAGE.replace("output_text", "reasoning_text")
ENDS = {"length": "incomplete", "cut_call": "incomplete", "cancelled": "incomplete error"}
ENDS |= dict.fromkeys(("cached", "thinking", "thinking_cut"), "incomplete")
ENDS |= dict.fromkeys(("error", "interrupted", "refused"), "failed error")


def test_a_reader_that_is_sent_away_misses_no_number() -> None:
    """The client asks for what follows the last number that it has seen."""
    *before, last = read(released_transcript("responses"))
    assert (last["type"], last["sequence_number"]) == ("error", before[-1]["sequence_number"])
    whole = read(transcript("responses", STREAMS["interrupted"]))
    assert whole[: len(before)] == before
    assert whole[len(before)]["sequence_number"] == last["sequence_number"] + 1


@pytest.mark.parametrize("path", _TRANSCRIPTS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_events_are_in_the_order_that_clients_expect(path: Path) -> None:
    events = read(path.read_bytes())
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    names = " ".join(event["type"].removeprefix("response.") for event in events)
    end = "incomplete" if "unicode" in path.stem else ENDS.get(path.stem, "completed")
    assert re.fullmatch(rf"created in_progress( {REASONING})?( {MESSAGE}| {FUNCTION})* {end}", names), names
    _check_items(events)


def _check_items(events: list[JsonBody]) -> None:
    """The deltas, `done` and the final object have the same content."""
    last = [event["response"] for event in events if "response" in event][-1]
    items: list[JsonBody] = []
    for event in events:
        if event["type"] == "response.output_item.added":
            assert event["output_index"] == len(items)
            items.append({"id": event["item"]["id"], "text": ""})
        if "delta" in event:
            items[-1]["text"] += event["delta"]
        if "item_id" in event:
            assert (event["item_id"], event["output_index"]) == (items[-1]["id"], len(items) - 1)
        if event["type"].endswith(("text.done", "arguments.done")):
            assert event.get("text", event.get("arguments")) == items[-1]["text"]
        if event["type"] == "response.output_item.done":
            assert event["item"] == last["output"][len(items) - 1]
    assert len({item["id"] for item in items}) == len(items) == len(last["output"])


@pytest.mark.parametrize(
    "path", sorted(GOLDEN.glob("responses*/*.json")), ids=lambda path: f"{path.parent.name}-{path.stem}"
)
def test_the_official_library_accepts_all_objects(path: Path) -> None:
    response = Response.model_validate_json(path.read_bytes(), strict=True)
    assert response.object == "response"
    streamed = path.with_suffix(".txt")
    if streamed.exists():
        last = [event["response"] for event in read(streamed.read_bytes()) if "response" in event][-1]
        assert last == json.loads(path.read_bytes())


def test_an_answer_without_streaming() -> None:
    response = whole({"metadata": {"a": "b"}, "instructions": "i", "user": "u"}, events_of("The", " river"))
    assert response.output_text == "The river"
    assert (response.status, response.error, response.incomplete_details) == ("completed", None, None)
    assert (response.metadata, response.instructions, response.user) == ({"a": "b"}, "i", "u")
    assert response.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens, response.usage.total_tokens) == (4, 3, 7)


@pytest.mark.parametrize("stream", ["error", "interrupted", "cancelled", "refused"])
def test_a_failed_answer_without_streaming_is_an_error(stream: str) -> None:
    view = call_of({}).view
    with pytest.raises(TailraceError) as error:
        view.open(facts_of({})).whole(STREAMS[stream])
    assert isinstance(error.value, EngineError) or stream == "refused"
    background = json.loads(
        call_of({"background": True}).view.open(facts_of({"background": True})).whole(STREAMS[stream])
    )
    assert background["status"] == ("cancelled" if stream == "cancelled" else "failed")
    assert (background["error"] is None) == (stream == "cancelled")


@pytest.mark.parametrize(("status", "named"), [("queued", "queued"), ("running", "in_progress")])
def test_an_answer_that_has_not_started(status: str, named: str) -> None:
    encoder = ResponsesEncoder(replace(facts_of({"background": True}), status=status), ResponsesView())
    response = Response.model_validate_json(encoder.whole([]), strict=True)
    assert (response.status, response.background, response.output, response.usage) == (named, True, [], None)


def test_a_reader_of_a_failed_stream_gets_the_reason() -> None:
    failed, error = shown({}, STREAMS["error"])[-2:]
    assert failed["response"]["error"]["code"] == "server_error"
    assert error["code"] == error["error"]["code"] == "engine_unavailable"
    assert error["message"] == error["error"]["message"] == failed["response"]["error"]["message"]


def test_text_that_looks_like_a_call_is_one_only_where_tools_were_shown() -> None:
    def kinds(body: JsonBody) -> list[str]:
        return [item.type for item in whole(body, events_of(CALL)).output]

    assert kinds({"tools": [LOOK]}) == ["function_call"]
    assert kinds({}) == ["message"]
    assert kinds({"tools": [LOOK], "tool_choice": "none"}) == ["message"]


def test_every_token_of_the_text_has_its_logprob_once() -> None:
    """Text is held back until a character is complete, and while it may become a tool call."""
    asks: JsonBody = {"tools": [LOOK], "top_logprobs": 0}
    texts = ["So <", "tool", " it", "", "\u00e9", CALL + "and", " on"]
    events: list[Event] = [TextDelta(text, (97 + n,), logprobs=(-1.0 - n,)) for n, text in enumerate(texts)]
    events += [TextDelta("", (256,), logprobs=(-9.0,), finish_reason="stop"), End("done", Usage(4, 8))]
    before, call, behind = shown(asks, events)[-1]["response"]["output"]
    assert call["type"] == "function_call"
    assert [one["logprob"] for one in before["content"][0]["logprobs"]] == [-1.0, -2.0, -3.0, -4.0, -5.0]
    assert [one["logprob"] for one in behind["content"][0]["logprobs"]] == [-7.0]


def test_the_answer_as_a_message() -> None:
    assert answer_message(facts_of({"tools": [LOOK]}), events_of("a", CALL, "b")) == Message(
        "assistant", "ab", (ToolCall(f"call_{facts().record.stream_id}_1", "look", '{"a": 1}'),)
    )
    assert answer_message(facts_of({}), []) == Message("assistant", "")


pieces = st.sampled_from(
    [CALL, "<tool_call>", "</tool_call>", "<tool", '{"name": "a", "arguments": {', "}}", "a", "\n", ""]
)


@settings(max_examples=examples(100), deadline=None)
@given(
    st.lists(pieces | st.text(max_size=5), max_size=8), st.booleans(), st.sampled_from(["stop", "length", "", "lost"])
)
def test_the_official_library_accepts_any_stream(texts: list[str], tools: bool, end: str) -> None:
    body: JsonBody = {"tools": [LOOK]} if tools else {}
    events = events_of(*texts, end=False)
    if end in ("stop", "length"):
        events += [TextDelta("", (256,), finish_reason="stop" if end == "stop" else "length")]
        events += [End("done", Usage(4, len(texts) + 1))]
    elif end:
        events += [*STREAMS["error"][-1:]]
    found = shown(body, events)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    if end:
        _check_items(found)
        in_one_piece = ResponsesEncoder(facts_of(body), ResponsesView()).whole(events)
        assert json.loads(in_one_piece) == [event["response"] for event in found if "response" in event][-1]
    response = whole(body, events)
    if not tools:
        assert response.output_text == "".join(texts)
