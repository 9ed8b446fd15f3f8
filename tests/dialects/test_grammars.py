"""Grammars of clients: supported ones pass unchanged, all others are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.dialects.bodies import JsonBody, read_json, to_json
from tailrace.dialects.grammars import ANY_OBJECT, grammar_of_schema, read_response_format, read_tgi_grammar
from tailrace.errors import RequestError, TailraceError, UnsupportedParameter
from tailrace.types import Grammar

CANARY = "kanarienvogel"  # whatever a client made up; no message may say it again


def refusal(read: Callable[[], object]) -> TailraceError:
    with pytest.raises(TailraceError) as refused:
        read()
    assert CANARY not in refused.value.message
    assert len(refused.value.message) < 400
    return refused.value


def outcome(read: Callable[[], Grammar | None]) -> Grammar | RequestError | None:
    """Return the result if it is a grammar or a refusal."""
    try:
        return read()
    except RequestError as error:
        return error


def of_schema(schema: object) -> TailraceError:
    error = refusal(lambda: grammar_of_schema(schema, "field"))
    assert error.param == "field"
    assert error.message.startswith("field")
    return error


def of_regex(text: object) -> TailraceError:
    """Return the refusal of a regular expression, alone and in a schema."""
    error = refusal(lambda: read_tgi_grammar("regex", text))
    assert error.param == "grammar"
    assert type(of_schema({"type": "string", "pattern": text})) is type(error)
    return error


def each(*values: object) -> tuple[object, ...]:
    """Return values of all types as one tuple, for tests that mix them."""
    return values


def nested(depth: int) -> JsonBody:
    """Return a schema with this depth."""
    schema: JsonBody = {"type": "null"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def chain(num_links: int, num_choices: int = 2) -> JsonBody:
    """Return definitions whose choices all lead to the next one, so that the number of paths grows exponentially."""
    links: JsonBody = {
        f"d{number}": {"anyOf": [{"$ref": f"#/$defs/d{number + 1}"}] * num_choices} for number in range(num_links)
    }
    return {"$ref": "#/$defs/d0", "$defs": links | {f"d{num_links}": {"type": "null"}}}


LIST = {"type": "object", "properties": {"next": {"$ref": "#/$defs/list"}}}


@pytest.mark.parametrize(
    "schema",
    [
        {},
        *({"type": kind} for kind in each("object", "array", "string", "integer", "number", "boolean", "null")),
        {"type": ["string", "null"]},
        {"type": "object", "properties": {"a": {}, "b": True}, "required": ["a"], "additionalProperties": False},
        {"type": "object", "additionalProperties": {"type": "integer"}},
        {"type": "array", "items": {"type": "integer"}, "minItems": 0, "maxItems": 64},
        {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "items": False},
        {"type": "array", "prefixItems": [{"type": "integer"}], "minItems": 1, "maxItems": 1},
        {"type": "string", "minLength": 3, "maxLength": 48},
        {"type": "string", "minLength": 3, "maxLength": 3},
        *({"type": "string", "format": name}
          for name in ("date", "time", "date-time", "email", "uuid", "ipv4", "ipv6")),
        {"type": "string", "pattern": "^[a-z]+$"},
        {"type": "integer", "minimum": -(10**12), "maximum": 10**12},
        {"type": "integer", "minimum": 5, "maximum": 5},
        {"enum": ["a", 1, 1.5, True, None]},
        {"const": "\u00e9"},
        {"anyOf": [{"type": "string"}, {"type": "null"}]},
        {"$ref": "#/$defs/a", "description": "d", "$defs": {"a": {"type": "string"}}},
        {"$ref": "#/definitions/a b", "definitions": {"a b": {"type": "string"}}},
        {"$ref": "#/$defs/list", "$defs": {"list": LIST}},
        {"anyOf": [{"$ref": "#/$defs/a"}] * 20, "$defs": {"a": {"type": "null"}}},
        {"$schema": "s", "$id": "i", "title": "t", "description": "d", "default": {"a": [1]}, "examples": [{}],
         "strict": True},
    ],
    ids=str,
)  # fmt: skip
def test_supported_schemas_pass_unchanged(schema: JsonBody) -> None:
    grammar = grammar_of_schema(schema, "field")
    assert grammar.kind == "json_schema"
    assert grammar.source.isascii()
    assert json.loads(grammar.source) == schema
    assert list(json.loads(grammar.source)) == list(schema)  # properties come in the order of the schema


def test_properties_may_have_the_names_of_keywords() -> None:
    schema = {"type": "object", "properties": {"oneOf": {"type": "string"}, "$ref": {"type": "null"}, CANARY: {}}}
    assert json.loads(grammar_of_schema(schema, "field").source) == schema


@pytest.mark.parametrize(
    "name",
    ["additionalItems", "allOf", "contains", "dependencies", "dependentRequired", "dependentSchemas", "else",
     "exclusiveMaximum", "exclusiveMinimum", "if", "maxContains", "maxProperties", "minContains", "minProperties",
     "multipleOf", "not", "nullable", "oneOf", "patternProperties", "propertyNames", "then", "unevaluatedItems",
     "unevaluatedProperties", "uniqueItems"],
)  # fmt: skip
@pytest.mark.parametrize("below", [False, True])
def test_unsupported_keywords_are_named(name: str, below: bool) -> None:
    schema: JsonBody = {"type": "string", name: CANARY}
    error = of_schema({"anyOf": [{}, {"items": schema}]} if below else schema)
    assert isinstance(error, UnsupportedParameter)
    assert name in error.message


@pytest.mark.parametrize("name", [CANARY, "", "Type", "$anchor", "$dynamicRef"])
def test_unknown_keywords_are_not_repeated(name: str) -> None:
    error = of_schema({name: 1})
    assert isinstance(error, UnsupportedParameter)
    assert "one of its keywords" in error.message


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        *((value, "needs a JSON schema") for value in each(None, True, 5, "{}", [])),
        *(({"type": kind}, "type must be")
          for kind in each(CANARY, 5, None, {}, {"a": 1}, [[]], ["string", {}], ["any"])),
        *(({name: value}, f"{name} must be a whole number")
          for name in ("minItems", "maxItems", "minLength", "maxLength")
          for value in each(-1, 1.0, True, None, CANARY, [], {})),
        *(({name: value}, "because engines need too long")
          for name in ("minItems", "maxItems", "minLength", "maxLength")
          for value in (65, 10**30)),
        *(({"type": "integer", name: value}, f"{name} must be a whole number, and")
          for name in ("minimum", "maximum")
          for value in each(10**12 + 1, -(10**12) - 1, 10**30, 1.5, False, None, CANARY, [], {})),
        ({"minimum": 1}, "needs the type integer"),
        ({"type": "number", "maximum": 1}, "needs the type integer"),
        ({"type": ["integer", "null"], "maximum": 1}, "needs the type integer"),
        # Two that cannot even be compared.
        ({"type": "integer", "minimum": CANARY, "maximum": 1}, "minimum must be a whole number"),
        ({"type": "integer", "minimum": 1, "maximum": None}, "maximum must be a whole number"),
        ({"prefixItems": [{}, {}], "maxItems": 1}, "do not allow"),
        ({"prefixItems": [{}, {}], "minItems": 3}, "do not allow"),
        *(({"properties": {f"{CANARY}{character}": {}}}, "the name of a property") for character in '"\\\n\0\x1f'),
        *((schema, "false is allowed only for additionalProperties")
          for schema in ({"items": False}, {"anyOf": [{}, False]}, {"properties": {"a": False}},
                         {"prefixItems": [False]}, {"$defs": {"a": False}}, {"definitions": {"a": False}})),
        ({"minItems": 3, "maxItems": 2}, "minItems is larger than maxItems"),
        ({"minLength": 3, "maxLength": 2}, "minLength is larger than maxLength"),
        ({"type": "integer", "minimum": 3, "maximum": 2}, "minimum is larger than maximum"),
        *(({"required": value}, "required must be") for value in each(CANARY, 5, None, {}, [1], [None], [["a"]])),
        *(({"enum": value}, "enum must be") for value in each([], {}, None, 5, CANARY, [[]], [{}], [1, [CANARY]])),
        *(({"const": value}, "const must be") for value in each([], {}, [CANARY])),
        *(({"type": "string", "format": value}, "format must be") for value in each(CANARY, "uri", 5, None, [], {})),
        *(({name: value}, f"{name} must be an object")
          for name in ("properties", "$defs", "definitions") for value in each([], None, 5, CANARY)),
        *(({name: value}, f"{name} must be a list of schemas")
          for name in ("anyOf", "prefixItems") for value in each([], {}, None, 5, CANARY)),
        *((schema, "a schema must be an object")
          for value in each(5, None, CANARY, [], [{}])
          for schema in ({"items": value}, {"additionalProperties": value}, {"properties": {CANARY: value}},
                         {"anyOf": [value]}, {"prefixItems": [value]}, {"$defs": {CANARY: value}})),
    ],
    ids=str,
)  # fmt: skip
def test_wrong_values_are_refused_with_the_reason(schema: object, reason: str) -> None:
    error = of_schema(schema)
    assert type(error) is RequestError
    assert reason in error.message


@pytest.mark.parametrize(
    ("reference", "definitions"),
    [
        *((value, {"a": {}}) for value in
          each(None, 5, [], {}, "", "#", "#/", "a", "#/$defs/b", "#/$defs/", "#/$defs/a/b", "#/$defs/a~1b",
           "#/$defs/%61", "#/properties/a", f"http://{CANARY}/#/$defs/a", "#/$defs/a#", "##/$defs/a")),
        *(("#/$defs/a", value) for value in
          each({}, {"a": True},
           # In circles, without ever coming to a character.
           {"a": {"$ref": "#/$defs/a"}},
           {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
           {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}},
           {"a": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/a"}]}},
           {"a": {"anyOf": [{"type": "null"}, {"anyOf": [{"$ref": "#/$defs/a"}]}]}},
           {"a": {"anyOf": [{"$ref": "#/$defs/b"}]}, "b": {"anyOf": [{"$ref": "#/$defs/a"}]}},
           {"a": {"anyOf": [{"$ref": "#/$defs/b"}, {"$ref": "#/$defs/b"}]},
            "b": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/a"}]}})),
    ],
    ids=str,
)  # fmt: skip
def test_invalid_references_are_refused(reference: object, definitions: object) -> None:
    error = of_schema({"type": "array", "items": {"$ref": reference}, "$defs": definitions})
    assert type(error) is RequestError
    assert "a $ref must lead to" in error.message


@pytest.mark.parametrize("beside", [{"type": "string"}, {"required": ["a"]}, {"maxLength": 3}, {"enum": [1]}])
def test_keywords_that_engines_ignore_beside_a_reference_are_refused(beside: JsonBody) -> None:
    error = of_schema({"$ref": "#/$defs/a", **beside, "$defs": {"a": {}}})
    assert type(error) is RequestError
    assert "$ref cannot be combined" in error.message


@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": [{"type": "string"}], "type": "string"},
        {"enum": ["a"], "maxLength": 1},
        {"const": "a", "enum": ["a"]},
        {"type": "string", "pattern": "a", "minLength": 1},
        {"type": "string", "format": "date", "pattern": "a"},
        {"pattern": "a"},
        {"format": "date"},
    ],
)
def test_keywords_that_engines_read_alone_must_be_alone(schema: JsonBody) -> None:
    assert type(of_schema(schema)) is RequestError


@pytest.mark.parametrize(
    "schema",
    [
        {"enum": ["a" * 20_001]},
        {"enum": ["a" * 200] * 101},
        {"properties": {"a" * 10_001: {"const": "b" * 10_000}}},
        {"prefixItems": [{"type": "string", "pattern": "[ab]{60}"}] * 2},
    ],
)
def test_schemas_that_compile_slowly_are_refused(schema: JsonBody) -> None:
    error = of_schema(schema)
    assert isinstance(error, RequestError)
    assert "too large" in error.message


@pytest.mark.parametrize(
    ("fits", "too_large"),
    [
        (nested(16), nested(17)),
        ({"prefixItems": [{}] * 99}, {"prefixItems": [{}] * 100}),
        ({"properties": {str(n): {} for n in range(99)}}, {"properties": {str(n): {} for n in range(100)}}),
        ({"enum": list(range(200))}, {"enum": list(range(201))}),
        ({"prefixItems": [{"enum": list(range(100))}] * 2}, {"prefixItems": [{"enum": list(range(67))}] * 3}),
        ({"prefixItems": [{"maxLength": 24}] * 2}, {"prefixItems": [{"maxLength": 17}] * 3}),
        ({"prefixItems": [{"minLength": 24}] * 2}, {"prefixItems": [{"minLength": 17}] * 3}),
        (chain(14), chain(200)),
    ],
    ids=lambda schema: str(schema)[:60],
)
def test_size_has_limits(fits: JsonBody, too_large: JsonBody) -> None:
    assert json.loads(grammar_of_schema(fits, "field").source) == fits
    assert type(of_schema(too_large)) is RequestError


@pytest.mark.parametrize(
    "schema",
    [
        nested(60),
        {"enum": list(range(100_000))},
        {"enum": [CANARY] * 100_000},
        {"properties": {f"{CANARY}{number}": {} for number in range(30_000)}},
        {"anyOf": [{}] * 90_000},
        {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/b"}] * 30_000}, "b": {}}},
        chain(14, num_choices=7),
        chain(5_000),
        {"$ref": "#/$defs/" + "a" * 1_000_000},
        {"type": "x" * 1_000_000},
        {"pattern": "(" * 1_000_000},
    ],
    ids=lambda schema: str(schema)[:60],
)
def test_hostile_schemas_are_refused_quickly(schema: JsonBody) -> None:
    of_schema(read_json(to_json(schema)))


def test_nested_choices_take_linear_time() -> None:
    """Six choices at thirteen levels have 6^13 paths."""
    grammar_of_schema(chain(13, num_choices=6), "field")


# Regular expressions


@pytest.mark.parametrize(
    "text",
    ["a", "\u00e9", "a|b", "(a|b)c", "(?:a)", "a*b+c?", "a*?", "a{3}", "a{3,}", "a{3,64}", "^a$", "[^a-z]", ".",
     r"\d\D\w\W\s\S", r"\.\\\[\]\(\)\{\}\*\+\?\|\^\$\/\-\n\r\t", r"\"\'", "[*+]", "[a^]", "[(?=)]", "[{}]", r"[\]\[]",
     r"\(?\d{3}\)?", r"\$\d+", r"\++", r"\|?", r"\{x\}", "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}",
     "(a{64}){64}", ".{64}", "(?:.{32}){2}", "[a-z]" * 64, "x" * 2000, r"[^\\]\\", "(a+)+$", "(a*)*b"],
)  # fmt: skip
def test_portable_regexes_pass_unchanged(text: str) -> None:
    assert read_tgi_grammar("regex", text) == Grammar("regex", text)
    assert read_response_format({"type": "regex", "value": text}) == Grammar("regex", text)
    schema = {"type": "string", "pattern": text}
    assert json.loads(grammar_of_schema(schema, "field").source) == schema


@pytest.mark.parametrize(
    "text",
    ["(?=a)b", "(?!a)b", "(?<=a)b", "(?<!a)b", "(?P<n>a)", "(?P<n>a)(?P=n)", "(?i)a", "(?#a)b", "(?>a)b", r"(a)\1",
     "(a)(?(1)b|c)", r"\ba", r"\Ba", r"\Aa", r"a\Z", r"\x41", r"\u0041", r"\p{L}", r"\0", "a*+", "a++", "a?+", "a{2}+",
     "a^b", "^^a", "(^a)", "a$b", "(a$)", "a$\n", r"a\\^b", r"\[^a", "[[a]]", "[[:alpha:]]", "[]a]", "[^]a]", "[a--b]",
     "[a&&b]", "[a||b]", "[a~~b]",
     # On these the engine breaks down (measured with openvino-genai 2026.4.1).
     "()", "a(?:)", "((){64}){64}",
     "a|", "|a", "a||b", "(|a)", "(a|)", "(?:|a)", "^|a", "a|$", "{", "a{", "{}", "a{}", "a{b}", "a{,5}", "a{ 2}",
     '{"a": 1}',
     # Too many.
     "a{65}", "a{65,}", "a{1,65}", "a{99999999999}", "a{1,99999999999999999999}", "a{" + "9" * 1990 + "}",
     "((a{64}){64}){2}", "(?:(?:a{64}){64}){64}", "(?:ab{64}){63}" * 2, ".{64}.", "(?:.{33}){2}",
     r"\w{60}\d{5}", "[a-z]" * 65],
)  # fmt: skip
def test_other_regexes_are_refused(text: str) -> None:
    assert type(of_regex(text)) is UnsupportedParameter


@pytest.mark.parametrize(
    "text", [None, 5, [], {}, "", "x" * 2001, "(", ")", "(" * 2000, "[", "a\\", "*", "a**", "a{3,2}", "[b-a]", "(?:"]
)
def test_invalid_regexes_are_refused(text: object) -> None:
    assert type(of_regex(text)) is RequestError


@pytest.mark.parametrize("sign", ["\0", "\x01", "\x08", "\x0b", "\x0c", "\x0e", "\x1f", "\x7f"])
def test_a_regex_has_no_control_characters(sign: str) -> None:
    """A NUL ended the engine's process."""
    for text in (f"a{sign}b", sign, f"[{sign}]", f"\\{sign}"):
        assert type(of_regex(text)) is RequestError
        assert "control characters" in of_regex(text).message
        assert "control characters" in of_schema({"type": "string", "pattern": text}).message


