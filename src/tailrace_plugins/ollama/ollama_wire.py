"""Ollama's wire: `/api/chat` and `/api/generate` with lines of JSON, and its routes about models.

Missing parameters have Ollama's defaults (temperature 0.8, top_k 40, top_p 0.9) if the engine supports them, so that
answers are similar. Answers: `ollama_answers.py`. Intended divergences:

1. A prompt that is too long is refused; Ollama drops its beginning (`truncate`), and that of a long answer (`shift`).
   `num_ctx`, `keep_alive` and other options of loading are settings of this server, and are named as ignored. A model
   that a client unloads stays as long as the server's settings say.
2. Without `num_predict`, an answer has at most `--default-max-tokens`; a negative one is no limit. Penalties count
   prompt and answer.
3. Durations that are not measured are left out. `context` is not supported.
4. `/api/version` returns the version of Ollama with this API, because clients compare it.
5. A digest is that of the model's name, size and details, since hashing the weights takes long: `ollama ls` shows its
   first twelve characters, and fails without it. A size is that of the weights, also where Ollama adds the cache.
6. Clients cannot fetch models; `/api/pull` of a served model succeeds at once.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec.structs import asdict, replace

from tailrace.dialects import (
    MAX_MESSAGES,
    ChatMessage,
    CommonFields,
    Effort,
    Generate,
    GenerateCall,
    JsonBody,
    Operation,
    Other,
    ParsedRequest,
    RepetitionPenalty,
    Reply,
    SamplingFields,
    ServerFacts,
    Show,
    TemplateValues,
    Tool,
    ToolCallBody,
    ToolChoice,
    Wire,
    bare_request,
    choose_tools,
    effort_values,
    eyes_of,
    first_asked,
    grammar_of_schema,
    ignored,
    image_of_base64,
    note,
    omit,
    read_known,
    read_messages,
    read_tools,
    refused,
    require_json_or_curl,
    sampling_of,
    seed_of,
    switch_values,
    time_of,
    to_json,
    unread_reasoning,
    unsupported,
    with_images,
)
from tailrace.errors import RequestError
from tailrace.types import IMAGE_MARK, SHAPING, GenerateRequest, Grammar, Image, Infill, Message, Sampling
from tailrace_plugins.ollama import ollama_models as models
from tailrace_plugins.ollama.ollama_answers import OllamaView, encode_error
from tailrace_plugins.ollama.ollama_embeddings import OPERATIONS

__all__ = ["WIRE"]

_DEFAULTS = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}
_UNLOADED = re.compile(r"0+(\.0*)?(ns|us|ms|s|m|h)?")  # a `keep_alive` that unloads the model
_FOR_EVER = (-1, "-1", "-1s", "-1m", "-1h")
_LAST_TOKENS = (-1, 64)  # of `repeat_last_n`: all tokens, and Ollama's default
_COMMON = frozenset(CommonFields.__struct_fields__)
_UNUSED = {
    "context": refused([]),
    "keep_alive": ignored(*_FOR_EVER),
    "options.mirostat": ignored(0),
    "options.num_keep": ignored(0, 4),
    "options.penalize_newline": ignored(True),
    "options.tfs_z": ignored(1),
    "shift": ignored(True, False),
    "template": refused(""),
    "truncate": ignored(True, False),
}


class Options(CommonFields, kw_only=True):
    num_predict: int | None = None
    repeat_last_n: int | None = None
    repeat_penalty: RepetitionPenalty | None = None


class _Body(msgspec.Struct, kw_only=True):
    model: Annotated[str, msgspec.Meta(min_length=1)]
    stream: bool | None = None
    format: JsonBody | Literal["", "json"] | None = None
    options: Options | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=20)] | None = None
    think: bool | Effort | None = None


class OllamaGenerateBody(_Body, kw_only=True):
    prompt: str | None = None
    images: list[str] | None = None
    system: str | None = None
    suffix: str | None = None
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
    tools: list[Tool | Other] | None = None


def parse_generate(request: ParsedRequest) -> GenerateCall | Reply:
    """Raises: RequestError."""
    fields, unused = read_known(request.body, OllamaGenerateBody, _UNUSED)
    notes = list(unused)
    prompt = fields.prompt or ""
    if not prompt and not fields.suffix:
        return _load_reply(request, fields.model, {"response": ""}, notes)
    sampling = _sampling(request.server, fields, _grammar(fields.format), notes)
    if fields.suffix or fields.raw:
        which = "suffix" if fields.suffix else "raw"
        for name in ("system", "images"):
            if getattr(fields, name):
                raise RequestError(f"{which} cannot be used with {name}.", param=name)
        text = Infill(prompt, fields.suffix) if fields.suffix else prompt
        generate = GenerateRequest(prompts=(text,), sampling=sampling)
    elif fields.system or fields.images:
        system = (Message("system", fields.system),) if fields.system else ()
        images = eyes_of(request.server)
        content = _marked(fields.images or (), "images", notes, images, is_asked=True) + prompt
        messages = with_images((*system, Message("user", content)), images or ())
        generate = GenerateRequest(messages=messages, sampling=sampling)
    else:
        generate = replace(bare_request(request.server, prompt, sampling), split_reasoning=True)
    return _call(request, fields, generate, notes)


def parse_chat(request: ParsedRequest) -> GenerateCall | Reply:
    """Raises: RequestError."""
    fields, unused = read_known(request.body, OllamaChatBody, _UNUSED)
    notes = list(unused)
    if not fields.messages:
        return _load_reply(request, fields.model, {"message": {"role": "assistant", "content": ""}}, notes)
    offers = read_tools(fields.tools or (), notes)
    tools = choose_tools(offers, ToolChoice(), request.server, notes, any_name=True)
    grammar = tools.grammar(_grammar(fields.format))
    images = eyes_of(request.server)
    messages = read_messages(_messages(fields.messages, notes, images), notes, images=images)
    sampling = _sampling(request.server, fields, grammar, notes)
    continues = messages[-1].role == "assistant" and not messages[-1].tool_calls
    generate = GenerateRequest(
        messages=messages,
        tools=tools.shown,
        calls=tools.calls(single=False),
        continue_final=continues,
        sampling=sampling,
    )
    notes += unread_reasoning(messages, request.server, continues=continues, name="messages[].thinking")
    return _call(request, fields, generate, notes)


def _call(request: ParsedRequest, fields: _Body, generate: GenerateRequest, notes: list[str]) -> GenerateCall:
    view = OllamaView(
        model=request.server.model,
        is_chat=isinstance(fields, OllamaChatBody),
        logprobs=generate.sampling.logprobs,
        calls=generate.calls,
        shows_thinking=fields.think is not False,
    )
    values = _thinking(request.server, fields.think, notes, has_template=bool(generate.messages))
    named = replace(generate, model=models.served_name(request.server, fields.model), template_values=values)
    return GenerateCall(named, view, fields.stream is not False, tuple(notes))


def _thinking(
    server: ServerFacts, think: bool | Effort | None, notes: list[str], *, has_template: bool
) -> TemplateValues:
    """Return the values that control thinking in the chat template. A model without levels of it thinks, or does
    not."""
    if think is None or (think is False and not has_template):
        return {}
    if think and not (has_template and server.chat.splits_reasoning):
        notes.append("think")
        return {}
    levels = {} if isinstance(think, bool) else effort_values(server, think)
    if not levels and isinstance(think, str):
        notes.append(note("think", "has no levels"))
    return levels or switch_values(server, on=think not in (False, "none"))


def _load_reply(request: ParsedRequest, name: str, shown: JsonBody, notes: list[str]) -> Reply:
    """Answer a request without a prompt, which loads or unloads a model. Raises: UnknownModel."""
    models.require(request.server, name)
    head = {"model": request.server.model, "created_at": time_of(request.server.started_s)}
    is_unload = _UNLOADED.fullmatch(str(request.body.get("keep_alive", "")))
    done = {"done": True, "done_reason": "unload" if is_unload else "load"}
    return Reply(to_json({**head, **shown, **done}), ignored=tuple(notes))


def _grammar(value: object) -> Grammar | None:
    if value is None or value == "":
        return None
    return grammar_of_schema({"type": "object"} if value == "json" else value, "format")


def _sampling(server: ServerFacts, fields: _Body, grammar: Grammar | None, notes: list[str]) -> Sampling:
    """Return the parameters, with Ollama's defaults where the model recommends nothing. Raises: RequestError."""
    options = fields.options or Options()
    wants_logprobs = bool(fields.top_logprobs) if fields.logprobs is None else fields.logprobs
    if options.repeat_last_n == 0:  # no tokens count
        options.repeat_penalty = 1.0
    elif options.repeat_last_n is not None and options.repeat_last_n not in _LAST_TOKENS:
        notes.append("options.repeat_last_n")
    defaults = {name: value for name, value in _DEFAULTS.items() if name in server.generator.parameters}
    chosen: dict[str, Any] = {name: value for name, value in asdict(options).items() if value is not None}
    named = SamplingFields(
        **{name: value for name, value in chosen.items() if name in _COMMON},
        repetition_penalty=options.repeat_penalty,
        max_tokens=-1 if (options.num_predict or 0) < 0 else options.num_predict or None,
    )
    return replace(
        sampling_of(named, {**defaults, **server.recommended_sampling}),
        typical_p=options.typical_p or 1.0,  # also with temperature 0
        seed=None if options.seed == -1 else seed_of(options.seed),
        logprobs=wants_logprobs,
        top_logprobs=(fields.top_logprobs or 0) if wants_logprobs else 0,
        grammar=grammar,
    )


