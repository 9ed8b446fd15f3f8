"""Pages of durable streams as bodies and as server-sent events, in pieces of a limited size."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from tailrace_plugins.durable_streams.durable_answers import body_of, num_bytes_of, sse_of
from tailrace_plugins.durable_streams.page import Page

_MOST = 300_000  # bytes of a piece: every byte of 48 KiB may be a line of its own


def _page(content_type: str, pieces: Sequence[bytes]) -> Page:
    return Page(content_type, "i", "0", "1", pieces, 1, is_up_to_date=True, is_closed=False)


def _data_of(written: bytes) -> str:
    """Return the data of the first event, as a client reads it."""
    event, _, _ = written.decode().partition("\n\nevent: control\n")
    assert event.startswith("event: data\n")
    lines = event.split("\n")[1:]
    assert all(line.startswith("data:") for line in lines)
    return "\n".join(line.removeprefix("data:").removeprefix(" ") for line in lines)


_SOME = st.sampled_from(
    [b"", b" ", b"\r", b"\n", b"\r\n", b"a", "é🛶".encode(), b"\xff", b"\xf0\x9f", b"x" * 49_151, b"\n" * 50_000]
)


@given(st.lists(_SOME, min_size=1, max_size=8))
def test_text(pieces: list[bytes]) -> None:
    page, whole = _page("text/plain", pieces), b"".join(pieces)
    assert b"".join(body_of(page)) == whole
    assert num_bytes_of(page) == len(whole)
    written = list(sse_of(page, 7))
    assert all(len(piece) <= _MOST for piece in written)
    assert _data_of(b"".join(written)) == re.sub("\r\n|\r", "\n", whole.decode(errors="replace"))


@given(st.lists(_SOME, min_size=1, max_size=8))
def test_other_content(pieces: list[bytes]) -> None:
    page, whole = _page("a/b", pieces), b"".join(pieces)
    assert base64.b64decode(_data_of(b"".join(sse_of(page, 7)))) == whole


@given(st.lists(st.sampled_from([b"1", b'"a b"', b'"%s"' % (b"x" * 100_000)]), max_size=6))
def test_json(pieces: list[bytes]) -> None:
    page = _page("application/json", pieces)
    whole = b"".join(body_of(page))
    assert [msgspec.json.encode(one) for one in msgspec.json.decode(whole)] == pieces
    assert (num_bytes_of(page), max(map(len, body_of(page))) <= 49_152) == (len(whole), True)
    if pieces:
        assert _data_of(b"".join(sse_of(page, 7))) == whole.decode()


def test_a_small_event_is_written_at_once() -> None:
    assert len(list(sse_of(_page("text/plain", [b"late"]), 7))) == 1
