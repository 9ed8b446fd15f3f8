"""OpenAI's wire: `/v1/chat/completions` and `/v1/completions`, with the fields that vLLM adds. Answers:
`openai_chunks.py`.

Streams are exactly `data: ` and one line of JSON per chunk, ending in `data: [DONE]`, also after an error. There are no
`id:` lines: after one, the official client would read a heartbeat as an event without JSON. A failure during the stream
is a frame with `error` (raised by OpenAI's clients) and `error_type` (raised by Hugging Face's).

Intended divergences: 1. A cancelled stream ends with an error frame, because the API has no finish_reason for it.
2. In a chat `finish_reason` has its own chunk, as with OpenAI but not with vLLM. 3. A chat whose last message is the
assistant's continues this message, as with TGI. 4. A forced call ends with `tool_calls`, too.
"""

from __future__ import annotations

from dataclasses import replace as replace_fields
from typing import Annotated, Literal

import msgspec
from msgspec.structs import replace

from tailrace.conversations.items import messages_of
from tailrace.dialects import embeddings, rerank
from tailrace.dialects.bodies import JsonBody
from tailrace.dialects.conversations import (
    ConversationField,
    branch_point_of,
    in_conversation,
    open_branch,
    recalled,
    within_limits,
)
from tailrace.dialects.facts import ServerFacts
from tailrace.dialects.fields import (
    AnswerTokens,
    ReasoningTokens,
    RepetitionPenalty,
    TemplateValues,
    TokenFields,
    Tokens,
    TopLogprobs,
    answer_tokens,
    bad_words,
    sampling_of,
    template_values,
)
from tailrace.dialects.grammar_fields import grammar_of_rules, grammar_of_schema, read_response_format
from tailrace.dialects.messages import Messages, read_messages
from tailrace.dialects.native import encode_error
from tailrace.dialects.openai_chunks import ChatView, TextView, UsageShown
from tailrace.dialects.openai_models import list_models, show_model, show_version
from tailrace.dialects.parts import eyes_of
from tailrace.dialects.reasoning_fields import Effort, effort_values, reasoning_budget, switch_values, unread_reasoning
from tailrace.dialects.shapes import Other, ignored, read_known, refused, without_unused
from tailrace.dialects.structured_outputs import StructuredOutputs, read_structured_outputs
from tailrace.dialects.tools import (
    AllowedTools,
    ChosenCustomTool,
    ChosenTool,
    CustomTool,
    Function,
    Named,
    Tool,
    choose_tools,
    read_choice,
    read_tools,
)
from tailrace.dialects.wire import (
    Generate,
    GenerateCall,
    Operation,
    ParsedRequest,
    Show,
    Wire,
    named_model,
    shows_progress,
)
from tailrace.errors import RequestError, UnsupportedParameter
from tailrace.types import GenerateRequest, Grammar, Infill, Message, Sampling, Segment

__all__ = [
    "WIRE",
    "StreamOptions",
    "encode_error",
    "parse_chat",
    "parse_completion",
]

_REASONING_FIELD = "messages[].reasoning_content"
_DEFAULT_COMPLETION_TOKENS = 16  # as in OpenAI's reference
_UNUSED = {
    "audio": ignored(),
    "best_of": ignored(1),
    "cache_prompt": ignored(True),
    "chat_template": refused(),
    "length_penalty": ignored(1),
    "modalities": ignored(["text"]),
    "spaces_between_special_tokens": ignored(True),
    "tool_prompt": ignored(""),
    "use_beam_search": refused(False),
    "web_search_options": ignored(),
}
# Fields that only one of the two has.
_UNUSED_IN_CHATS = _UNUSED | {"echo": refused(False), "suffix": refused("")}
_UNUSED_IN_TEXTS = _UNUSED | {
    "chat_template_kwargs": ignored({}),
    "tool_choice": ignored("none", "auto"),
    "tools": ignored([]),
    "top_logprobs": ignored(0),
}
# Its answer has no fields for them.
_UNUSED_IN_INFILLS = {"echo": ignored(False), "logprobs": ignored(), "prompt_logprobs": ignored()}


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class _Body(TokenFields, kw_only=True):
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: JsonBody | None = None
    structured_outputs: StructuredOutputs | None = None
    grammar: str | None = None  # of llama.cpp
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_json: JsonBody | str | None = None
    guided_regex: str | None = None
    truncate_prompt_tokens: Tokens | None = None
    # llama.cpp's names, on this path.
    json_schema: JsonBody | None = None
    n_predict: AnswerTokens | None = None
    repeat_penalty: RepetitionPenalty | None = None
    return_progress: bool | None = None


