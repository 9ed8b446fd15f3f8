"""The pydantic form of a schema: a model's fields as inputs, and requests as instances of it.

Divergences from the vendor, on purpose: 1. An `int` is INT64 here; there it is INT32, and larger numbers are lost.
2. A field with a default need not be sent. 3. `Literal`s, enumerations and lists of lists are taken for what they hold.
"""

from __future__ import annotations

import types
from enum import Enum
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from tailrace.errors import RequestError
from tailrace.serve.inferless.errors import AppError
from tailrace.serve.inferless.schema import Input, Schema

__all__ = ["instance_of", "read_fields"]

_DATATYPES = {bool: "BOOL", int: "INT64", float: "FP64", str: "BYTES"}  # in this order: a bool is an int, too
_THE_APPS_OWN = ("value_error", "assertion_error")  # messages of the app's own validators, which may repeat the value


def read_fields(model: type[BaseModel], file: str = "app.py") -> Schema:
    """Raises: AppError that names a field whose type does not go over the wire."""
    return Schema({name: _read_field(name, one, f"{file}: {model.__name__}.{name}") for name, one in _fields(model)})


def instance_of(model: type[BaseModel], values: dict[str, object]) -> BaseModel:
    """The request as an app of this form gets it. Raises: RequestError that names the field."""
    given = {one.alias or name: values.get(name) for name, one in _fields(model) if name in values or one.is_required()}
    try:
        return model.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        name = str(first["loc"][0]) if first["loc"] else None
        reason = "The app refuses this value" if first["type"] in _THE_APPS_OWN else first["msg"]
        raise RequestError(f"{name}: {reason}." if name else f"{reason}.", param=name) from None


def _fields(model: type[BaseModel]) -> list[tuple[str, FieldInfo]]:
    return list(model.model_fields.items())


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
        raise AppError(f"{where}: its type has no datatype. Take str, int, float, bool or a list of them.")
    shape = (-1,) * depth or (1,)
    return Input(name, datatype, shape, declared.is_required() and not is_optional, example)


def _without_none(annotation: Any) -> tuple[Any, bool]:  # Any: annotations are whatever stands behind the colon
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
    return next((name for kind, name in _DATATYPES.items() if issubclass(annotation, kind)), None)


def _common(kinds: list[Any]) -> str | None:
    """The datatype that holds each of some types: int and float have one, str and int have none."""
    found = {_datatype(kind) for kind in kinds}
    if found == {"INT64", "FP64"}:
        return "FP64"
    return found.pop() if len(found) == 1 else None
