"""text-generation-inference's wire. Answers: `tgi_answers.py`.

One event per token, `data: ` with one line of JSON, no `[DONE]`; the last one has `generated_text` and the details.
Defaults and error texts are those of TGI 3.3.7, with these intended divergences:

1. Refusals of a streaming request have status 422 or 429, as in TGI's OpenAPI document but not in its code.
2. An incomplete character at the end is shown as U+FFFD; TGI then loses the whole `generated_text`.
3. A stop string is also found inside a token, and no text after it is shown.
4. A prompt and `max_new_tokens` that together exceed the window are refused, also above 1,024 new tokens.
5. Text can be held back because it may become a stop string. If then the end token comes, this token has the text and
   is not marked as special, because clients drop special tokens.
6. If the engine has no logprobs (an upstream server, for example), they are null.
7. `decoder_input_details` lists the tokens of the prompt; TGI needs a flag for them, and otherwise returns an empty
   list. Without an engine that has their logprobs, these are null.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec.structs import replace

from tailrace.dialects import (
    MAX_STOPS,
    Generate,
    GenerateCall,
    JsonBody,
    Operation,
    ParsedRequest,
    Reply,
    ServerFacts,
    Show,
    Wire,
    eyes_of,
    grammar_of_regex,
    grammar_of_schema,
    ignored,
    image_of_url,
    read_known,
    require_json,
    stops,
    to_json,
    unwrapped_schema,
)
from tailrace.errors import RequestError, UnsupportedMediaType
from tailrace.types import IMAGE_MARK, SHAPING, GenerateRequest, Grammar, Image, Sampling
from tailrace_plugins.tgi.tgi_answers import TGIView, encode_error
from tailrace_plugins.tgi.tgi_tokenize import TOKENIZE, find_adapter

__all__ = ["WIRE", "encode_error", "parse_generate", "parse_root", "parse_stream", "read_grammar"]

_MAX_TOP_N_TOKENS = 5
_MAX_BEST_OF = 2
# A link has no parenthesis and no space. So a search reads a text once, also if no link in it is closed.
_IMAGE = re.compile(r"!\[\]\((data:[^()\s]*|https?://[^()\s]*)\)", re.IGNORECASE)
_MAX_FACTOR = 100.0  # above it engines compute infinities
_MIN_TEMPERATURE = 1e-3  # below it the likeliest token is certain, and logits overflow
_MAX_SEED = 2**64 - 1
_UNUSED = {"parameters.watermark": ignored(False)}


class TgiGrammar(msgspec.Struct):
    type: str
    value: Any  # its type depends on `type`


class Parameters(msgspec.Struct, kw_only=True):
    best_of: Annotated[int, msgspec.Meta(ge=0, lt=2**32)] | None = None
    temperature: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)] | None = None
    top_p: float | None = None
    typical_p: float | None = None
    do_sample: bool = False
    max_new_tokens: Annotated[int, msgspec.Meta(ge=0, lt=2**32)] | None = None
    return_full_text: bool | None = None
    stop: list[str] = []
    truncate: Annotated[int, msgspec.Meta(ge=0, lt=2**32)] | None = None
    details: bool = False
    decoder_input_details: bool = False
    seed: Annotated[int, msgspec.Meta(ge=0)] | None = None
    top_n_tokens: Annotated[int, msgspec.Meta(ge=0, lt=2**32)] | None = None
    grammar: TgiGrammar | None = None
    adapter_id: str | None = None


class TgiBody(msgspec.Struct, kw_only=True):
    inputs: str
    parameters: Parameters | None = None
    stream: bool = False


def check_root(headers: Mapping[str, str]) -> None:
    """Check the type of `POST /`, which Ray's tutorial uses with ?prompt=. Raises: UnsupportedMediaType."""
    if not headers.get("content-type"):
        raise UnsupportedMediaType(
            "Send a prompt as /?prompt=, or JSON with inputs as application/json.", param="inputs"
        )
    require_json(headers)


def parse_root(request: ParsedRequest) -> GenerateCall:
    """Parse `POST /`. The field `stream` decides whether to stream. By default the answer includes the prompt."""
    return _parse(request, whole_in_list=True, full_text_by_default=True)


def parse_generate(request: ParsedRequest) -> GenerateCall:
    return _parse(request, stream=False)


def parse_stream(request: ParsedRequest) -> GenerateCall:
    return _parse(request, stream=True)


