"""What an app takes: `INPUT_SCHEMA`, read strictly, and requests held against it.

Divergences from the vendor, on purpose: 1. Streaming apps may have inputs of every datatype and shape. 2. `INT`,
`FLOAT` and `BOOLEAN`, which the vendor's pages name as families, are datatypes, too. 3. `example` may be missing.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from tailrace.dialects.bodies import printable
from tailrace.errors import RequestError
from tailrace.serve.inferless.errors import AppError

__all__ = ["DATATYPES", "Input", "Schema", "family", "read_schema"]

_INTEGERS = {f"{kind}{bits}": (bits, kind == "INT") for bits in (8, 16, 32, 64) for kind in ("INT", "UINT")}
_FLOATS = ("FP16", "FP32", "FP64", "BF16")
DATATYPES = {
    **{name: name for name in (*_INTEGERS, *_FLOATS, "BOOL", "BYTES")},
    "BOOLEAN": "BOOL",
    "FLOAT": "FP64",
    "INT": "INT64",
    "STRING": "BYTES",
}  # as an app writes them, and as they are called on the wire
_NOUNS = {"bool": ("true or false", "booleans"), "text": ("a string", "strings"), "float": ("a number", "numbers")}
_SAMPLES: dict[str, object] = {"bool": True, "text": "A sample line", "float": 0.5, "int": 1}
_FIELDS = ("datatype", "shape", "required", "example")


def family(datatype: str) -> str:
    """int, float, text or bool: datatypes of one family hold the same Python values, in different ranges."""
    if datatype in _INTEGERS:
        return "int"
    return "float" if datatype in _FLOATS else "bool" if datatype == "BOOL" else "text"


@dataclass(frozen=True, slots=True)
class Input:
    """One input. With the shape `(1,)` an app gets a bare value, with any other one a list, nested as deep."""

    name: str
    datatype: str  # as on the wire
    shape: tuple[int, ...] = (1,)  # -1: of any length
    is_required: bool = True
    example: object = None

    def value(self, given: object) -> object:
        """What the app gets. Raises: RequestError that says what was expected, never what was sent."""
        if self.shape == (1,):
            if isinstance(given, list) and len(given) == 1:
                given = given[0]
            return self._element(given)
        return self._nested(given, self.shape)

    def sample(self) -> object:
        """A value to show how this input is sent: the app's own example, where there is one."""
        example = self.example
        if example is not None:
            return example[0] if self.shape == (1,) and isinstance(example, list) and len(example) == 1 else example
        value = _SAMPLES[family(self.datatype)]
        for length in reversed(self.shape if self.shape != (1,) else ()):
            value = [value] * max(length, 1)
        return value

    def _nested(self, given: object, shape: tuple[int, ...]) -> object:
        if not shape:
            return self._element(given)
        if not isinstance(given, list) or shape[0] not in (-1, len(given)):
            raise self._refusal()
        return [self._nested(item, shape[1:]) for item in given]

    def _element(self, given: object) -> object:
        kind = family(self.datatype)
        if kind == "bool" and isinstance(given, bool):
            return given
        if kind == "text" and isinstance(given, str):
            return given
        if isinstance(given, int | float) and not isinstance(given, bool):
            if kind == "int" and isinstance(given, int):
                low, high = _range(self.datatype)
                if low <= given <= high:
                    return given
            if kind == "float" and abs(given) <= sys.float_info.max:
                return float(given)
        raise self._refusal()

    def _refusal(self) -> RequestError:
        kind = family(self.datatype)
        if kind == "int":
            low, high = _range(self.datatype)
            one, many = f"an integer from {low} to {high}", f"integers from {low} to {high}"
        else:
            one, many = _NOUNS[kind]
        if self.shape == (1,):
            expected = one
        elif len(self.shape) == 1:
            expected = f"a list of {many}" if self.shape[0] == -1 else f"a list of {self.shape[0]} {many}"
        else:
            expected = f"lists of {many} of shape {list(self.shape)}"
        return RequestError(f"{self.name}: expected {expected}.", param=self.name)


@dataclass(frozen=True, slots=True)
class Schema:
    """The inputs of an app (or its outputs), in their order."""

    inputs: Mapping[str, Input] = field(default_factory=dict)

    def check(self, given: Mapping[str, object]) -> dict[str, object]:
        """The values as the app gets them; optional ones that were not given (or were null) are absent.

        Raises: RequestError that names the input.
        """
        for name in given:
            if name not in self.inputs:
                shown = printable(name)
                known = ", ".join(self.inputs) or "none"
                raise RequestError(f"{shown}: there is no such input. The inputs are: {known}.", param=shown)
        values = {}
        for name, one in self.inputs.items():
            value = given.get(name)
            if value is not None:
                values[name] = one.value(value)
            elif one.is_required:
                raise RequestError(f"{name}: this input is required.", param=name)
        return values

    def sample(self) -> dict[str, object]:
        """Inputs that this schema lets through, as long as the app's examples do."""
        return {name: one.sample() for name, one in self.inputs.items() if one.is_required or one.example is not None}

    def tensors(self) -> list[dict[str, object]]:
        """As they stand in a model's metadata."""
        return [{"name": one.name, "datatype": one.datatype, "shape": list(one.shape)} for one in self.inputs.values()]


def read_schema(declared: object, file: str = "input_schema.py") -> Schema:
    """Raises: AppError that names the input and what is wrong with it."""
    if not isinstance(declared, dict):
        raise AppError(f"{file}: INPUT_SCHEMA must be a dict of inputs, not {type(declared).__name__}.")
    return Schema({name: _read_input(name, one, file) for name, one in declared.items()})


def _read_input(name: object, declared: object, file: str) -> Input:
    if not isinstance(name, str) or not name:
        raise AppError(f"{file}: INPUT_SCHEMA has an input whose name is not a string.")
    where = f"{file}: INPUT_SCHEMA[{name!r}]"
    if not isinstance(declared, dict):
        raise AppError(f"{where} must be a dict, not {type(declared).__name__}.")
    for key in declared:
        if key not in _FIELDS:
            raise AppError(f"{where} has {key!r}, which is none of {', '.join(_FIELDS)}.")
    if "datatype" not in declared:
        raise AppError(f"{where} has no datatype.")
    datatype = declared["datatype"]
    if not isinstance(datatype, str) or datatype not in DATATYPES:
        raise AppError(f"{where}: its datatype is {datatype!r}, which is none of {', '.join(sorted(DATATYPES))}.")
    is_required = declared.get("required", True)  # as the vendor reads it: only a False makes an input optional
    if not isinstance(is_required, bool):
        raise AppError(f"{where}: required must be True or False.")
    shape = _read_shape(declared.get("shape"), where)
    return Input(name, DATATYPES[datatype], shape, is_required, declared.get("example"))


def _read_shape(shape: object, where: str) -> tuple[int, ...]:
    if shape is None:
        raise AppError(f"{where} has no shape: [1] for a value, [-1] for a list.")
    if not isinstance(shape, list | tuple) or not shape:
        raise AppError(f"{where}: its shape must be a list of lengths, as in [1] or [-1].")
    for length in shape:
        if not isinstance(length, int) or isinstance(length, bool) or (length < 1 and length != -1):
            raise AppError(f"{where}: its shape holds {length!r}, but lengths are integers from 1, or -1 for any.")
    return tuple(shape)


def _range(datatype: str) -> tuple[int, int]:
    bits, is_signed = _INTEGERS[datatype]
    return (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if is_signed else (0, 2**bits - 1)
