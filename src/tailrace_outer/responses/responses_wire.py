"""OpenAI's newer wire: `/v1/responses`, with answers in the background. Answers: `responses_events.py`.

A response is a stream: its id is `resp_` and the stream's id. The stream's record keeps the fields that the response
repeats from the request and, except with `store: false`, the earlier messages for a `previous_response_id`. Stored
responses are also kept in the database, for longer than streams.

Intended divergences: 1. A failure in a stream is `response.failed` and then an `error` event, which makes the official
client raise; without it, the client would notice no failure. 2. A cancelled stream ends in the same way. 3. Items and
tools of kinds that this server does not have are left out, and named; `item_reference` is refused, because items are
not kept one by one. 4. With `truncation` of `auto`, nothing is dropped either: a prompt that is too long is refused.
5. A response with `store: false` is not found again over HTTP, but its stream is, on `/v1/streams`, like every stream.
6. `cached_tokens` is 0 for an engine that does not say how much of a prompt was cached: the format needs a number.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace as replaced
from itertools import islice
from typing import Annotated

import msgspec
from msgspec.structs import replace

from tailrace.conversations.item_images import ItemImage, marked, unmarked
from tailrace.conversations.items import Item, messages_of
from tailrace.dialects.answers import ToolsView
from tailrace.dialects.bodies import JsonBody, printable
from tailrace.dialects.conversations import (
    ConversationField,
    branch_point_of,
    open_branch,
    recalled,
    with_turn,
    within_limits,
)
from tailrace.dialects.fields import AnswerTokens, ReasoningTokens, SamplingFields, answer_tokens, sampling_of
from tailrace.dialects.grammar_fields import read_response_format
from tailrace.dialects.messages import MAX_MESSAGES, has_question, require_question, with_images
from tailrace.dialects.native import encode_error
from tailrace.dialects.parts import eyes_of
from tailrace.dialects.reasoning_fields import Effort, effort_values, reasoning_budget, unread_reasoning
from tailrace.dialects.shapes import Other, ignored, read_known, refused
from tailrace.dialects.tools import ChosenTools, choose_tools
from tailrace.dialects.wire import (
    Follow,
    Following,
    Generate,
    GenerateCall,
    OnStream,
    Operation,
    ParsedRequest,
    SocketLanes,
    View,
    Wire,
    named_model,
)
from tailrace.errors import RequestError, UnknownResponse
from tailrace.types import CallReading, End, GenerateRequest, Image, KeptImage, Message
from tailrace_outer.responses import responses_socket
from tailrace_outer.responses.responses_events import ResponsesView, answer_message, stream_id_of
from tailrace_outer.responses.responses_items import InputItem, items_from
from tailrace_outer.responses.responses_tools import (
    ResponseChoice,
    ResponseTool,
    namespaces_of,
    read_response_choice,
    read_response_tools,
    repeated_tool,
)

__all__ = ["WIRE"]

_LOGPROBS = "message.output_text.logprobs"  # the only value of `include` with an effect
_BACKGROUND_S = 3600.0  # linger time of an answer in the background
_UNUSED = {
    "context_management": ignored([]),
    "image": ignored(),
    "max_tool_calls": ignored(),
    "moderation": ignored(),
    "n": ignored(1),
    "prompt": refused(),
    "truncation": ignored("disabled"),
}


class TextOptions(msgspec.Struct):
    format: JsonBody | None = None


class ReasoningOptions(msgspec.Struct):
    effort: Effort | None = None
    max_tokens: ReasoningTokens | None = None


class ResponsesBody(SamplingFields, kw_only=True):
    input: str | list[InputItem] | None = None
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: AnswerTokens | None = None
    stream: bool | None = None
    background: bool | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    conversation: ConversationField = None
    metadata: dict[str, str] | None = None
    include: list[str] | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    text: TextOptions | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: ResponseChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    user: str | None = None
    generate: bool | None = None  # false: only read the input, for a request that continues from here


def parse(request: ParsedRequest) -> GenerateCall:
    """Raises: RequestError."""
    fields, unused = read_known(request.body, ResponsesBody, _UNUSED)
    include = fields.include or []
    notes = [*unused, *(f"include.{printable(one)}" for one in include if one != _LOGPROBS)]
    if fields.background and fields.store is False:
        raise RequestError("background needs store to be true.", param="store")
    offers = read_response_tools(fields.tools or (), notes)
    tools = choose_tools(offers, read_response_choice(fields.tool_choice), request.server, notes)
    is_warmup = fields.generate is False
    if is_warmup and fields.conversation is not None:
        raise RequestError("generate: false adds nothing to a conversation.", param="generate")
    grammar = read_response_format(_format(fields), "text.format")
    if fields.conversation is not None and fields.previous_response_id is not None:
        raise RequestError("conversation and previous_response_id cannot be used together.", param="conversation")
    branch = request.branch and open_branch(request.branch, has_input=bool(fields.input))
    images = eyes_of(request.server)
    items = _items(fields, notes, images, may_be_empty=branch is not None or is_warmup)
    earlier = branch.items if branch is not None else ()
    messages = _earlier_messages(request, fields.previous_response_id) + messages_of((*earlier, *items))
    kept: list[Image] | None = None if images is None else []
    messages = with_images(recalled(messages, kept), (*(kept or ()), *(images or ())))
    messages = within_limits(messages, len(messages) - len(messages_of(items)))
    if len(messages) > MAX_MESSAGES:
        raise RequestError(f"The conversation has more than {MAX_MESSAGES} messages.", param="previous_response_id")
    instructions = (Message("system", fields.instructions),) if fields.instructions else ()
    # Codex CLI warms up with what precedes the first question.
    asked = (*messages, Message("user", "")) if is_warmup and not has_question(messages) else messages
    require_question(asked, param="input")
    effort = fields.reasoning.effort if fields.reasoning is not None else None
    values = effort_values(request.server, effort)
    if effort is not None and not values:
        notes.append("reasoning.effort")
    notes += unread_reasoning(messages_of(items), request.server, continues=False, name="input[].reasoning")
    wants_logprobs = _LOGPROBS in include or fields.top_logprobs is not None
    in_background = bool(fields.background)
    sampling = sampling_of(fields, request.server.recommended_sampling)
    most = fields.reasoning.max_tokens if fields.reasoning is not None else None
    longest = answer_tokens(fields.max_output_tokens, "max_output_tokens")
    is_single = fields.parallel_tool_calls is False
    calls = tools.calls(single=is_single)
    generate = GenerateRequest(
        model=fields.model,
        messages=instructions + asked,
        tools=tools.shown,
        calls=calls,
        template_values=values,
        sampling=replace(
            sampling,
            logprobs=wants_logprobs,
            top_logprobs=fields.top_logprobs or 0,
            grammar=None if is_warmup else tools.grammar(grammar),
            single_call=is_single and tools.allows_several_calls,
            max_reasoning_tokens=reasoning_budget(most, request.server, notes, "reasoning.max_tokens"),
            max_tokens=1 if is_warmup else longest or sampling.max_tokens,
        ),
        on_disconnect="detach" if in_background else "cancel",
        linger_s=_BACKGROUND_S if in_background else None,
        memo=_memo(request, fields, messages, tools, calls, wants_logprobs),
        keep=fields.store is not False,
    )
    if branch is not None:
        generate = with_turn(generate, branch, items, ToolsView(calls), calls_by_item=True)
    view, unkept = ResponsesView(must_finish=not in_background), b""
    if request.socket is not None:
        view = responses_socket.SocketView(lane=request.socket.lane)
        # A response that is not stored can be continued on its own socket.
        unkept = msgspec.json.encode(_kept_messages(messages)) if fields.store is False else b""
    is_streamed = bool(fields.stream) or request.socket is not None
    # Codex shortens a conversation only after such an event; a status ends its work.
    return GenerateCall(
        generate,
        view,
        is_streamed,
        tuple(notes),
        at_once=in_background,
        overflows_in_stream=True,
        unkept=unkept,
    )


def _items(
    fields: ResponsesBody, notes: list[str], images: list[Image] | None, *, may_be_empty: bool
) -> tuple[Item, ...]:
    """Return the items of the input. `images` is as in `items_from`. Raises: RequestError."""
    items = items_from(fields.input, notes, images=images)
    if not fields.input and not may_be_empty:
        if fields.input is None or fields.max_output_tokens != 1:
            raise RequestError("input must not be empty.", param="input")
        return (Item(role="user"),)  # a client that only wants to know whether this path is there
    return items


def _format(fields: ResponsesBody) -> JsonBody | None:
    """Return the format as in chat completions. Here the schema is next to its type."""
    given = fields.text.format if fields.text is not None else None
    if given is not None and given.get("type") == "json_schema" and "schema" in given:
        return {"type": "json_schema", "json_schema": {"schema": given["schema"]}}
    return given


def past(request: ParsedRequest) -> str | None:
    """Return the stream id of the previous response."""
    response_id = request.body.get("previous_response_id")
    return stream_id_of(response_id) if isinstance(response_id, str) else None


def _earlier_messages(request: ParsedRequest, response_id: str | None) -> tuple[Message, ...]:
    """Return the messages up to and including a response."""
    if response_id is None:
        return ()
    if request.past is None:
        raise UnknownResponse("Previous response not found.", param="previous_response_id")
    facts, events = request.past
    memo = msgspec.json.decode(facts.record.memo) if facts.record.memo else {}
    kept = memo.get("said")
    if kept is None and request.socket is not None and facts.record.stream_id in request.socket.begun:
        kept = msgspec.json.decode(request.socket.begun[facts.record.stream_id])
    if kept is None:
        raise UnknownResponse(
            "Previous response not found: it was not stored (store: false).", param="previous_response_id"
        )
    if not events or not isinstance(events[-1], End) or events[-1].status != "done":
        raise RequestError("That response is not complete.", param="previous_response_id")
    answer = () if memo.get("warmup") else (answer_message(facts, events),)
    return (*_read_messages(kept, facts.record.images), *answer)


def _kept_messages(messages: tuple[Message, ...]) -> list[JsonBody]:
    """Return messages without the bytes of their images, which the database has."""
    kept = []
    for message in messages:
        text, images = unmarked(message.content)
        fields: JsonBody = msgspec.to_builtins(replaced(message, content=text, images=()))
        kept.append(fields | ({"images": [image.at for image in images]} if images else {}))
    return kept


def _read_messages(kept: list[JsonBody], images: tuple[KeptImage, ...]) -> Iterator[Message]:
    """Yield the messages of `_kept_messages`, with their images in order. Raises: UnknownResponse if the images were
    not kept."""
    if sum(len(fields.get("images", ())) for fields in kept) != len(images):
        raise UnknownResponse(
            "That response was about images, which this server does not keep. Send the whole conversation as input "
            "instead.",
            param="previous_response_id",
        )
    rest = iter(images)
    for fields in kept:
        marks = [ItemImage(at) for at in fields.get("images", ())]
        message = msgspec.convert({**fields, "images": []}, Message)
        content = marked(message.content, marks)
        found = tuple(Image(b"", "previous_response_id", kept=one) for one in islice(rest, len(marks)))
        yield replaced(message, content=content, images=found)


def _memo(
    request: ParsedRequest,
    fields: ResponsesBody,
    messages: tuple[Message, ...],
    tools: ChosenTools,
    calls: CallReading | None,
    logprobs: bool,
) -> bytes:
    names = ("background", "frequency_penalty", "instructions", "max_output_tokens", "metadata",
             "parallel_tool_calls", "presence_penalty", "previous_response_id", "reasoning", "temperature", "top_p",
             "top_logprobs", "user")  # fmt: skip
    echo = {name: msgspec.to_builtins(value) for name in names if (value := getattr(fields, name)) is not None}
    if fields.conversation is not None:
        echo["conversation"] = {"id": getattr(fields.conversation, "id", fields.conversation)}
    echo["store"] = fields.store is not False
    given = zip(fields.tools or (), request.body.get("tools") or (), strict=True)
    echo["tools"] = [repeated_tool(tool, as_given) for tool, as_given in given if not isinstance(tool, Other)]
    if fields.tool_choice is not None:
        echo["tool_choice"] = request.body["tool_choice"]
    if fields.text is not None and fields.text.format is not None:
        echo["text"] = {"format": fields.text.format}
    return msgspec.json.encode(
        {
            "echo": echo,
            "calls": calls,
            "custom": sorted(tools.custom),
            "namespaces": namespaces_of(fields.tools or ()),
            "logprobs": logprobs,
            "said": _kept_messages(messages) if echo["store"] else None,
            **({"warmup": True} if fields.generate is False else {}),
        }
    )


def parse_following(request: ParsedRequest) -> Following:
    """Raises: SeqOutOfRange."""
    view = ResponsesView(
        starting_after=responses_socket.number_of(request.query.get("starting_after", "")), is_found=True
    )
    return Following(stream_id_of(request.path["response_id"]), 0, view)


def find(request: ParsedRequest) -> tuple[str, View]:
    return stream_id_of(request.path["response_id"]), ResponsesView(is_found=True)


def find_to_delete(request: ParsedRequest) -> tuple[str, View]:
    return stream_id_of(request.path["response_id"]), ResponsesView(is_found=True, is_deleted=True)


_RESPONSE = "/v1/responses/{response_id}"

_CREATE = Operation(
    "POST",
    "/v1/responses",
    Generate(parse, past, branch_point_of),
    "Answer an input. With `background` the answer comes at once, with the current state.",
    body=ResponsesBody,
    has_images=True,
    example={"input": "Tell me a story about dogs.", "max_output_tokens": 64, "stream": True},
)

WIRE = Wire(
    name="responses",
    title="OpenAI: responses",
    operations=(
        _CREATE,
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
    lanes={
        "/v1/responses": SocketLanes(
            _CREATE,
            responses_socket.read_command,
            responses_socket.resumed,
            responses_socket.lane_of,
            responses_socket.encode_error,
            responses_socket.in_lane,
            responses_socket.noted,
            responses_socket.MAX_LANES,
        )
    },
    unused=_UNUSED,
    names={"max_tokens": "max_output_tokens", "prompt": "input"},
)
