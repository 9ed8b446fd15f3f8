"""Ollama's wire: `/api/chat` and `/api/generate` with lines of JSON, and its routes about models.

Missing parameters have Ollama's defaults (temperature 0.8, top_k 40, top_p 0.9) if the engine supports them, so that
answers are similar. Answers: `ollama_answers.py`. Intended divergences:

1. A prompt that is too long is refused; Ollama drops its beginning. `num_ctx`, `keep_alive` and other options of
   loading are settings of this server, and are named as ignored.
2. `num_predict` of -1 or -2 means `--default-max-tokens`, like no value. Penalties count prompt and answer.
3. Durations that are not measured are left out. `context` is not supported.
4. `/api/version` returns the version of Ollama with this API, because clients compare it.
5. A digest is that of the model's name: `ollama ls` shows its first twelve characters, and fails without it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec.structs import asdict

from tailrace.dialects import ollama_models as models
from tailrace.dialects.answers import no_embeddings, refused
from tailrace.dialects.bodies import JsonBody, read_known, refuse, require_json_or_curl, time_of, to_json
from tailrace.dialects.facts import ServerFacts
from tailrace.dialects.fields import (
    MAX_MESSAGES,
    ChatMessage,
    CommonFields,
    RepetitionPenalty,
    SamplingFields,
    TemplateValues,
    ToolCallBody,
    read_messages,
    sampling_of,
)
from tailrace.dialects.grammars import ANY_OBJECT, grammar_of_schema
from tailrace.dialects.ollama_answers import OllamaView, encode_error
from tailrace.dialects.plain import bare_request
from tailrace.dialects.reasoning import Effort, effort_values, switch_values, unread_reasoning
from tailrace.dialects.tools import Tool, choose_tools
from tailrace.dialects.wire import Generate, GenerateCall, Operation, ParsedRequest, Reply, Show, Wire
from tailrace.errors import RequestError, UnsupportedParameter
from tailrace.types import GenerateRequest, Grammar, Message, Sampling

__all__ = ["WIRE"]

_DEFAULTS = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}
_UNLOADED = (0, "0", "0s", "0m")
_COMMON = frozenset(CommonFields.__struct_fields__)
_REFUSED: dict[str, tuple[object, ...]] = {
    "context": ([],),
    "images": ([],),
    "shift": (False,),
    "suffix": ("",),
    "template": ("",),
    "truncate": (False,),
}
_REFUSED_OPTIONS: dict[str, tuple[object, ...]] = {
    "mirostat": (0,),
    "penalize_newline": (True,),
    "repeat_last_n": (-1,),
    "tfs_z": (1, 1.0),
}


class Options(CommonFields, kw_only=True):
    num_predict: Annotated[int, msgspec.Meta(ge=-2, le=2**31 - 1)] | None = None
    repeat_penalty: RepetitionPenalty | None = None


class _Body(msgspec.Struct, kw_only=True):
    model: Annotated[str, msgspec.Meta(min_length=1)]
    stream: bool | None = None
    format: JsonBody | Literal["", "json"] | None = None
    options: Options | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    think: bool | Literal["low", "medium", "high"] | None = None


class OllamaGenerateBody(_Body, kw_only=True):
    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None


class OllamaTurn(msgspec.Struct):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None
    tool_calls: list[ToolCallBody] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaChatBody(_Body, kw_only=True):
    messages: Annotated[list[OllamaTurn], msgspec.Meta(max_length=MAX_MESSAGES)] | None = None
    tools: list[Tool] | None = None


_T = TypeVar("_T", bound=_Body)


def parse_generate(request: ParsedRequest) -> GenerateCall | Reply:
    """Raises: RequestError."""
    fields, ignored = _read(request, OllamaGenerateBody)
    if not fields.prompt:
        return _load_reply(request, fields.model, {"response": ""})
    sampling = _sampling(request.server, fields, _grammar(fields.format))
    if fields.raw:
        if fields.system:
            raise RequestError("raw cannot be used with system.", param="system")
        generate = GenerateRequest(prompts=(fields.prompt,), sampling=sampling)
    elif fields.system:
        messages = (Message("system", fields.system), Message("user", fields.prompt))
        generate = GenerateRequest(messages=messages, sampling=sampling)
    else:
        generate = replace(bare_request(request.server, fields.prompt, sampling), split_reasoning=True)
    if fields.think and not generate.messages:
        raise RequestError("think needs a prompt that uses the chat template.", param="think")
    return _call(request, fields, generate, ignored)


def parse_chat(request: ParsedRequest) -> GenerateCall | Reply:
    """Raises: RequestError."""
    fields, ignored = _read(request, OllamaChatBody)
    if not fields.messages:
        return _load_reply(request, fields.model, {"message": {"role": "assistant", "content": ""}})
    tools = choose_tools(fields.tools or [], "<auto>", request.server)
    grammar = _grammar(fields.format)
    if tools.shown and grammar is not None:
        raise RequestError("format cannot be used with tools.", param="format")
    messages = _messages(fields.messages)
    sampling = _sampling(request.server, fields, grammar)
    continues = messages[-1].role == "assistant" and not messages[-1].tool_calls
    generate = GenerateRequest(messages=messages, tools=tools.shown, continue_final=continues, sampling=sampling)
    ignored += unread_reasoning(messages, request.server, continues=continues, name="messages[].thinking")
    return _call(request, fields, generate, ignored + tools.ignored)


def _read(request: ParsedRequest, shape: type[_T]) -> tuple[_T, tuple[str, ...]]:
    body, options = request.body, request.body.get("options")
    if isinstance(options, dict):
        refuse(options, _REFUSED_OPTIONS)
        body = {**body, "options": {name: one for name, one in options.items() if name not in _REFUSED_OPTIONS}}
    return read_known(body, shape, _REFUSED)


def _call(request: ParsedRequest, fields: _Body, generate: GenerateRequest, ignored: tuple[str, ...]) -> GenerateCall:
    view = OllamaView(
        model=request.server.model,
        is_chat=isinstance(fields, OllamaChatBody),
        logprobs=generate.sampling.logprobs,
        reads_tools=bool(generate.tools),
        shows_thinking=fields.think is not False,
    )
    values = _thinking(request.server, fields.think) if generate.messages else {}
    named = replace(generate, model=models.served_name(request.server, fields.model), template_values=values)
    return GenerateCall(named, view, fields.stream is not False, ignored)


def _thinking(server: ServerFacts, think: bool | Effort | None) -> TemplateValues:
    """Return the values that control thinking in the chat template. Raises: UnsupportedParameter for a model without
    thinking, or without levels of it."""
    if think is None:
        return {}
    if think and not server.splits_reasoning:
        raise UnsupportedParameter("think: this model does not support thinking here.", param="think")
    if isinstance(think, bool):
        return switch_values(server, on=think)
    if not (values := effort_values(server, think)):
        raise UnsupportedParameter("think: this model has no levels of thinking.", param="think")
    return values


def _load_reply(request: ParsedRequest, name: str, shown: JsonBody) -> Reply:
    """Answer a request without a prompt, which loads a model. Raises: UnknownModel; UnsupportedParameter if the request
    unloads the model."""
    models.require(request.server, name)
    if request.body.get("keep_alive") in _UNLOADED:
        raise UnsupportedParameter("This server keeps its model loaded.", param="keep_alive")
    head = {"model": request.server.model, "created_at": time_of(request.server.started_s)}
    return Reply(to_json({**head, **shown, "done": True, "done_reason": "load"}))


def _grammar(value: object) -> Grammar | None:
    if value is None or value == "":
        return None
    return ANY_OBJECT if value == "json" else grammar_of_schema(value, "format")


def _sampling(server: ServerFacts, fields: _Body, grammar: Grammar | None) -> Sampling:
    """Return the parameters, with Ollama's defaults. Raises: RequestError."""
    options = fields.options or Options()
    if fields.top_logprobs and not fields.logprobs:
        raise RequestError("top_logprobs needs logprobs.", param="top_logprobs")
    chosen: dict[str, Any] = {name: value for name, value in _DEFAULTS.items() if name in server.parameters}
    chosen |= {name: value for name, value in asdict(options).items() if value is not None}
    named = SamplingFields(
        **{name: value for name, value in chosen.items() if name in _COMMON},
        repetition_penalty=options.repeat_penalty,
        max_tokens=options.num_predict if (options.num_predict or 0) > 0 else None,
    )
    return replace(
        sampling_of(named),
        typical_p=options.typical_p or 1.0,  # also with temperature 0
        seed=None if options.seed == -1 else options.seed,
        logprobs=bool(fields.logprobs),
        top_logprobs=fields.top_logprobs or 0,
        grammar=grammar,
    )


