"""The check of whole answers, in a process with limits."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

from tailrace.schemas.answer_check import AnswerCheck

NOT_CHECKED = "the answer could not be checked within the limits of time and memory"


async def check(*pairs: tuple[Any, str]) -> list[list[str]]:
    return await AnswerCheck()(pairs)


async def test_answers_say_where_they_do_not_conform() -> None:
    schema = {"properties": {"a": {"type": "array", "items": {"maximum": 3}}}, "required": ["b"]}
    assert await check((schema, '{"a": [1, 5], "b": 1}'), (schema, '{"a": [1]}'), ({}, "1"), ({"const": 1}, "{")) == [
        ["#/a/1 (maximum)"],
        ["# (required)"],
        [],
        ["the answer is not JSON"],
    ]


async def test_an_answer_ends_whatever_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", None)
    assert await check(({}, "1"), ({}, "2")) == [[NOT_CHECKED], [NOT_CHECKED]]


async def test_nothing_to_check_starts_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", None)
    assert await check() == []


@pytest.mark.parametrize(
    ("schema", "text", "expected"),
    [
        ({"$schema": "http://json-schema.org/draft-04/schema#", "minimum": 1, "exclusiveMinimum": True}, "1",
         ["# (exclusiveMinimum)"]),
        ({"$schema": "http://example.com/unknown", "type": "string"}, "1", ["# (type)"]),
        ({"$ref": "http://127.0.0.1:9/other.json"}, "1", []),  # is not fetched
        ({"format": "email"}, '"nobody"', ["# (format)"]),
        ({"format": "unknown"}, '"nobody"', []),
    ],
)  # fmt: skip
async def test_drafts_formats_and_other_documents(schema: Any, text: str, expected: list[str]) -> None:
    assert await check((schema, text)) == [expected]


async def test_a_hostile_schema_ends_its_process_only() -> None:
    links = {f"a{n}": {"allOf": [{"$ref": f"#/$defs/a{n + 1}"}] * 2} for n in range(60)}
    doubling = {"$ref": "#/$defs/a0", "$defs": links | {"a60": {"type": "integer"}}}
    assert await check((doubling, "1")) == [[NOT_CHECKED]]
    assert await check(({"type": "integer"}, "1")) == [[]]


async def test_a_catastrophic_pattern_is_limited() -> None:
    found = await check(({"pattern": "^(a+)+$"}, f'"{"a" * 60}b"'))
    assert found in ([["# (pattern)"]], [[NOT_CHECKED]])
