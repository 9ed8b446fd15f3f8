"""Reads JSON values into the shapes of a wire (msgspec structs), and says which parts have no effect.

The rule of all wires (docs/decisions/take-what-clients-send.md): take what a client sends, unless the answer would be
wrong and the client could not know. So a value that does not fit its shape is corrected where its meaning is clear:

- a whole number may be written as 256.0;
- a null for a field that has a default means that the field is absent;
- in a list of things of several kinds that may have `Other`, a thing of an unknown kind becomes an `Other`, and a thing
  without a kind is of the first one.

A wire lists the fields that its API has and this server does not use in a table of `ignored()` and `refused()`. Fields
that neither a shape nor a table has are ignored, and named.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import NamedTuple, TypeAlias, TypeVar

import msgspec
from msgspec import inspect

from tailrace.dialects.bodies import JsonBody, printable
from tailrace.errors import RequestError, UnsupportedParameter

__all__ = [
    "Other",
    "Unused",
    "UnusedFields",
    "ignored",
    "note",
    "path_of",
    "read_fields",
    "read_known",
    "refused",
    "require_nothing_left_out",
    "without_unused",
]

T = TypeVar("T", bound=msgspec.Struct)

_OTHER = "<other>"


class Other(msgspec.Struct, tag=_OTHER):
    """A part, a tool or an item of a kind that the shape does not have."""

    kind: str = ""  # as the client wrote it


class Unused(NamedTuple):
    """A field of an API that this server does not use."""

    is_refused: bool
    neutral: tuple[object, ...]  # values that ask for nothing


UnusedFields: TypeAlias = Mapping[str, Unused]  # by name; `options.mirostat` is a field of the object `options`


def ignored(*neutral: object) -> Unused:
    """A field that does not change the answer, or asks for more than there is. It is named, except for neutral
    values."""
    return Unused(is_refused=False, neutral=neutral)


def refused(*neutral: object) -> Unused:
    """A field without which the answer would be wrong, and the client could not know."""
    return Unused(is_refused=True, neutral=neutral)


def note(path: str, what: str = "") -> str:
    """Return an entry of X-Tailrace-Ignored: a path in the request, and what became of it."""
    return f"{path} ({what})" if what else path


def require_nothing_left_out(notes: Sequence[str]) -> None:
    """For callers who want an error instead. Raises: UnsupportedParameter that names the first entry."""
    if notes:
        raise UnsupportedParameter(f"{notes[0]} has no effect here.", param=path_of(notes[0]))


def path_of(entry: str) -> str:
    """Return the path of an entry."""
    return entry.partition(" (")[0]


def read_fields(body: JsonBody, shape: type[T], *, strict: bool = False) -> tuple[T, tuple[str, ...]]:
    """Return the body as a msgspec struct, and the names of unknown fields at any depth.

    Raises: RequestError that names the field; with `strict`, UnsupportedParameter for an unknown field.
    """
    kind = _type_of(shape)
    try:
        value = msgspec.convert(body, shape)
    except msgspec.ValidationError:
        body = _corrected_object(body, kind)
        try:
            value = msgspec.convert(body, shape)
        except msgspec.ValidationError as error:
            raise _refusal(error, kind) from None
    unknown = tuple(sorted(set(_unknown(body, kind, ""))))
    if strict and unknown:
        raise UnsupportedParameter(f"Unknown field: {unknown[0]}.", param=unknown[0])
    return value, unknown


def read_known(body: JsonBody, shape: type[T], unused: UnusedFields) -> tuple[T, tuple[str, ...]]:
    """As `read_fields`, without the fields of a table.

    Raises: RequestError; UnsupportedParameter for a refused field.
    """
    rest, named = without_unused(body, unused)
    value, unknown = read_fields(rest, shape)
    return value, named + unknown


def without_unused(body: JsonBody, unused: UnusedFields) -> tuple[JsonBody, tuple[str, ...]]:
    """Return the body without the fields of a table, and the names of the ignored ones.

    Raises: UnsupportedParameter for a refused field.
    """
    rest, named = dict(body), []
    for name, one in unused.items():
        outer, _, inner = name.partition(".")
        if outer not in body:
            continue
        holder = rest
        if inner:
            if not isinstance(rest[outer], dict):
                continue
            holder = rest[outer] = dict(rest[outer])
        value = holder.pop(inner or outer, None)
        if value is None or value in one.neutral:
            continue
        if one.is_refused:
            raise UnsupportedParameter(f"{name} is not supported here.", param=name)
        named.append(name)
    return rest, tuple(named)


def _refusal(error: msgspec.ValidationError, shape: inspect.Type) -> RequestError:
    reason, _, path = str(error).partition(" - at `$")
    param = path.rstrip("`").lstrip(".")[:100] or None
    if "Invalid enum value" in reason or "Invalid value" in reason:
        allowed = ", ".join(_allowed(shape, param or ""))
        reason = f"Not one of {allowed}" if allowed else "Not a value of this field"  # the value is not repeated
    return RequestError(f"{f'{param}: ' if param else ''}{reason[:200]}.", param=param)


# Corrections


def _corrected(value: object, shape: inspect.Type) -> object:
    """Return a value in the form that a shape expects, as far as its meaning is clear."""
    if isinstance(value, float):
        kinds = {type(one) for one in _alternatives(shape)}
        is_whole = value.is_integer() and inspect.IntType in kinds and inspect.FloatType not in kinds
        return int(value) if is_whole else value
    if isinstance(value, list):
        items = _items(shape)
        return value if items is None else [_corrected(item, items) for item in value]
    return _corrected_object(value, shape) if isinstance(value, dict) else value


def _corrected_object(value: JsonBody, shape: inspect.Type) -> JsonBody:
    structs = [one for one in _alternatives(shape) if isinstance(one, inspect.StructType)]
    if any(one.tag == _OTHER for one in structs):
        kind = value.get("type")
        if kind is None:
            value = {**value, "type": structs[0].tag}
        elif isinstance(kind, str) and all(one.tag != kind for one in structs):
            return {"type": _OTHER, "kind": kind}
    known = _struct_of(value, shape)
    if known is None:
        return value
    fields = _fields_of(known.cls)
    corrected = {}
    for name, item in value.items():
        if name not in fields:
            corrected[name] = item
        elif item is not None or not _may_be_left_out(fields[name]):
            corrected[name] = _corrected(item, fields[name].type)
    return corrected


def _may_be_left_out(field: inspect.Field) -> bool:
    """Whether the field has a default, and null is not one of its values."""
    return not field.required and not any(isinstance(one, inspect.NoneType) for one in _alternatives(field.type))


# Shapes


def _unknown(value: object, shape: inspect.Type, where: str) -> Iterator[str]:
    """Yield the names of fields that a shape does not have. The value must already be converted to the shape."""
    if isinstance(value, dict):
        struct = _struct_of(value, shape)
        if struct is None:
            return
        known = _fields_of(struct.cls)
        for name, item in value.items():
            if name not in known:
                yield where + printable(name)
            elif isinstance(item, dict | list):
                yield from _unknown(item, known[name].type, f"{where}{name}.")
    elif isinstance(value, list):
        items = _items(shape)
        if items is not None:
            for item in value:
                if isinstance(item, dict | list):  # most long lists are lists of numbers
                    yield from _unknown(item, items, f"{where[:-1]}[].")


_type_of = cache(inspect.type_info)


def _struct_of(value: JsonBody, shape: inspect.Type) -> inspect.StructType | None:
    """Return the struct that an object is in this shape; None if the shape allows anything."""
    tag = str(value.get("type", ""))
    for one in _alternatives(shape):
        if isinstance(one, inspect.StructType) and (one.tag is None or one.tag == tag):
            return one
    return None


@cache
def _fields_of(shape: type[msgspec.Struct]) -> Mapping[str, inspect.Field]:
    struct = inspect.type_info(shape)
    assert isinstance(struct, inspect.StructType)
    tag = inspect.Field(struct.tag_field, struct.tag_field, inspect.StrType()) if struct.tag_field else None
    return ({tag.name: tag} if tag else {}) | {field.encode_name: field for field in struct.fields}


def _allowed(shape: inspect.Type, path: str) -> list[str]:
    """Return the values that a field allows. `path` is like `messages[0].content[1].type`."""
    found, tags = [shape], set[str]()
    for step in re.findall(r"\[[^]]*\]|[^][.]+", path):
        alternatives = [one for each in found for one in _alternatives(each)]
        structs = [one for one in alternatives if isinstance(one, inspect.StructType)]
        if step[0] == "[":
            found = [one.item_type for one in alternatives if isinstance(one, inspect.ListType)]
        else:
            tags = {str(one.tag) for one in structs if one.tag_field == step}
            found = [known[step].type for one in structs if step in (known := _fields_of(one.cls))]
    literals = [one for each in found for one in _alternatives(each) if isinstance(one, inspect.LiteralType)]
    return sorted(tags or {str(value) for one in literals for value in one.values})


def _items(shape: inspect.Type) -> inspect.Type | None:
    return next((one.item_type for one in _alternatives(shape) if isinstance(one, inspect.ListType)), None)


def _alternatives(shape: inspect.Type) -> tuple[inspect.Type, ...]:
    return shape.types if isinstance(shape, inspect.UnionType) else (shape,)