class ChatReasoning(msgspec.Struct):
    """OpenRouter's form."""

    effort: Effort | None = None
    max_tokens: ReasoningTokens | None = None
    enabled: bool | None = None
    exclude: bool | None = None


class OpenAIChatBody(_Body, kw_only=True):
    messages: Messages
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    tools: list[Tool | CustomTool | Other] | None = None
    tool_choice: str | ChosenTool | ChosenCustomTool | AllowedTools | Other | None = None
    parallel_tool_calls: bool | None = None
    functions: list[Function] | None = None  # the older form of tools
    function_call: str | Named | None = None  # and of tool_choice
    chat_template_kwargs: TemplateValues | None = None
    reasoning_effort: Effort | None = None
    reasoning_format: Literal["auto", "deepseek", "none"] | None = None
    include_reasoning: bool | None = None
    reasoning: ChatReasoning | None = None
    # Names of the budget for reasoning in llama.cpp, vLLM and Alibaba's API.
    thinking_budget_tokens: ReasoningTokens | None = None
    thinking_token_budget: ReasoningTokens | None = None
    thinking_budget: ReasoningTokens | None = None
    conversation: ConversationField = None


class CompletionBody(_Body, kw_only=True):
    prompt: str | list[str | int | list[int]]
    suffix: str | None = None
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=5)] | None = None
    echo: bool | None = None


class FimBody(CompletionBody, kw_only=True):
    random_seed: int | None = None  # Mistral's name of `seed`


def parse_chat(request: ParsedRequest) -> GenerateCall:
    """Raises: RequestError."""
    fields, unused = read_known(request.body, OpenAIChatBody, _UNUSED_IN_CHATS)
    notes = list(unused)
    is_older = not fields.tools and bool(fields.functions)
    is_single = is_older or fields.parallel_tool_calls is False
    offers, choice = read_tools(fields.tools or (), notes), fields.tool_choice
    if is_older:
        offers = read_tools([Tool(function) for function in fields.functions or ()], notes, name="functions")
        named = fields.function_call
        choice = ChosenTool(named) if isinstance(named, Named) else named
    tools = choose_tools(offers, read_choice(choice), request.server, notes)
    grammar = _grammar(fields)
    wants_logprobs = bool(fields.top_logprobs) if fields.logprobs is None else fields.logprobs
    branch, before, images = request.branch, tuple[Message, ...](), eyes_of(request.server)
    if branch is not None:
        branch = open_branch(branch, has_input=bool(fields.messages))
        before = recalled(messages_of(branch.items), images)
    messages = within_limits(read_messages(fields.messages, notes, before, images=images), len(before))
    continues = messages[-1].role == "assistant" and not messages[-1].tool_calls
    values = _reasoning_values(fields, request.server, notes)
    notes += unread_reasoning(messages[len(before) :], request.server, continues=continues, name=_REASONING_FIELD)
    calls = tools.calls(single=is_single)
    generate = GenerateRequest(
        model=fields.model,
        messages=messages,
        tools=tools.shown,
        calls=calls,
        template_values=values | template_values(fields.chat_template_kwargs),
        continue_final=continues,
        split_reasoning=fields.reasoning_format != "none",
        truncate=fields.truncate_prompt_tokens,
        bad_words=bad_words(fields),
        sampling=replace(
            _sampling(fields, request.server, notes),
            logprobs=wants_logprobs,
            top_logprobs=(fields.top_logprobs or 0) if wants_logprobs else 0,
            grammar=tools.grammar(grammar),
            single_call=is_single and tools.allows_several_calls,
            max_reasoning_tokens=_reasoning_budget(fields, request.server, notes),
        ),
    )
    view = ChatView(
        usage=_usage(fields, notes),
        logprobs=wants_logprobs,
        calls=calls,
        custom_tools=tools.custom,
        shows_reasoning=fields.include_reasoning is not False and not (fields.reasoning and fields.reasoning.exclude),
        has_older_calls=is_older,
        prompt_logprobs=fields.prompt_logprobs is not None,
        shows_progress=_shows_progress(fields, request.server, notes),
    )
    if branch is not None:
        generate = in_conversation(branch, generate, len(before), view)
    return GenerateCall(generate, view, bool(fields.stream), tuple(notes))


