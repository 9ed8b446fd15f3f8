"""The wire of Triton, KServe (its v2 protocol) and Inferless: `/v2/models/{model}/infer`, `/generate` and
`/generate_stream`, each also under `/versions/1/`. Each event is one `data:` line. There are no ids and no last event:
a stream that ends without `error` is complete.

The name of the prompt's input decides the name of the output: `TEXT` and `OUT` (Inferless' template), `text_input` and
`text_output` (Triton's backends), `prompt` and `generated_text`. Sampling parameters are tensors of one element in
`inputs`, or plain values, at the top level or in `parameters`. Without any except a length and stop strings, sampling
is greedy, as on the other wires for bare prompts.

Intended divergences: 1. `infer` also works for streaming models, and returns the whole answer. 2. An answer does not
include the prompt (`exclude_input_in_output`). 3. An unknown model is 404; Triton answers 400. 4. If the model has a
chat template, the prompt is a chat, as on the other wires for bare prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec

from tailrace.dialects import (
    AnswerTokens,
    Encoder,
    EventStreamView,
    Generate,
    GenerateCall,
    JsonBody,
    Operation,
    ParsedRequest,
    SamplingFields,
    Show,
    StreamFacts,
    Wire,
    bare_request,
    bare_sampling,
    failure_of,
    finished_end,
    ignored,
    printable,
    quote,
    read_fields,
    read_known,
    refused,
    require_json_or_curl,
    show_live,
    to_json,
    without_unused,
)
from tailrace.errors import RequestError, TailraceError
from tailrace.types import Event, Released, TextDelta
from tailrace_plugins.triton import triton_models as models
from tailrace_plugins.triton.triton_models import OUTPUTS, VERSION
from tailrace_plugins.triton.triton_tensors import HEADER_LENGTH, TritonTensor, binary_text, read_tensors, values_of

__all__ = ["WIRE", "TritonView"]

_UNUSED = {
    "bad_words": refused("", [], [""]),
    "beam_width": refused(1),
    "end_id": ignored(),
    "exclude_input_in_output": refused(True),
    "image": refused("", []),
    "length_penalty": ignored(1),
    "lora_name": refused(""),
    "min_length": refused(0),
    "n": ignored(1),
    "pad_id": ignored(),
    "priority": ignored(0),
    "return_context_logits": ignored(False),
    "return_finish_reason": ignored(False),
    "return_generation_logits": ignored(False),
    "return_log_probs": ignored(False),
    "return_logprobs": ignored(False),
    "return_num_input_tokens": ignored(False),
    "return_num_output_tokens": ignored(False),
    "return_token_ids": ignored(False),
    "sampling_parameters": refused("", {}),
    "sequence_end": refused(False),
    "sequence_id": refused(0, ""),
    "sequence_start": refused(False),
    "timeout": ignored(0),
}
_UNUSED_OF_OUTPUTS = {"classification": refused(0), "shared_memory_region": refused()}
_BINARY, _BINARY_OUTPUT = "binary_data", "binary_data_output"  # parameters of an output, and of all of them

RequestId = Annotated[str, msgspec.Meta(max_length=256)]  # repeated in every event


class Inputs(SamplingFields, kw_only=True):
    """The inputs. Exactly one prompt must be given."""

    TEXT: str | None = None
    text_input: str | None = None
    prompt: str | None = None
    max_new_tokens: AnswerTokens | None = None
    stop_words: str | list[str] | None = None
    stream: bool | None = None


class RequestedOutput(msgspec.Struct):
    name: str
    parameters: JsonBody | None = None


class TritonGenerateBody(Inputs, kw_only=True):
    parameters: JsonBody | None = None  # more inputs
    id: RequestId | None = None


class InferBody(msgspec.Struct, kw_only=True):
    inputs: list[TritonTensor] | None = None
    outputs: list[RequestedOutput] | None = None
    parameters: JsonBody | None = None
    id: RequestId | None = None


def check_headers(headers: Mapping[str, str]) -> None:
    """Accept any type for a body with binary tensors: pages of other origins cannot send its header.

    Raises: UnsupportedMediaType.
    """
    if HEADER_LENGTH not in headers:
        require_json_or_curl(headers)


def parse_infer(request: ParsedRequest) -> GenerateCall:
    """Raises: RequestError."""
    return _call(request, is_tensor=True)


def parse_generate(request: ParsedRequest) -> GenerateCall:
    """Raises: RequestError."""
    return _call(request)


def parse_stream(request: ParsedRequest) -> GenerateCall:
    """Raises: RequestError."""
    return _call(request, stream=True)


def _read_inputs(body: JsonBody, *, is_tensor: bool) -> tuple[JsonBody, InferBody, tuple[str, ...]]:
    """Return the inputs as plain values, the rest of the body, and names of unknown fields. Raises: RequestError."""
    shape = {name: body[name] for name in InferBody.__struct_fields__ if name in body} if "inputs" not in body else body
    outer, unused = read_fields(shape, InferBody)
    unused += _ignored_parameters(outer.outputs or (), known=(_BINARY,) if is_tensor else ())
    given = dict(outer.parameters or {})
    if is_tensor:
        given.pop(_BINARY_OUTPUT, None)
    if outer.inputs is None:
        return {**given, **{name: value for name, value in body.items() if name not in shape}}, outer, unused
    for name, value in values_of(outer.inputs):
        if name in given:
            raise RequestError("An input is given twice.", param="inputs")
        given[name] = value
    return given, outer, unused


def _ignored_parameters(outputs: Sequence[RequestedOutput], *, known: tuple[str, ...]) -> tuple[str, ...]:
    """Return ignored parameters of outputs. Raises: UnsupportedParameter."""
    names = set()
    for output_spec in outputs:
        given, _ = without_unused(output_spec.parameters or {}, _UNUSED_OF_OUTPUTS)
        names |= {name for name, value in given.items() if value is not False and name not in known}
    return tuple(f"outputs[].parameters.{printable(name)}" for name in sorted(names))


def _wants_binary(body: InferBody) -> bool:
    """Whether the output is to be a binary tensor. The official client asks for it by default."""
    of_all = (body.parameters or {}).get(_BINARY_OUTPUT) is True
    return any((one.parameters or {}).get(_BINARY, of_all) is True for one in body.outputs or ()) or (
        of_all and not body.outputs
    )


def _call(request: ParsedRequest, *, is_tensor: bool = False, stream: bool = False) -> GenerateCall:
    models.require(request)
    given, outer, unknown = _read_inputs(request.body, is_tensor=is_tensor)
    fields, unused = read_known(given, Inputs, _UNUSED)
    prompts = [name for name in OUTPUTS if getattr(fields, name) is not None]
    if len(prompts) != 1:
        raise RequestError(f"Send exactly one of the inputs {', '.join(OUTPUTS)}.", param="text_input")
    output = OUTPUTS[prompts[0]]
    wants_binary = is_tensor and _wants_binary(outer)
    if any(output_spec.name != output for output_spec in outer.outputs or ()):
        raise RequestError(f"The only output is {output}.", param="outputs")
    if fields.stream is not None and fields.stream != stream:
        raise RequestError("stream: use generate_stream to stream, and generate otherwise.", param="stream")
    fields.max_tokens = fields.max_new_tokens if fields.max_tokens is None else fields.max_tokens
    words = [fields.stop_words] if isinstance(fields.stop_words, str) else fields.stop_words or []
    fields.stop = fields.stop if fields.stop is not None else [word for word in words if word] or None
    generate = bare_request(request.server, getattr(fields, prompts[0]), bare_sampling(request.server, fields))
    shape = next((tuple(tensor.shape) for tensor in outer.inputs or () if tensor.name == prompts[0]), (1,))
    view = TritonView(output, is_tensor=is_tensor, is_binary=wants_binary, shape=shape, request_id=outer.id)
    return GenerateCall(generate, view, stream, unknown + unused)


@dataclass(frozen=True, slots=True)
class TritonView(EventStreamView):
    output: str = "text_output"
    is_tensor: bool = False
    shape: tuple[int, ...] = (1,)
    is_binary: bool = False  # its tensor follows the JSON, as bytes
    request_id: str | None = None  # the client's own

    def open(self, facts: StreamFacts) -> Encoder:
        return TritonEncoder(facts, self)


class TritonEncoder(Encoder):
    def __init__(self, facts: StreamFacts, view: TritonView) -> None:
        self._view = view
        self._named: JsonBody = {"model_name": facts.record.model, "model_version": VERSION}
        if view.request_id is not None:
            self._named = {"id": view.request_id, **self._named}
        self._head = f"data: {to_json(self._named)[:-1].decode()},{quote(view.output)}:"

    def encode(self, seq: int, event: Event | Released) -> bytes:
        if not isinstance(event, TextDelta):
            return b"" if event.status == "done" else b"data: " + encode_error(failure_of(event))[1] + b"\n\n"
        return f"{self._head}{quote(event.text)}}}\n\n".encode("ascii") if event.text else b""

    def whole(self, events: Sequence[Event]) -> bytes:
        finished_end(events)
        text = "".join(event.text for event in events if isinstance(event, TextDelta))
        view = self._view
        if not view.is_tensor:
            return to_json({**self._named, view.output: text})
        output: JsonBody = {"name": view.output, "datatype": "BYTES", "shape": view.shape}
        if not view.is_binary:
            return to_json({**self._named, "outputs": [{**output, "data": [text]}]})
        content = binary_text(text)
        output["parameters"] = {"binary_data_size": len(content)}
        head = to_json({**self._named, "outputs": [output]})
        self.headers = {"content-type": "application/octet-stream", HEADER_LENGTH: str(len(head))}
        return head + content


def encode_error(error: TailraceError) -> tuple[int, bytes]:
    """`{"error"}`, also as the last event of a stream."""
    return error.status, to_json({"error": error.message, **error.cut_fields})


_TENSORS = {"inputs": [{"name": "TEXT", "shape": [1], "datatype": "BYTES", "data": ["Why do rivers bend?"]}]}
_PLAIN = {"text_input": "Why do rivers bend?", "max_tokens": 64}


def _of_model(path: str) -> tuple[Operation, ...]:
    verbs: list[tuple[str, Callable[[ParsedRequest], GenerateCall], str, type[msgspec.Struct], JsonBody]] = [
        ("infer", parse_infer, "Answer a prompt in a tensor.", InferBody, _TENSORS),
        ("generate", parse_generate, "Answer a prompt.", TritonGenerateBody, _PLAIN),
        ("generate_stream", parse_stream, "Answer a prompt, as events.", TritonGenerateBody, _PLAIN),
    ]
    return (
        *(
            Operation(
                "POST",
                f"{path}/{verb}",
                Generate(parse),
                text,
                body=body,
                example=example,
                check=check_headers,
                read=read_tensors,
            )
            for verb, parse, text, body, example in verbs
        ),
        Operation("GET", path, Show(models.show_model), "The inputs and outputs of a model."),
        Operation("GET", path + "/config", Show(models.show_config), "The configuration of a model, as on Triton."),
        Operation("GET", path + "/ready", Show(models.show_model_ready), "Whether a model accepts requests."),
    )


WIRE = Wire(
    name="triton",
    title="Triton, KServe v2 and Inferless",
    operations=(
        Operation("GET", "/v2", Show(models.show_server), "The name and version of the server."),
        Operation("GET", "/v2/health/live", Show(show_live), "Whether the server makes progress."),
        Operation("GET", "/v2/health/ready", Show(models.show_ready), "Whether the server accepts requests."),
        Operation("POST", "/v2/repository/index", Show(models.list_models), "List the models."),
        *_of_model("/v2/models/{model}"),
        *_of_model("/v2/models/{model}/versions/{version}"),
    ),
    encode_error=encode_error,
    find_model=models.find_in_path,
    prefix="/v2/",
    unused=_UNUSED,
)
