"""Reads bodies of Triton's v2 wire as an app's inputs, and encodes its outputs as tensors and events. Pure functions.

A body is `{"inputs": [tensors]}`, `{"parameters": {name: value}}` or the inputs themselves, bare.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import msgspec

from tailrace.dialects import JsonBody, read_fields
from tailrace.errors import RequestError
from tailrace_plugins.inferless.inferless_errors import OutputError
from tailrace_plugins.inferless.schema import DATATYPES, Schema, family
from tailrace_plugins.triton.triton_tensors import TritonTensor
from tailrace_plugins.triton.triton_wire import RequestedOutput

__all__ = ["InferRequest", "read", "tensors_of", "values_of"]

_MAX_ID = 256
_MAX_RANK = 8
_HARMLESS = ("binary_data_output",)  # sent by the official client; answers are JSON, which it accepts
_NUMPY = {
    **{f"{kind.lower()}{bits}": f"{kind}{bits}" for bits in (8, 16, 32, 64) for kind in ("INT", "UINT")},
    **{f"float{bits}": f"FP{bits}" for bits in (16, 32, 64)},
    "bfloat16": "BF16",
    "bool": "BOOL",
}


@dataclass(frozen=True, slots=True)
class InferRequest:
    """One valid request."""

    inputs: dict[str, object]
    request_id: str | None = None  # the client's own, repeated in the answer
    outputs: tuple[str, ...] = ()  # the requested outputs; empty: all
    stream: bool | None = None  # sent by some clients in addition to the path


class Envelope(msgspec.Struct, kw_only=True):
    """The fields of a body besides the inputs."""

    inputs: list[TritonTensor] | None = None
    parameters: JsonBody | None = None
    outputs: list[RequestedOutput] | None = None
    id: str | None = None
    stream: bool | None = None


def read(body: JsonBody, schema: Schema) -> InferRequest:
    """Read a body. Raises: RequestError that names the input or the field."""
    shape = {name: body[name] for name in Envelope.__struct_fields__ if name in body and name not in schema.inputs}
    envelope, _ = read_fields(shape, Envelope)
    if envelope.id is not None and len(envelope.id) > _MAX_ID:
        raise RequestError(f"id: at most {_MAX_ID} characters.", param="id")
    given: dict[str, object] = {name: value for name, value in body.items() if name not in shape}
    more = list((envelope.parameters or {}).items())
    more += [(tensor.name, _value_of(tensor, schema)) for tensor in envelope.inputs or ()]
    for name, value in more:
        if name in given:
            raise RequestError("An input is given twice.", param=name if name in schema.inputs else "inputs")
        if name in schema.inputs or name not in _HARMLESS:
            given[name] = value
    wanted = tuple(output.name for output in envelope.outputs or ())
    return InferRequest(schema.check(given), envelope.id, wanted, envelope.stream)


def _value_of(tensor: TritonTensor, schema: Schema) -> object:
    """Return a tensor's data, nested as in the schema. The wire's data may be flat or nested. Raises: RequestError."""
    declared = schema.inputs.get(tensor.name)
    if declared is None:
        return None  # the schema's check reports unknown names
    name, shape = declared.name, tensor.shape
    datatype = DATATYPES.get(tensor.datatype)
    kinds = {"float": ("float", "int")}.get(family(declared.datatype), (family(declared.datatype),))
    if datatype is None or family(datatype) not in kinds:
        raise RequestError(f"{name}: its datatype must be {declared.datatype}.", param=name)
    if len(shape) == len(declared.shape) + 1 and shape[0] == 1:
        shape = shape[1:]  # a batch dimension of 1, which the vendor's client can add
    flat: list[object] = tensor.data
    while flat and isinstance(flat[0], list):
        if not all(isinstance(item, list) for item in flat):
            raise RequestError(f"{name}: its data does not have its shape.", param=name)
        flat = list(chain.from_iterable(item for item in flat if isinstance(item, list)))
    fits = len(shape) <= _MAX_RANK and all(length >= (len(shape) > 1) for length in shape)
    if not shape or not fits or math.prod(shape) != len(flat):
        raise RequestError(f"{name}: its data does not have its shape.", param=name)
    for length in reversed(shape[1:]):
        flat = [flat[start : start + length] for start in range(0, len(flat), length)]
    return flat


def values_of(outputs: object) -> dict[str, Any]:  # Any: what JSON holds
    """Return an app's outputs as JSON values: numpy and torch values become Python values, bytes become text.

    Raises: OutputError that names the output.
    """
    return {name: _plain(name, value) for name, value in _members(outputs)}


def tensors_of(outputs: object) -> list[dict[str, Any]]:  # Any: as `values_of`
    """Return an app's outputs as tensors, with datatypes inferred from the values. Raises: OutputError."""
    return [_tensor(name, value) for name, value in _members(outputs)]


