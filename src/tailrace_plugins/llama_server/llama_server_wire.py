"""The wire of llama.cpp's server for texts: `POST /infill`, `POST /completion`, `POST /detokenize`, `POST
/apply-template` and `GET /props`. `POST /tokenize` is in TGI's wire, which has the same path. Embeddings are in
llama_server_vectors.py.

Editors use it: llama.vim and llama-vscode send the text around the cursor to `/infill`, Tabby and Continue send prompts
to `/completion`. Chats are on OpenAI's wire, as with llama.cpp's server itself. Source of the format: the server's
README, and the requests that these clients send.

Intended divergences: 1. An answer has no `generation_settings`, and an empty `prompt`. 2. A time
limit (`t_max_predict_ms`) is ignored and named: a client that leaves ends its answer at once. 3. The texts before and
after the gap may fill the whole window, not only one batch. 4. `n_probs` gives at most 20 tokens, fewer or none if the
engine cannot; then it is named. `post_sampling_probs` is ignored: logprobs are those of the model, before sampling.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec.structs import replace

from tailrace.dialects import (
    Generate,
    GenerateCall,
    JsonBody,
    LogitBias,
    Messages,
    Operation,
    ParsedRequest,
    Reply,
    SamplingFields,
    ServerFacts,
    Show,
    Wire,
    eyes_of,
    grammar_of_rules,
    grammar_of_schema,
    ignored,
    image_of_base64,
    logit_biases,
    named_model,
    note,
    read_fields,
    read_known,
    read_messages,
    refused,
    sampling_of,
    to_json,
)
from tailrace.errors import RequestError, UnsupportedParameter
from tailrace.types import IMAGE_MARK, GenerateRequest, Image, Infill, Sampling
from tailrace_plugins.llama_server.llama_server_answers import LlamaView, encode_error
from tailrace_plugins.llama_server.llama_server_vectors import OPERATIONS as EMBEDDINGS

__all__ = ["WIRE"]

_DEFAULTS = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
_MAX_JOINED_CHARACTERS = 8_192  # of the texts between ids, which are tokenised while the server waits
_MARKER = "<__media__>"  # stands where an image is
_MAX_FILES = 256
_MAX_RESPONSE_FIELDS = 64
_MAX_PROBS = 20  # as on all wires
_UNUSED = {
    "cache_prompt": ignored(True),
    "id_slot": ignored(-1, 0),
    "image_data": refused([]),
    "lora": refused([]),
    "min_keep": ignored(0),
    "mirostat": ignored(0),
    "multimodal_data": refused([]),
    "n_cache_reuse": ignored(0),
    "n_discard": ignored(0),
    "n_indent": ignored(0),
    "n_keep": ignored(0),
    "post_sampling_probs": ignored(False),
    "samplers": ignored(),
    "t_max_predict_ms": ignored(0, -1),
    "t_max_prompt_ms": ignored(0, -1),
    "timings_per_token": ignored(False),
}


class _Body(SamplingFields, kw_only=True):
    model: str | None = None
    n_predict: Annotated[int, msgspec.Meta(ge=-2)] | None = None
    n_probs: Annotated[int, msgspec.Meta(ge=0)] | None = None
    repeat_penalty: Annotated[float, msgspec.Meta(gt=0, le=100)] | None = None
    grammar: str | None = None
    json_schema: JsonBody | None = None
    logit_bias: LogitBias | None = None
    stream: bool | None = None
    return_tokens: bool | None = None
    response_fields: Annotated[list[str], msgspec.Meta(max_length=_MAX_RESPONSE_FIELDS)] | None = None


class MediaPrompt(msgspec.Struct, kw_only=True):
    """A text with a marker for each image, and the images as base64."""

    prompt_string: str
    multimodal_data: list[str] = []


class LlamaCompletionBody(_Body, kw_only=True):
    prompt: str | list[str | Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]] | MediaPrompt


class DetokenizeBody(msgspec.Struct, kw_only=True):
    tokens: list[Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]]
    model: str | None = None


class TemplateBody(msgspec.Struct, kw_only=True):
    messages: Messages
    model: str | None = None


class ExtraText(msgspec.Struct):
    """A piece of another file."""

    text: str = ""
    filename: str = "tmp"


class InfillBody(_Body, kw_only=True):
    input_prefix: str
    input_suffix: str
    prompt: str = ""  # what follows the prefix: the line with the cursor, up to it
    input_extra: Annotated[list[ExtraText], msgspec.Meta(max_length=_MAX_FILES)] = msgspec.field(default_factory=list)


def parse_completion(request: ParsedRequest) -> GenerateCall:
    """Raises: RequestError."""
    fields, unused = read_known(request.body, LlamaCompletionBody, _UNUSED)
    if not fields.prompt:
        raise RequestError("The prompt is empty.", param="prompt")
    if isinstance(fields.prompt, MediaPrompt):
        text, images = _with_images(request.server, fields.prompt)
        return _call(request, fields, unused, GenerateRequest(prompts=(text,), images=images))
    prompt = fields.prompt if isinstance(fields.prompt, str) else _joined(request, fields.prompt)
    return _call(request, fields, unused, GenerateRequest(prompts=(prompt,)))


def _with_images(server: ServerFacts, prompt: MediaPrompt) -> tuple[str, tuple[Image, ...]]:
    """Return the text with marks where its images are, and the images. Raises: RequestError."""
    where, given = "prompt.multimodal_data", prompt.multimodal_data
    if given and eyes_of(server) is None:
        raise UnsupportedParameter("This model takes no images.", param=where)
    if not prompt.prompt_string:
        raise RequestError("The prompt is empty.", param="prompt.prompt_string")
    if prompt.prompt_string.count(_MARKER) != len(given):
        raise RequestError(f"prompt_string needs one {_MARKER} for each image of multimodal_data.", param=where)
    images = tuple(image_of_base64(one, f"{where}[{index}]") for index, one in enumerate(given))
    return prompt.prompt_string.replace(_MARKER, IMAGE_MARK), images


def _joined(request: ParsedRequest, parts: list[str | int]) -> str | tuple[tuple[int, ...], ...]:
    """Return the prompt of a list of texts and ids. Raises: RequestError."""
    texts = [part for part in parts if isinstance(part, str)]
    if len(texts) == len(parts):
        if len(texts) > 1:
            raise UnsupportedParameter("A request has one prompt here: send one request for each text.", param="prompt")
        return texts[0]
    if sum(map(len, texts)) > _MAX_JOINED_CHARACTERS:
        raise RequestError(
            f"The texts of a prompt that has ids, too, have at most {_MAX_JOINED_CHARACTERS} characters.",
            param="prompt",
        )
    if any("\0" in text for text in texts):
        raise RequestError("Text must not contain NUL characters.", param="prompt")
    ids: list[int] = []
    for index, part in enumerate(parts):
        if isinstance(part, int):
            ids.append(part)
        else:
            ids += [token_id for token_id, *_ in request.server.prompts.tokenize(part, bos=not index)]
    return (tuple(ids),)


def parse_infill(request: ParsedRequest) -> GenerateCall:
    """Raises: RequestError."""
    fields, unused = read_known(request.body, InfillBody, _UNUSED)
    if not request.server.prompts.can_infill:
        raise _CannotInfill(
            "Infill is not supported by this model: it has no tokens that mark the text before and after a gap, or its "
            "server takes no such prompts. Serve a model for code, such as Qwen2.5-Coder."
        )
    files = tuple((one.filename, one.text) for one in fields.input_extra if one.text)
    asked = Infill(fields.input_prefix + fields.prompt, fields.input_suffix, files)
    window, answer = request.server.generator.limit_tokens(), fields.n_predict
    if answer is None or answer < 0:
        answer = request.server.default_max_tokens
    room = window - max(1, min(answer, window * 3 // 4))  # a prompt has at least a quarter of the window
    return _call(request, fields, unused, GenerateRequest(prompts=(asked,), truncate=room))


class _CannotInfill(UnsupportedParameter):
    status = 501


def _call(request: ParsedRequest, fields: _Body, unused: tuple[str, ...], generate: GenerateRequest) -> GenerateCall:
    if (fields.n or 1) > 1:
        raise UnsupportedParameter("An answer of this API has a single text: n must be 1.", param="n")
    is_only_prompt = fields.n_predict == 0  # llama.vim: read the prompt, so that the next request finds it in the cache
    sampling = _sampling(request, fields)
    if fields.n_probs and sampling.top_logprobs != fields.n_probs:
        unused += (note("n_probs", f"is {sampling.top_logprobs}" if sampling.logprobs else ""),)
    generate = replace(generate, model=fields.model or None, sampling=sampling)
    view = LlamaView(
        is_only_prompt=is_only_prompt,
        returns_tokens=bool(fields.return_tokens),
        has_probabilities=sampling.logprobs,
        response_fields=tuple(fields.response_fields or ()),
        model=request.server.model,
    )
    return GenerateCall(generate, view, bool(fields.stream), unused)


def _sampling(request: ParsedRequest, fields: _Body) -> Sampling:
    """Return the parameters, with llama.cpp's defaults where the model recommends nothing. Raises: RequestError."""
    if fields.seed == -1:
        fields.seed = None
    if fields.repeat_penalty is not None:
        fields.repetition_penalty = fields.repeat_penalty
    if fields.n_predict is not None:
        fields.max_tokens = fields.n_predict if fields.n_predict > 0 else -1 if fields.n_predict else 1
    if (fields.temperature or 0) > 2:
        fields.temperature = 2.0
    defaults = {name: value for name, value in _DEFAULTS.items() if name in request.server.generator.parameters}
    sampling = sampling_of(fields, {**defaults, **request.server.recommended_sampling})
    grammar = None if fields.json_schema is None else grammar_of_schema(fields.json_schema, "json_schema")
    if grammar is None and fields.grammar:  # the schema is preferred, as there
        grammar = grammar_of_rules(fields.grammar, "grammar")
    parameters = request.server.generator.parameters
    num_probs = fields.n_probs or 0
    return replace(
        sampling,
        grammar=grammar,
        logit_bias=logit_biases(fields.logit_bias or {}),
        logprobs=num_probs > 0 and "logprobs" in parameters,
        top_logprobs=min(num_probs, _MAX_PROBS) if "top_logprobs" in parameters else 0,
    )


