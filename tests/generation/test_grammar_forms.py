"""Grammars of calls in the form of each family: what a model writes is allowed, and is read back."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from tests.generation.allowed import allows

from tailrace.engines.grammars.guidance import to_guidance
from tailrace.generation.grammar_forms import engine_form
from tailrace.schemas import GUIDANCE, PASSED_ON, PORTABLE, looser
from tailrace.schemas.answer_check import SchemasAsked
from tailrace.schemas.calls import AskedCalls, AskedTool
from tailrace.schemas.conjunction import SchemaError
from tailrace.text.calls import FORMATS, WholeCall, WholeCallReader, parameters_of
from tailrace.text.calls.written import surroundings
from tailrace.types import CallReading, Grammar

FREE = {"harmony", "gemma4", "functiongemma"}  # whose calls are no JSON, or stand in channels
PYTHON = {name for name, form in FORMATS.items() if type(form.syntaxes[0]).__name__ == "PythonCalls"}
LOOK: dict[str, Any] = {
    "type": "object",
    "properties": {
        "at": {"type": "string"},
        "n": {"type": "integer"},
        "on": {"type": "boolean"},
        "kind": {"enum": ["near", "far"]},
        "list": {"type": "array", "items": {"type": "integer"}},
    },
    "required": ["at", "n"],
}
ANSWER = {"type": "object", "properties": {"z": {"type": "integer"}}, "required": ["z"]}
ARGUMENTS: list[dict[str, Any]] = [
    {"at": 'sky <b> & "q"', "n": 3},
    {"at": "x", "n": -1, "on": True, "kind": "far", "list": [1]},
    {"at": "two\nlines", "n": 0, "kind": "near"},
]


def form_of(name: str, *, forced: bool = False, answer: object = ANSWER, schema: object = LOOK) -> Grammar:
    asked = AskedCalls(
        [AskedTool("look", "tools[0]", schema), AskedTool("go", "tools[1]")], answer, "response_format", forced
    )
    given = Grammar("calls", msgspec.json.encode(asked).decode(), "tools")
    return engine_form(given, name, GUIDANCE, {})


def written(name: str, tool: str, arguments: dict[str, Any]) -> str:
    if name in PYTHON:  # with the quotes of JSON
        form = FORMATS[name].write(tool, "{}")
        return form.replace("()", f"({', '.join(f'{key}={json.dumps(value)}' for key, value in arguments.items())})")
    return FORMATS[name].write(tool, json.dumps(arguments))


@pytest.mark.parametrize("name", sorted(set(FORMATS) - FREE))
@pytest.mark.parametrize("forced", [False, True])
def test_what_the_family_writes_is_allowed_and_read_back(name: str, forced: bool) -> None:
    grammar = form_of(name, forced=forced)
    assert (grammar.kind, grammar.left_open, grammar.asked) == ("parts", (), "")
    before, between, after = surroundings(FORMATS[name])
    tools = parameters_of([{"function": {"name": "look", "parameters": LOOK}}])
    for tool, arguments in [*(("look", one) for one in ARGUMENTS), ("go", {})]:
        text = before + written(name, tool, arguments) + after
        assert allows(grammar, text), text
        reader = WholeCallReader(CallReading(name, forced, forced, tools))
        found = [part for part in reader.push(text) + reader.flush() if isinstance(part, WholeCall)]
        assert found == [WholeCall(tool, arguments)]
    two = before + written(name, "look", ARGUMENTS[0]) + between + written(name, "go", {}) + after
    assert allows(grammar, two) == (not forced)
    assert allows(grammar, '{"z": 5}') == (not forced)


@pytest.mark.parametrize("name", sorted(set(FORMATS) - FREE))
def test_other_answers_are_not_allowed(name: str) -> None:
    grammar, (before, _, after) = form_of(name), surroundings(FORMATS[name])
    for tool, arguments in (("look", {"n": 1}), ("look", {"at": "x", "n": "many"}), ("other", {})):
        assert not allows(grammar, before + written(name, tool, arguments) + after)
    assert not allows(grammar, "Hello.")
    assert not allows(grammar, '{"y": 5}')


@pytest.mark.parametrize("name", [*sorted(FREE), ""])
def test_a_form_that_cannot_be_a_grammar_is_checked_at_the_end(name: str) -> None:
    grammar = form_of(name)
    assert (grammar.kind, grammar.left_open) == ("free", ("response_format",))
    assert msgspec.json.decode(grammar.asked, type=SchemasAsked) == SchemasAsked(ANSWER, {"look": LOOK, "go": None})


@pytest.mark.parametrize("name", [*sorted(FREE), ""])
def test_a_forced_call_without_a_form_is_json(name: str) -> None:
    grammar = form_of(name, forced=True)
    assert grammar.kind == "json_schema"
    assert allows(grammar, '{"name": "look", "arguments": {"at": "x", "n": 1}}')
    assert not allows(grammar, '{"name": "look", "arguments": {"n": 1}}')


def test_texts_between_tags_are_checked_at_the_end() -> None:
    """Their pattern or length is not kept: a grammar lets any text through up to the closing tag."""
    schema = {"type": "object", "properties": {"at": {"type": "string", "pattern": "[a-z]+"}}}
    grammar = form_of("qwen3-coder", schema=schema)
    assert grammar.left_open == ("tools[0]#/properties/at",)
    assert grammar.asked
    assert form_of("hermes", schema=schema).left_open == ()


def test_control_tokens_are_tokens() -> None:
    asked = AskedCalls([AskedTool("look", "tools[0]")], forced=True)
    given = Grammar("calls", msgspec.json.encode(asked).decode())
    grammar = engine_form(given, "hermes", GUIDANCE, {"<tool_call>": 7, "<other>": 8})
    assert "<[7]>" in to_guidance(grammar)
    assert "<[7]>" not in to_guidance(grammar, as_text=True)
    assert "<[8]>" not in to_guidance(grammar)


def test_definitions_of_two_tools_may_have_the_same_names() -> None:
    tools = [
        AskedTool(name, "tools[0]", {"properties": {"a": {"$ref": "#/$defs/T"}}, "$defs": {"T": {"type": kind}}})
        for name, kind in (("look", "integer"), ("go", "boolean"))
    ]
    given = Grammar("calls", msgspec.json.encode(AskedCalls(tools, forced=True)).decode())
    for reach in (GUIDANCE, PORTABLE):
        grammar = engine_form(given, "", reach, {})
        assert allows(grammar, '{"name": "look", "arguments": {"a": 1}}')
        assert allows(grammar, '{"name": "go", "arguments": {"a": true}}')
        assert not allows(grammar, '{"name": "go", "arguments": {"a": 1}}')


def test_an_error_names_the_tool_the_path_and_the_keyword() -> None:
    with pytest.raises(SchemaError) as refused:
        form_of("hermes", schema={"properties": {"a": {"type": "text"}}})
    assert str(refused.value).startswith("tools[0] (look): #/properties/a/type must be")


def test_another_server_gets_the_schema_as_it_is_and_the_answer_is_checked() -> None:
    schema = '{"type":"object","description":"d","properties":{"a":{"type":"array","uniqueItems":true}}}'
    grammar = engine_form(Grammar("json_schema", schema), "", PASSED_ON, {})
    assert (grammar.source, grammar.left_open) == (schema, ())
    assert msgspec.json.decode(grammar.asked, type=SchemasAsked).answer == json.loads(schema)
    with pytest.raises(SchemaError):
        engine_form(Grammar("json_schema", '{"type":"text"}'), "", PASSED_ON, {})


def test_too_many_tools_have_any_objects_as_arguments() -> None:
    schema = {"properties": {f"p{number}": {"type": "string"} for number in range(40)}}
    asked = AskedCalls([AskedTool(f"t{number}", f"tools[{number}]", schema) for number in range(9)], forced=True)
    given = Grammar("calls", msgspec.json.encode(asked).decode(), "tools")
    *others, last = looser(PORTABLE)
    for reach in others:
        with pytest.raises(SchemaError, match="too large"):
            engine_form(given, "", reach, {})
    grammar = engine_form(given, "", last, {})
    assert grammar.left_open == tuple(f"tools[{number}]" for number in range(9))
    assert allows(grammar, '{"name": "t3", "arguments": {"p1": "x"}}')
    assert grammar.asked
