"""docs/tools.md agrees with the formats. TAILRACE_REGENERATE=1 generates its table."""

from __future__ import annotations

import os
from pathlib import Path

from tailrace.text.calls import FORMATS

PAGE = Path(__file__).parent.parent / "docs" / "tools.md"
_BEGIN = "<!-- made by TAILRACE_REGENERATE=1 pytest tests/test_tools_page.py -->\n"
_END = "<!-- end -->"


def table() -> str:
    lines = ["| format | families | a call |", "|---|---|---|"]
    for name, known in FORMATS.items():
        call = known.write("look", '{"at": "sky"}').replace("\n", "⏎").replace("|", "\\|")
        lines.append(f"| `{name}` | {known.families} | `{call}` |")
    return "\n".join(lines) + "\n"


def test_the_table_is_current() -> None:
    text = PAGE.read_text()
    before, _, rest = text.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    expected = f"{before}{_BEGIN}{table()}{_END}{after}"
    if os.environ.get("TAILRACE_REGENERATE"):
        PAGE.write_text(expected)
    assert PAGE.read_text() == expected
