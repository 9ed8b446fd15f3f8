"""Anthropic's wire: `/v1/messages` and `/v1/messages/count_tokens`. Answers: `anthropic_events.py`. Blocks of content:
`anthropic_blocks.py`.

The headers of its clients (`x-api-key`, `anthropic-version`, `anthropic-beta`) may have any value. Intended
divergences: 1. Thinking is shown in full, never in a summary. Its signature
is the stream's id, and is not checked. If a model's thinking cannot be switched off, it is hidden. 2. Text blocks of
one turn, and successive turns of one role, are joined by a line end, because chat templates allow one text per turn.
3. `tool_choice` of `any` and `tool` makes exactly one call. 4. `is_error` of a tool's result is ignored, and named;
`cache_control` has no effect, because every prefix is cached where the engine can. 5. A model's `created_at` is the
start of the server, because the real time is unknown. 6. The first text of Claude Code's `system`, which changes with
every request, is left out, and named: no prefix would ever be found in a cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec.structs import replace

from tailrace.dialects import (
    MAX_MESSAGES,
    AnswerTokens,
    ChosenTools,
    Effort,
    Fraction,
    Generate,
    GenerateCall,
    JsonBody,
    Offer,
    Operation,
    Other,
    ParsedRequest,
    ReasoningTokens,
    Reply,
    SamplingFields,
    ServerFacts,
    Show,
    Temperature,
    TemplateValues,
    ToolChoice,
    TopK,
    Wire,
    choose_tools,
    effort_values,
    eyes_of,
    grammar_of_schema,
    ignored,
    left_out,
    named_model,
    note,
    read_count,
    read_known,
    read_messages,
    reasoning_budget,
    refused,
    sampling_of,
    stops,
    switch_values,
    time_of,
    to_json,
    unread_reasoning,
)
from tailrace.errors import RequestError, UnknownModel
from tailrace.types import GenerateRequest, Grammar, means_any_model
from tailrace_plugins.anthropic.anthropic_blocks import AnthropicTurn, TextBlock, read_turns
from tailrace_plugins.anthropic.anthropic_events import MessagesView, encode_error

__all__ = ["WIRE"]

_UNUSED = {
    "compaction": refused(),
    "container": ignored(),
    "context_management": ignored({}, {"edits": []}),
    "diagnostics": ignored(),
    "inference_geo": ignored(),
    "mcp_servers": ignored([]),
    "speed": ignored("standard"),
    "thread": refused({"type": "create"}),
}
_UNUSED_IN_COUNTS = _UNUSED | {"compaction": ignored()}
_DEFAULT_PAGE, _MAX_PAGE = 20, 1000  # models, as in Anthropic's reference
_VERSION = "anthropic-version"  # this header distinguishes its clients from OpenAI's on shared paths
_BILLING = "x-anthropic-billing-header"  # how Claude Code's changing text in `system` begins


class AnthropicTool(msgspec.Struct, tag="custom"):
    name: str
    input_schema: JsonBody
    description: str | None = None
    strict: bool | None = None
    # Without effect: prefixes are cached anyway, all tools are shown at once, and calls are always streamed eagerly.
    cache_control: JsonBody | None = None
    defer_loading: bool | None = None
    eager_input_streaming: bool | None = None


class AnthropicToolChoice(msgspec.Struct):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingDisabled(msgspec.Struct, tag="disabled"):
    pass


class ThinkingAdaptive(msgspec.Struct, tag="adaptive"):
    display: Literal["summarized", "omitted"] | None = None


class ThinkingEnabled(msgspec.Struct, tag="enabled"):
    budget_tokens: ReasoningTokens | None = None
    display: Literal["summarized", "omitted"] | None = None


class Format(msgspec.Struct):
    type: Literal["json_schema"]
    schema: JsonBody


class OutputConfig(msgspec.Struct):
    format: Format | None = None
    effort: Effort | None = None


class CountBody(msgspec.Struct, kw_only=True):
    model: str
    messages: Annotated[list[AnthropicTurn], msgspec.Meta(max_length=MAX_MESSAGES)]
    system: str | list[TextBlock | Other] | None = None
    tools: list[AnthropicTool | Other] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: ThinkingDisabled | ThinkingAdaptive | ThinkingEnabled | None = None
    output_config: OutputConfig | None = None
    output_format: Format | None = None  # an older form of output_config.format
    cache_control: JsonBody | None = None


class MessagesBody(CountBody, kw_only=True):
    max_tokens: AnswerTokens
    stream: bool | None = None
    temperature: Temperature | None = None
    top_p: Fraction | None = None
    top_k: TopK | None = None
    stop_sequences: list[str] | None = None


def parse(request: ParsedRequest) -> GenerateCall:
    """Raises: RequestError."""
    fields, unused = read_known(request.body, MessagesBody, _UNUSED)
    notes = list(unused)
    generate, tools = _prompt(fields, request.server, notes)
    grammar = _grammar(fields)
    is_single = fields.tool_choice is not None and bool(fields.tool_choice.disable_parallel_tool_use)
    names = ("temperature", "top_p", "top_k", "max_tokens")
    sampling = replace(
        sampling_of(
            SamplingFields(**{name: getattr(fields, name) for name in names}), request.server.recommended_sampling
        ),
        grammar=tools.grammar(grammar),
        single_call=is_single and tools.allows_several_calls,
        stop=stops(fields.stop_sequences, name="stop_sequences"),
    )
    thinking = fields.thinking
    if isinstance(thinking, ThinkingEnabled) and request.server.chat.splits_reasoning:  # else `thinking` is named
        most = reasoning_budget(thinking.budget_tokens, request.server, notes, "thinking.budget_tokens")
        sampling = replace(sampling, max_reasoning_tokens=most)
    calls = tools.calls(single=is_single)
    view = MessagesView(
        calls=calls,
        shows_thinking=isinstance(thinking, ThinkingAdaptive | ThinkingEnabled) and thinking.display != "omitted",
    )
    return GenerateCall(replace(generate, sampling=sampling, calls=calls), view, bool(fields.stream), tuple(notes))


def count_tokens(request: ParsedRequest) -> Reply:
    """Raises: RequestError."""
    if named_model(request) is None:
        raise UnknownModel("There is no such model here.", param="model")
    fields, unused = read_known(request.body, CountBody, _UNUSED_IN_COUNTS)
    notes = list(unused)
    generate, _ = _prompt(fields, request.server, notes)
    count = request.server.generator.count_tokens(request.attributed(generate))
    return Reply(to_json({"input_tokens": count}), ignored=tuple(notes))


def _prompt(fields: CountBody, server: ServerFacts, notes: list[str]) -> tuple[GenerateRequest, ChosenTools]:
    """Return the prompt and the tools. Raises: RequestError."""
    tools = choose_tools(_offers(fields, notes), _choice(fields.tool_choice), server, notes)
    images = eyes_of(server)
    turns = read_turns(_system(fields, notes), fields.messages, notes, images)
    messages = read_messages(turns, notes, images=images)
    last = messages[-1]
    begins_answer = last.role == "assistant" and not last.tool_calls
    if begins_answer and last.content[-1:].isspace():
        raise RequestError("The final assistant content cannot end with trailing whitespace.", param="messages")
    notes += unread_reasoning(messages, server, continues=begins_answer, name="messages[].content[].thinking")
    values = _thinking(fields, server, notes)
    request = GenerateRequest(
        fields.model, messages=messages, tools=tools.shown, continue_final=begins_answer, template_values=values
    )
    return request, tools


def _offers(fields: CountBody, notes: list[str]) -> list[Offer]:
    offers = []
    for index, tool in enumerate(fields.tools or ()):
        where = f"tools[{index}]"
        if isinstance(tool, Other):  # a tool of Anthropic's servers, or one whose schema only its models know
            notes.append(left_out(where, tool.kind))
        else:
            offers.append(Offer(tool.name, where, tool.description, tool.input_schema, tool.strict))
    return offers


def _choice(given: AnthropicToolChoice | None) -> ToolChoice:
    """Raises: RequestError."""
    if given is None or given.type == "auto":
        return ToolChoice()
    if given.type == "tool":
        if given.name is None:
            raise RequestError("tool_choice of type tool needs a name.", param="tool_choice")
        return ToolChoice("required", frozenset({given.name}))
    return ToolChoice("none" if given.type == "none" else "required")


def _system(fields: CountBody, notes: list[str]) -> str | Sequence[TextBlock | Other] | None:
    """Return `system` without the text that changes with every request."""
    system = fields.system
    if system and isinstance(system, list):
        first = system[0]
        if isinstance(first, TextBlock) and first.text.startswith(_BILLING):
            notes.append(note("system[0]", _BILLING))
            return [TextBlock(text=""), *system[1:]]
    return system


def _grammar(fields: CountBody) -> Grammar | None:
    """Raises: RequestError."""
    newer = fields.output_config.format if fields.output_config is not None else None
    form, name = (newer, "output_config") if newer is not None else (fields.output_format, "output_format")
    return grammar_of_schema(form.schema, name) if form is not None else None


def _thinking(fields: CountBody, server: ServerFacts, notes: list[str]) -> TemplateValues:
    """Return the values that control thinking in the chat template. Thinking is off by default."""
    effort = fields.output_config.effort if fields.output_config is not None else None
    values = effort_values(server, effort)
    if effort is not None and not values:
        notes.append("output_config.effort")
    match fields.thinking:
        case ThinkingAdaptive():
            return values
        case ThinkingEnabled():
            if not server.chat.splits_reasoning:
                notes.append("thinking")
            return values | (switch_values(server, on=True) if server.chat.splits_reasoning else {})
    return values | switch_values(server, on=False)


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
        "max_input_tokens": server.generator.limit_tokens(),
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
            has_images=True,
            query=("beta",),  # of the official client, if it sends fields of betas
            example={**_EXAMPLE, "max_tokens": 64, "stream": True},
        ),
        Operation(
            "POST",
            "/v1/messages/count_tokens",
            Show(count_tokens, is_slow=True),
            "Count the tokens of a chat's prompt.",
            body=CountBody,
            has_images=True,
            query=("beta",),
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
    unused=_UNUSED,
    names={"prompt": "messages"},
)
