"""What stands inside messages is not lost without a word."""

from __future__ import annotations

from typing import Any

import pytest

from tailrace.dialects import native, openai
from tailrace.errors import RequestError, UnsupportedParameter


def body(**message: Any) -> dict[str, Any]:  # Any: JSON
    return {"messages": [{"role": "user", **message}]}


def test_an_unknown_field_is_refused_or_named() -> None:
    with pytest.raises(UnsupportedParameter):
        native.parse(body(content="hi", name="me"))
    assert openai.parse_chat(body(content="hi", name="me")).ignored == ("messages[].name",)


@pytest.mark.parametrize("parse", [native.parse, openai.parse_chat])
def test_no_content_is_no_message(parse: Any) -> None:  # Any: two functions of different types
    with pytest.raises(RequestError):
        parse(body())


@pytest.mark.parametrize("parse", [native.parse, openai.parse_chat])
def test_tool_calls_are_refused_by_name(parse: Any) -> None:  # Any: two functions of different types
    with pytest.raises(UnsupportedParameter):
        parse({"messages": [{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}]})