def show_properties(request: ParsedRequest) -> Reply:
    """Answer with the fields that clients read to size their requests."""
    server = request.server
    return Reply(
        to_json(
            {
                "default_generation_settings": {"n_ctx": server.generator.limit_tokens()},
                "total_slots": server.max_requests,
                "model_alias": server.model,
                "model_path": server.model,
                "modalities": {"vision": server.generator.sees, "audio": False},
                "media_marker": _MARKER,
                "build_info": f"tailrace-{server.version}",
                "is_sleeping": server.state == "unloaded",
            }
        )
    )


def detokenize(request: ParsedRequest) -> Reply:
    """Answer with the fields of llama.cpp's server and of vLLM. Raises: RequestError."""
    fields, unused = read_fields(request.body, DetokenizeBody)
    try:
        text = request.server.prompts.detokenize(fields.tokens)
    except RequestError:
        raise RequestError("tokens has an id that the model does not have.", param="tokens") from None
    return Reply(to_json({"content": text, "prompt": text}), ignored=unused)


def apply_template(request: ParsedRequest) -> Reply:
    """Raises: RequestError."""
    fields, unused = read_fields(request.body, TemplateBody)
    notes = list(unused)
    text, _ = request.server.prompts.tokenize_chat(read_messages(fields.messages, notes))
    return Reply(to_json({"prompt": text}), ignored=tuple(notes))


