"""Reads grammars of answers from requests: JSON schemas, regular expressions, rules and structural tags."""

from __future__ import annotations

import re
from dataclasses import replace

from tailrace.dialects.bodies import to_json
from tailrace.errors import RequestError, UnsupportedParameter
from tailrace.schemas.conjunction import SchemaError
from tailrace.schemas.regexes import TOO_LARGE, UNSUPPORTED, regex_fault
from tailrace.schemas.structural_tags import read_structural_tag
from tailrace.types import Grammar

__all__ = [
    "ANY_OBJECT",
    "grammar_of_choice",
    "grammar_of_regex",
    "grammar_of_rules",
    "grammar_of_schema",
    "grammar_of_tags",
    "read_response_format",
    "unwrapped_schema",
]

_MAX_VALUES = 200  # of a choice
_MAX_RULES = 65_536  # characters of a grammar
_SPECIAL = re.compile(r"[.\\\[\](){}*+?|^$/\-\"']")  # characters that all engines allow to be escaped with \
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")

_WRAPPER = {"name", "description", "schema", "strict"}
ANY_OBJECT = Grammar("json_schema", '{"type":"object"}')


def read_response_format(value: object, param: str = "response_format") -> Grammar | None:
    """Read OpenAI's `response_format`, also in the form of Hugging Face's client. Raises: RequestError."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise RequestError(f"{param} must be an object.", param=param)
    kind = value.get("type")
    if kind == "text":
        return None
    if kind == "json_schema":
        wrapped = value.get("json_schema")
        schema = wrapped.get("schema") if isinstance(wrapped, dict) else value.get("schema", value.get("value"))
        return grammar_of_schema(schema, param)
    if kind in ("json_object", "json"):
        given = value.get("schema", value.get("value"))  # of llama.cpp, and of Hugging Face's client
        return grammar_of_schema(given, param) if given is not None else replace(ANY_OBJECT, param=param)
    if kind == "regex":
        return grammar_of_regex(value.get("value"), param)
    if kind == "grammar":  # Fireworks' form
        return grammar_of_rules(value.get("grammar"), f"{param}.grammar")
    if kind == "structural_tag":
        return grammar_of_tags(value, param)
    raise RequestError(
        f"{param} takes the types text, json_object, json_schema, regex, grammar and structural_tag.", param=param
    )


def unwrapped_schema(schema: object) -> object:
    """Return the inner one of `{"name", "schema"}`. As a schema itself, it would allow any answer."""
    is_wrapped = isinstance(schema, dict) and schema.keys() <= _WRAPPER and isinstance(schema.get("schema"), dict)
    return schema["schema"] if isinstance(schema, dict) and is_wrapped else schema


def grammar_of_schema(schema: object, param: str) -> Grammar:
    """Return a grammar from a JSON schema, which may be named as in TGI's and OpenAI's APIs. The generator brings it
    into the form of the engine, and refuses what is no JSON schema. Raises: RequestError."""
    schema = unwrapped_schema(schema)
    if not isinstance(schema, dict):
        raise RequestError(f"{param} needs a JSON schema.", param=param)
    return Grammar("json_schema", to_json(schema).decode(), param)


def grammar_of_regex(text: object, param: str) -> Grammar:
    """Return a grammar from a regular expression for the whole answer, in the syntax that all engines support: without
    look-around, back-references or large counts. Raises: RequestError."""
    if fault := regex_fault(text):
        kind = UnsupportedParameter if fault in (UNSUPPORTED, TOO_LARGE) else RequestError
        raise kind(f"{param}: {fault}.", param=param)
    assert isinstance(text, str)
    return Grammar("regex", text, param)


def grammar_of_rules(text: object, param: str) -> Grammar:
    """Return a context-free grammar from its text, in GBNF or Lark. The generator reads it. Raises: RequestError."""
    if not isinstance(text, str) or not text.strip():
        raise RequestError(f"{param} needs the text of a grammar, in GBNF or Lark.", param=param)
    if len(text) > _MAX_RULES:
        raise RequestError(f"{param} has more than {_MAX_RULES} characters.", param=param)
    return Grammar("cfg", text, param)


def grammar_of_tags(value: object, param: str) -> Grammar:
    """Return a structural tag. The generator brings it into the form of the engine. Raises: RequestError."""
    try:
        read_structural_tag(value)
    except SchemaError as error:
        raise RequestError(f"{param}: this structural tag cannot be used: {error}.", param=param) from None
    return Grammar("tags", to_json(value).decode(), param)


def grammar_of_choice(choices: object, param: str) -> Grammar:
    """Return a grammar for answers that are one of these texts. Raises: RequestError."""
    if not isinstance(choices, list) or not 1 <= len(choices) <= _MAX_VALUES:
        raise RequestError(f"{param} must be a list of 1 to {_MAX_VALUES} texts.", param=param)
    if not all(isinstance(choice, str) and choice and not _CONTROL.search(choice) for choice in choices):
        raise RequestError(f"The texts of {param} must not be empty or have control characters.", param=param)
    escaped = [_SPECIAL.sub(r"\\\g<0>", choice) for choice in dict.fromkeys(choices)]
    return grammar_of_regex("|".join(escaped), param)