def _messages(turns: Sequence[OllamaTurn], notes: list[str], images: list[Image] | None) -> list[ChatMessage]:
    """Return the messages of a chat in OpenAI's format. `images` gets the images of users, which come before the text.
    Raises: as `_marked`."""
    messages = []
    asked_from = first_asked([turn.role for turn in turns])
    for index, turn in enumerate(turns):
        content = turn.content or ""
        if turn.images:
            is_asked, is_answer = index >= asked_from and turn.role == "user", turn.role == "assistant"
            where, seen = f"messages[{index}].images", images if turn.role == "user" else None
            marks = _marked(turn.images, where, notes, seen, is_asked=is_asked, is_answer=is_answer)
            content = "\n".join(filter(None, (content, marks))) if seen is None else marks + content
        messages.append(
            ChatMessage(turn.role, content, turn.tool_calls, turn.tool_call_id, turn.tool_name, None, turn.thinking)
        )
    return messages


def _marked(
    given: Sequence[str],
    where: str,
    notes: list[str],
    images: list[Image] | None,
    *,
    is_asked: bool,
    is_answer: bool = False,
) -> str:
    """Return the marks of images, which `images` gets; without eyes a placeholder. Raises: UnsupportedParameter for an
    image that the user asks about and the model does not read; RequestError for one that cannot be read."""
    if not given:
        return ""
    if images is None:
        return omit("image", where, notes, is_asked=is_asked, is_answer=is_answer)
    images += (image_of_base64(one, f"{where}[{number}]") for number, one in enumerate(given))
    return IMAGE_MARK * len(given)


