"""What does not fit a shape is corrected where its meaning is clear, and otherwise refused by its name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
import pytest

from tailrace.dialects.bodies import JsonBody
from tailrace.dialects.shapes import (
    Other,
    ignored,
    note,
    path_of,
    read_fields,
    read_known,
    refused,
    require_nothing_left_out,
)
from tailrace.errors import RequestError, UnsupportedParameter


class Text(msgspec.Struct, tag="text"):
    text: str
    size: int | None = None


class Link(msgspec.Struct, tag="link"):
    parts: list[Text | Other]


class Closed(msgspec.Struct, tag="closed"):
    pass


class Open(msgspec.Struct, tag="open"):
    width: int = 0


class Body(msgspec.Struct, kw_only=True):
    count: Annotated[int, msgspec.Meta(ge=1)] = 1
    share: float = 0.0
    either: int | float = 0
    name: str = "nobody"
    maybe: str | None = "x"
    ids: list[int] = []
    anything: Any = None  # Any: JSON
    parts: str | list[Text | Link | Other] = ""
    door: Closed | Open | None = None
    mode: Literal["a", "b"] = "a"
    inner: Text | None = None


def read(body: JsonBody) -> Body:
    return read_fields(body, Body)[0]


def test_whole_numbers() -> None:
    body = read({"count": 3.0, "share": 2, "either": 4.0, "ids": [1, 2.0, -3.0], "anything": {"a": 1.0}})
    assert (body.count, type(body.count)) == (3, int)
    assert (body.share, type(body.either)) == (2.0, float)  # which may have a fraction
    assert body.ids == [1, 2, -3]
    assert type(body.anything["a"]) is float  # of no shape
    for wrong in ({"count": 3.5}, {"count": 0.0}, {"ids": [1.5]}, {"count": "3"}, {"count": True}):
        with pytest.raises(RequestError) as caught:
            read(wrong)
        assert str(caught.value.param).partition("[")[0] in wrong


def test_a_null_means_absent_where_there_is_a_default() -> None:
    assert read({"count": None, "name": None, "parts": None, "mode": None, "ids": None}) == read({})
    assert read({"maybe": None}).maybe is None  # where null is a value
    with pytest.raises(RequestError):
        read({"inner": {"text": None}})


def test_other_kinds() -> None:
    text = {"type": "text", "text": "a"}
    found = read({"parts": [text, {"type": "image", "size": [1]}, {"type": "link", "parts": [text, {"type": "x"}]}]})
    assert found.parts == [Text("a"), Other("image"), Link([Text("a"), Other("x")])]
    assert read({"parts": [{"text": "a"}, {"type": None, "text": "b"}]}).parts == [
        Text("a"),
        Text("b"),
    ]  # the first one
    assert read_fields({"parts": [{"type": "image", "url": "x"}]}, Body)[1] == ()


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"parts": [{"type": 5}]}, "parts[0].type"),
        ({"parts": [{"type": ["text"]}]}, "parts[0].type"),
        ({"parts": ["a"]}, "parts[0]"),
        ({"parts": [{"type": "text"}]}, "parts[0]"),
        ({"door": {"type": "ajar"}}, "door.type"),  # there is no `Other`
        ({"door": {"width": 5}}, "door"),  # and no first kind
        ({"mode": "c"}, "mode"),
        ({"inner": {"type": "image"}}, "inner.type"),
    ],
    ids=str,
)
def test_what_has_no_clear_meaning_is_refused(body: JsonBody, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        read(body)
    assert caught.value.param == param


def test_a_correction_does_not_change_the_body() -> None:
    body: JsonBody = {"count": 3.0, "parts": [{"text": "a", "size": 1.0}], "name": None}
    read(body)
    assert body == {"count": 3.0, "parts": [{"text": "a", "size": 1.0}], "name": None}


def test_unknown_fields_are_named_once_at_any_depth() -> None:
    body = {
        "x": 1,
        "parts": [{"type": "text", "text": "a", "y": 1}, {"type": "text", "text": "b", "y": 2}],
        "count": 1.0,
    }
    assert read_fields(body, Body)[1] == ("parts[].y", "x")


def test_a_table_of_fields_at_two_levels() -> None:
    table = {"beams": refused(1), "speed": ignored("slow"), "anything.old": ignored(), "anything.bad": refused([])}
    body = {"speed": "fast", "anything": {"old": 1, "more": 2}, "name": "n"}
    fields, named = read_known(body, Body, table)
    assert (fields.anything, fields.name, named) == ({"more": 2}, "n", ("speed", "anything.old"))
    assert body["anything"] == {"old": 1, "more": 2}
    assert read_known({"speed": "slow", "beams": 1, "anything": {"bad": [], "old": None}}, Body, table)[1] == ()
    assert read_known({"anything": 5}, Body, table)[0].anything == 5
    wrongs: dict[str, JsonBody] = {"beams": {"beams": 2}, "anything.bad": {"anything": {"bad": [1]}}}
    for name, wrong in wrongs.items():
        with pytest.raises(UnsupportedParameter) as caught:
            read_known(wrong, Body, table)
        assert caught.value.param == name


def test_entries() -> None:
    assert (note("a.b"), note("tools[3]", "web_search")) == ("a.b", "tools[3] (web_search)")
    assert path_of("tools[3] (web_search)") == "tools[3]"
    require_nothing_left_out([])
    with pytest.raises(UnsupportedParameter) as caught:
        require_nothing_left_out(["tools[3] (web_search)", "x"])
    assert caught.value.param == "tools[3]"
