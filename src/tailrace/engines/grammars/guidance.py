"""Converts grammars to llguidance's language, for the check and for the engines that use llguidance.

llguidance reads JSON schemas as the standard says: objects and lists may have additional members, and a pattern may
match anywhere. The schema is closed here: only the named members are allowed, and a pattern matches the whole text. A
narrower answer still conforms, and a small model does not get lost in members that nobody asked for.
"""

from __future__ import annotations

import re
from typing import Any, TypeAlias
from urllib.parse import quote

import msgspec

from tailrace.engines.grammars.answer_parts import rules_of
from tailrace.text.calls.written import AnswerParts
from tailrace.types import Grammar

__all__ = ["control_names", "to_guidance"]

_Schema: TypeAlias = Any  # JSON

_HEAD = "%llguidance {}\n"
# Keywords that contain schemas. All others are copied unchanged.
_BY_NAME = ("$defs", "definitions", "properties")
_LISTS = ("anyOf", "prefixItems")
_SINGLE = ("additionalProperties", "items")
_BETWEEN_SLASHES = {"/": r"\/", "\n": r"\n"}
# llguidance's own sets contain the characters of all scripts. These ASCII sets also work inside of a set.
_SETS = {
    r"\d": "[0-9]",
    r"\D": "[^0-9]",
    r"\w": "[0-9A-Za-z_]",
    r"\W": "[^0-9A-Za-z_]",
    r"\s": r"[ \t\n\r\f\v]",
    r"\S": r"[^ \t\n\r\f\v]",
}
# Small models get stuck in unlimited white space, so the separators are those of Python's JSON. (llama.cpp's version
# takes them as texts, other versions as patterns; these values mean the same in both.)
_SPACES = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_PARTS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\(\?:|.", re.DOTALL)  # of a regular expression
_STARTS, _ENDS = ("", "(", "(?:", "|"), ("", ")", "|")
_SAY_NOTHING = frozenset(("$id", "$schema", "default", "description", "examples", "strict", "title"))


def to_guidance(grammar: Grammar, *, as_text: bool = False) -> str:
    """Convert a grammar to llguidance's language, which llama.cpp also accepts. `as_text`: for a vocabulary without
    control tokens, whose names are text then."""
    if grammar.kind == "lark":
        return grammar.source if grammar.source.lstrip().startswith("%llguidance") else _HEAD + grammar.source
    if grammar.kind == "json_schema":
        return f"{_HEAD}start: {_json(msgspec.json.decode(grammar.source))}\n"
    if grammar.kind == "parts":
        parts = msgspec.json.decode(grammar.source, type=AnswerParts)
        return _HEAD + rules_of(parts, _json, _regex, as_text=as_text)
    return f"{_HEAD}start: {_regex(grammar.source)}\n"


def control_names(grammar: Grammar) -> dict[int, str]:
    """Return the names of the control tokens in a grammar, by their ids. With `as_text`, the grammar has these names
    instead of the tokens."""
    if grammar.kind != "parts":
        return {}
    tokens = msgspec.json.decode(grammar.source, type=AnswerParts).tokens
    return {token_id: name for name, token_id in tokens.items()}


def _regex(regex: str) -> str:
    text = re.sub(r"\\.|/|\n", lambda match: _BETWEEN_SLASHES.get(match[0], match[0]), _plain(regex))
    return f"/{text or '()'}/"


def _json(schema: _Schema) -> str:
    closed = _closed(schema) | {"x-guidance": _SPACES}
    return f"%json {msgspec.json.encode(closed).decode()}"


def _plain(regex: str) -> str:
    """Remove ^ and $ at the ends of alternatives, and replace \\d, \\w and \\s with ASCII sets."""
    parts = ["", *_PARTS.findall(regex), ""]
    kept = []
    for before, part, after in zip(parts, parts[1:], parts[2:], strict=False):
        if not (part == "^" and before in _STARTS) and not (part == "$" and after in _ENDS):
            kept.append(re.sub(r"\\.", lambda match: _SETS.get(match[0], match[0]), part))
    return "".join(kept)


def _closed(schema: _Schema) -> _Schema:
    """Allow only the named members, and make patterns match the whole string."""
    if not isinstance(schema, dict):
        return schema
    closed = {name: value for name, value in schema.items() if name not in _SAY_NOTHING}
    for name in _BY_NAME:
        if name in closed:
            closed[name] = {key: _closed(inner) for key, inner in closed[name].items()}
    for name in _LISTS:
        if name in closed:
            closed[name] = [_closed(inner) for inner in closed[name]]
    for name in _SINGLE:
        if name in closed:
            closed[name] = _closed(closed[name])
    if "properties" in closed:
        closed.setdefault("additionalProperties", False)
    if "prefixItems" in closed:
        closed.setdefault("items", False)
    if "pattern" in closed:
        closed["pattern"] = f"^(?:{_plain(closed['pattern'])})$"
    if "$ref" in closed:
        closed["$ref"] = quote(closed["$ref"], safe="#/$")
    return closed
