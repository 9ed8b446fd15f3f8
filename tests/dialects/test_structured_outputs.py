"""vLLM's fields for structured outputs."""

from __future__ import annotations

import json
import re

import pytest
from tests.dialects.fake_server import parsed

from tailrace.dialects import openai
from tailrace.dialects.bodies import JsonBody
from tailrace.dialects.grammar_fields import ANY_OBJECT
from tailrace.errors import RequestError, UnsupportedParameter
from tailrace.types import Grammar

SCHEMA: JsonBody = {"type": "object", "properties": {"a": {"type": "integer"}}}
GBNF = 'root ::= "a" | "b"'
TAG: JsonBody = {"structures": [{"begin": "<a>", "schema": SCHEMA, "end": "</a>"}], "triggers": ["<a"]}
CHAT: JsonBody = {"messages": [{"role": "user", "content": "Hi"}]}
TEXT: JsonBody = {"prompt": "Hi"}


def grammar(fields: JsonBody) -> Grammar | None:
    """Return the grammar, which is the same for chats and for texts."""
    found = openai.parse_chat(parsed(CHAT | fields)).request.sampling.grammar
    assert openai.parse_completion(parsed(TEXT | fields)).request.sampling.grammar == found
    return found


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"structured_outputs": {"grammar": GBNF}}, "structured_outputs.grammar"),
        ({"guided_grammar": GBNF}, "guided_grammar"),
        ({"grammar": GBNF}, "grammar"),
        ({"response_format": {"type": "grammar", "grammar": GBNF}}, "response_format.grammar"),
    ],
)
def test_a_context_free_grammar(fields: JsonBody, param: str) -> None:
    found = grammar(fields)
    assert found == Grammar("cfg", GBNF)
    assert found.param == param
    assert grammar({**fields, "guided_grammar": ""} if param == "grammar" else fields) == found


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "structural_tag", **TAG}},
        {"structured_outputs": {"structural_tag": TAG}},
        {"structured_outputs": {"structural_tag": json.dumps(TAG)}},
    ],
    ids=str,
)
def test_a_structural_tag(fields: JsonBody) -> None:
    found = grammar(fields)
    assert found is not None
    assert (found.kind, json.loads(found.source)["structures"]) == ("tags", TAG["structures"])


def refusal(fields: JsonBody) -> RequestError:
    with pytest.raises(RequestError) as refused:
        grammar(fields)
    return refused.value


@pytest.mark.parametrize(
    "fields",
    [
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": json.dumps(SCHEMA), "disable_fallback": False}},
        {"guided_json": SCHEMA},
        {"guided_json": json.dumps(SCHEMA), "structured_outputs": {}},
    ],
    ids=str,
)
def test_a_schema(fields: JsonBody) -> None:
    found = grammar(fields)
    assert found is not None
    assert (found.kind, json.loads(found.source)) == ("json_schema", SCHEMA)


def test_any_object() -> None:
    assert grammar({"structured_outputs": {"json_object": True}}) == ANY_OBJECT
    assert grammar({"structured_outputs": {"json_object": False}}) is None


def test_a_regular_expression() -> None:
    assert grammar({"structured_outputs": {"regex": "[ab]+"}}) == Grammar("regex", "[ab]+")
    assert grammar({"guided_regex": "[ab]+"}) == Grammar("regex", "[ab]+")


@pytest.mark.parametrize(
    "choices",
    [
        ["yes"],
        ["yes", "no", "yes"],
        ["a|b", "(c", "d.*", "e\\", "[f]", "g/h", "{2}", "^i$"],
        ["\u00e9 \u00fc", "\"'-#%"],
    ],
)
def test_a_choice_is_a_regular_expression_for_its_texts_and_no_other(choices: list[str]) -> None:
    found = grammar({"structured_outputs": {"choice": choices}})
    assert found is not None
    assert found == grammar({"guided_choice": choices})
    assert found.kind == "regex"
    assert all(re.fullmatch(found.source, choice) for choice in choices)
    assert not any(re.fullmatch(found.source, other) for other in ("", "ye", "a", "dxx", "f", "ii"))


@pytest.mark.parametrize(
    "choices", [[], [""], ["a", ""], ["a\nb"], ["a\0"], ["a"] * 201, ["abcdefghij" * 100, "klmnopqrst" * 101]]
)
def test_choices_that_are_none(choices: list[str]) -> None:
    assert refusal({"structured_outputs": {"choice": choices}}).param == "structured_outputs.choice"
    assert refusal({"guided_choice": choices}).param == "guided_choice"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("whitespace_pattern", "[ ]"),
        ("disable_any_whitespace", True),
        ("disable_additional_properties", True),
        ("disable_fallback", True),
    ],
)
def test_unsupported_fields_are_refused_by_name(name: str, value: object) -> None:
    error = refusal({"structured_outputs": {"regex": "a", name: value}})
    assert type(error) is UnsupportedParameter
    assert error.param == f"structured_outputs.{name}"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"structured_outputs": {"regex": "a", "json": SCHEMA}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": "[1]"}}, "structured_outputs.json"),
        ({"structured_outputs": {"regex": "(?=a)"}}, "structured_outputs.regex"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_grammar": " "}, "guided_grammar"),
        ({"grammar": "x" * 65_537}, "grammar"),
        ({"structured_outputs": {"regex": "a", "grammar": GBNF}}, "structured_outputs.json"),
        ({"structured_outputs": {"structural_tag": "["}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"structural_tag": {"format": {"type": "x"}}}}, "structured_outputs.structural_tag"),
        ({"response_format": {"type": "structural_tag"}}, "response_format"),
        ({"response_format": {"type": "grammar"}}, "response_format.grammar"),
        ({"response_format": {"type": "x"}}, "response_format"),
        ({"guided_json": {}, "structured_outputs": {"regex": "a"}}, "response_format"),
    ],
    ids=str,
)
def test_refusals_name_the_field(fields: JsonBody, param: str) -> None:
    assert refusal(fields).param == param


def test_one_answer_has_one_grammar() -> None:
    with pytest.raises(RequestError):
        openai.parse_chat(parsed(CHAT | {"response_format": {"type": "json_object"}, "guided_regex": "a"}))
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    with pytest.raises(RequestError, match="not with another grammar"):
        openai.parse_chat(parsed(CHAT | {"tools": [tool], "guided_regex": "a"}))
