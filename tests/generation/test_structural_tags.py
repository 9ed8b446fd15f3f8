"""Structural tags, and context-free grammars: which answers they allow, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.generation.allowed import allows

from tailrace.engines.grammars.check import NOT_COMPILED, GrammarCheck
from tailrace.engines.grammars.guidance import to_guidance
from tailrace.errors import RequestError
from tailrace.generation.grammar_fitter import GrammarFitter
from tailrace.generation.grammar_forms import engine_form
from tailrace.schemas import GUIDANCE, PASSED_ON, PORTABLE, Reach
from tailrace.schemas.conjunction import SchemaError
from tailrace.types import Grammar

Json = dict[str, Any]  # Any: of JSON
ONE: Json = {"at_least_one": True, "stop_after_first": True}
ANY: Json = {"type": "any_text"}
NUMBERS: Json = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
ADD: Json = {"begin": "<call=add>", "content": {"type": "json_schema", "json_schema": NUMBERS}, "end": "</call>"}
STOP: Json = {"begin": "<call=stop>", "content": {"type": "const_string", "value": ""}, "end": "</call>"}
TRIGGERED: Json = {"type": "triggered_tags", "triggers": ["<call="], "tags": [ADD, STOP]}
ADDED, STOPPED = '<call=add>{"n": 1}</call>', "<call=stop></call>"
THINK: Json = {"type": "tag", "begin": "<think>", "content": ANY, "end": "</think>"}
DIGITS: Json = {"type": "regex", "pattern": "[0-9]+"}


def form_of(value: Json, reach: Reach = GUIDANCE, control_tokens: dict[str, int] | None = None) -> Grammar:
    return engine_form(Grammar("tags", json.dumps(value), "response_format"), "", reach, control_tokens or {})


def of_format(value: Json) -> Grammar:
    return form_of({"type": "structural_tag", "format": value})


@pytest.mark.parametrize(
    ("given", "allowed", "refused"),
    [
        (TRIGGERED, ["", "text", ADDED, f"one {ADDED} two {STOPPED}"], ["<call=x>", "<call=add>{}</call>", "a <call="]),
        (TRIGGERED | {"at_least_one": True}, [ADDED, f"{STOPPED} and {ADDED}!"], ["", "text", f"a{ADDED}"]),
        (TRIGGERED | {"stop_after_first": True}, ["text", f"a {ADDED}"], [f"{ADDED} ", f"{ADDED}{STOPPED}"]),
        (TRIGGERED | ONE, [ADDED, STOPPED], ["", f"a{ADDED}"]),
        ({"type": "sequence", "elements": [THINK, DIGITS]}, ["<think>a b</think>12"], ["12", "<think></think>a"]),
        ({"type": "sequence", "elements": [DIGITS, ANY]}, ["1", "1 and all"], ["and all"]),
        (
            {"type": "sequence", "elements": [ANY, {"type": "const_string", "value": "Answer: "}, DIGITS]},
            ["Well. Answer: 42", "Answer: 1"],
            ["42", "Well. Answer: x"],
        ),
        ({"type": "or", "elements": [DIGITS, {"type": "const_string", "value": "none"}]}, ["7", "none"], ["", "no"]),
        (THINK | {"end": ["</think>", "<end>"]}, ["<think>a</think>", "<think>a<end>"], ["<think>a"]),
        (
            {"type": "tags_with_separator", "tags": [ADD, STOP], "separator": ", "},
            ["", ADDED, f"{ADDED}, {STOPPED}"],
            [f"{ADDED}{STOPPED}", f"{ADDED}, ", "text"],
        ),
        (
            {"type": "tags_with_separator", "tags": [STOP], "separator": "", **ONE},
            [STOPPED],
            ["", STOPPED * 2],
        ),
    ],
)  # fmt: skip
def test_answers_of_a_format(given: Json, allowed: list[str], refused: list[str]) -> None:
    grammar = of_format(given)
    assert [allows(grammar, text) for text in (*allowed, *refused)] == [True] * len(allowed) + [False] * len(refused)


def test_the_older_form_means_the_same() -> None:
    older = {
        "type": "structural_tag",
        "structures": [{"begin": "<call=add>", "schema": NUMBERS, "end": "</call>"}],
        "triggers": ["<call="],
    }
    assert form_of(older) == of_format(TRIGGERED | {"tags": [ADD]})


def test_what_a_grammar_cannot_keep_is_named_with_its_path() -> None:
    schema = NUMBERS | {"dependentRequired": {"n": ["m"]}}
    tag = ADD | {"content": {"type": "json_schema", "json_schema": schema}}
    assert of_format(TRIGGERED | {"tags": [tag]}).left_open == (
        "response_format#/format/tags/0/content/dependentRequired",
    )


def test_control_tokens_of_the_model_are_tokens() -> None:
    grammar = form_of(
        {"format": TRIGGERED | {"triggers": ["<call=add>"], "tags": [ADD]}}, control_tokens={"<call=add>": 9}
    )
    assert "<[9]>" in to_guidance(grammar)
    assert allows(grammar, f"text {ADDED}")


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"type": "sequence", "elements": [ANY, DIGITS]}, "any_text needs a fixed text behind it"),
        ({"type": "sequence", "elements": [TRIGGERED, DIGITS]}, "triggered_tags must end the answer"),
        (TRIGGERED | {"triggers": ["<tool"]}, "no trigger begins tag 0"),
        (TRIGGERED | {"tags": []}, "there are no tags"),
        ({"type": "or", "elements": []}, "or needs elements"),
        (THINK | {"end": []}, "end needs a text"),
        (THINK | {"end": ""}, "any_text in a tag needs an end"),
        ({"type": "regex", "pattern": "(?=a)"}, "/pattern"),
        ({"type": "json_schema", "json_schema": {"type": "secret"}}, "#/format"),
        ({"type": "secret"}, ".format.type is not as in a structural tag"),
        ({"type": "sequence", "elements": [{"type": "const_string", "value": "a"}] * 1001}, "too many parts"),
    ],
)  # fmt: skip
def test_what_cannot_be_used(given: Json, reason: str) -> None:
    with pytest.raises(SchemaError, match=reason) as refused:
        of_format(given)
    assert "secret" not in str(refused.value).replace("/secret", "")


def test_formats_inside_of_formats_have_a_limit() -> None:
    given: Json = DIGITS
    for _ in range(200):
        given = {"type": "sequence", "elements": [given]}
    with pytest.raises(SchemaError, match=r"too many parts|nested too deeply"):
        of_format(given)


GBNF = 'root ::= "yes" | item+\nitem ::= "- " [a-z]+ "\\n"\n'
LARK = 'start: NUMBER (" + " NUMBER)*\nNUMBER: /[0-9]+/\n'


async def _fit(text: str) -> Grammar:
    fitter = GrammarFitter(GrammarCheck(), GUIDANCE, {})
    return await fitter.fit(Grammar("cfg", text, "guided_grammar"), call_format="", caller="", within_s=60)


@pytest.mark.parametrize(
    ("text", "allowed", "refused"),
    [
        (GBNF, ["yes", "- a\n", "- a\n- bc\n"], ["no", "", "- a"]),
        (LARK, ["1", "1 + 22"], ["", "1 +", "a"]),
        (f"%llguidance {{}}\n{LARK}", ["1"], ["a"]),
        ('root ::= "(" root ")" | "x"', ["x", "((x))"], ["((x)", ""]),
    ],
)
async def test_grammars(text: str, allowed: list[str], refused: list[str]) -> None:
    grammar = await _fit(text)
    assert [allows(grammar, one) for one in (*allowed, *refused)] == [True] * len(allowed) + [False] * len(refused)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('root ::= "a" secret', "a rule that another one names, is missing"),
        ('first ::= "a"', "the rule root"),
        ('root ::= "a"\nb ::= !', "line 2 cannot be read"),
        ('root ::= "secret', "cannot be read"),
        (f"root ::= {'(' * 5000}", "nested too deeply"),
        ('start: "a" b\nb: secret', f"{NOT_COMPILED}: line 2 is wrong"),
        ('%llguidance {}\nstart: "a" b\nb: secret', f"{NOT_COMPILED}: line 3 is wrong"),
        ("start: /[0-9/", NOT_COMPILED),
        ("secret", NOT_COMPILED),
        ("start: <|secret|>", NOT_COMPILED),
        ("\0", NOT_COMPILED),
    ],
)
async def test_grammars_that_cannot_be_used(text: str, reason: str) -> None:
    with pytest.raises(RequestError, match=reason) as refused:
        await _fit(text)
    assert (refused.value.param, "secret" in refused.value.message) == ("guided_grammar", False)


@pytest.mark.parametrize("kind", ["cfg", "tags"])
def test_other_engines(kind: str) -> None:
    source = json.dumps({"format": TRIGGERED}) if kind == "tags" else GBNF
    grammar = Grammar("tags" if kind == "tags" else "cfg", source)
    assert engine_form(grammar, "", PASSED_ON, {}) == grammar
    with pytest.raises(SchemaError, match="only JSON schemas and regular expressions"):
        engine_form(grammar, "", PORTABLE, {})