def parse_completion(request: ParsedRequest) -> GenerateCall:
    """Raises: RequestError."""
    fields, unused = read_known(request.body, CompletionBody, _UNUSED_IN_TEXTS)
    notes = list(unused)
    wants_logprobs = fields.logprobs is not None
    is_only_prompt = bool(fields.echo) and fields.max_tokens == 0
    if is_only_prompt:
        fields.max_tokens = 1  # which is not shown: engines have no other way to read a prompt
    supported = request.server.generator.parameters
    if fields.logprobs and "logprobs" in supported and "top_logprobs" not in supported:
        raise UnsupportedParameter(
            "This engine has only the logprobs of the chosen tokens: logprobs can be 0.", param="logprobs"
        )
    sampling = _sampling(fields, request.server, notes)
    shows_prompt = fields.prompt_logprobs is not None
    if fields.echo and fields.logprobs is not None:
        most = max(fields.logprobs, fields.prompt_logprobs or 0)
        sampling = replace(sampling, prompt_logprobs=most)
    generate = GenerateRequest(
        model=fields.model,
        prompts=_prompts(fields.prompt, fields.suffix or ""),
        truncate=fields.truncate_prompt_tokens,
        bad_words=bad_words(fields),
        sampling=replace(
            sampling,
            logprobs=wants_logprobs,
            top_logprobs=fields.logprobs or 0,
            grammar=_grammar(fields),
            max_tokens=sampling.max_tokens or _DEFAULT_COMPLETION_TOKENS,
        ),
    )
    view = TextView(
        usage=_usage(fields, notes),
        logprobs=wants_logprobs,
        echo=bool(fields.echo),
        is_only_prompt=is_only_prompt,
        prompt_logprobs=shows_prompt,
        shows_progress=_shows_progress(fields, request.server, notes),
    )
    return GenerateCall(generate, view, bool(fields.stream), tuple(notes))


def parse_fim(request: ParsedRequest) -> GenerateCall:
    """Mistral's form of an infill: the fields of a completion, and the answer of a chat. Raises: RequestError."""
    body, unused = without_unused(request.body, _UNUSED_IN_INFILLS)
    seed = body.pop("random_seed", None)
    if seed is not None and body.get("seed") is None:
        body["seed"] = seed
    call = parse_completion(replace_fields(request, body=body))
    assert isinstance(call.view, TextView)
    view = ChatView(usage=call.view.usage, shows_progress=call.view.shows_progress, has_content=True)
    return replace_fields(call, view=view, ignored=(*unused, *call.ignored))


def _reasoning_values(fields: OpenAIChatBody, server: ServerFacts, notes: list[str]) -> TemplateValues:
    """Return the values that control reasoning in the chat template."""
    options, name = fields.reasoning or ChatReasoning(), "reasoning_effort"
    effort = fields.reasoning_effort
    if effort is None and options.effort is not None:
        effort, name = options.effort, "reasoning.effort"
    values = effort_values(server, effort)
    if effort is not None and not values:
        notes.append(name)
    if options.enabled is None:
        return values
    switch = switch_values(server, on=options.enabled)
    if not switch and options.enabled != server.chat.splits_reasoning:
        notes.append("reasoning.enabled")
    return values | switch


def _reasoning_budget(fields: OpenAIChatBody, server: ServerFacts, notes: list[str]) -> int | None:
    """Return the most tokens of reasoning; the smallest, if several fields say it."""
    budgets = [
        reasoning_budget(given, server, notes, name)
        for name, given in (
            ("reasoning.max_tokens", fields.reasoning.max_tokens if fields.reasoning is not None else None),
            ("thinking_budget_tokens", fields.thinking_budget_tokens),
            ("thinking_token_budget", fields.thinking_token_budget),
            ("thinking_budget", fields.thinking_budget),
        )
    ]
    return min((budget for budget in budgets if budget is not None), default=None)


def _sampling(fields: _Body, server: ServerFacts, notes: list[str]) -> Sampling:
    """Return the parameters that chats and texts share. Raises: RequestError."""
    if fields.prompt_logprobs is not None and fields.stream:  # vLLM's chunks have no field for them
        notes.append("prompt_logprobs")
        fields.prompt_logprobs = None
    if fields.max_tokens is None:
        fields.max_tokens = answer_tokens(fields.n_predict, "n_predict")
    if fields.repetition_penalty is None:
        fields.repetition_penalty = fields.repeat_penalty
    return sampling_of(fields, server.recommended_sampling)


