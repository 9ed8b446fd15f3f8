"""The wire of Triton, KServe (its v2 protocol) and Inferless: `/v2/models/{model}/infer`, `/generate` and
`/generate_stream`, each also under `/versions/1/`. Each event is one `data:` line. There are no ids and no last event:
a stream that ends without `error` is complete.

The name of the prompt's input decides the name of the output: `TEXT` and `OUT` (Inferless' template), `text_input` and
`text_output` (Triton's backends), `prompt` and `generated_text`. Sampling parameters are tensors of one element in
`inputs`, or plain values, at the top level or in `parameters`. Without any except a length and stop strings, sampling
is greedy, as on the other wires for bare prompts.

Intended divergences: 1. `infer` also works for streaming models, and returns the whole answer. 2. An answer does not
include the prompt (`exclude_input_in_output`). 3. An unknown model is 404; Triton answers 400. 4. If the model has a
chat template, the prompt is a chat, as on the other wires for bare prompts. 5. Binary tensors are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from tailrace.dialects import triton_models as models
from tailrace.dialects.answers import EventStreamView, show_live
from tailrace.dialects.bodies import (
    JsonBody,
    printable,
    quote,
    read_fields,
    read_known,
    refuse,
    require_json_or_curl,
    to_json,
)
from tailrace.dialects.facts import StreamFacts
from tailrace.dialects.fields import SamplingFields, Tokens
from tailrace.dialects.plain import bare_request, bare_sampling
from tailrace.dialects.triton_models import OUTPUTS, VERSION
from tailrace.dialects.wire import (
    Encoder,
    Generate,
    GenerateCall,
    Operation,
    ParsedRequest,
    Show,
    Wire,
    failure_of,
    finished_end,
)
from tailrace.errors import RequestError, TailraceError, UnsupportedParameter
from tailrace.types import End, Event, TextDelta

__all__ = ["WIRE", "TritonView"]

_INTEGERS = {f"{kind}{bits}": (bits, kind == "INT") for bits in (8, 16, 32, 64) for kind in ("INT", "UINT")}
_FLOATS = frozenset({"FP16", "FP32", "FP64", "BF16"})
_TEXTS = frozenset({"BYTES", "STRING"})  # the name in Triton, and in Inferless
_REFUSED: dict[str, tuple[object, ...]] = {
    "bad_words": ("", [], [""]),
    "beam_width": (1,),
    "end_id": (),
    "exclude_input_in_output": (True,),
    "image": ("", []),
    "length_penalty": (1, 1.0),
    "lora_name": ("",),
    "min_length": (0,),
    "n": (1,),
    "pad_id": (),
    "priority": (0,),
    "return_context_logits": (False,),
    "return_finish_reason": (False,),
    "return_generation_logits": (False,),
    "return_log_probs": (False,),
    "return_logprobs": (False,),
    "return_num_input_tokens": (False,),
    "return_num_output_tokens": (False,),
    "return_token_ids": (False,),
    "sampling_parameters": ("", {}),
    "sequence_end": (False,),
    "sequence_id": (0, ""),
    "sequence_start": (False,),
    "timeout": (0,),
}
_REFUSED_OF_OUTPUTS: dict[str, tuple[object, ...]] = {"classification": (0,), "shared_memory_region": ()}
_MAX_NAMED = 10

RequestId = Annotated[str, msgspec.Meta(max_length=256)]  # repeated in every event


class Inputs(SamplingFields, kw_only=True):
    """The inputs. Exactly one prompt must be given."""

    TEXT: str | None = None
    text_input: str | None = None
    prompt: str | None = None
    max_new_tokens: Tokens | None = None
    stop_words: str | list[str] | None = None
    stream: bool | None = None


class TritonTensor(msgspec.Struct):
    name: str
    shape: list[int]
    datatype: str
    data: list[Any]  # Any: checked against the datatype
    parameters: JsonBody | None = None
    optional: bool | None = None


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
    """Raises: UnsupportedMediaType; UnsupportedParameter for a body with binary data."""
    if "inference-header-content-length" in headers:
        raise UnsupportedParameter(
            "Binary tensors are not supported: send data in the JSON (binary_data=False).",
            param="inference-header-content-length",
        )
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


def _read_inputs(body: JsonBody) -> tuple[JsonBody, InferBody, tuple[str, ...]]:
    """Return the inputs as plain values, the rest of the body, and names of unknown fields. Raises: RequestError."""
    shape = {name: body[name] for name in InferBody.__struct_fields__ if name in body} if "inputs" not in body else body
    outer, ignored = read_fields(shape, InferBody)
    ignored += _ignored_parameters(outer.outputs or ())
    given = dict(outer.parameters or {})
    if outer.inputs is None:
        return {**given, **{name: value for name, value in body.items() if name not in shape}}, outer, ignored
    for name, value in _values(outer.inputs):
        if name in given:
            raise RequestError("An input is given twice.", param="inputs")
        given[name] = value
    return given, outer, ignored


def _ignored_parameters(outputs: Sequence[RequestedOutput]) -> tuple[str, ...]:
    """Return ignored parameters of outputs. The official client requests binary output by default.

    Raises: UnsupportedParameter.
    """
    names = set()
    for output_spec in outputs:
        given = output_spec.parameters or {}
        refuse(given, _REFUSED_OF_OUTPUTS)
        names |= {name for name in given if name not in _REFUSED_OF_OUTPUTS and given[name] is not False}
    return tuple(f"outputs[].parameters.{printable(name)}" for name in sorted(names)[:_MAX_NAMED])


def _call(request: ParsedRequest, *, is_tensor: bool = False, stream: bool = False) -> GenerateCall:
    models.require(request)
    given, outer, unknown = _read_inputs(request.body)
    fields, ignored = read_known(given, Inputs, _REFUSED)
    prompts = [name for name in OUTPUTS if getattr(fields, name) is not None]
    if len(prompts) != 1:
        raise RequestError(f"Send exactly one of the inputs {', '.join(OUTPUTS)}.", param="text_input")
    output = OUTPUTS[prompts[0]]
    if any(output_spec.name != output for output_spec in outer.outputs or ()):
        raise RequestError(f"The only output is {output}.", param="outputs")
    if fields.stream is not None and fields.stream != stream:
        raise RequestError("stream: use generate_stream to stream, and generate otherwise.", param="stream")
    fields.max_tokens = fields.max_tokens or fields.max_new_tokens
    words = [fields.stop_words] if isinstance(fields.stop_words, str) else fields.stop_words or []
    fields.stop = fields.stop if fields.stop is not None else [word for word in words if word] or None
    generate = bare_request(request.server, getattr(fields, prompts[0]), bare_sampling(request.server, fields))
    shape = next((tuple(tensor.shape) for tensor in outer.inputs or () if tensor.name == prompts[0]), (1,))
    view = TritonView(output, is_tensor=is_tensor, shape=shape, request_id=outer.id)
    return GenerateCall(generate, view, stream, unknown + ignored)


def _values(tensors: list[TritonTensor]) -> Iterator[tuple[str, object]]:
    """Yield the name and the element of each tensor. Raises: RequestError."""
    for index, tensor in enumerate(tensors):
        where = f"inputs[{index}]"
        if tensor.shape not in ([1], [1, 1]):
            raise RequestError(f"{where}: its shape must be [1] or [1, 1].", param="inputs")
        data: Any = tensor.data
        if len(tensor.shape) == 2 and len(data) == 1 and isinstance(data[0], list):
            data = data[0]
        if len(data) != 1 or not _is_of(data[0], tensor.datatype):
            raise RequestError(f"{where}: its data must be one value of its datatype.", param="inputs")
        value = data[0]
        if isinstance(value, float) and value.is_integer():
            value = int(value)  # some clients send counts as floats
        yield tensor.name, value


def _is_of(value: object, datatype: str) -> bool:
    if datatype in _INTEGERS:
        bits, is_signed = _INTEGERS[datatype]
        low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1)) if is_signed else (0, 2**bits)
        return isinstance(value, int) and not isinstance(value, bool) and low <= value < high
    if datatype in _FLOATS:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, str) if datatype in _TEXTS else isinstance(value, bool) and datatype == "BOOL"


@dataclass(frozen=True, slots=True)
class TritonView(EventStreamView):
    output: str = "text_output"
    is_tensor: bool = False
    shape: tuple[int, ...] = (1,)
    request_id: str | None = None  # the client's own

    def open(self, facts: StreamFacts) -> Encoder:
        return TritonEncoder(facts, self)


class TritonEncoder:
    def __init__(self, facts: StreamFacts, view: TritonView) -> None:
        self._view = view
        self._named: JsonBody = {"model_name": facts.model, "model_version": VERSION}
        if view.request_id is not None:
            self._named = {"id": view.request_id, **self._named}
        self._head = f"data: {to_json(self._named)[:-1].decode()},{quote(view.output)}:"

    def encode(self, seq: int, event: Event) -> bytes:
        if type(event) is End:
            return b"" if event.status == "done" else b"data: " + encode_error(failure_of(event))[1] + b"\n\n"
        assert type(event) is TextDelta
        return f"{self._head}{quote(event.text)}}}\n\n".encode("ascii") if event.text else b""

    def whole(self, events: Sequence[Event]) -> bytes:
        finished_end(events)
        text = "".join(event.text for event in events if isinstance(event, TextDelta))
        view = self._view
        if not view.is_tensor:
            return to_json({**self._named, view.output: text})
        output = {"name": view.output, "datatype": "BYTES", "shape": view.shape, "data": [text]}
        return to_json({**self._named, "outputs": [output]})


def encode_error(error: TailraceError) -> tuple[int, bytes]:
    """`{"error"}`, also as the last event of a stream."""
    return error.status, to_json({"error": error.message})


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
            Operation("POST", f"{path}/{verb}", Generate(parse), text, body=body, example=example, check=check_headers)
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
    refused=_REFUSED,
)
