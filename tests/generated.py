"""Tables of the docs that tests make."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["REGENERATE", "check_table", "table_in"]

REGENERATE = (
    "The page is not what the code says. TAILRACE_REGENERATE=1 pytest tests/{test} writes it. Read its changes."
)

_END = "<!-- end -->"


def table_in(page: Path, test: str) -> str:
    """Return the table that a page has now behind that line."""
    return page.read_text().partition(_begin(test))[2].partition(_END)[0]


def _begin(test: str) -> str:
    return f"<!-- made by TAILRACE_REGENERATE=1 pytest tests/{test} -->\n"


def check_table(page: Path, test: str, table: str) -> None:
    """Check that a page has this table, behind the line that names the test that makes it. With TAILRACE_REGENERATE,
    write it first."""
    begin = _begin(test)
    before, _, rest = page.read_text().partition(begin)
    _, _, after = rest.partition(_END)
    expected = f"{before}{begin}{table}{_END}{after}"
    if os.environ.get("TAILRACE_REGENERATE"):
        page.write_text(expected)
    assert page.read_text() == expected, REGENERATE.format(test=test)
