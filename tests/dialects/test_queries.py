"""Queries are read strictly."""

from __future__ import annotations

import pytest

from tailrace.dialects.queries import read_query
from tailrace.errors import RequestError


def test_fields_are_decoded() -> None:
    found = read_query(b"prompt=a%20b+c%C3%A9&max_tokens=")
    assert found == {"prompt": "a b cé", "max_tokens": ""}


@pytest.mark.parametrize(
    "query", [b"prompt=%FF", b"prompt=%ED%A0%80", b"prompt=a&prompt=b", b"prompt=\xff", b"a=1&" * 99]
)
def test_what_is_not_clear_is_refused(query: bytes) -> None:
    with pytest.raises(RequestError):
        read_query(query)
