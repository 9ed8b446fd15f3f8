"""AG-UI's wire: what its `HttpAgent` posts and reads. Events: `ag_ui_events.py`.

`POST /v1/ag-ui` runs, and `GET /v1/ag-ui/{thread}/events` follows the run that is made in a thread, for the
`connect` of an agent. The run goes on while nobody reads it. `forwardedProps` may have the model and parameters, with
OpenAI's names.

Intended divergences: 1. The state of an app is not shown to the model; `context` is, at the end of the system message.
2. Activities and encrypted reasoning are left out. 3. Nothing here interrupts a run, so `resume` is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec.structs import replace

from tailrace.dialects import (
    MAX_MESSAGES,
    ChatMessage,
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
from tailrace.errors import UnsupportedParameter
from tailrace.types import GenerateRequest, Image
from tailrace_plugins.front_ends.ag_ui_events import AgUiView
from tailrace_plugins.front_ends.chats import ChatId, ChatMemo, follow_running, stop_running

__all__ = ["WIRE"]

_NAME = "ag_ui"
_VIEW = AgUiView()
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


def parse(request: ParsedRequest) -> GenerateCall:
    """Raises: RequestError."""
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
        memo=ChatMemo(fields.thread_id, run=fields.run_id, calls=calls).encode(),
    )
    return GenerateCall(generate, _VIEW, stream=True, ignored=tuple(notes))


def _messages(fields: RunBody, notes: list[str], images: list[Image] | None) -> list[ChatMessage]:
    """Return messages in OpenAI's format. Raises: RequestError."""
    found: list[ChatMessage] = []
    reasoning: list[ReasoningDetail] = []
    asked_from = first_asked([one.role for one in fields.messages])
    for index, message in enumerate(fields.messages):
        role = message.role
        if role == "activity":
            continue
        content = message.content if not isinstance(message.content, dict) else None
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
            Generate(parse),
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
        Operation("GET", "/v1/ag-ui/{chat:path}/events", follow_running(_NAME, _VIEW), "Follow the run of a thread."),
        Operation("DELETE", "/v1/ag-ui/{chat:path}/events", stop_running(_NAME, _VIEW), "Stop the run of a thread."),
    ),
    encode_error=encode_error,
    find_model=_find_model,
    prefix="/v1/ag-ui",
    unused=_UNUSED,
    names={"prompt": "messages", "max_tokens": "forwardedProps.max_tokens"},
)
