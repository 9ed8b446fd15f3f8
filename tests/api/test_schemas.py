"""JSON schemas and tools over real sockets, with a random model whose grammars are real. What a client sees of what a
grammar does not keep."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from tests.api.process import Server
from tests.checkpoints import tiny_tools_dir
from tests.missing import skip_missing

from tailrace.models import CATALOGUE
from tailrace.models.fetch import locate

__all__ = ["tiny_tools_dir"]

Json = dict[str, Any]  # Any: of JSON
ASKED = [{"role": "user", "content": "q"}]
PAIRS: Json = {"type": "array", "items": {"enum": [1]}, "minItems": 2, "maxItems": 2, "uniqueItems": True}
LEFT_OPEN = "#/uniqueItems (left open)"
YES: Json = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}},
    "required": ["a"],
    "additionalProperties": False,
}
# Each has few answers, so that a random model comes to their end.
SCHEMAS: dict[str, Json] = {
    "allOf": {"allOf": [{"properties": {"a": {"type": "boolean"}}, "required": ["a"]}, {"$ref": "#/$defs/b"}],
              "$defs": {"b": {"properties": {"b": {"enum": [1, 2, 3]}}, "required": ["b"]}}},
    "oneOf": {"oneOf": [{"type": "integer", "minimum": -5, "exclusiveMaximum": 5}, {"type": "null"}]},
    "recursive": {"type": "object",
                  "properties": {"v": {"type": "boolean"}, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
                  "required": ["v", "next"], "x-order": 1, "$comment": "c"},
    "pattern": {"type": "string", "pattern": "^(red|gr[ae]y)$|^#[0-9a-f]{3}$", "maxLength": 100},
    "items": {"prefixItems": [{"const": "x"}, {"multipleOf": 5, "minimum": 0, "maximum": 20}], "items": False,
              "minItems": 2, "$schema": "https://json-schema.org/draft/2020-12/schema"},
}  # fmt: skip


@pytest.fixture(scope="module")
def server(tiny_tools_dir: Path) -> Iterator[Server]:
    pytest.importorskip("torch")
    with contextlib.closing(Server(str(tiny_tools_dir), "--engine", "transformers", "--kv-tokens", "16384")) as running:
        yield running.wait_ready(timeout_s=120)


def chat(server: Server, **body: object) -> Json:
    answer = server.post("/v1/chat/completions", {"messages": ASKED, "max_tokens": 300, **body})
    assert answer.status_code == 200, answer.text
    return {**answer.json(), "ignored": answer.headers.get("x-tailrace-ignored")}


def format_of(schema: Json) -> Json:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


def tool(name: str, parameters: object) -> Json:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


@pytest.fixture(scope="module")
def default_server() -> Iterator[Server]:
    if locate(CATALOGUE["smollm2"]) is None:
        skip_missing("smollm2", "run `tailrace pull`")
    with contextlib.closing(Server("smollm2", "--engine", "openvino", "--kv-tokens", "32768")) as running:
        yield running.wait_ready(timeout_s=120)


@pytest.mark.parametrize("name", SCHEMAS)
def test_complete_answers_conform(name: str, server: Server) -> None:
    _check_answers(server, SCHEMAS[name], 6)


# The default model does not end a recursive one: it goes on to its limit.
@pytest.mark.deep
@pytest.mark.parametrize("name", sorted({*SCHEMAS, "object"} - {"recursive"}))
def test_sixty_answers_of_the_default_model_conform(name: str, default_server: Server) -> None:
    _check_answers(default_server, {**SCHEMAS, "object": YES}[name], 60)


def _check_answers(server: Server, schema: Json, num_answers: int) -> None:
    num_complete = 0
    for seed in range(2 * num_answers):
        answer = chat(server, response_format=format_of(schema), n=4, seed=4 * seed, top_p=0.9)
        for choice in answer["choices"]:
            if choice["finish_reason"] == "stop":
                jsonschema.validate(json.loads(choice["message"]["content"]), schema)
                num_complete += 1
        if num_complete >= num_answers:
            return
    pytest.fail(f"only {num_complete} answers came to their end")


def test_a_context_free_grammar(server: Server) -> None:
    rules = 'root ::= "(" root ")" | "[" root "]" | "x"'
    for field in ({"guided_grammar": rules}, {"grammar": rules}, {"structured_outputs": {"grammar": rules}}):
        answer = chat(server, n=4, seed=1, **field)
        texts = [one["message"]["content"] for one in answer["choices"] if one["finish_reason"] == "stop"]
        assert texts
        for text in texts:
            half = len(text) // 2
            assert text == text[:half] + "x" + text[:half][::-1].translate(str.maketrans("([", ")]"))


def test_a_structural_tag(server: Server) -> None:
    """What a random model writes around the tags is any text."""
    tag = {"begin": "<yes>", "content": {"type": "json_schema", "json_schema": YES}, "end": "</yes>"}
    form = {"type": "triggered_tags", "triggers": ["<yes>"], "tags": [tag], "at_least_one": True}
    answer = chat(server, response_format={"type": "structural_tag", "format": form}, n=4, seed=1)
    for choice in answer["choices"]:
        for part in choice["message"]["content"].split("<yes>")[1:]:
            jsonschema.validate(json.loads(part.partition("</yes>")[0]), YES)
        assert choice["message"]["content"].startswith("<yes>")
    once = chat(server, response_format={"type": "structural_tag", "format": {**form, "stop_after_first": True}})
    assert once["choices"][0]["message"]["content"].endswith("</yes>")


@pytest.mark.parametrize("field", ["guided_grammar", "grammar"])
def test_a_grammar_that_does_not_compile(field: str, server: Server) -> None:
    answer = server.post("/v1/chat/completions", {"messages": ASKED, field: "start: /[0-9"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


def test_what_is_left_open_is_named_and_the_end_says_where_it_fails(server: Server) -> None:
    answer = chat(server, response_format=format_of(PAIRS))
    assert answer["choices"][0]["message"]["content"] == "[1, 1]"
    assert answer["ignored"] == f"response_format{LEFT_OPEN}"
    assert answer["schema_mismatches"] == ["# (uniqueItems)"]
    fits = chat(server, response_format=format_of({**PAIRS, "uniqueItems": False, "contains": {"const": 1}}))
    assert fits["schema_mismatches"] == []
    kept = chat(server, response_format=format_of({**PAIRS, "uniqueItems": True, "maxItems": 1, "minItems": 1}))
    assert kept["choices"][0]["message"]["content"] == "[1]"


def test_streams_say_it_in_their_last_event(server: Server) -> None:
    body = {"messages": ASKED, "response_format": format_of(PAIRS), "stream": True}
    lines = server.post("/v1/chat/completions", body).text.strip().split("\n\n")
    assert json.loads(lines[-2].removeprefix("data: ")) | {"id": "", "created": 0, "model": ""} == {
        "id": "",
        "object": "chat.completion.chunk",
        "created": 0,
        "model": "",
        "system_fingerprint": "fp_tailrace",
        "choices": [],
        "schema_mismatches": ["# (uniqueItems)"],
    }


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("/v1/responses", {"input": "q", "text": {"format": {"type": "json_schema", "name": "x", "schema": PAIRS}}},
         "text.format"),
        ("/v1/messages", {"messages": ASKED, "max_tokens": 60, "model": "default",
                          "output_config": {"format": {"type": "json_schema", "schema": PAIRS}}}, "output_config"),
        ("/api/chat", {"model": "default", "messages": ASKED, "stream": False, "format": PAIRS}, "format"),
    ],
)  # fmt: skip
def test_other_wires_say_it_too(path: str, body: Json, name: str, server: Server) -> None:
    answer = server.post(path, body)
    assert answer.status_code == 200, answer.text
    assert f"{name}{LEFT_OPEN}" in answer.headers["x-tailrace-ignored"]
    assert answer.json()["schema_mismatches"] == ["# (uniqueItems)"]


@pytest.mark.parametrize(
    "bounds",
    [
        {"minimum": -(2**53 - 1), "maximum": 2**53 - 1},  # Zod's z.int()
        {"exclusiveMinimum": 0, "maximum": 2**53 - 1},
        {"minimum": -(2**63), "maximum": 2**63 - 1},
    ],
)
def test_bounds_of_integers(bounds: Json, server: Server) -> None:
    chat(server, response_format=format_of({"properties": {"age": {"type": "integer", **bounds}}}), max_tokens=20)


@pytest.mark.parametrize(
    "one",
    [
        {"type": "string", "maxLength": 100},
        {"type": "string", "maxLength": 65_536},
        {"type": "array", "items": {"type": "string"}, "maxItems": 100},
        {"enum": [f"v{number}" for number in range(250)]},
        {"type": "string", "pattern": "^(?!x)[a-z]+$"},
        {"type": "string", "format": "uri"},
        {"oneOf": [{"type": "string"}, {"type": "integer"}]},
    ],
    ids=lambda one: str(one)[:40],
)
def test_large_bounds_and_what_no_grammar_keeps(one: Json, server: Server) -> None:
    schema = {"type": "object", "properties": {"nickname": one}, "required": ["nickname"]}
    chat(server, response_format=format_of(schema), max_tokens=8)
    tools = [*(tool(f"t{number}", YES) for number in range(9)), tool("mailer", schema)]
    chat(server, tools=tools, tool_choice="required", max_tokens=8)


def test_a_json_object_may_have_a_schema(server: Server) -> None:
    answer = chat(server, response_format={"type": "json_object", "schema": {"const": "42"}})
    assert answer["choices"][0]["message"]["content"] == '"42"'


def test_the_arguments_of_a_forced_call_are_an_object(server: Server) -> None:
    parameters = {"properties": {"a": {"type": "boolean"}}, "required": ["a"]}  # without a type
    answer = chat(server, tools=[tool("mailer", parameters)], tool_choice="required")
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "mailer"
    assert list(json.loads(call["function"]["arguments"])) == ["a"]


_TOOLS = [tool("f", YES)]
_BOTH: dict[str, Json] = {
    "/v1/chat/completions": {"messages": ASKED, "tools": _TOOLS, "response_format": format_of(YES), "max_tokens": 60},
    "/v1/responses": {"input": "q", "tools": [{"type": "function", "name": "f", "parameters": YES}],
                      "text": {"format": {"type": "json_schema", "name": "x", "schema": YES}},
                      "max_output_tokens": 60},
    "/v1/messages": {"messages": ASKED, "max_tokens": 60, "tools": [{"name": "f", "input_schema": YES}],
                     "output_config": {"format": {"type": "json_schema", "schema": YES}}},
    "/api/chat": {"messages": ASKED, "tools": _TOOLS, "stream": False, "format": YES, "options": {"num_predict": 60}},
}  # fmt: skip


@pytest.mark.parametrize("path", _BOTH)
def test_with_tools_and_a_schema_the_answer_is_calls_or_a_text(path: str, server: Server) -> None:
    """A random model takes either way."""
    answer = server.post(path, {"model": "default", **_BOTH[path]})
    assert answer.status_code == 200, answer.text
    assert "x-tailrace-ignored" not in answer.headers


def test_both_ways_are_taken(server: Server) -> None:
    kinds = set[str]()
    for number in range(12):
        if len(kinds) == 2:
            break
        asked = [{"role": "user", "content": f"question {number}"}]
        (choice,) = chat(server, messages=asked, tools=_TOOLS, response_format=format_of(YES), seed=number)["choices"]
        if choice["finish_reason"] == "length":
            continue
        message = choice["message"]
        calls = [call["function"]["arguments"] for call in message.get("tool_calls", ())]
        kinds.add("calls" if calls else "text")
        for text in calls or [message["content"]]:
            jsonschema.validate(json.loads(text), YES)
    assert kinds == {"calls", "text"}


def test_an_error_names_the_field_the_tool_and_the_path(server: Server) -> None:
    wrong = {"type": "object", "properties": {"a": {"minimum": "kanarienvogel"}}}
    for body, words in (
        ({"response_format": format_of(wrong)},
         "response_format: this JSON schema cannot be used: #/properties/a/minimum"),
        ({"tools": [tool("f", YES), tool("mailer", wrong)], "tool_choice": "required"},
         "tools[1] (mailer): #/properties/a/minimum must be a number"),
    ):  # fmt: skip
        answer = server.post("/v1/chat/completions", {"messages": ASKED, **body})
        assert answer.status_code == 400
        assert words in answer.json()["error"]["message"]
        assert "kanarienvogel" not in answer.text


@pytest.mark.deep
def test_a_hostile_schema_is_refused_or_checked_within_limits(server: Server) -> None:
    link = [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]
    loop = {"anyOf": link, "$defs": {"a": {"anyOf": link}, "b": {"allOf": [{"anyOf": link}, {"anyOf": link}]}}}
    links = {f"a{n}": {"allOf": [{"anyOf": [{"$ref": f"#/$defs/a{n + 1}"}] * 2}] * 2} for n in range(40)}
    doubling = {"$ref": "#/$defs/a0", "$defs": links | {"a40": {"type": "null"}}}
    for schema in (loop, doubling, {"type": "string", "pattern": "^(a+)+$", "not": {"pattern": "^((a+)+)+b$"}}):
        answer = server.post(
            "/v1/chat/completions", {"messages": ASKED, "response_format": format_of(schema), "max_tokens": 9}
        )
        assert answer.status_code in (200, 400), answer.text
    chat(server, max_tokens=2)
