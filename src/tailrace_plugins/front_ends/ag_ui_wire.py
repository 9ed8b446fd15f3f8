"""AG-UI's wire: what its `HttpAgent` posts and reads. Events: `ag_ui_events.py`.

`POST /v1/ag-ui` runs, and `GET /v1/ag-ui/{thread}/events` follows the run that is made in a thread, for the
`connect` of an agent. The run goes on while nobody reads it. `forwardedProps` may have the model and parameters, with
OpenAI's names.

TanStack AI's client speaks AG-UI, too, and comes back when an answer breaks off: it sends its request again, with the
id of the last event in `Last-Event-ID`, and after a reload it asks for the run by its id. It leaves out the events that
it has already, by their ids, so the whole run is sent.

Intended divergences: 1. The state of an app is not shown to the model; `context` is, at the end of the system message.
2. Activities and encrypted reasoning are left out. 3. Nothing here interrupts a run, so `resume` is refused.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec.structs import replace

from tailrace.dialects import (
    MAX_MESSAGES,
    ChatMessage,
    Follow,
    Following,
    FunctionCall,
    Generate,
    GenerateCall,
    ImagePart,
    JsonBody,
    Offer,
    Operation,
    Other,
    ParsedRequest,
    ReasoningDetail,
    SamplingFields,
    ServerFacts,
    TextPart,
    ToolCallBody,
    ToolChoice,
    Wire,
    choose_tools,
    encode_error,
    eyes_of,
    find_model,
    first_asked,
    image_of_base64,
    image_of_url,
    read_fields,
    read_known,
    read_messages,
    refused,
    sampling_of,
    text_of,
    unread_reasoning,
)
from tailrace.errors import RequestError, UnknownStream, UnsupportedParameter
from tailrace.types import GenerateRequest, Image
from tailrace_plugins.front_ends.ag_ui_events import AgUiView
from tailrace_plugins.front_ends.chats import ChatId, ChatMemo, chat_topic, follow_running, stop_running

__all__ = ["WIRE"]

_NAME = "ag_ui"
_VIEW = AgUiView()
_RESUMING_VIEW = AgUiView(resumes=True)
_RUN_ID = "x-run-id"  # only clients that come back send it
_EVENT_ID = re.compile(r"([A-Za-z0-9_-]{22})\.[0-9]{1,18}\.[0-9]{1,18}")
_UNUSED = {"resume": refused([])}


class _Source(msgspec.Struct, rename="camel"):
    type: str
    value: str = ""
    mime_type: str | None = None


class _TextPart(msgspec.Struct, tag="text"):
    text: str
    id: str | None = None
    metadata: Any = None  # Any: JSON


class _ImagePart(ImagePart, tag="image", kw_only=True):
    source: _Source
    id: str | None = None
    metadata: Any = None

    def image(self, where: str) -> Image:
        """Raises: RequestError."""
        match self.source.type:
            case "data":
                return image_of_base64(self.source.value, f"{where}.source.value")
            case "url":
                return image_of_url(self.source.value, f"{where}.source.value")
        raise UnsupportedParameter(f"{where}.source: send the image itself, as data.", param=f"{where}.source")


_Content: TypeAlias = str | list[_TextPart | _ImagePart | Other]


class _Call(msgspec.Struct, rename="camel"):
    function: FunctionCall
    id: str = ""
    type: str = "function"
    encrypted_value: str | None = None
    metadata: JsonBody | None = None


class _Message(msgspec.Struct, rename="camel"):
    role: Literal["developer", "system", "assistant", "user", "tool", "reasoning", "activity"]
    id: str = ""
    content: _Content | JsonBody | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None
    error: str | None = None
    # Without effect.
    name: str | None = None
    activity_type: str | None = None
    encrypted_value: str | None = None
    metadata: JsonBody | None = None
    subagent_run_id: str | None = None


class _Tool(msgspec.Struct):
    name: str
    description: str = ""
    parameters: JsonBody | None = None
    metadata: JsonBody | None = None


class _Context(msgspec.Struct):
    description: str
    value: str


class _Props(SamplingFields, kw_only=True):
    """What an app forwards for this server."""

    model: str | None = None
    tool_choice: Literal["auto", "none", "required"] | None = None


class RunBody(msgspec.Struct, rename="camel", kw_only=True):
    thread_id: ChatId
    run_id: ChatId
    messages: Annotated[list[_Message], msgspec.Meta(max_length=MAX_MESSAGES)]
    tools: list[_Tool] | None = None
    context: list[_Context] | None = None
    forwarded_props: JsonBody | None = None
    # Without effect.
    protocol_version: str | None = None
    parent_run_id: str | None = None
    state: Any = None  # Any: JSON


def _broken_off(request: ParsedRequest) -> str | None:
    """Return the stream of the answer that the client had when it broke off; None for a new run. Raises:
    RequestError."""
    last = request.headers.get("last-event-id")
    if not last:
        return None
    found = _EVENT_ID.fullmatch(last)
    if found is None:
        raise RequestError("Last-Event-ID must be the id of an event of this API.", param="last-event-id")
    return found[1]


def _repeated(request: ParsedRequest) -> str | None:
    """Return the topic of the run that a client which comes back may have begun already."""
    run = request.body.get("runId")
    return _run_topic(run) if _RUN_ID in request.headers and isinstance(run, str) else None


def _parse_any(request: ParsedRequest) -> GenerateCall | Following:
    """Raises: RequestError, UnknownStream."""
    if _broken_off(request) is not None:
        return _parse_again(request)
    if request.newest is not None:  # the connection was lost before the first event
        return Following(request.newest.record.stream_id, 0, _RESUMING_VIEW)
    return parse(request)


def _parse_again(request: ParsedRequest) -> Following:
    """Raises: RequestError, UnknownStream if the request is for another run than the events that the client has."""
    fields, _ = read_known(request.body, RunBody, _UNUSED)
    if request.past is not None:
        facts, _ = request.past
        if facts.record.wire == _NAME and ChatMemo.of(facts).run == fields.run_id:
            return Following(facts.record.stream_id, 0, _view_for(request))
    raise UnknownStream("There is no such run.")


def parse(request: ParsedRequest) -> GenerateCall:
    """Return the call of a new run. Raises: RequestError."""
    fields, unused = read_known(request.body, RunBody, _UNUSED)
    props, more = read_fields(fields.forwarded_props or {}, _Props)
    notes = [*unused, *(f"forwardedProps.{name}" for name in more)]
    server = request.server
    offers = [
        Offer(tool.name, f"tools[{index}]", tool.description or None, tool.parameters)
        for index, tool in enumerate(fields.tools or ())
    ]
    tools = choose_tools(offers, ToolChoice(props.tool_choice or "auto"), server, notes)
    images = eyes_of(server)
    messages = read_messages(_messages(fields, notes, images), notes, images=images)
    notes += unread_reasoning(messages, server, continues=False, name="messages[].content")
    if props.n not in (None, 1):
        raise UnsupportedParameter("forwardedProps.n must be 1.", param="forwardedProps.n")
    calls = tools.calls(single=False)
    generate = GenerateRequest(
        props.model,
        messages=messages,
        tools=tools.shown,
        sampling=replace(sampling_of(props, server.recommended_sampling), grammar=tools.grammar(None)),
        calls=calls,
        on_disconnect="detach",
        memo=ChatMemo(fields.thread_id, fields.run_id, calls=calls).encode(),
        topics=(chat_topic(fields.thread_id), _run_topic(fields.run_id)),
    )
    return GenerateCall(generate, _view_for(request), stream=True, ignored=tuple(notes))


def _view_for(request: ParsedRequest) -> AgUiView:
    return _RESUMING_VIEW if _RUN_ID in request.headers else _VIEW


def _run_topic(run: str) -> str:
    return f"run {run}"


def _named_run(request: ParsedRequest) -> str:
    run = request.query.get("runId")
    if not run:
        raise RequestError("runId is missing.", param="runId")
    return _run_topic(run)


def parse_joining(request: ParsedRequest) -> Following:
    """Raises: UnknownStream."""
    if request.newest is None:
        raise UnknownStream("There is no such run.")
    return Following(request.newest.record.stream_id, 0, _RESUMING_VIEW)


def _messages(fields: RunBody, notes: list[str], images: list[Image] | None) -> list[ChatMessage]:
    """Return messages in OpenAI's format. Raises: RequestError."""
    found: list[ChatMessage] = []
    reasoning: list[ReasoningDetail] = []
    asked_from = first_asked([one.role for one in fields.messages])
    for index, message in enumerate(fields.messages):
        role = message.role
        if role == "activity":
            continue
        content = message.content
        if isinstance(content, dict):
            raise RequestError(f"messages[{index}].content must be text or a list of parts.", param="messages")
        is_user = role == "user"
        text = text_of(
            _parts(content), f"messages[{index}].content", notes, between="\n",
            is_asked=is_user and index >= asked_from, is_answer=role in ("assistant", "reasoning"),
            images=images if is_user else None,
        )  # fmt: skip
        if role == "reasoning":  # before the answer that it belongs to
            reasoning.append(ReasoningDetail(text))
            continue
        answer = ChatMessage(role, text, tool_call_id=message.tool_call_id)
        if role == "assistant":
            answer.tool_calls = [ToolCallBody(call.function, id=call.id) for call in message.tool_calls or ()] or None
            answer.reasoning_details, reasoning = reasoning, []
        elif message.error:
            answer.content = f"Error: {message.error}\n{text}".rstrip()
        found.append(answer)
    return _with_context(found, fields.context or ())


