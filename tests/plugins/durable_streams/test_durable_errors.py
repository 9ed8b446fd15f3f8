"""The codes of errors, which clients compare: a change here is a change of the API."""

from __future__ import annotations

import re
from pathlib import Path

from tailrace.errors import TailraceError
from tailrace_plugins.durable_streams import durable_errors

PAGE = Path(__file__).parents[3] / "docs" / "durable-streams.md"


def test_the_page_lists_every_code_with_its_status_and_meaning() -> None:
    kinds = [getattr(durable_errors, name) for name in durable_errors.__all__]
    shown = re.findall(r"^\| `(\w+)` \| (\d+) \| (.*) \|$", PAGE.read_text("utf-8"), re.MULTILINE)
    assert all(issubclass(kind, TailraceError) for kind in kinds)
    assert {(kind.code, str(kind.status), (kind.__doc__ or "").rstrip(".")) for kind in kinds} == set(shown)
    assert {code for code, _, _ in shown} == {
        "stream_conflict", "stream_closed", "sequence_gap", "stale_epoch", "streams_full",
    }  # fmt: skip
