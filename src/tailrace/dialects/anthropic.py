"""Anthropic's wire: `/v1/messages` and `/v1/messages/count_tokens`. Answers: `anthropic_events.py`.

The headers of its clients (`x-api-key`, `anthropic-version`, `anthropic-beta`) may have any value. Intended
divergences: 1. Thinking is shown in full, never in a summary. Its `budget_tokens` are ignored, and named. Its signature
is the stream's id, and is not checked. If a model's thinking cannot be switched off, it is hidden. 2. Text blocks of
one turn, and successive turns of one role, are joined by a line end, because chat templates allow one text per turn.
3. `tool_choice` of `any` and `tool` makes exactly one call. 4. `is_error` of a tool's result and `cache_control` are
ignored, and named. 5. A model's `created_at` is the start of the server, because the real time is unknown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Literal

import msgspec

from tailrace.dialects.anthropic_events import MessagesView, encode_error
from tailrace.dialects.bodies import JsonBody, read_known, time_of, to_json
from tailrace.dialects.facts import ServerFacts
from tailrace.dialects.fields import (
    MAX_MESSAGES,
    ChatMessage,
    FunctionCall,
    SamplingFields,
    TemplateValues,
    TextPart,
    Tokens,
    ToolCallBody,
    read_messages,
    sampling_of,
    stops,
)
from tailrace.dialects.grammars import grammar_of_schema
from tailrace.dialects.queries import read_count
from tailrace.dialects.reasoning import switch_values, unread_reasoning
from tailrace.dialects.tools import Function, Tool, ToolChoice, choose_tools
from tailrace.dialects.wire import Generate, GenerateCall, Operation, ParsedRequest, Reply, Show, Wire, named_model
from tailrace.errors import RequestError, UnknownModel, UnsupportedParameter
from tailrace.types import GenerateRequest, means_any_model

__all__ = ["WIRE"]

_REFUSED: dict[str, tuple[object, ...]] = {
    "compaction": (),
    "container": (),
    "context_management": ({},),
    "diagnostics": (),
    "inference_geo": (),
    "mcp_servers": ([],),
    "speed": ("standard",),
    "thread": (),
}
_DEFAULT_PAGE, _MAX_PAGE = 20, 1000  # models, as in Anthropic's reference
_VERSION = "anthropic-version"  # this header distinguishes its clients from OpenAI's on shared paths
_CHOICES = {"auto": "<auto>", "any": "<required>", "none": "<none>"}  # for `choose_tools`


class ToolUse(msgspec.Struct, tag="tool_use"):
    id: str
    name: str
    input: JsonBody


class ToolResult(msgspec.Struct, tag="tool_result"):
    tool_use_id: str
    content: str | list[TextPart] | None = None


class Thinking(msgspec.Struct, tag="thinking"):
    thinking: str
    signature: str = ""


class AnthropicTurn(msgspec.Struct):
    role: Literal["user", "assistant", "system"]
    content: str | list[TextPart | Thinking | ToolUse | ToolResult]


ToolName = Annotated[str, msgspec.Meta(pattern="^[a-zA-Z0-9_-]{1,128}$")]


class AnthropicTool(msgspec.Struct):
    name: ToolName
    input_schema: JsonBody
    description: str | None = None
    type: Literal["custom"] | None = None


class AnthropicToolChoice(msgspec.Struct):
    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingDisabled(msgspec.Struct, tag="disabled"):
    pass


class ThinkingAdaptive(msgspec.Struct, tag="adaptive"):
    display: Literal["summarized", "omitted"] | None = None


class ThinkingEnabled(msgspec.Struct, tag="enabled"):
    budget_tokens: Annotated[int, msgspec.Meta(ge=1024, le=2**31 - 1)]
    display: Literal["summarized", "omitted"] | None = None


class Format(msgspec.Struct):
    type: Literal["json_schema"]
    schema: JsonBody


class OutputConfig(msgspec.Struct):
    format: Format | None = None


class CountBody(msgspec.Struct, kw_only=True):
    model: str
    messages: Annotated[list[AnthropicTurn], msgspec.Meta(max_length=MAX_MESSAGES)]
    system: str | list[TextPart] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: ThinkingDisabled | ThinkingAdaptive | ThinkingEnabled | None = None


class MessagesBody(CountBody, kw_only=True):
    max_tokens: Tokens
    stream: bool | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] | None = None
    stop_sequences: list[str] | None = None
    output_config: OutputConfig | None = None


def parse(request: ParsedRequest) -> GenerateCall:
    """Raises: RequestError."""
    fields, ignored = read_known(request.body, MessagesBody, _REFUSED)
    generate, tools, more = _prompt(fields, request.server)
    thinking = fields.thinking
    if isinstance(thinking, ThinkingEnabled) and thinking.budget_tokens >= fields.max_tokens:
        raise RequestError("thinking.budget_tokens must be less than max_tokens.", param="thinking")
    form = fields.output_config.format if fields.output_config is not None else None
    grammar = grammar_of_schema(form.schema, "output_config") if form is not None else None
    if tools.shown and grammar is not None:
        raise RequestError("output_config.format cannot be used with tools.", param="output_config")
    named = SamplingFields(
        temperature=fields.temperature, top_p=fields.top_p, top_k=fields.top_k, max_tokens=fields.max_tokens
    )
    is_single = fields.tool_choice is not None and bool(fields.tool_choice.disable_parallel_tool_use)
    sampling = replace(
        sampling_of(named),
        grammar=tools.forced or grammar,
        single_call=is_single and tools.allows_several_calls,
        stop=stops(fields.stop_sequences, name="stop_sequences"),
    )
    view = MessagesView(
        reads_tools=bool(tools.shown),
        forced_tool=tools.forced is not None,
        single_call=is_single,
        shows_thinking=isinstance(thinking, ThinkingAdaptive | ThinkingEnabled) and thinking.display != "omitted",
    )
    return GenerateCall(replace(generate, sampling=sampling), view, bool(fields.stream), ignored + more)


def count_tokens(request: ParsedRequest) -> Reply:
    """Raises: RequestError."""
    fields, ignored = read_known(request.body, CountBody, _REFUSED)
    generate, _, more = _prompt(fields, request.server)
    return Reply(to_json({"input_tokens": request.server.count_tokens(generate)}), ignored=ignored + more)


def _prompt(fields: CountBody, server: ServerFacts) -> tuple[GenerateRequest, ToolChoice, tuple[str, ...]]:
    """Return the prompt, the tools and the names of ignored fields. Raises: RequestError."""
    choice = fields.tool_choice or AnthropicToolChoice("auto")
    if (choice.type == "tool") != (choice.name is not None):
        raise RequestError("tool_choice of type tool needs a name; other types have none.", param="tool_choice")
    given = [Tool(Function(tool.name, tool.description, tool.input_schema)) for tool in fields.tools or ()]
    tools = choose_tools(given, choice.name or _CHOICES[choice.type], server)
    messages = _messages(fields)
    read = read_messages(messages)
    last = messages[-1]
    begins_answer = last.role == "assistant" and not last.tool_calls
    if begins_answer and isinstance(last.content, list) and last.content and last.content[-1].text[-1].isspace():
        raise RequestError("The final assistant content cannot end with trailing whitespace.", param="messages")
    values, ignored = _thinking(fields, server)
    unread = unread_reasoning(read, server, continues=begins_answer, name="messages[].content[].thinking")
    generate = GenerateRequest(
        fields.model, messages=read, tools=tools.shown, continue_final=begins_answer, template_values=values
    )
    return generate, tools, tools.ignored + ignored + unread


def _thinking(fields: CountBody, server: ServerFacts) -> tuple[TemplateValues, tuple[str, ...]]:
    """Return the values that switch thinking on or off in the chat template, and the ignored fields. Thinking is off by
    default. Raises: UnsupportedParameter."""
    match fields.thinking:
        case ThinkingAdaptive():
            return {}, ()
        case ThinkingEnabled():
            if not server.splits_reasoning:
                raise UnsupportedParameter("thinking: reasoning of this model is not separated.", param="thinking")
            return switch_values(server, on=True), ("thinking.budget_tokens",)
    return switch_values(server, on=False), ()


def _messages(fields: CountBody) -> list[ChatMessage]:
    """Return the messages for the chat template; results of tools are separate messages. Raises: RequestError."""
    messages: list[ChatMessage] = []
    system = fields.system if isinstance(fields.system, str) else _joined(fields.system or ())
    if system:
        messages.append(ChatMessage("system", [TextPart(system)]))
    for turn in fields.messages:
        _add(messages, turn)
    return messages


def _add(messages: list[ChatMessage], turn: AnthropicTurn) -> None:
    """Raises: RequestError."""
    blocks = [TextPart(turn.content)] if isinstance(turn.content, str) else turn.content
    calls = [block for block in blocks if isinstance(block, ToolUse)]
    results = [block for block in blocks if isinstance(block, ToolResult)]
    if (calls and turn.role != "assistant") or (results and turn.role != "user"):
        raise RequestError("Only assistant turns have tool_use, and only user turns tool_result.", param="messages")
    for result in results:
        content = result.content if isinstance(result.content, str) else _joined(result.content or ())
        messages.append(ChatMessage("tool", content, None, result.tool_use_id))
    text = _joined([block for block in blocks if isinstance(block, TextPart)])
    thoughts = [block.thinking for block in blocks if isinstance(block, Thinking)]
    if thoughts and turn.role != "assistant":
        raise RequestError("Only assistant turns have thinking.", param="messages")
    if not text and not calls and not any(thoughts):
        if not results and turn.role != "assistant":
            raise RequestError("A message has no content.", param="messages")
        return
    before = messages[-1] if messages else None
    if before is None or before.role != turn.role or before.tool_calls:
        before = ChatMessage(turn.role, [])
        messages.append(before)
    assert isinstance(before.content, list)
    if text:
        before.content.append(TextPart("\n" + text if before.content else text))
    before.reasoning_content = "\n".join(filter(None, [before.reasoning_content, *thoughts])) or None
    before.tool_calls = [ToolCallBody(FunctionCall(call.name, call.input), call.id) for call in calls] or None


def _joined(parts: Sequence[TextPart]) -> str:
    return "\n".join(part.text for part in parts if part.text)


def list_models(request: ParsedRequest) -> Reply:
    """Raises: RequestError for an invalid page."""
    servers, has_more = _page(request)
    names = [server.model for server in servers]
    page = {
        "data": [_model(server) for server in servers],
        "has_more": has_more,
        "first_id": names[0] if names else None,
        "last_id": names[-1] if names else None,
    }
    return Reply(to_json(page))


def _page(request: ParsedRequest) -> tuple[Sequence[ServerFacts], bool]:
    """Return a page of models, and whether there are more after it (before it for before_id). Raises: RequestError."""
    limit = read_count(request.query, "limit") or _DEFAULT_PAGE
    if limit > _MAX_PAGE:
        raise RequestError(f"limit must be at most {_MAX_PAGE}.", param="limit")
    if "after_id" in request.query and "before_id" in request.query:
        raise RequestError("after_id and before_id cannot be used together.", param="before_id")
    if "before_id" in request.query:
        before = request.every[: _position(request, "before_id")]
        return before[-limit:], len(before) > limit
    after = request.every[_position(request, "after_id") + 1 :] if "after_id" in request.query else request.every
    return after[:limit], len(after) > limit


def _position(request: ParsedRequest, param: str) -> int:
    names = [server.model for server in request.every]
    if request.query[param] not in names:
        raise RequestError(f"{param} is not a model of this server.", param=param)
    return names.index(request.query[param])


def show_model(request: ParsedRequest) -> Reply:
    """Raises: UnknownModel."""
    name = request.path["name"]
    if name != request.server.model and not means_any_model(name):
        raise UnknownModel("There is no such model here.", param="model")
    return Reply(to_json(_model(request.server)))


def _model(server: ServerFacts) -> JsonBody:
    return {
        "type": "model",
        "id": server.model,
        "display_name": server.model,
        "created_at": time_of(server.started_s),
        "lifecycle": "active",
        "max_input_tokens": server.max_total_tokens,
    }


_EXAMPLE = {"model": "default", "messages": [{"role": "user", "content": "Why do rivers bend?"}]}

WIRE = Wire(
    name="anthropic",
    title="Anthropic: messages",
    operations=(
        Operation(
            "POST",
            "/v1/messages",
            Generate(parse),
            "Answer a chat.",
            body=MessagesBody,
            example={**_EXAMPLE, "max_tokens": 64, "stream": True},
        ),
        Operation(
            "POST",
            "/v1/messages/count_tokens",
            Show(count_tokens, is_slow=True),
            "Count the tokens of a chat's prompt.",
            body=CountBody,
            example=_EXAMPLE,
        ),
        Operation(
            "GET",
            "/v1/models",
            Show(list_models),
            "List the models.",
            query=("limit", "after_id", "before_id"),
            only_with_header=_VERSION,
        ),
        Operation("GET", "/v1/models/{name:path}", Show(show_model), "Show a model.", only_with_header=_VERSION),
    ),
    encode_error=encode_error,
    find_model=named_model,
    prefix="/v1/messages",
    refused=_REFUSED,
)
