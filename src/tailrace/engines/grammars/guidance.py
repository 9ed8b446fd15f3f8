"""Grammars in the words of llguidance, for the check before all engines and for those that it holds to a grammar.

It reads JSON schemas as the standard does: objects and lists may have more than is named, and a pattern may match
anywhere. OpenVINO's library takes what is named for all there is, so llguidance is told the same: a narrower answer
still conforms, and a schema means one thing on all engines.
"""

from __future__ import annotations

import re
from typing import Any, TypeAlias
from urllib.parse import quote

import msgspec

from tailrace.types import Grammar

__all__ = ["to_guidance"]

_Schema: TypeAlias = Any  # JSON

# Ones that hold schemas, and how; what is in neither goes as it is.
_BY_NAME = ("$defs", "definitions", "properties")
_LISTS = ("anyOf", "prefixItems")
_SINGLE = ("additionalProperties", "items")
_BETWEEN_SLASHES = {"/": r"\/", "\n": r"\n"}
# Its own hold the digits of all scripts. These may stand in a set as well.
_SETS = {
    r"\d": "[0-9]",
    r"\D": "[^0-9]",
    r"\w": "[0-9A-Za-z_]",
    r"\W": "[^0-9A-Za-z_]",
    r"\s": r"[ \t\n\r\f\v]",
    r"\S": r"[^ \t\n\r\f\v]",
}
# White space that may go on without end is where small models get lost: so it is as Python writes
# JSON. (To llama.cpp's version the separators are texts, to others patterns; what stands here is the same in both.)
_SPACES = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_SAY_NOTHING = frozenset(("$id", "$schema", "default", "description", "examples", "strict", "title"))


def to_guidance(grammar: Grammar) -> str:
    """The grammar in llguidance's own language, which llama.cpp takes as well."""
    if grammar.kind == "json_schema":
        closed = _closed(msgspec.json.decode(grammar.source)) | {"x-guidance": _SPACES}
        schema = msgspec.json.encode(closed).decode()
        return f"%llguidance {{}}\nstart: %json {schema}\n"
    text = re.sub(r"\\.|/|\n", lambda match: _BETWEEN_SLASHES.get(match[0], match[0]), _plain(grammar.source))
    return f"%llguidance {{}}\nstart: /{text or '()'}/\n"


def _plain(regex: str) -> str:
    """Without the ^ and $ that may stand at its ends, and with sets of ASCII for what stands for a set."""
    text = regex.removeprefix("^")
    text = text[:-1] if re.search(r"(?<!\\)(\\\\)*\$\Z", text) else text
    return re.sub(r"\\.", lambda match: _SETS.get(match[0], match[0]), text)


def _closed(schema: _Schema) -> _Schema:
    """With nothing allowed beside what is named, and with patterns that are for the whole string."""
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