def test_a_regex_may_have_lines() -> None:
    assert read_tgi_grammar("regex", "a\tb\r\nc") == Grammar("regex", "a\tb\r\nc")


def test_errors_do_not_repeat_the_regex() -> None:
    of_regex(f"({CANARY}")
    of_regex(f"(?={CANARY})")
    of_regex(f"(?P<{CANARY}>a)")


@settings(max_examples=400)
@given(st.text("ab0159()[]{}|*+?^$\\.-,:=!<>PiudDwnx&~\n", max_size=30))
def test_any_text_is_accepted_or_refused_as_a_regex(text: str) -> None:
    """Warnings are errors in tests, and versions of Python warn about different expressions."""
    found = outcome(lambda: read_tgi_grammar("regex", text))
    assert found == Grammar("regex", text) or (isinstance(found, RequestError) and found.param == "grammar")


@pytest.mark.parametrize(
    "text", ["[a" * 1000, "[" * 2000, "\\" * 2000, "(?:" * 600, "a|" * 1000, "{" * 2000, "{1,1}" * 400, "a{1}b" * 400,
             "(a*)*" * 400, "(" * 900 + ")" * 900, "(((a*)*)*)*" * 100, "[^" * 1000, "x*" * 1000]
)  # fmt: skip
def test_hostile_regexes_are_refused_quickly(text: str) -> None:
    outcome(lambda: read_tgi_grammar("regex", text))


