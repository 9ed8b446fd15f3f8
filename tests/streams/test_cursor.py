from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.errors import ForeignCursor, SeqOutOfRange
from tailrace.types import event_id, new_stream_id, parse_cursor

stream_ids = st.text("abcXYZ019_-", min_size=1, max_size=64)
seqs = st.integers(0, 10**15 - 1)


@given(stream_ids, seqs)
def test_an_event_id_finds_its_stream_and_place(stream_id: str, seq: int) -> None:
    cursor = event_id(stream_id, seq)
    assert parse_cursor(cursor) == parse_cursor(cursor, stream_id) == (stream_id, seq)


@given(st.text(max_size=30))
def test_any_text_is_a_cursor_or_is_refused(cursor: str) -> None:
    try:
        stream_id, seq = parse_cursor(cursor)
    except SeqOutOfRange:
        assert not re.fullmatch("[A-Za-z0-9_-]+-(0|[1-9][0-9]{0,14})", cursor)
        return
    assert event_id(stream_id, seq) == cursor


@given(stream_ids, stream_ids, seqs)
def test_the_cursor_of_another_stream(stream_id: str, other: str, seq: int) -> None:
    if stream_id == other:
        return
    with pytest.raises(ForeignCursor) as caught:
        parse_cursor(event_id(other, seq), stream_id)
    assert (caught.value.status, caught.value.param) == (409, "last-event-id")


def test_a_bare_number_needs_a_stream() -> None:
    assert parse_cursor("17", "abc") == ("abc", 17)
    assert parse_cursor("0", "abc") == ("abc", 0)
    with pytest.raises(SeqOutOfRange):
        parse_cursor("17")


@pytest.mark.parametrize(
    "cursor",
    [
        *("", "-", "abc", "abc-", "-5", "--", "abc-01", "abc-+5", "abc-5 ", " abc-5", "abc-5\n", "abc-5.0"),
        *("abc-1e3", "abc-0x5", "abc-1_000", "abc-" + "9" * 16, "abc-" + "9" * 5000, "a" * 65 + "-5", "a b-5"),
        *(
            "abc-\u0661",
            "abc-\uff15",
            "\u00e9-5",
            "abc\0-5",
            "abc-5\0",
            "abc\u20115",
            "-1",
            "+1",
            "01",
            "1.0",
            "\u0661",
        ),
    ],
)
def test_invalid_cursors(cursor: str) -> None:
    for stream_id in (None, "abc"):
        with pytest.raises(SeqOutOfRange) as caught:
            parse_cursor(cursor, stream_id)
        assert (caught.value.status, caught.value.param) == (400, "last-event-id")


def test_a_huge_number_is_refused_where_the_stream_is_known_too() -> None:
    for cursor in ("9" * 16, "9" * 5000):
        with pytest.raises(SeqOutOfRange):
            parse_cursor(cursor, "abc")


def test_ids_of_real_streams_are_cursors_that_browsers_may_send_anywhere() -> None:
    for _ in range(50):  # about every second one has a dash or an underscore
        stream_id = new_stream_id()
        cursor = event_id(stream_id, 10**15 - 1)
        assert re.fullmatch("[A-Za-z0-9._~-]{1,40}", cursor)
        assert parse_cursor(cursor) == (stream_id, 10**15 - 1)
