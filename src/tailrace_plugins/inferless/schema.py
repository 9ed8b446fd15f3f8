"""An app's inputs, and the check of requests against them. Reads `INPUT_SCHEMA`, or the fields of a pydantic model.

Divergences from the vendor, on purpose: 1. Streaming apps may have inputs of every datatype and shape. 2. `INT`,
`FLOAT` and `BOOLEAN`, which the vendor's pages name as families, are datatypes, too. 3. `example` may be missing.
For a pydantic model: 4. An `int` is INT64; at the vendor it is INT32, which loses larger numbers. 5. A field with a
default is optional. 6. `Literal`s, enumerations and lists of lists have the datatype of their values.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from tailrace.dialects import printable
from tailrace.errors import RequestError
from tailrace_plugins.inferless.inferless_errors import AppError

__all__ = ["DATATYPES", "Input", "Schema", "family", "instance_of", "read_fields", "read_schema"]

_INTEGERS = {f"{kind}{bits}": (bits, kind == "INT") for bits in (8, 16, 32, 64) for kind in ("INT", "UINT")}
_FLOATS = ("FP16", "FP32", "FP64", "BF16")
DATATYPES = {
    **{name: name for name in (*_INTEGERS, *_FLOATS, "BOOL", "BYTES")},
    "BOOLEAN": "BOOL",
    "FLOAT": "FP64",
    "INT": "INT64",
    "STRING": "BYTES",
}  # an app's names, and the names on the wire
_DESCRIPTIONS = {
    "bool": ("true or false", "booleans"),
    "text": ("a string", "strings"),
    "float": ("a number", "numbers"),
}
_SAMPLES: dict[str, object] = {"bool": True, "text": "A sample line", "float": 0.5, "int": 1}
_FIELDS = ("datatype", "shape", "required", "example")
_BY_TYPE = {bool: "BOOL", int: "INT64", float: "FP64", str: "BYTES"}  # bool first: a bool is also an int
_APP_VALIDATORS = ("value_error", "assertion_error")  # hide these messages: an app's validator may repeat the value


def family(datatype: str) -> str:
    """Return int, float, text or bool. Datatypes of one family have the same Python type with different ranges."""
    if datatype in _INTEGERS:
        return "int"
    return "float" if datatype in _FLOATS else "bool" if datatype == "BOOL" else "text"


@dataclass(frozen=True, slots=True)
class Input:
    """One input. With the shape `(1,)` an app gets a single value, with other shapes nested lists."""

    name: str
    datatype: str  # as on the wire
    shape: tuple[int, ...] = (1,)  # -1: of any length
    is_required: bool = True
    example: object = None

    def value(self, given: object) -> object:
        """Return the value for the app. Raises: RequestError that says what was expected, never what was sent."""
        if self.shape == (1,):
            if isinstance(given, list) and len(given) == 1:
                given = given[0]
            return self._element(given)
        return self._nested(given, self.shape)

    def sample(self) -> object:
        """Return an example value: the app's own, or a default."""
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
            one, many = _DESCRIPTIONS[kind]
        if self.shape == (1,):
            expected = one
        elif len(self.shape) == 1:
            expected = f"a list of {many}" if self.shape[0] == -1 else f"a list of {self.shape[0]} {many}"
        else:
            expected = f"lists of {many} of shape {list(self.shape)}"
        return RequestError(f"{self.name}: expected {expected}.", param=self.name)


@dataclass(frozen=True, slots=True)
class Schema:
    """The inputs or the outputs of an app, in order."""

    inputs: Mapping[str, Input] = field(default_factory=dict)

    def check(self, given: Mapping[str, object]) -> dict[str, object]:
        """Return the values for the app. Optional inputs that are missing or null are absent.

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
        """Return example inputs. They are valid if the app's examples are."""
        return {name: one.sample() for name, one in self.inputs.items() if one.is_required or one.example is not None}

    def tensors(self) -> list[dict[str, object]]:
        """Return the tensors of the model's metadata."""
        return [{"name": one.name, "datatype": one.datatype, "shape": list(one.shape)} for one in self.inputs.values()]