# Anything at all

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(10**13), 10**13)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=4)
)
values = st.recursive(
    scalars | st.sampled_from(["string", "integer", "date", "#/$defs/a", "#/$defs/b", "[a-z]{3}"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                ["$defs", "$ref", "additionalProperties", "anyOf", "const", "definitions", "enum", "format", "items",
                 "maxItems", "maxLength", "maximum", "minItems", "minLength", "minimum", "pattern", "prefixItems",
                 "properties", "required", "type", "title", "oneOf", "a", "b", CANARY]
            ),
            inner,
            max_size=6,
        )
    ),
    max_leaves=30,
)  # fmt: skip


@settings(max_examples=500)
@given(values)
def test_any_json_is_accepted_or_refused_as_a_schema(schema: object) -> None:
    found = outcome(lambda: grammar_of_schema(schema, "field"))
    if isinstance(found, Grammar):
        assert json.loads(found.source) == schema
    else:
        assert found is not None
        assert found.param == "field"
        assert CANARY not in found.message


@settings(max_examples=300)
@given(values, st.sampled_from(["json", "json_object", "json_schema", "regex", "text", "x"]))
def test_any_json_is_accepted_or_refused_as_a_response_format(value: object, kind: str) -> None:
    formats: list[object] = [
        value,
        {"type": value},
        {"type": kind, "json_schema": value},
        {"type": kind, "json_schema": {"schema": value}},
        {"type": kind, "value": value},
        {"type": kind, "schema": value},
    ]
    for one in formats:
        found = outcome(partial(read_response_format, one))
        assert not isinstance(found, RequestError) or found.param == "response_format"
    found = outcome(lambda: read_tgi_grammar(kind, value))
    assert not isinstance(found, RequestError) or found.param == "grammar"


