"""Queries are read strictly."""

from __future__ import annotations

import pytest

from tailrace.dialects.queries import read_fields_of_body, read_query
from tailrace.errors import RequestError, UnsupportedMediaType


def test_fields_are_decoded() -> None:
    found = read_query(b"prompt=a%20b+c%C3%A9&max_tokens=")
    assert found == {"prompt": "a b cé", "max_tokens": ""}


@pytest.mark.parametrize(
    "query", [b"prompt=%FF", b"prompt=%ED%A0%80", b"prompt=a&prompt=b", b"prompt=\xff", b"a=1&" * 99]
)
def test_ambiguous_queries_are_refused(query: bytes) -> None:
    with pytest.raises(RequestError):
        read_query(query)


FORM = "application/x-www-form-urlencoded; charset=utf-8"
JSON = "application/json"


@pytest.mark.parametrize(
    ("kind", "body", "fields"),
    [
        (FORM, b"query=a%20b+c%C3%A9&max_tokens=5", {"query": "a b c\u00e9", "max_tokens": "5"}),
        (
            JSON,
            b'{"query": "a b c\\u00e9", "max_tokens": 5, "stop": null}',
            {"query": "a b c\u00e9", "max_tokens": "5"},
        ),
        ("", b"", {}),
        ("text/plain", b"", {}),
    ],
)
def test_a_body_has_the_same_fields(kind: str, body: bytes, fields: dict[str, str]) -> None:
    assert read_fields_of_body(kind, body) == fields


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (FORM, b"query=%FF"), (FORM, b"query=a&query=b"), (JSON, b'{"query": ["a"]}'), (JSON, b'{"query": true}'),
        (JSON, b'{"query": 1.5}'), (JSON, b'["a"]'), (JSON, b"query=a"),
    ],
)  # fmt: skip
def test_bodies_that_are_refused(kind: str, body: bytes) -> None:
    with pytest.raises(RequestError):
        read_fields_of_body(kind, body)


@pytest.mark.parametrize("kind", ["", "text/plain", "multipart/form-data; boundary=x"])
def test_other_kinds_of_bodies(kind: str) -> None:
    with pytest.raises(UnsupportedMediaType):
        read_fields_of_body(kind, b"query=a")