class _UnansweredCalls:
    """Tool calls without a result, the oldest first. The time is linear in the length of the chat."""

    def __init__(self) -> None:
        self._all: deque[str] = deque()
        self._by_name: dict[str, deque[str]] = {}
        self._answered: set[str] = set()

    def add(self, call_id: str, name: str) -> None:
        self._all.append(call_id)
        self._by_name.setdefault(name, deque()).append(call_id)

    def take(self, name: str | None) -> str | None:
        """Return the call to which the next result belongs; `name` is the tool's, if the result has it."""
        ids = self._all if name is None else self._by_name.get(name, deque())
        while ids:
            call_id = ids.popleft()
            if call_id not in self._answered:
                self._answered.add(call_id)
                return call_id
        return None


def _messages(turns: Sequence[OllamaTurn]) -> tuple[Message, ...]:
    """Return the messages of a chat. Adds ids to calls and results, which templates need and Ollama does not have.

    Raises: RequestError.
    """
    messages: list[ChatMessage] = []
    unanswered = _UnansweredCalls()
    num_calls = 0
    for turn in turns:
        if turn.images:
            raise UnsupportedParameter("images are not supported here.", param="messages")
        for call in turn.tool_calls or ():
            num_calls += 1
            call.id = call.id or f"call{num_calls:05}"  # some templates require nine characters
            unanswered.add(call.id, call.function.name)
        answered = turn.tool_call_id
        if turn.role == "tool" and not answered:
            answered = unanswered.take(turn.tool_name)
        messages.append(ChatMessage(turn.role, turn.content or "", turn.tool_calls, answered, turn.thinking))
    return read_messages(messages)


