"""The AI SDK's wire: what `useChat` posts and reads, with its default transport. Chunks: `ai_sdk_events.py`.

`POST /v1/ai-sdk/chat` answers a chat, and `GET /v1/ai-sdk/chat/{id}/stream` is where `useChat` with `resume: true`
looks for an answer that is made. The answer goes on while nobody reads it, since the page may come back. A page that
names the question also gets the answer that has ended while nobody read it.

The AI SDK has no fields for the model and its tools, because its own servers choose them. Here they are fields of the
body, which a page sets in its transport, with the names of the AI SDK's functions.

Intended divergences: 1. Parts that an app defines (`data-…`) and sources are not shown to the model. 2. A call whose
approval is open has no result. 3. A file that is no image is refused in a question, and a placeholder elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec.structs import replace

from tailrace.dialects import (
    MAX_MESSAGES,
    ChatMessage,
    Effort,
    Follow,
    Following,
    Fraction,
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
    Reply,
    SamplingFields,
    Temperature,
    TextPart,
    ToolCallBody,
    ToolChoice,
    TopK,
    Wire,
    choose_tools,
    effort_values,
    encode_error,
    eyes_of,
    first_asked,
    image_of_url,
    named_model,
    note,
    read_known,
    read_messages,
    refused,
    sampling_of,
    stops,
    text_of,
    to_json,
    unread_reasoning,
)
from tailrace.errors import RequestError
from tailrace.types import GenerateRequest, Image
from tailrace_plugins.front_ends.ai_sdk_events import UiMessageView
from tailrace_plugins.front_ends.chats import ChatId, ChatMemo, chat_topic, named_chat, stop_running

__all__ = ["WIRE"]

_NAME = "ai_sdk"
_VIEW = UiMessageView()
_RESULTS = ("output-available", "output-error", "output-denied")  # states of a call that has a result
_UNUSED = {"experimental_attachments": refused([])}  # of ai 4


class _Part(msgspec.Struct, rename="camel"):
    """A part of a message. Its type is text, reasoning, file, step-start, tool-NAME, dynamic-tool, source-… or
    data-…."""

    type: str
    text: str = ""
    media_type: str = ""
    url: str = ""
    filename: str | None = None
    tool_call_id: str = ""
    tool_name: str = ""
    state: str = ""
    input: Any = None  # Any: JSON
    output: Any = None
    error_text: str = ""
    # Without effect.
    id: str | None = None
    source_id: str | None = None
    title: str | None = None
    data: Any = None
    raw_input: Any = None
    approval: JsonBody | None = None
    preliminary: bool | None = None
    provider_executed: bool | None = None
    provider_metadata: JsonBody | None = None
    call_provider_metadata: JsonBody | None = None
    result_provider_metadata: JsonBody | None = None
    tool_metadata: JsonBody | None = None
    input_encoding: str | None = None

    @property
    def tool(self) -> str:
        """The name of the tool that this part is a call of; "" if it is none."""
        if self.type == "dynamic-tool":
            return self.tool_name
        return self.type.removeprefix("tool-") if self.type.startswith("tool-") else ""


class _UiMessage(msgspec.Struct):
    role: Literal["system", "user", "assistant"]
    parts: list[_Part]
    id: str = ""
    metadata: Any = None  # Any: JSON


class _Tool(msgspec.Struct, rename="camel"):
    input_schema: JsonBody | None = None
    parameters: JsonBody | None = None  # assistant-ui's name of the same
    description: str | None = None
    strict: bool | None = None


class _ChosenTool(msgspec.Struct, rename="camel"):
    type: Literal["tool"]
    tool_name: str


class UiChatBody(msgspec.Struct, rename="camel", kw_only=True):
    id: ChatId
    messages: Annotated[list[_UiMessage], msgspec.Meta(max_length=MAX_MESSAGES)]
    trigger: str | None = None  # the messages already are what it asks for
    message_id: str | None = None
    model: str | None = None
    system: str | None = None
    tools: dict[str, _Tool] | None = None
    tool_choice: Literal["auto", "none", "required"] | _ChosenTool | None = None
    max_output_tokens: Annotated[int, msgspec.Meta(ge=1)] | None = None
    temperature: Temperature | None = None
    top_p: Fraction | None = None
    top_k: TopK | None = None
    presence_penalty: Annotated[float, msgspec.Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, msgspec.Meta(ge=-2, le=2)] | None = None
    seed: int | None = None
    stop_sequences: list[str] | None = None
    reasoning_effort: Effort | None = None


class _FilePart(ImagePart):
    """An image as `text_of` takes it."""

    url: str

    def image(self, where: str) -> Image:
        """Raises: RequestError."""
        return image_of_url(self.url, f"{where}.url")


def parse(request: ParsedRequest) -> GenerateCall:
    """Raises: RequestError."""
    fields, unused = read_known(request.body, UiChatBody, _UNUSED)
    notes = list(unused)
    server = request.server
    tools = choose_tools(_offers(fields.tools or {}), _choice(fields.tool_choice), server, notes)
    images = eyes_of(server)
    messages = read_messages(_messages(fields, notes, images), notes, images=images)
    notes += unread_reasoning(messages, server, continues=False, name="messages[].parts[].text")
    values = effort_values(server, fields.reasoning_effort)
    if fields.reasoning_effort is not None and not values:
        notes.append("reasoningEffort")
    calls = tools.calls(single=False)
    last = fields.messages[-1]
    questions = [message.id for message in fields.messages if message.role == "user"]
    memo = ChatMemo(
        message=last.id[:256] if last.role == "assistant" else "",
        question=questions[-1][:256] if questions else "",
        calls=calls,
    )
    generate = GenerateRequest(
        fields.model,
        messages=messages,
        tools=tools.shown,
        template_values=values,
        sampling=replace(
            sampling_of(_sampling(fields), server.recommended_sampling),
            grammar=tools.grammar(None),
            stop=stops(fields.stop_sequences, name="stopSequences"),
        ),
        calls=calls,
        on_disconnect="detach",
        memo=memo.encode(),
        topics=(chat_topic(fields.id),),
    )
    return GenerateCall(generate, _VIEW, stream=True, ignored=tuple(notes))


def _sampling(fields: UiChatBody) -> SamplingFields:
    names = ("temperature", "top_p", "top_k", "presence_penalty", "frequency_penalty", "seed")
    given = {name: getattr(fields, name) for name in names}
    return SamplingFields(**given, max_tokens=fields.max_output_tokens)


def _offers(tools: dict[str, _Tool]) -> list[Offer]:
    return [
        Offer(name, f"tools[{index}]", tool.description, tool.input_schema or tool.parameters, tool.strict)
        for index, (name, tool) in enumerate(tools.items())
    ]


def _choice(given: str | _ChosenTool | None) -> ToolChoice:
    match given:
        case _ChosenTool():
            return ToolChoice("required", frozenset({given.tool_name}))
        case "none" | "required":
            return ToolChoice(given)
    return ToolChoice()


def _messages(fields: UiChatBody, notes: list[str], images: list[Image] | None) -> list[ChatMessage]:
    """Return messages in OpenAI's format. An answer of several steps becomes several, with the results of its calls
    between them. Raises: RequestError."""
    if not fields.messages:
        raise RequestError("messages must not be empty.", param="messages")
    found = [ChatMessage("system", fields.system)] if fields.system else []
    asked_from = first_asked([message.role for message in fields.messages])
    for index, message in enumerate(fields.messages):
        where = f"messages[{index}].parts"
        if message.role == "assistant":
            found += _answer(message.parts, where, notes)
            continue
        is_user = message.role == "user"
        parts = [_content(part, f"{where}[{number}]", notes) for number, part in enumerate(message.parts)]
        seen = images if is_user else None
        text = text_of(
            [part for part in parts if part is not None],
            where, notes, between="\n", is_asked=is_user and index >= asked_from, images=seen,
        )  # fmt: skip
        found.append(ChatMessage(message.role, text))
    return found


def _content(part: _Part, where: str, notes: list[str]) -> TextPart | ImagePart | Other | None:
    """Return a part of a question; None if the model is not shown it."""
    if part.type == "text":
        return TextPart(part.text)
    if part.type == "file":
        return _FilePart(part.url) if part.media_type.startswith("image/") else Other("file")
    notes.append(note(where, "not shown to the model"))
    return None


def _answer(parts: Sequence[_Part], where: str, notes: list[str]) -> list[ChatMessage]:
    found: list[ChatMessage] = []
    step: list[_Part] = []
    for number, part in enumerate(parts):
        if part.type == "step-start":
            found += _step(step)
            step = []
        elif part.type in ("text", "reasoning") or part.tool:
            step.append(part)
        elif not part.type.startswith(("data-", "source-")):
            notes.append(note(f"{where}[{number}]", "not shown to the model"))
    return found + _step(step)


def _step(parts: Sequence[_Part]) -> list[ChatMessage]:
    """Return the message of a step, and the results of its calls."""
    if not parts:
        return []
    calls = [part for part in parts if part.tool]
    message = ChatMessage(
        "assistant",
        "".join(part.text for part in parts if part.type == "text"),
        tool_calls=[ToolCallBody(FunctionCall(call.tool, call.input), id=call.tool_call_id) for call in calls] or None,
        reasoning_details=[ReasoningDetail(part.text) for part in parts if part.type == "reasoning"],
    )
    results = [
        ChatMessage("tool", _result(call), tool_call_id=call.tool_call_id) for call in calls if call.state in _RESULTS
    ]
    return [message, *results]


def _result(call: _Part) -> str:
    match call.state:
        case "output-error":
            return f"Error: {call.error_text}"
        case "output-denied":
            return "The user did not allow this call."
    return call.output if isinstance(call.output, str) else to_json(call.output).decode()


def _asked(request: ParsedRequest) -> str:
    """Return the id of the message whose answer is asked for; "": any answer that is made."""
    return request.query.get("messageId", "")


def parse_following(request: ParsedRequest) -> Following | Reply:
    newest = request.newest
    if newest is None or _asked(request) not in ("", ChatMemo.of(newest).question):
        return Reply(b"", 204)
    return Following(newest.record.stream_id, 0, _VIEW)


WIRE = Wire(
    name=_NAME,
    title="AI SDK: UI message stream",
    operations=(
        Operation(
            "POST",
            "/v1/ai-sdk/chat",
            Generate(parse),
            "Answer a chat of useChat.",
            body=UiChatBody,
            has_images=True,
            example={
                "id": "chat-1",
                "messages": [{"id": "1", "role": "user", "parts": [{"type": "text", "text": "Why do rivers bend?"}]}],
                "maxOutputTokens": 64,
            },
        ),
        Operation(
            "GET",
            "/v1/ai-sdk/chat/{chat:path}/stream",
            Follow(parse_following, named_chat, lambda request: bool(_asked(request))),
            "Follow the answer that is made in a chat.",
            query=("messageId",),
        ),
        Operation(
            "DELETE",
            "/v1/ai-sdk/chat/{chat:path}/stream",
            stop_running(_VIEW),
            "Stop the answer that is made in a chat.",
        ),
    ),
    encode_error=encode_error,
    find_model=named_model,
    prefix="/v1/ai-sdk",
    unused=_UNUSED,
    names={"prompt": "messages", "max_tokens": "maxOutputTokens", "top_p": "topP", "top_k": "topK"},
)
