"""Reads and writes JSON bodies. Reading is strict; the written JSON is ASCII, which every client reads correctly."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from functools import cache
from itertools import islice
from json.encoder import encode_basestring_ascii
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from tailrace.errors import RequestError, UnsupportedMediaType, UnsupportedParameter
from tailrace.text.templates import is_deeper

__all__ = [
    "JsonBody",
    "printable",
    "quote",
    "read_fields",
    "read_json",
    "read_known",
    "read_value",
    "refuse",
    "require_json",
    "require_json_or_curl",
    "require_plain_utf8",
    "time_of",
    "to_json",
]

T = TypeVar("T", bound=msgspec.Struct)

_CONTENT_TYPE = re.compile(r"content\[[^]]*\]\.type$")  # of a part of a message
_MAX_BRACKETS = 100_000  # of lists and objects, also inside strings; reading so many takes about 40 ms
_MAX_NAMED = 10
_CHARSET = re.compile(r";\s*charset\s*=\s*\"?([^\s;\"]*)", re.IGNORECASE)

JsonBody = dict[str, Any]  # Any: JSON from the client, not yet checked

# All other characters are escaped: some clients split lines at U+2028, U+2029 and U+0085.
quote = encode_basestring_ascii
_encode_json = msgspec.json.Encoder().encode


def to_json(value: object) -> bytes:
    """Return compact JSON in ASCII."""
    text = _encode_json(value)
    if text.isascii():
        return text
    return _BEYOND_ASCII.sub(_escape, text.decode()).encode("ascii")


_BEYOND_ASCII = re.compile(r"[^\x00-\x7f]+")


def _escape(match: re.Match[str]) -> str:
    return quote(match[0])[1:-1]


def time_of(seconds: int) -> str:
    """Return seconds since the epoch in the format of RFC 3339."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def require_json(headers: Mapping[str, str]) -> None:
    """Require a JSON body. Forms on pages of other origins cannot send this type.

    Raises: UnsupportedMediaType.
    """
    kind = _kind(headers)
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise UnsupportedMediaType("Send the body as Content-Type: application/json.", param="content-type")


def require_json_or_curl(headers: Mapping[str, str]) -> None:
    """As `require_json`, but also accept a body without a type or with curl's default type. Commands in the
    documentation of some APIs, LiteLLM's requests to Ollama and Triton's client send no type. Requests of browsers have
    an Origin or Sec-Fetch-Site header, and need the type.

    Raises: UnsupportedMediaType.
    """
    is_untyped = _kind(headers) in ("", "application/x-www-form-urlencoded")
    if not is_untyped or "origin" in headers or "sec-fetch-site" in headers:
        require_json(headers)


def require_plain_utf8(headers: Mapping[str, str]) -> None:
    """Raises: UnsupportedMediaType for another charset than UTF-8, or for a compressed body."""
    charset = _CHARSET.search(headers.get("content-type", ""))
    if charset and charset[1].lower() not in ("utf-8", "utf8", "us-ascii", "ascii"):
        raise UnsupportedMediaType("Send the body in UTF-8.", param="content-type")
    if headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise UnsupportedMediaType("Send the body without a Content-Encoding.", param="content-encoding")


def _kind(headers: Mapping[str, str]) -> str:
    return headers.get("content-type", "").partition(";")[0].strip().lower()


def read_json(body: bytes) -> JsonBody:
    """As `read_value`, but require an object."""
    value = read_value(body)
    if not isinstance(value, dict):
        raise RequestError("The body must be a JSON object.")
    return value


def read_value(body: bytes) -> object:
    """Read JSON without NaN, lone surrogates or deep nesting.

    Raises: RequestError, which never repeats the input.
    """
    if body.count(b"[") + body.count(b"{") > _MAX_BRACKETS:
        raise RequestError("The body has too many lists and objects.")
    try:
        value = msgspec.json.decode(body)
    except RecursionError:
        raise RequestError("The body is nested too deeply.") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        position = re.search(r"\(byte (\d+)\)", str(error))
        where = f" at byte {position[1]}" if position else ""
        raise RequestError(f"The body is not valid JSON{where}.") from None
    if is_deeper(value):
        raise RequestError("The body is nested too deeply.")
    result: object = value
    return result