_NO_PULLING = "Clients cannot fetch models here. `tailrace serve MODEL` fetches one when it starts."
_MODEL = {"model": "default"}
_TURNS = [{"role": "user", "content": "Tell me a story about dogs."}]


WIRE = Wire(
    name="ollama",
    title="Ollama",
    operations=(
        Operation(
            "POST",
            "/api/chat",
            Generate(parse_chat),
            "Answer a chat.",
            body=OllamaChatBody,
            check=require_json_or_curl,
            example={**_MODEL, "messages": _TURNS, "options": {"num_predict": 64}},
        ),
        Operation(
            "POST",
            "/api/generate",
            Generate(parse_generate),
            "Answer a prompt.",
            body=OllamaGenerateBody,
            check=require_json_or_curl,
            example={**_MODEL, "prompt": "Why do rivers bend?", "options": {"num_predict": 64}},
        ),
        Operation(
            "POST",
            "/api/show",
            Show(models.show_model),
            "Show what a model can do.",
            body=models.ShowBody,
            check=require_json_or_curl,
            example=_MODEL,
        ),
        no_embeddings("/api/embed"),
        no_embeddings("/api/embeddings"),
        Operation("POST", "/api/pull", refused(_NO_PULLING), "Refused: models are chosen when the server starts."),
        Operation("GET", "/api/tags", Show(models.list_models), "List the models."),
        Operation("GET", "/api/ps", Show(models.list_running), "List the loaded models."),
        Operation("GET", "/api/version", Show(models.show_version), "The version of Ollama with this API."),
    ),
    encode_error=encode_error,
    find_model=models.find_tagged,
    prefix="/api/",
    refused=_REFUSED | {f"options.{name}": harmless for name, harmless in _REFUSED_OPTIONS.items()},
)
