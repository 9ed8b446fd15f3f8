"""Anthropic's wire: `/v1/messages` and `/v1/messages/count_tokens`. Answers: `anthropic_events.py`.

The headers of its clients (`x-api-key`, `anthropic-version`, `anthropic-beta`) may be anything. Divergences, on
purpose: 1. Thinking that is left to the model (`adaptive`) is taken, as the models here do none; `enabled` is refused.
2. Blocks and turns that belong together are joined by a line end, since chat templates know one text a turn.
3. `tool_choice` of `any` and `tool` makes exactly one call. 4. `is_error` of a tool's result and `cache_control` are
ignored, and named.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Literal

import msgspec

from tailrace.dialects.anthropic_events import MessagesView, encode_error
from tailrace.dialects.bodies import JsonBody, read_known, to_json
from tailrace.dialects.fields import (
    MAX_MESSAGES,
    ChatMessage,
    FunctionCall,
    SamplingFields,
    TextPart,
    Tokens,
    ToolCallBody,
    read_messages,
    sampling_of,
    stops,
)
from tailrace.dialects.grammars import grammar_of_schema
from tailrace.dialects.tools import Function, choose_tools
from tailrace.dialects.tools import Tool as OpenAITool
from tailrace.dialects.tools import ToolChoice as OpenAIToolChoice
from tailrace.dialects.wire import Asked, Call, Generate, Operation, Reply, ServerFacts, Show, Wire, pick_named
from tailrace.errors import RequestError
from tailrace.types import GenerateRequest

__all__ = ["WIRE"]

_REFUSED: dict[str, tuple[object, ...]] = {
    "compaction": (),
    "container": (),
    "context_management": ({},),
    "diagnostics": (),
    "inference_geo": (),
    "mcp_servers": ([],),
    "speed": ("standard",),
    "thinking": ({"type": "disabled"}, {"type": "adaptive"}),
    "thread": (),
}
_CHOICES = {"auto": "<auto>", "any": "<required>", "none": "<none>"}  # as `choose_tools` has them


class ToolUse(msgspec.Struct, tag="tool_use"):
    id: str
    name: str
    input: JsonBody


class ToolResult(msgspec.Struct, tag="tool_result"):
    tool_use_id: str
    content: str | list[TextPart] | None = None


class Turn(msgspec.Struct):
    role: Literal["user", "assistant", "system"]
    content: str | list[TextPart | ToolUse | ToolResult]


ToolName = Annotated[str, msgspec.Meta(pattern="^[a-zA-Z0-9_-]{1,128}$")]


class Tool(msgspec.Struct):
    name: ToolName
    input_schema: JsonBody
    description: str | None = None
    type: Literal["custom"] | None = None


class ToolChoice(msgspec.Struct):
    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
    disable_parallel_tool_use: bool | None = None


class Format(msgspec.Struct):
    type: Literal["json_schema"]
    schema: JsonBody


class OutputConfig(msgspec.Struct):
    format: Format | None = None


class CountBody(msgspec.Struct, kw_only=True):
    model: str
    messages: Annotated[list[Turn], msgspec.Meta(max_length=MAX_MESSAGES)]
    system: str | list[TextPart] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None


class Body(CountBody, kw_only=True):
    max_tokens: Tokens
    stream: bool | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=0, le=1_000_000)] | None = None
    stop_sequences: list[str] | None = None
    output_config: OutputConfig | None = None


def parse(asked: Asked) -> Call:
    """Raises: RequestError."""
    fields, ignored = read_known(asked.body, Body, _REFUSED)
    request, tools = _prompt(fields, asked.server)
    wanted = fields.output_config.format if fields.output_config is not None else None
    grammar = grammar_of_schema(wanted.schema, "output_config") if wanted is not None else None
    if request.tools and grammar is not None:
        raise RequestError("output_config.format and tools exclude each other.", param="output_config")
    named = SamplingFields(
        temperature=fields.temperature, top_p=fields.top_p, top_k=fields.top_k, max_tokens=fields.max_tokens
    )
    sampling = replace(
        sampling_of(named, grammar=tools.forced or grammar), stop=stops(fields.stop_sequences, name="stop_sequences")
    )
    view = MessagesView(
        reads_tools=bool(request.tools),
        forced_tool=tools.forced is not None,
        single_call=fields.tool_choice is not None and bool(fields.tool_choice.disable_parallel_tool_use),
    )
    return Call(replace(request, sampling=sampling), view, bool(fields.stream), ignored + tools.ignored)


def count_tokens(asked: Asked) -> Reply:
    """Raises: RequestError."""
    fields, ignored = read_known(asked.body, CountBody, _REFUSED)
    request, tools = _prompt(fields, asked.server)
    return Reply(to_json({"input_tokens": asked.server.count_tokens(request)}), ignored=ignored + tools.ignored)


def _prompt(fields: CountBody, server: ServerFacts) -> tuple[GenerateRequest, OpenAIToolChoice]:
    """What the model gets to see, and what becomes of the tools. Raises: RequestError."""
    choice = fields.tool_choice or ToolChoice("auto")
    if (choice.type == "tool") != (choice.name is not None):
        raise RequestError("A name goes with the tool_choice of type tool.", param="tool_choice")
    given = [OpenAITool(Function(tool.name, tool.description, tool.input_schema)) for tool in fields.tools or ()]
    tools = choose_tools(given, choice.name or _CHOICES[choice.type], server)
    messages = _messages(fields)
    read = read_messages(messages)
    last = messages[-1]
    begins_answer = last.role == "assistant" and not last.tool_calls
    if begins_answer and isinstance(last.content, list) and last.content[-1].text[-1].isspace():
        raise RequestError("The final assistant content cannot end with trailing whitespace.", param="messages")
    request = GenerateRequest(model=fields.model, messages=read, tools=tools.shown, continue_final=begins_answer)
    return request, tools


def _messages(fields: CountBody) -> list[ChatMessage]:
    """The turns as the chat template is to see them, the results of tools by themselves. Raises: RequestError."""
    messages: list[ChatMessage] = []
    system = fields.system if isinstance(fields.system, str) else _joined(fields.system or ())
    if system:
        messages.append(ChatMessage("system", [TextPart(system)]))
    for turn in fields.messages:
        _add(messages, turn)
    return messages


def _add(messages: list[ChatMessage], turn: Turn) -> None:
    """Raises: RequestError."""
    blocks = [TextPart(turn.content)] if isinstance(turn.content, str) else turn.content
    calls = [block for block in blocks if isinstance(block, ToolUse)]
    results = [block for block in blocks if isinstance(block, ToolResult)]
    if (calls and turn.role != "assistant") or (results and turn.role != "user"):
        raise RequestError("tool_use is an assistant's block, and tool_result a user's.", param="messages")
    for result in results:
        content = result.content if isinstance(result.content, str) else _joined(result.content or ())
        messages.append(ChatMessage("tool", content, None, result.tool_use_id))
    text = _joined([block for block in blocks if isinstance(block, TextPart)])
    if not text and not calls:
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
    before.tool_calls = [ToolCallBody(FunctionCall(call.name, call.input), call.id) for call in calls] or None


def _joined(parts: Sequence[TextPart]) -> str:
    return "\n".join(part.text for part in parts if part.text)


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
            body=Body,
            example={**_EXAMPLE, "max_tokens": 64, "stream": True},
        ),
        Operation(
            "POST",
            "/v1/messages/count_tokens",
            Show(count_tokens, is_slow=True),
            "How many tokens the prompt of a chat has.",
            body=CountBody,
            example=_EXAMPLE,
        ),
    ),
    encode_error=encode_error,
    pick=pick_named,
    prefix="/v1/messages",
    refused=_REFUSED,
)