def read_fields(body: JsonBody, shape: type[T], *, strict: bool = False) -> tuple[T, tuple[str, ...]]:
    """Return the body as a msgspec struct, and the names of unknown fields at any depth (at most ten).

    Raises: RequestError that names the field; with `strict`, UnsupportedParameter for an unknown field.
    """
    try:
        value = msgspec.convert(body, shape)
    except msgspec.ValidationError as error:
        reason, _, path = str(error).partition(" - at `$")
        param = path.rstrip("`").lstrip(".")[:100] or None
        if "Invalid enum value" in reason or "Invalid value" in reason:
            allowed = ", ".join(_allowed(_type_of(shape), param or ""))
            reason = f"Not one of {allowed}" if allowed else "Not a value of this field"  # the value is not repeated
            if param and _CONTENT_TYPE.search(param):
                reason += "; images, audio and files are not supported"
        where = f"{param}: " if param else ""
        raise RequestError(f"{where}{reason[:200]}.", param=param) from None
    ignored = tuple(sorted(set(islice(_unknown(body, _type_of(shape), ""), _MAX_NAMED))))
    if strict and ignored:
        raise UnsupportedParameter(f"Unknown field: {ignored[0]}.", param=ignored[0])
    return value, ignored


def read_known(body: JsonBody, shape: type[T], refused: Mapping[str, tuple[object, ...]]) -> tuple[T, tuple[str, ...]]:
    """As `read_fields`, but first refuse the fields in `refused`, which have no support here.

    Raises: RequestError; UnsupportedParameter for a refused field.
    """
    refuse(body, refused)
    return read_fields({name: value for name, value in body.items() if name not in refused}, shape)


def _unknown(value: object, shape: inspect.Type, where: str) -> Iterator[str]:
    """Yield the names of fields that a shape does not have. The value must already be converted to the shape."""
    if isinstance(value, dict):
        known = _fields(shape, str(value.get("type", "")))
        if known is None:
            return
        for name, item in value.items():
            if name not in known:
                yield where + printable(name)
            elif isinstance(item, dict | list):
                yield from _unknown(item, known[name], f"{where}{name}.")
    elif isinstance(value, list):
        items = _items(shape)
        if items is not None:
            for item in value:
                if isinstance(item, dict | list):  # most long lists are lists of numbers
                    yield from _unknown(item, items, f"{where[:-1]}[].")


_type_of = cache(inspect.type_info)


def _fields(shape: inspect.Type, tag: str) -> Mapping[str, inspect.Type] | None:
    """Return the fields of the object that a shape allows; None if it allows anything."""
    for one in _alternatives(shape):
        if isinstance(one, inspect.StructType) and (one.tag is None or one.tag == tag):
            return _fields_of(one.cls)
    return None


@cache
def _fields_of(shape: type[msgspec.Struct]) -> Mapping[str, inspect.Type]:
    struct = inspect.type_info(shape)
    assert isinstance(struct, inspect.StructType)
    tag: dict[str, inspect.Type] = {struct.tag_field: inspect.StrType()} if struct.tag_field else {}
    return tag | {field.encode_name: field.type for field in struct.fields}


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
            found = [known for one in structs if (known := _fields_of(one.cls).get(step))]
    literals = [one for each in found for one in _alternatives(each) if isinstance(one, inspect.LiteralType)]
    return sorted(tags or {str(value) for one in literals for value in one.values})


def _items(shape: inspect.Type) -> inspect.Type | None:
    return next((one.item_type for one in _alternatives(shape) if isinstance(one, inspect.ListType)), None)


def _alternatives(shape: inspect.Type) -> tuple[inspect.Type, ...]:
    return shape.types if isinstance(shape, inspect.UnionType) else (shape,)


def printable(name: str) -> str:
    """Return the name of a field, safe for a header."""
    return re.sub(r"[^A-Za-z0-9_.-]", "?", name[:40])


def refuse(body: JsonBody, neutral: Mapping[str, tuple[object, ...]]) -> None:
    """Refuse fields that are not supported, unless they have one of their neutral values.

    Raises: UnsupportedParameter that names the field.
    """
    for name, harmless in neutral.items():
        if name in body and body[name] is not None and body[name] not in harmless:
            raise UnsupportedParameter(f"{name} is not supported here.", param=name)
