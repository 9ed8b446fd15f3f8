"""What vLLM's wire calls `structured_outputs`, and called `guided_…` before: a schema, a regex or a choice."""

from __future__ import annotations

import msgspec

from tailrace.dialects.bodies import JsonBody, read_json
from tailrace.dialects.grammars import ANY_OBJECT, grammar_of_choice, grammar_of_regex, grammar_of_schema
from tailrace.errors import RequestError, UnsupportedParameter
from tailrace.types import Grammar

__all__ = ["StructuredOutputs", "read_structured_outputs"]

# Known to vLLM. Its switches say how JSON may look; here it looks one way.
_REFUSED = (
    "disable_additional_properties",
    "disable_any_whitespace",
    "disable_fallback",
    "grammar",
    "structural_tag",
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


def read_structured_outputs(wanted: StructuredOutputs | None, prefix: str) -> Grammar | None:
    """The grammar that is asked for, if one is. `prefix` stands before the fields' names. Raises: RequestError."""
    if wanted is None:
        return None
    for name in _REFUSED:
        if getattr(wanted, name):
            raise UnsupportedParameter(f"{prefix}{name} is not supported.", param=f"{prefix}{name}")
    grammars = []
    if wanted.choice is not None:
        grammars.append(grammar_of_choice(wanted.choice, f"{prefix}choice"))
    if wanted.json is not None:
        grammars.append(grammar_of_schema(_schema(wanted.json, f"{prefix}json"), f"{prefix}json"))
    if wanted.json_object:
        grammars.append(ANY_OBJECT)
    if wanted.regex is not None:
        grammars.append(grammar_of_regex(wanted.regex, f"{prefix}regex"))
    if len(grammars) > 1:
        raise RequestError("An answer is held to one of json, regex and choice.", param=f"{prefix}json")
    return grammars[0] if grammars else None


def _schema(value: JsonBody | str, param: str) -> JsonBody:
    """A schema may come as text. Raises: RequestError."""
    if not isinstance(value, str):
        return value
    try:
        return read_json(value.encode())
    except RequestError:
        raise RequestError(f"{param}: this is not a JSON schema.", param=param) from None
