"""Tables of the docs that tests make."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["REGENERATE", "check_table"]

REGENERATE = (
    "The page is not what the code says. TAILRACE_REGENERATE=1 pytest tests/{test} writes it. Read its changes."
)

_END = "<!-- end -->"


def check_table(page: Path, test: str, table: str) -> None:
    """Check that a page has this table, behind the line that names the test that makes it. With TAILRACE_REGENERATE,
    write it first."""
    begin = f"<!-- made by TAILRACE_REGENERATE=1 pytest tests/{test} -->\n"
    text = page.read_text()
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(_END)
    expected = f"{before}{begin}{table}{_END}{after}"
    if os.environ.get("TAILRACE_REGENERATE"):
        page.write_text(expected)
    assert page.read_text() == expected, REGENERATE.format(test=test)
