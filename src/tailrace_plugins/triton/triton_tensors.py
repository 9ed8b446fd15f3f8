"""Tensors of KServe's v2 protocol, in JSON and in binary form (its extension "binary tensor data").

A body with binary tensors is JSON, whose length is in the header `Inference-Header-Content-Length`, and then the bytes
of the tensors in their order. Reading turns binary tensors into those of JSON, and the wire knows only these.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from tailrace.dialects import JsonBody, read_json
from tailrace.errors import RequestError

__all__ = ["HEADER_LENGTH", "TritonTensor", "binary_text", "read_tensors", "values_of"]

HEADER_LENGTH = "inference-header-content-length"
_INTEGERS = {f"{kind}{bits}": (bits, kind == "INT") for bits in (8, 16, 32, 64) for kind in ("INT", "UINT")}
_FLOATS = frozenset({"FP16", "FP32", "FP64", "BF16"})
_TEXTS = frozenset({"BYTES", "STRING"})  # the name in Triton, and in Inferless
_FORMATS = {"BOOL": "?", "INT8": "b", "UINT8": "B", "INT16": "h", "UINT16": "H", "INT32": "i", "UINT32": "I",
            "INT64": "q", "UINT64": "Q", "FP16": "e", "BF16": "e", "FP32": "f", "FP64": "d"}  # fmt: skip
_SIZE = "binary_data_size"  # the parameter of a tensor


class TritonTensor(msgspec.Struct):
    name: str
    shape: list[int]
    datatype: str
    data: list[Any]  # Any: checked against the datatype
    parameters: JsonBody | None = None
    optional: bool | None = None


def read_tensors(body: bytes, headers: Mapping[str, str]) -> JsonBody:
    """Read a body as JSON. Binary tensors get the field `data`. Raises: RequestError."""
    length = headers.get(HEADER_LENGTH)
    if length is None:
        return read_json(body)
    if not re.fullmatch("[0-9]{1,10}", length, re.ASCII) or int(length) > len(body):
        raise RequestError("Inference-Header-Content-Length is not the length of the JSON.", param=HEADER_LENGTH)
    read, rest = read_json(body[: int(length)]), body[int(length) :]
    tensors = read.get("inputs")
    position = 0
    for index, tensor in enumerate(tensors if isinstance(tensors, list) else ()):
        where = f"inputs[{index}]"
        size = _size_of(tensor, where)
        if size is None:
            continue
        if size > len(rest) - position:
            raise RequestError(f"{where}: the body has fewer bytes than its {_SIZE}.", param="inputs")
        tensor["data"] = _decode(rest[position : position + size], tensor.get("datatype"), where)
        position += size
    if position != len(rest):
        raise RequestError(f"The body has more bytes than the {_SIZE} of its inputs.", param="inputs")
    return read


def _size_of(tensor: object, where: str) -> int | None:
    """Return how many bytes a tensor has; None for one in JSON. Raises: RequestError."""
    if not isinstance(tensor, dict) or not isinstance(parameters := tensor.get("parameters"), dict):
        return None
    if _SIZE not in parameters:
        return None
    size = parameters.pop(_SIZE)
    if not isinstance(size, int) or isinstance(size, bool) or size < 0 or "data" in tensor:
        raise RequestError(f"{where}: it needs either data, or a number of bytes as {_SIZE}.", param="inputs")
    return size


def _decode(content: bytes, datatype: object, where: str) -> list[object]:
    """Return the elements of a tensor: little-endian numbers, or texts with their length before them.

    Raises: RequestError.
    """
    if datatype in _TEXTS:
        return list(_texts(content, where))
    form = _FORMATS.get(datatype) if isinstance(datatype, str) else None
    if form is None:
        raise RequestError(f"{where}: its datatype is not known.", param="inputs")
    if len(content) % struct.calcsize(form):
        raise RequestError(f"{where}: its bytes are not whole elements.", param="inputs")
    if datatype == "BF16":  # the upper half of an FP32
        content, form = b"".join(b"\0\0" + content[at : at + 2] for at in range(0, len(content), 2)), "f"
    elements = [element for (element,) in struct.iter_unpack(f"<{form}", content)]
    if not all(math.isfinite(element) for element in elements):
        raise RequestError(f"{where}: its elements must be finite.", param="inputs")
    return elements


def _texts(content: bytes, where: str) -> Iterator[str]:
    position = 0
    while position < len(content):
        start = position + 4
        length = int.from_bytes(content[position:start], "little")
        if start + length > len(content):
            raise RequestError(f"{where}: its bytes are not whole elements.", param="inputs")
        try:
            yield content[start : start + length].decode()
        except UnicodeDecodeError:
            raise RequestError(f"{where}: its text is not UTF-8.", param="inputs") from None
        position = start + length


def binary_text(text: str) -> bytes:
    """Return a text as a binary tensor of one element."""
    content = text.encode()
    return len(content).to_bytes(4, "little") + content


def values_of(tensors: Sequence[TritonTensor]) -> Iterator[tuple[str, object]]:
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