def read_schema(declared: object, file: str = "input_schema.py") -> Schema:
    """Read an INPUT_SCHEMA. Raises: AppError that names the input and the problem."""
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
            raise AppError(f"{where} has the unknown field {key!r}. The fields are {', '.join(_FIELDS)}.")
    if "datatype" not in declared:
        raise AppError(f"{where} has no datatype.")
    datatype = declared["datatype"]
    if not isinstance(datatype, str) or datatype not in DATATYPES:
        raise AppError(
            f"{where}: the datatype {datatype!r} is unknown. The datatypes are {', '.join(sorted(DATATYPES))}."
        )
    is_required = declared.get("required", True)  # as at the vendor: only False makes an input optional
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
            raise AppError(f"{where}: its shape contains {length!r}, but lengths are integers from 1, or -1 for any.")
    return tuple(shape)


def _range(datatype: str) -> tuple[int, int]:
    bits, is_signed = _INTEGERS[datatype]
    return (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if is_signed else (0, 2**bits - 1)


def read_fields(model: type[BaseModel], file: str = "app.py") -> Schema:
    """Read the fields of a pydantic model. Raises: AppError that names a field whose type has no datatype."""
    fields = model.model_fields.items()
    return Schema({name: _read_field(name, one, f"{file}: {model.__name__}.{name}") for name, one in fields})


def instance_of(model: type[BaseModel], values: dict[str, object]) -> BaseModel:
    """Make the app's request object. Raises: RequestError that names the field."""
    fields = model.model_fields.items()
    given = {one.alias or name: values.get(name) for name, one in fields if name in values or one.is_required()}
    try:
        return model.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        name = str(first["loc"][0]) if first["loc"] else None
        reason = "The app rejects this value" if first["type"] in _APP_VALIDATORS else first["msg"]
        raise RequestError(f"{name}: {reason}." if name else f"{reason}.", param=name) from None


def _read_field(name: str, declared: FieldInfo, where: str) -> Input:
    annotation, is_optional = _without_none(declared.annotation)
    default = declared.get_default(call_default_factory=False)
    example = declared.examples[0] if declared.examples else None if declared.is_required() else default
    depth = 0
    while annotation is list or get_origin(annotation) in (list, tuple, set):
        depth += 1
        annotation = next(iter(get_args(annotation)), str)
    datatype = _datatype(annotation)
    if datatype is None:
        raise AppError(f"{where}: its type has no datatype. Use str, int, float, bool or a list of them.")
    shape = (-1,) * depth or (1,)
    return Input(name, datatype, shape, declared.is_required() and not is_optional, example)


def _without_none(annotation: Any) -> tuple[Any, bool]:  # Any: annotations may be any object
    if get_origin(annotation) not in (Union, types.UnionType):
        return annotation, False
    left = [one for one in get_args(annotation) if one is not type(None)]
    if len(left) == len(get_args(annotation)):
        return annotation, False
    return (left[0] if len(left) == 1 else Union[tuple(left)]), True  # noqa: UP007  # made of what is left


def _datatype(annotation: Any) -> str | None:
    if get_origin(annotation) is Literal:
        return _common([type(value) for value in get_args(annotation)])
    if get_origin(annotation) in (Union, types.UnionType):
        return _common(list(get_args(annotation)))
    if not isinstance(annotation, type):
        return None
    if issubclass(annotation, Enum):
        return _common([type(member.value) for member in annotation])
    return next((name for kind, name in _BY_TYPE.items() if issubclass(annotation, kind)), None)


def _common(kinds: list[Any]) -> str | None:
    """Return a datatype for all of these types, or None: int and float have one, str and int have none."""
    found = {_datatype(kind) for kind in kinds}
    if found == {"INT64", "FP64"}:
        return "FP64"
    return found.pop() if len(found) == 1 else None