_FIXED = "Models are chosen when the server starts: `tailrace serve MODEL`, or --model for several."
_OF_MODELS: tuple[tuple[Literal["POST", "DELETE"], str], ...] = (
    ("POST", "create"),
    ("POST", "copy"),
    ("POST", "push"),
    ("POST", "blobs/{digest}"),
    ("DELETE", "delete"),
)
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
            has_images=True,
            check=require_json_or_curl,
            example={**_MODEL, "messages": _TURNS, "options": {"num_predict": 64}},
        ),
        Operation(
            "POST",
            "/api/generate",
            Generate(parse_generate),
            "Answer a prompt.",
            body=OllamaGenerateBody,
            has_images=True,
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
        *OPERATIONS,
        Operation(
            "POST",
            "/api/pull",
            Show(models.pull),
            "Succeeds for a served model. Others cannot be fetched.",
            body=models.PullBody,
            check=require_json_or_curl,
            example=_MODEL,
        ),
        *(
            Operation(method, f"/api/{path}", unsupported(_FIXED), "Refused: models are chosen when the server starts.")
            for method, path in _OF_MODELS
        ),
        Operation("GET", "/api/tags", Show(models.list_models), "List the models."),
        Operation("GET", "/api/ps", Show(models.list_running), "List the loaded models."),
        Operation("GET", "/api/version", Show(models.show_version), "The version of Ollama with this API."),
    ),
    encode_error=encode_error,
    find_model=models.find_tagged,
    prefix="/api/",
    unused=_UNUSED,
    names={"max_tokens": "options.num_predict", "prompt": "messages", "repetition_penalty": "options.repeat_penalty"}
    | {name: f"options.{name}" for name in SHAPING - {"repetition_penalty"}},
)
