"""OpenAI's newer wire: `/v1/responses`, with answers in the background. Answers: `responses_events.py`.

A response is a stream: its id is `resp_` and the stream's id. The stream's record keeps the fields that the response
repeats from the request and, except with `store: false`, the earlier messages for a `previous_response_id`. Stored
responses are also kept in the database, for longer than streams.

Intended divergences: 1. A failure in a stream is `response.failed` and then an `error` event, which makes the official
client raise; without it, the client would notice no failure. 2. A cancelled stream ends in the same way.
3. `cached_tokens` is always 0, because engines do not report it.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Annotated, Literal

import msgspec

from tailrace.conversations.items import messages_of
from tailrace.dialects.answers import ToolsView
from tailrace.dialects.bodies import JsonBody, read_known
from tailrace.dialects.conversations import ConversationField, open_branch, place_of, with_turn
from tailrace.dialects.fields import MAX_MESSAGES, SamplingFields, require_question, sampling_of
from tailrace.dialects.grammars import read_response_format
from tailrace.dialects.native import encode_error
from tailrace.dialects.reasoning import Effort, effort_values, unread_reasoning
from tailrace.dialects.responses_events import ResponsesView, answer_message
from tailrace.dialects.responses_items import items_from, read_items
from tailrace.dialects.tools import (
    ChosenFunction,
    ChosenTool,
    Function,
    FunctionName,
    Tool,
    ToolChoice,
    choice_of,
    choose_tools,
)
from tailrace.dialects.wire import (
    Follow,
    Following,
    Generate,
    GenerateCall,
    OnStream,
    Operation,
    ParsedRequest,
    View,
    Wire,
    named_model,
)
from tailrace.errors import RequestError, SeqOutOfRange, UnknownStream, UnsupportedParameter
from tailrace.types import End, GenerateRequest, Message

__all__ = ["WIRE"]

_LOGPROBS = "message.output_text.logprobs"  # the only supported value of `include`
_ENCRYPTED = "reasoning.encrypted_content"  # the default of some clients; ignored, because reasoning is shown here
_BACKGROUND_S = 3600.0  # linger time of an answer in the background
_REFUSED: dict[str, tuple[object, ...]] = {
    "context_management": ([],),
    "image": (),
    "max_tool_calls": (),
    "max_completion_tokens": (),
    "max_tokens": (),
    "moderation": (),
    "n": (1,),
    "prompt": (),
    "truncation": ("disabled",),
}


class FunctionTool(msgspec.Struct, tag="function"):
    name: FunctionName
    description: str | None = None
    parameters: JsonBody | None = None
    strict: bool | None = None


class ChosenByName(msgspec.Struct, tag="function"):
    name: FunctionName


class TextOptions(msgspec.Struct):
    format: JsonBody | None = None


class ReasoningOptions(msgspec.Struct):
    effort: Effort | None = None


class ResponsesBody(SamplingFields, kw_only=True):
    input: str | list[JsonBody]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] | None = None
    stream: bool | None = None
    background: bool | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    conversation: ConversationField = None
    metadata: dict[str, str] | None = None
    include: list[str] | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    text: TextOptions | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenByName | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    user: str | None = None


def parse(request: ParsedRequest) -> GenerateCall:
    """Raises: RequestError; StreamError for an unknown previous response."""
    fields, ignored = read_known(request.body, ResponsesBody, _REFUSED)
    include = fields.include or []
    if any(one not in (_LOGPROBS, _ENCRYPTED) for one in include):
        raise UnsupportedParameter(f"include supports only {_LOGPROBS}.", param="include")
    if _ENCRYPTED in include:
        ignored += (f"include.{_ENCRYPTED}",)
    if fields.background and fields.store is False:
        raise RequestError("background needs store to be true.", param="store")
    given = [Tool(Function(tool.name, tool.description, tool.parameters, tool.strict)) for tool in fields.tools or ()]
    chosen = fields.tool_choice
    named = ChosenTool(ChosenFunction(chosen.name)) if isinstance(chosen, ChosenByName) else chosen
    tools = choose_tools(given, choice_of(named), request.server)
    grammar = read_response_format(_format(fields), "text.format")
    if tools.shown and grammar is not None:
        raise RequestError("text.format cannot be used with tools.", param="text.format")
    if fields.conversation is not None and fields.previous_response_id is not None:
        raise RequestError("conversation and previous_response_id cannot be used together.", param="conversation")
    branch = request.branch and open_branch(request.branch, has_input=bool(fields.input))
    given_items, ignored_in_items = read_items(fields.input, may_be_empty=branch is not None)
    items = items_from(given_items)
    earlier = branch.items if branch is not None else ()
    messages = _earlier_messages(request, fields.previous_response_id) + messages_of((*earlier, *items))
    if len(messages) > MAX_MESSAGES:
        raise RequestError(f"The conversation has more than {MAX_MESSAGES} messages.", param="previous_response_id")
    instructions = (Message("system", fields.instructions),) if fields.instructions else ()
    require_question(messages, param="input")
    values = effort_values(request.server, fields.reasoning.effort if fields.reasoning is not None else None)
    if fields.reasoning is not None and fields.reasoning.effort is not None and not values:
        ignored += ("reasoning.effort",)
    new = messages_of(items)
    ignored += unread_reasoning(new, request.server, continues=False, name="input[].reasoning")
    wants_logprobs = _LOGPROBS in include or fields.top_logprobs is not None
    in_background = bool(fields.background)
    generate = GenerateRequest(
        model=fields.model,
        messages=instructions + messages,
        tools=tools.shown,
        template_values=values,
        sampling=replace(
            sampling_of(fields),
            logprobs=wants_logprobs,
            top_logprobs=fields.top_logprobs or 0,
            grammar=tools.forced or grammar,
            single_call=fields.parallel_tool_calls is False and tools.allows_several_calls,
            max_tokens=fields.max_output_tokens,
        ),
        on_disconnect="detach" if in_background else "cancel",
        linger_s=_BACKGROUND_S if in_background else None,
        memo=_memo(fields, messages, tools, wants_logprobs),
        keep=fields.store is not False,
    )
    if branch is not None:
        calls = ToolsView(bool(tools.shown), tools.forced is not None, fields.parallel_tool_calls is False)
        generate = with_turn(generate, branch, items, calls, calls_by_item=True)
    view = ResponsesView(must_finish=not in_background)
    all_ignored = ignored + ignored_in_items + tools.ignored
    return GenerateCall(generate, view, bool(fields.stream), all_ignored, at_once=in_background)


def _format(fields: ResponsesBody) -> JsonBody | None:
    """Return the format as in chat completions. Here the schema is next to its type."""
    given = fields.text.format if fields.text is not None else None
    if given is not None and given.get("type") == "json_schema" and "schema" in given:
        return {"type": "json_schema", "json_schema": {"schema": given["schema"]}}
    return given


def past(request: ParsedRequest) -> str | None:
    """Return the stream id of the previous response."""
    response_id = request.body.get("previous_response_id")
    return _stream_id(response_id) if isinstance(response_id, str) else None


def _earlier_messages(request: ParsedRequest, response_id: str | None) -> tuple[Message, ...]:
    """Return the messages up to and including a response."""
    if response_id is None:
        return ()
    if request.past is None:
        raise UnknownStream("There is no such response.", param="previous_response_id")
    facts, events = request.past
    kept = msgspec.json.decode(facts.memo).get("said") if facts.memo else None
    if kept is None:
        raise UnknownStream("The messages before that response were not stored.", param="previous_response_id")
    if not events or not isinstance(events[-1], End) or events[-1].status != "done":
        raise RequestError("That response is not complete.", param="previous_response_id")
    return (*msgspec.convert(kept, tuple[Message, ...]), answer_message(facts, events))


def _memo(fields: ResponsesBody, messages: tuple[Message, ...], tools: ToolChoice, logprobs: bool) -> bytes:
    names = ("background", "instructions", "max_output_tokens", "metadata", "parallel_tool_calls",
             "previous_response_id", "reasoning", "temperature", "top_p", "top_logprobs", "tool_choice",
             "user")  # fmt: skip
    echo = {name: msgspec.to_builtins(value) for name in names if (value := getattr(fields, name)) is not None}
    if fields.conversation is not None:
        echo["conversation"] = {"id": getattr(fields.conversation, "id", fields.conversation)}
    echo["store"] = fields.store is not False
    echo["tools"] = msgspec.to_builtins(fields.tools or [])
    if fields.text is not None and fields.text.format is not None:
        echo["text"] = {"format": fields.text.format}
    kept = messages if echo["store"] else None
    return msgspec.json.encode(
        {
            "echo": echo,
            "reads_tools": bool(tools.shown),
            "forced": tools.forced is not None,
            "single_call": fields.parallel_tool_calls is False,
            "logprobs": logprobs,
            "said": kept,
        }
    )


def parse_following(request: ParsedRequest) -> Following:
    """Raises: SeqOutOfRange."""
    after = request.query.get("starting_after", "")
    if after and not re.fullmatch("[0-9]{1,15}", after, re.ASCII):
        raise SeqOutOfRange("starting_after must be a sequence number.", param="starting_after")
    view = ResponsesView(starting_after=int(after) if after else -1)
    return Following(_stream_id(request.path["response_id"]), 0, view)


def find(request: ParsedRequest) -> tuple[str, View]:
    return _stream_id(request.path["response_id"]), ResponsesView()


def find_to_delete(request: ParsedRequest) -> tuple[str, View]:
    return _stream_id(request.path["response_id"]), ResponsesView(is_deleted=True)


def _stream_id(response_id: str) -> str:
    return response_id.removeprefix("resp_")


_RESPONSE = "/v1/responses/{response_id}"

WIRE = Wire(
    name="responses",
    title="OpenAI: responses",
    operations=(
        Operation(
            "POST",
            "/v1/responses",
            Generate(parse, past, place_of),
            "Answer an input. With `background` the answer comes at once, with the current state.",
            body=ResponsesBody,
            example={"input": "Tell me a story about dogs.", "max_output_tokens": 64, "stream": True},
        ),
        Operation(
            "GET",
            _RESPONSE,
            Follow(parse_following),
            "The events of a response after `starting_after`.",
            query=("stream!", "starting_after"),
            only_with="stream=true",
        ),
        Operation("GET", _RESPONSE, OnStream(find), "Show the current state of a response.", query=("stream",)),
        Operation("POST", _RESPONSE + "/cancel", OnStream(find, "cancel"), "Cancel a response."),
        Operation("DELETE", _RESPONSE, OnStream(find_to_delete, "delete"), "Cancel and delete a response."),
    ),
    encode_error=encode_error,
    find_model=named_model,
    refused=_REFUSED,
)
