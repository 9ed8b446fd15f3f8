"""What is in the rows of streams."""

from __future__ import annotations

import msgspec
import pytest

from tailrace.streams import Record, new_stream_id
from tailrace.streams._rows import Rows
from tailrace.types import CallReading, Prompt, ReasoningFormat


@pytest.mark.parametrize(
    ("prompt", "kept"),
    [
        (Prompt("Hi", (1, 2)), ["Hi", [1, 2]]),
        (Prompt("", (), ReasoningFormat(("<a>",), ("</a>",))), ["", [], [["<a>"], ["</a>"]]]),
        (Prompt("", (), ReasoningFormat(("<a>",), ("</a>",), "inside")), ["", [], [["<a>"], ["</a>"], "inside"]]),
        (Prompt("", (), None, CallReading()), ["", [], None, {}]),
    ],
)
def test_prompts_are_kept_without_defaults(prompt: Prompt, kept: object) -> None:
    """Servers of the version before read no tuples with elements that they do not know."""
    rows, record = Rows(None), Record(new_stream_id(), 5.0, prompts=(prompt, prompt))
    row = rows.encode_record(record)
    assert msgspec.msgpack.decode(row[1:])["prompts"] == [kept, kept]
    assert rows.read_record(record.stream_id, row) == record