def _members(outputs: object) -> list[tuple[str, object]]:
    dump = getattr(outputs, "model_dump", None)  # a pydantic model
    if dump is not None:
        outputs = dump()
    if not isinstance(outputs, Mapping):
        raise OutputError(f"The app should return a dict of outputs, not {type(outputs).__name__}.")
    for name in outputs:
        if not isinstance(name, str):
            raise OutputError(f"The names of outputs should be strings; one is {type(name).__name__}.")
    return list(outputs.items())


def _plain(name: str, value: Any) -> Any:  # Any: whatever the app has put there
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()  # no lone surrogates, and no subclasses
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        if not -(2**63) <= value < 2**64:
            raise OutputError(f"{name}: an integer of more than 64 bits.")
        return int(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise OutputError(f"{name}: {float(value)} is not a valid number in JSON.")
        return float(value)
    if isinstance(value, bytes | bytearray):
        try:
            return value.decode()
        except UnicodeDecodeError:
            raise OutputError(f"{name}: bytes that are not UTF-8. Send them as base64.") from None
    if isinstance(value, list | tuple):
        return [_plain(name, item) for item in value]
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise OutputError(f"{name}: a dict whose keys are not strings.")
        return {key: _plain(name, item) for key, item in value.items()}
    if hasattr(value, "dtype") and hasattr(value, "tolist"):
        return _plain(name, value.tolist())
    raise OutputError(f"{name}: a value of type {type(value).__name__}, which cannot be JSON.")


def _tensor(name: str, value: Any) -> dict[str, Any]:  # Any: as `_plain`
    plain = _plain(name, value)
    shape, flat = [1], plain
    if isinstance(plain, list):
        shape, flat = _flat(name, plain)
    else:
        flat = [plain]
    declared = _NUMPY.get(str(getattr(value, "dtype", "")).removeprefix("torch."))
    return {"name": name, "datatype": declared or _datatype(name, flat), "shape": shape, "data": flat}


def _flat(name: str, value: list[Any]) -> tuple[list[int], list[Any]]:
    shape, flat = [len(value)], value
    while flat and any(isinstance(item, list) for item in flat):
        if not all(isinstance(item, list) and len(item) == len(flat[0]) for item in flat):
            raise OutputError(f"{name}: its lists differ in length; send it as a string (json.dumps).")
        shape.append(len(flat[0]))
        flat = list(chain.from_iterable(flat))
    return shape, flat


def _datatype(name: str, flat: list[Any]) -> str:
    kinds = {type(item) for item in flat}
    if kinds <= {str}:
        return "BYTES"
    if kinds == {bool}:
        return "BOOL"
    if kinds == {int}:
        return "INT64" if max(flat) < 2**63 else "UINT64"
    if kinds <= {int, float}:
        return "FP64"
    odd = next((kind.__name__ for kind in (dict, type(None)) if kind in kinds), "mixed")
    raise OutputError(f"{name}: {odd} values cannot be a tensor; send them as a string (json.dumps).")
