"""Grammars of clients: regular expressions that all engines support, and where requests have schemas."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.dialects.fake_server import chat, completion, generate, parsed
from tests.examples import examples

from tailrace.dialects import GenerateCall
from tailrace.dialects.bodies import JsonBody
from tailrace.dialects.grammar_fields import ANY_OBJECT, grammar_of_regex, grammar_of_schema, read_response_format
from tailrace.errors import RequestError, TailraceError, UnsupportedParameter
from tailrace.types import Grammar
from tailrace_plugins.ollama import ollama_wire as ollama
from tailrace_plugins.tgi.tgi_wire import read_grammar as read_tgi_grammar

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


def of_regex(text: object) -> TailraceError:
    """Return the refusal of a regular expression."""
    error = refusal(lambda: grammar_of_regex(text, "grammar"))
    assert error.param == "grammar"
    return error


@pytest.mark.parametrize("schema", [None, True, 5, "{}", []])
def test_a_schema_is_an_object(schema: object) -> None:
    error = refusal(lambda: grammar_of_schema(schema, "field"))
    assert (type(error), error.param, error.message) == (RequestError, "field", "field needs a JSON schema.")


# Regular expressions


@pytest.mark.parametrize(
    "text",
    ["a", "\u00e9", "a|b", "(a|b)c", "(?:a)", "a*b+c?", "a*?", "a{3}", "a{3,}", "a{3,64}", "^a$", "[^a-z]", ".",
     r"\d\D\w\W\s\S", r"\.\\\[\]\(\)\{\}\*\+\?\|\^\$\/\-\n\r\t", r"\"\'", "[*+]", "[a^]", "[(?=)]", "[{}]", r"[\]\[]",
     r"\(?\d{3}\)?", r"\$\d+", r"\++", r"\|?", r"\{x\}", "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}",
     "(a{64}){64}", ".{64}", "(?:.{32}){2}", "[a-z]" * 64, "x" * 2000, r"[^\\]\\", "(a+)+$", "(a*)*b"],
)  # fmt: skip
def test_portable_regexes_pass_unchanged(text: str) -> None:
    assert grammar_of_regex(text, "grammar") == Grammar("regex", text)
    assert read_response_format({"type": "regex", "value": text}) == Grammar("regex", text)


@pytest.mark.parametrize(
    "text",
    ["(?=a)b", "(?!a)b", "(?<=a)b", "(?<!a)b", "(?P<n>a)", "(?P<n>a)(?P=n)", "(?i)a", "(?#a)b", "(?>a)b", r"(a)\1",
     "(a)(?(1)b|c)", r"\ba", r"\Ba", r"\Aa", r"a\Z", r"\x41", r"\u0041", r"\p{L}", r"\0", "a*+", "a++", "a?+", "a{2}+",
     "a^b", "^^a", "(^a)", "a$b", "(a$)", "a$\n", r"a\\^b", r"\[^a", "[[a]]", "[[:alpha:]]", "[]a]", "[^]a]", "[a--b]",
     "[a&&b]", "[a||b]", "[a~~b]",
     # With empty alternatives or groups, whose repetition takes engines long.
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


def test_a_regex_may_have_lines() -> None:
    assert grammar_of_regex("a\tb\r\nc", "grammar") == Grammar("regex", "a\tb\r\nc")


def test_errors_do_not_repeat_the_regex() -> None:
    of_regex(f"({CANARY}")
    of_regex(f"(?={CANARY})")
    of_regex(f"(?P<{CANARY}>a)")


@settings(max_examples=examples(400))
@given(st.text("ab0159()[]{}|*+?^$\\.-,:=!<>PiudDwnx&~\n", max_size=30))
def test_any_text_is_accepted_or_refused_as_a_regex(text: str) -> None:
    """Warnings are errors in tests, and versions of Python warn about different expressions."""
    found = outcome(lambda: grammar_of_regex(text, "grammar"))
    assert found == Grammar("regex", text) or (isinstance(found, RequestError) and found.param == "grammar")


@pytest.mark.parametrize(
    "text", ["[a" * 1000, "[" * 2000, "\\" * 2000, "(?:" * 600, "a|" * 1000, "{" * 2000, "{1,1}" * 400, "a{1}b" * 400,
             "(a*)*" * 400, "(" * 900 + ")" * 900, "(((a*)*)*)*" * 100, "[^" * 1000, "x*" * 1000]
)  # fmt: skip
def test_hostile_regexes_are_refused_quickly(text: str) -> None:
    outcome(lambda: grammar_of_regex(text, "grammar"))


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


@settings(max_examples=examples(500))
@given(values)
def test_any_json_is_accepted_or_refused_as_a_schema(schema: object) -> None:
    found = outcome(lambda: grammar_of_schema(schema, "field"))
    if isinstance(found, Grammar):
        assert json.loads(found.source) == schema
    else:
        assert found is not None
        assert found.param == "field"
        assert CANARY not in found.message


@settings(max_examples=examples(300))
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
_NAMED = {"name": "n", "schema": SCHEMA}


@pytest.mark.parametrize(
    "wrapped",
    [
        {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}},
        {"type": "json_schema", "schema": SCHEMA},
        {"type": "json_schema", "value": SCHEMA},
        {"type": "json_object", "value": SCHEMA},
        {"type": "json_object", "schema": SCHEMA},  # llama.cpp's form
        {"type": "json", "value": SCHEMA},
        {"type": "json_schema", "value": {"name": "n", "schema": SCHEMA}},  # TGI's form
        {"type": "json_object", "schema": {"name": "n", "description": "d", "schema": SCHEMA, "strict": True}},
    ],
    ids=str,
)
def test_response_formats_with_a_schema(wrapped: JsonBody) -> None:
    grammar = read_response_format(wrapped)
    assert grammar is not None
    assert json.loads(grammar.source) == SCHEMA


@pytest.mark.parametrize(
    "body",
    [
        {"response_format": {"type": "json_schema", "value": _NAMED}},
        {"structured_outputs": {"json": _NAMED}},
        {"guided_json": _NAMED},
        {"json_schema": _NAMED},
    ],
    ids=lambda body: next(iter(body)),
)
def test_a_named_schema_never_allows_any_answer(body: JsonBody) -> None:
    """Its keywords are none of JSON Schema's, which ignores other keywords."""
    for generation in (
        chat({"messages": [{"role": "user", "content": "Hi"}], **body}),
        completion({"prompt": "Hi", **body}),
    ):
        grammar = generation.request.sampling.grammar
        assert grammar is not None
        assert json.loads(grammar.source) == SCHEMA


def test_a_named_schema_of_other_wires() -> None:
    of_tgi = generate({"inputs": "Hi", "parameters": {"grammar": {"type": "json_schema", "value": _NAMED}}})
    messages = [{"role": "user", "content": "Hi"}]
    of_ollama = ollama.parse_chat(parsed({"model": "scripted", "messages": messages, "format": _NAMED}))
    for call in (of_tgi, of_ollama):
        assert isinstance(call, GenerateCall)
        assert call.request.sampling.grammar is not None
        assert json.loads(call.request.sampling.grammar.source) == SCHEMA


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