def _parse(
    request: ParsedRequest,
    *,
    stream: bool | None = None,
    whole_in_list: bool = False,
    full_text_by_default: bool = False,
) -> GenerateCall:
    """Raises: RequestError."""
    fields, unused = read_known(request.body, TgiBody, _UNUSED)
    given = fields.parameters if fields.parameters is not None else Parameters(do_sample=True)
    streaming = fields.stream if stream is None else stream
    sampled = _is_sampled(given)
    _check(given, sampled, streaming)
    if not fields.inputs:
        raise RequestError("`inputs` cannot be empty", param="inputs")
    if given.truncate is not None and not 0 < given.truncate < request.server.generator.limit_tokens():
        most = request.server.generator.limit_tokens() - 1
        text = f"`truncate` must be strictly positive and less than {most}. Given: {given.truncate}"
        raise RequestError(text, param="truncate")
    if given.grammar is not None and "grammar" not in request.server.generator.parameters:
        raise RequestError("grammar is not supported", param="grammar")
    sampling = _sampling(given, sampled, logprobs="logprobs" in request.server.generator.parameters)
    if given.decoder_input_details and "prompt_logprobs" in request.server.generator.parameters:
        sampling = replace(sampling, prompt_logprobs=0)
    text, images = _without_images(fields.inputs, request.server)
    generate = GenerateRequest(
        model=given.adapter_id,
        prompts=(text,),
        images=images,
        sampling=sampling,
        truncate=given.truncate,
        may_shorten=False,
    )
    full_text = full_text_by_default if given.return_full_text is None else given.return_full_text
    view = TGIView(
        whole_in_list=whole_in_list,
        details=given.details or given.decoder_input_details,
        prefill=given.decoder_input_details,
        full_text=full_text,
        sampled=sampled,
    )
    return GenerateCall(generate, view, streaming, unused)


def _without_images(text: str, server: ServerFacts) -> tuple[str, tuple[Image, ...]]:
    """Return a prompt with marks where its images are, and the images: in Markdown, as TGI has them. A model
    without eyes reads the Markdown. Unlike TGI, nothing is fetched: a text with Markdown may be anybody's, not only the
    client's. Raises: RequestError."""
    images = eyes_of(server)
    if images is None or "![](" not in text:
        return text, ()

    def mark(found: re.Match[str]) -> str:
        image = image_of_url(found[1], "inputs")
        if image.url:
            raise RequestError("inputs: an image must be a data URL: ![](data:image/png;base64,…)", param="inputs")
        images.append(image)
        return IMAGE_MARK

    return _IMAGE.sub(mark, text), tuple(images)


def _check(given: Parameters, sampled: bool, streaming: bool) -> None:
    """Check TGI's ranges in TGI's order, with its messages. Raises: RequestError."""
    best_of = 1 if given.best_of is None else given.best_of
    if streaming and best_of != 1:
        raise RequestError("`best_of` != 1 is not supported when streaming tokens", param="best_of")
    if streaming and given.decoder_input_details:
        text = "`decoder_input_details` == true is not supported when streaming tokens"
        raise RequestError(text, param="decoder_input_details")
    if best_of > _MAX_BEST_OF:
        raise RequestError(f"`best_of` must be > 0 and <= {_MAX_BEST_OF}. Given: {best_of}", param="best_of")
    if best_of > 1 and not sampled:
        raise RequestError("you must use sampling when `best_of` is > 1", param="best_of")
    _check_ranges(given)
    if given.max_new_tokens == 0:
        raise RequestError("`max_new_tokens` must be strictly positive", param="max_new_tokens")
    if len(given.stop) > MAX_STOPS:
        count = len(given.stop)
        raise RequestError(f"`stop` supports up to {MAX_STOPS} stop sequences. Given: {count}", param="stop")
    if best_of > 1 and given.seed is not None:
        raise RequestError("`seed` must not be set when `best_of` > 1", param="seed")
    if given.seed is not None and given.seed > _MAX_SEED:
        raise RequestError(f"`seed` must be <= {_MAX_SEED}", param="seed")
    if (given.top_n_tokens or 0) > _MAX_TOP_N_TOKENS:
        text = f"`top_n_tokens` must be >= 0 and <= {_MAX_TOP_N_TOKENS}. Given: {given.top_n_tokens}"
        raise RequestError(text, param="top_n_tokens")


def _check_ranges(given: Parameters) -> None:
    for name in ("temperature", "repetition_penalty"):
        value = getattr(given, name)
        if value is not None and value <= 0:
            raise RequestError(f"`{name}` must be strictly positive", param=name)
        if (value or 0.0) > _MAX_FACTOR:
            raise RequestError(f"`{name}` must be <= {_MAX_FACTOR}", param=name)
    if given.frequency_penalty is not None and not -2 <= given.frequency_penalty <= 2:
        raise RequestError("`frequency_penalty` must be >= -2.0 and <= 2.0", param="frequency_penalty")
    for name in ("top_p", "typical_p"):
        value = getattr(given, name)
        if value is not None and not 0 < value < 1:
            raise RequestError(f"`{name}` must be > 0.0 and < 1.0", param=name)
    if given.top_k is not None and given.top_k <= 0:
        raise RequestError("`top_k` must be strictly positive", param="top_k")


def _is_sampled(given: Parameters) -> bool:
    """Return whether any field turns sampling on, as in TGI. Otherwise the likeliest token is taken."""
    if given.temperature is not None and given.temperature < _MIN_TEMPERATURE:
        return False
    asks = any(value is not None for value in (given.top_k, given.top_p, given.typical_p))
    return given.do_sample or asks or given.temperature not in (None, 1.0)