def _grammar(fields: _Body) -> Grammar | None:
    """Read OpenAI's, vLLM's or vLLM's older fields for a grammar. Raises: RequestError."""
    older = StructuredOutputs(
        json=fields.guided_json,
        regex=fields.guided_regex,
        choice=fields.guided_choice,
        grammar=fields.guided_grammar,
    )
    grammars = [
        read_response_format(fields.response_format),
        grammar_of_schema(fields.json_schema, "json_schema") if fields.json_schema is not None else None,
        grammar_of_rules(fields.grammar, "grammar") if fields.grammar else None,
        read_structured_outputs(fields.structured_outputs, "structured_outputs."),
        read_structured_outputs(older, "guided_"),
    ]
    given = [grammar for grammar in grammars if grammar is not None]
    if len(given) > 1:
        raise RequestError("Use only one of response_format and structured_outputs.", param="response_format")
    return given[0] if given else None


def _prompts(prompt: str | list[str | int | list[int]], suffix: str) -> tuple[str | Infill | tuple[Segment, ...], ...]:
    """Return the prompts, each a text or token ids, or with a suffix an infill. Raises: RequestError."""
    given = [prompt] if isinstance(prompt, str) else prompt
    ids = tuple(one for one in given if isinstance(one, int))
    if 0 < len(ids) < len(given):
        raise RequestError("prompt: token ids and texts cannot be mixed.", param="prompt")
    prompts = (
        [ids] if ids else [one if isinstance(one, str) else tuple(one) for one in given if not isinstance(one, int)]
    )
    if suffix:
        texts = [one for one in prompts if isinstance(one, str)]
        if not texts or len(texts) < len(prompts):
            raise RequestError("suffix: with token ids there is no suffix; send the prompt as text.", param="suffix")
        return tuple(Infill(text, suffix) for text in texts)
    if not prompts or not all(prompts):
        raise RequestError("The prompt is empty.", param="prompt")
    return tuple(one if isinstance(one, str) else (one,) for one in prompts)


def _usage(fields: _Body, notes: list[str]) -> UsageShown:
    options = fields.stream_options
    if options is None or not options.include_usage:
        return "never"
    if not fields.stream:
        notes.append("stream_options")
    return "always" if options.continuous_usage_stats else "at_end"


def _shows_progress(fields: _Body, server: ServerFacts, notes: list[str]) -> bool:
    return shows_progress(server, notes, wanted=fields.return_progress, is_streamed=bool(fields.stream))


_CHAT = {"messages": [{"role": "user", "content": "Tell me a story about dogs."}], "max_tokens": 64, "stream": True}

WIRE = Wire(
    name="openai",
    title="OpenAI: chat and text completions",
    operations=(
        Operation(
            "POST",
            "/v1/chat/completions",
            Generate(parse_chat, conversation=branch_point_of),
            "Answer a chat.",
            body=OpenAIChatBody,
            has_images=True,
            example=_CHAT,
        ),
        Operation(
            "POST",
            "/v1/completions",
            Generate(parse_completion),
            "Continue prompts.",
            body=CompletionBody,
            example={"prompt": "The river runs", "max_tokens": 32},
        ),
        Operation(
            "POST",
            "/v1/fim/completions",
            Generate(parse_fim),
            "Fill the gap between two texts, as on Mistral's API.",
            body=FimBody,
            example={"prompt": "def mean(values):\n    total = ", "suffix": "\n    return total", "max_tokens": 32},
        ),
        Operation("GET", "/v1/models", Show(list_models), "List the models.", query=("client_version",)),
        Operation("GET", "/v1/models/{name:path}", Show(show_model), "Show a model."),
        embeddings.OPERATION,
        *rerank.OPERATIONS,
        Operation("GET", "/version", Show(show_version), "The version of the server, as on vLLM."),
    ),
    encode_error=encode_error,
    find_model=named_model,
    unused=_UNUSED,
    names={
        "input": "documents",  # of a ranking; embeddings have `input`
        "include_special": "skip_special_tokens",
        "prompt_logprobs": "echo",
        "max_tokens": "max_completion_tokens",
        "prompt": "messages",
        "top_logprobs": "logprobs",
    },
)