_LINE = "def mean(values):\n    return "
_COMPLETION = {"prompt": "The river runs", "n_predict": 32}

WIRE = Wire(
    name="llama-server",
    title="llama.cpp's server: completions, infill and embeddings",
    operations=(
        Operation(
            "POST",
            "/infill",
            Generate(parse_infill),
            "Fill the gap between two texts.",
            body=InfillBody,
            example={"input_prefix": _LINE, "input_suffix": "\n\nprint(mean([1, 2]))\n", "n_predict": 16},
        ),
        *(
            Operation(
                "POST",
                path,
                Generate(parse_completion),
                "Continue a prompt.",
                body=LlamaCompletionBody,
                has_images=True,
                example=_COMPLETION,
            )
            for path in ("/completion", "/completions")
        ),
        Operation(
            "POST",
            "/detokenize",
            Show(detokenize, is_slow=True),
            "The text of tokens, as on llama.cpp's server and vLLM.",
            body=DetokenizeBody,
            example={"tokens": [1, 2, 3]},
        ),
        Operation(
            "POST",
            "/apply-template",
            Show(apply_template, is_slow=True),
            "The prompt that the chat template makes of messages.",
            body=TemplateBody,
            example={"messages": [{"role": "user", "content": "Hello"}]},
        ),
        Operation("GET", "/props", Show(show_properties), "The properties of the server, as on llama.cpp's."),
        *EMBEDDINGS,
    ),
    encode_error=encode_error,
    find_model=named_model,
    unused=_UNUSED,
    names={"max_tokens": "n_predict", "repetition_penalty": "repeat_penalty", "prompt": "input_prefix"},
)
