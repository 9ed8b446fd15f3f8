"""vLLM's `structured_outputs`, formerly `guided_…`: a schema, a regex, a choice, a grammar or a structural tag."""

from __future__ import annotations

import msgspec

from tailrace.dialects.bodies import JsonBody, read_json
from tailrace.dialects.grammar_fields import (
    ANY_OBJECT,
    grammar_of_choice,
    grammar_of_regex,
    grammar_of_rules,
    grammar_of_schema,
    grammar_of_tags,
)
from tailrace.errors import RequestError, UnsupportedParameter
from tailrace.types import Grammar

__all__ = ["StructuredOutputs", "read_structured_outputs"]

# vLLM's fields without support here. Some control whitespace in JSON, which is fixed here.
_REFUSED = (
    "disable_additional_properties",
    "disable_any_whitespace",
    "disable_fallback",
    "whitespace_pattern",
)


class StructuredOutputs(msgspec.Struct, kw_only=True):
    choice: list[str] | None = None
    json: JsonBody | str | None = None
    json_object: bool | None = None
    regex: str | None = None
    disable_additional_properties: bool | None = None
    disable_any_whitespace: bool | None = None
    disable_fallback: bool | None = None
    grammar: str | None = None
    structural_tag: JsonBody | str | None = None
    whitespace_pattern: str | None = None


def read_structured_outputs(outputs: StructuredOutputs | None, prefix: str) -> Grammar | None:
    """Return the grammar, or None. `prefix` comes before the names of the fields in errors. Raises: RequestError."""
    if outputs is None:
        return None
    for name in _REFUSED:
        if getattr(outputs, name):
            raise UnsupportedParameter(f"{prefix}{name} is not supported.", param=f"{prefix}{name}")
    grammars = []
    if outputs.choice is not None:
        grammars.append(grammar_of_choice(outputs.choice, f"{prefix}choice"))
    if outputs.json is not None:
        grammars.append(grammar_of_schema(_object(outputs.json, f"{prefix}json"), f"{prefix}json"))
    if outputs.json_object:
        grammars.append(ANY_OBJECT)
    if outputs.regex is not None:
        grammars.append(grammar_of_regex(outputs.regex, f"{prefix}regex"))
    if outputs.grammar:
        grammars.append(grammar_of_rules(outputs.grammar, f"{prefix}grammar"))
    if outputs.structural_tag:
        tag = _object(outputs.structural_tag, f"{prefix}structural_tag")
        grammars.append(grammar_of_tags(tag, f"{prefix}structural_tag"))
    if len(grammars) > 1:
        raise RequestError("Use only one of json, regex, choice, grammar and structural_tag.", param=f"{prefix}json")
    return grammars[0] if grammars else None


def _object(value: JsonBody | str, param: str) -> JsonBody:
    """Read an object, which may be a text. Raises: RequestError."""
    if not isinstance(value, str):
        return value
    try:
        return read_json(value.encode())
    except RequestError:
        raise RequestError(f"{param}: this is not a JSON object.", param=param) from None