def _sampling(given: Parameters, sampled: bool, *, logprobs: bool) -> Sampling:
    return Sampling(
        temperature=(1.0 if given.temperature is None else given.temperature) if sampled else 0.0,
        top_p=(given.top_p or 1.0) if sampled else 1.0,
        top_k=(given.top_k or 0) if sampled else 0,
        typical_p=(given.typical_p or 1.0) if sampled else 1.0,
        repetition_penalty=given.repetition_penalty or 1.0,
        frequency_penalty=given.frequency_penalty or 0.0,
        seed=given.seed,
        max_tokens=given.max_new_tokens,
        stop=stops(given.stop),
        include_stop=True,
        logprobs=logprobs,
        top_logprobs=given.top_n_tokens or 0,
        grammar=read_grammar(given.grammar.type, given.grammar.value) if given.grammar is not None else None,
        n=given.best_of or 1,
    )


def read_grammar(kind: str, value: object) -> Grammar:
    """Read TGI's `grammar`, with TGI's error messages. Raises: RequestError."""
    if kind == "regex":
        return grammar_of_regex(value, "grammar")
    if kind not in ("json", "json_object", "json_schema"):
        raise RequestError("grammar is not valid: the types are json, json_schema and regex", param="grammar")
    if kind == "json_schema":
        value = unwrapped_schema(value)
    if not isinstance(value, dict) or "properties" not in value:
        raise RequestError("grammar is not valid: Grammar must have a 'properties' field", param="grammar")
    return grammar_of_schema(value, "grammar")


_POOLINGS = {"mean": "mean", "first": "cls", "last": "last_token"}  # the names of Text Embeddings Inference
_RERANKER = {"reranker": {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}}


def show_info(request: ParsedRequest) -> Reply:
    """The reply has the form of TGI or, if the first model makes vectors, that of Text Embeddings Inference."""
    server = request.server
    limit_tokens = server.generator.limit_tokens()
    kind: JsonBody = {
        "model_pipeline_tag": "text-generation",
        "max_concurrent_requests": server.max_requests,
        "max_best_of": _MAX_BEST_OF,
        "max_stop_sequences": MAX_STOPS,
        "max_input_tokens": limit_tokens - 1,
        "max_total_tokens": limit_tokens,
        "validation_workers": 1,
        "max_client_batch_size": server.max_prompts,
    }
    if server.task != "generate":
        embedding: JsonBody = {"embedding": {"pooling": _POOLINGS[server.pooling]}}
        kind = {
            "model_dtype": "float32",  # of the vectors and scores
            "model_type": embedding if server.task == "embed" else _RERANKER,
            "max_concurrent_requests": server.max_requests,
            "max_input_length": limit_tokens,
            "max_batch_tokens": limit_tokens * server.max_inputs,
            "max_batch_requests": None,
            "max_client_batch_size": server.max_inputs,
            "auto_truncate": False,
            "tokenization_workers": 1,
        }
    shown: JsonBody = {
        "model_id": server.model,
        "model_sha": None,
        **kind,
        "router": "tailrace",
        "version": server.version,
        "sha": None,
        "docker_label": None,
    }
    if request.others:
        shown["models"] = [one.model for one in request.every]
    return Reply(to_json(shown))


def show_health(request: ParsedRequest) -> Reply:
    if not request.server.generator.is_ready:
        return Reply(to_json({"error": "unhealthy", "error_type": "healthcheck"}), 503, retry_after_s=1.0)
    # TGI, TEI and vLLM have no body. Probes of llama.cpp's server look for this one.
    return Reply(to_json({"status": "ok"}))


_EXAMPLE = {"inputs": "What is Deep Learning?", "parameters": {"max_new_tokens": 20}}

WIRE = Wire(
    name="tgi",
    title="Text Generation Inference (TGI)",
    operations=(
        Operation(
            "POST",
            "/",
            Generate(parse_root),
            "Generate. With `stream` the answer has events.",
            body=TgiBody,
            has_images=True,
            check=check_root,
            example={**_EXAMPLE, "stream": True},
        ),
        Operation(
            "POST",
            "/generate",
            Generate(parse_generate),
            "Generate.",
            body=TgiBody,
            has_images=True,
            example=_EXAMPLE,
        ),
        Operation(
            "POST",
            "/generate_stream",
            Generate(parse_stream),
            "Generate, as events.",
            body=TgiBody,
            has_images=True,
            example=_EXAMPLE,
        ),
        *TOKENIZE,
        Operation("GET", "/info", Show(show_info), "The model and its limits."),
        Operation("GET", "/health", Show(show_health), "Whether requests are accepted."),
        Operation("GET", "/v1/health", Show(show_health), "Whether requests are accepted, as on llama.cpp's server."),
        Operation("GET", "/ping", Show(show_health), "Whether requests are accepted, for SageMaker."),
    ),
    encode_error=encode_error,
    find_model=find_adapter,
    unused=_UNUSED,
    names={"model": "parameters.adapter_id", "top_logprobs": "top_n_tokens"}
    | {name: f"parameters.{name}" for name in SHAPING},
)
