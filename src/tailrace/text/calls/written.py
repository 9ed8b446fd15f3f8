"""How the calls of a format are written, as parts of which a grammar can be made.

A part is JSON: a text; `{"json": SCHEMA}`, a JSON value; `{"until": TEXT}`, any text up to and with this text;
`{"any": [TEXT, …]}`, one of these texts; `{"maybe": [PART, …]}`; `{"listed": [[IS_REQUIRED, [PART, …]], …]}`, some of
these in this order, with commas between them. Structural tags have these, too: `{"regex": REGEX}`;
`{"either": [[PART, …], …]}`; `{"repeat": [PART, …]}`, any number of times; `{"free": true}`, any text up to the end.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import msgspec

from tailrace.text.calls.call_formats import CallFormat
from tailrace.text.calls.parameters import parameters_of
from tailrace.text.calls.syntaxes import JsonCalls, NamedCalls, PythonCalls, TaggedCalls

__all__ = ["AnswerParts", "CallParts", "Part", "call_parts", "surroundings"]

Part: TypeAlias = Any  # JSON, see above
_Schema: TypeAlias = dict[str, Any]  # in plain form
_HOLE = "\0"
_NO_FORMS = ("harmony",)  # its answers have channels, in which a text would have to be, too


class CallParts(NamedTuple):
    """One call. `open_names` are the arguments whose schemas are kept only in part."""

    parts: list[Part]
    open_names: list[str]


class AnswerParts(msgspec.Struct, frozen=True, omit_defaults=True):
    """An answer: one or more calls, or a JSON value. `tokens` are the control tokens in its texts, by their text."""

    calls: list[list[Part]]
    before: str = ""
    between: str | None = None  # None: there is one call
    after: str = ""
    answer: Any = None  # a schema
    tokens: dict[str, int] = {}


def surroundings(form: CallFormat) -> tuple[str, str, str]:
    """Return what stands before, between and after the calls of an answer."""
    closes = form.syntaxes[0].markers[-1:]
    between = "\n" if closes and closes[0].startswith("</") else ""
    before, after = form.around if len(form.around) == 2 else ("", "")
    return before, between, after


def call_parts(form: CallFormat, name: str, arguments: _Schema) -> CallParts | None:
    """Return the parts of a call of this tool; None if no grammar can be made of them."""
    syntax = form.syntaxes[0]
    if form.name in _NO_FORMS:
        return None
    match syntax:
        case TaggedCalls():
            return _tagged(syntax, name, arguments)
        case PythonCalls():
            return _python(syntax, name, arguments)
        case JsonCalls():
            head, _, tail = syntax.write(name, _HOLE).partition(_HOLE)
            return CallParts([head, {"json": arguments}, tail], [])
        case NamedCalls() if len(syntax.quotes[0]) == 1:
            head, _, tail = syntax.write(name, _HOLE).partition(_HOLE)
            return CallParts([head, {"json": arguments}, tail], [])
    return None


def _properties(arguments: _Schema) -> dict[str, _Schema] | None:
    """Return the schemas of the arguments, each with its definitions; None if they have no fixed names."""
    if "type" not in arguments:
        return None
    more = {"$defs": arguments["$defs"]} if "$defs" in arguments else {}
    return {name: schema | more for name, schema in arguments.get("properties", {}).items()}


def _tagged(syntax: TaggedCalls, name: str, arguments: _Schema) -> CallParts | None:
    properties = _properties(arguments)
    if properties is None:
        return None
    kinds = parameters_of([{"function": {"name": name, "parameters": arguments}}])[name]
    head, _, tail = syntax.write(name, f'{{"{_HOLE}": 0}}'.replace(_HOLE, "\\u0000")).partition(_HOLE)
    head = head.removesuffix(syntax.key_open)
    line = "\n" if head.endswith("\n") and "\n" in tail else ""
    tail = tail.rpartition(syntax.value_close)[2]
    head = head.removesuffix(line)
    parts: list[Part] = [head]
    open_names = []
    for key, schema in properties.items():
        close = line + syntax.value_close
        given: list[Part] = [line + syntax.key_open + key + syntax.key_close + syntax.value_open + line]
        values = [schema["const"]] if "const" in schema else schema.get("enum", [])
        if values and all(isinstance(value, str) for value in values):
            given += [{"any": values}, close]
        elif kinds.get(key):
            given.append({"until": close})
            open_names += [key] if schema.keys() - {"type", "$defs"} or schema.get("type") != "string" else []
        else:
            given += [{"json": schema}, close]
        parts += given if key in arguments.get("required", ()) else [{"maybe": given}]
    return CallParts([*parts, tail], open_names)


def _python(syntax: PythonCalls, name: str, arguments: _Schema) -> CallParts | None:
    properties = _properties(arguments)
    if properties is None or not all(key.isidentifier() for key in properties):
        return None
    required = arguments.get("required", ())
    listed = [[key in required, [f"{key}=", {"json": schema}]] for key, schema in properties.items()]
    head, tail = "".join([*syntax.opens[:1], f"[{name}("]), "".join([")]", *syntax.closes[:1]])
    return CallParts([head, {"listed": listed}, tail] if listed else [head + tail], [])
