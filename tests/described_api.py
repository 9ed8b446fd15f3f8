"""How tests describe a route of an API: the fields that clients send, and a value for each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import inspect

from tailrace.dialects.bodies import JsonBody

__all__ = ["ANY", "Api", "Value", "as_it_is", "fields_of"]

Value = Any  # Any: of JSON
ANY = "*"  # an unknown field; as a key of `moot`, every field


def as_it_is(body: JsonBody) -> JsonBody:
    return body


@dataclass(frozen=True)
class Api:
    """One route of an API. The tests add one field at a time to `base`: its body, or its query if `in_query`."""

    title: str
    door: str  # method and path, or command and path of a WebSocket
    base: JsonBody
    fields: Iterable[str]  # with dots for nested fields
    samples: Mapping[str, Value]
    companions: Mapping[str, JsonBody] = field(default_factory=dict)  # fields that a field needs; None removes one
    # Fields that correctly have no effect, and the reason. ANY: every field that `base` does not have.
    moot: Mapping[str, str] = field(default_factory=dict)
    form: Callable[[JsonBody], JsonBody] = as_it_is  # makes the body from the fields
    note: str = ""
    in_query: bool = False
    headers: Mapping[str, str] = field(default_factory=dict)


def fields_of(shape: type[msgspec.Struct], *inside: str) -> set[str]:
    """Return the names of a body's fields. A field named in `inside` is replaced by its own fields."""
    struct = inspect.type_info(shape)
    assert isinstance(struct, inspect.StructType)
    names = set()
    for one in struct.fields:
        kinds = one.type.types if isinstance(one.type, inspect.UnionType) else (one.type,)
        inner = next((kind.cls for kind in kinds if isinstance(kind, inspect.StructType)), None)
        if one.encode_name in inside and inner is not None:
            names |= {f"{one.encode_name}.{name}" for name in fields_of(inner)}
        else:
            names.add(one.encode_name)
    return names