def _parts(content: _Content | None) -> str | Sequence[TextPart | ImagePart | Other] | None:
    if content is None or isinstance(content, str):
        return content
    return [TextPart(part.text) if isinstance(part, _TextPart) else part for part in content]


def _with_context(messages: list[ChatMessage], context: Sequence[_Context]) -> list[ChatMessage]:
    if not context:
        return messages
    text = "\n".join(f"{one.description}: {one.value}" for one in context)
    if messages and messages[0].role in ("system", "developer"):
        messages[0].content = f"{messages[0].content}\n\n{text}"
        return messages
    return [ChatMessage("system", text), *messages]


def _find_model(request: ParsedRequest) -> ServerFacts | None:
    props = request.body.get("forwardedProps")
    return find_model(request, props.get("model") if isinstance(props, dict) else None)


WIRE = Wire(
    name=_NAME,
    title="AG-UI: runs of an agent",
    operations=(
        Operation(
            "POST",
            "/v1/ag-ui",
            Generate(_parse_any, past=_broken_off, topic=_repeated),
            "Run: answer a thread.",
            body=RunBody,
            has_images=True,
            example={
                "threadId": "thread-1",
                "runId": "run-1",
                "messages": [{"id": "1", "role": "user", "content": "Why do rivers bend?"}],
                "tools": [],
                "context": [],
                "state": {},
                "forwardedProps": {"max_tokens": 64},
            },
        ),
        Operation(
            "GET",
            "/v1/ag-ui",
            Follow(parse_joining, _named_run, lambda request: True),
            "Follow a run, also one that has ended, from its beginning.",
            query=("runId!", "offset"),
        ),
        Operation("GET", "/v1/ag-ui/{chat:path}/events", follow_running(_VIEW), "Follow the run of a thread."),
        Operation("DELETE", "/v1/ag-ui/{chat:path}/events", stop_running(_VIEW), "Stop the run of a thread."),
    ),
    encode_error=encode_error,
    find_model=_find_model,
    prefix="/v1/ag-ui",
    unused=_UNUSED,
    names={"prompt": "messages", "max_tokens": "forwardedProps.max_tokens"},
)