# What wires wrap around them

SCHEMA: JsonBody = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    "wrapped",
    [
        {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}},
        {"type": "json_schema", "schema": SCHEMA},
        {"type": "json_schema", "value": SCHEMA},
        {"type": "json_object", "value": SCHEMA},
        {"type": "json", "value": SCHEMA},
    ],
    ids=str,
)
def test_response_formats_with_a_schema(wrapped: JsonBody) -> None:
    grammar = read_response_format(wrapped)
    assert grammar is not None
    assert json.loads(grammar.source) == SCHEMA


def test_response_formats_without_one() -> None:
    assert read_response_format(None) is None
    assert read_response_format({"type": "text"}) is None
    assert read_response_format({"type": "json_object"}) == ANY_OBJECT
    assert read_response_format({"type": "json"}) == ANY_OBJECT


@pytest.mark.parametrize(
    "wrapped",
    [
        5,
        [],
        CANARY,
        {},
        {"type": CANARY},
        {"type": None},
        {"type": ["json"]},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": SCHEMA},
        {"type": "json_schema", "json_schema": {"schema": CANARY}},
        {"type": "json_object", "value": 5},
        {"type": "regex"},
    ],
    ids=str,
)
def test_response_formats_that_are_none(wrapped: object) -> None:
    error = refusal(lambda: read_response_format(wrapped))
    assert type(error) is RequestError
    assert error.param == "response_format"


@pytest.mark.parametrize(
    ("kind", "value"),
    [("json", SCHEMA), ("json_object", SCHEMA), ("json_schema", SCHEMA), ("json_schema", {"schema": SCHEMA})],
)
def test_grammars_of_tgi(kind: str, value: JsonBody) -> None:
    assert json.loads(read_tgi_grammar(kind, value).source) == SCHEMA


@pytest.mark.parametrize(
    ("kind", "value", "reason"),
    [
        (CANARY, SCHEMA, "the types are json, json_schema and regex"),
        ("json", {}, "must have a 'properties' field"),
        ("json", {"type": "object"}, "must have a 'properties' field"),
        ("json", "{}", "must have a 'properties' field"),
        ("json", {"schema": SCHEMA}, "must have a 'properties' field"),
        ("json_schema", {"schema": {"type": "object"}}, "must have a 'properties' field"),
    ],
)
def test_grammars_that_tgi_refuses(kind: str, value: object, reason: str) -> None:
    error = refusal(lambda: read_tgi_grammar(kind, value))
    assert type(error) is RequestError
    assert error.param == "grammar"
    assert reason in error.message
