"""docs/tools.md agrees with the formats. TAILRACE_REGENERATE=1 generates its table."""

from __future__ import annotations

from pathlib import Path

from tests.generated import check_table

from tailrace.text.calls import FORMATS

PAGE = Path(__file__).parent.parent / "docs" / "tools.md"


def table() -> str:
    lines = ["| format | families | a call |", "|---|---|---|"]
    for name, known in FORMATS.items():
        call = known.write("look", '{"at": "sky"}').replace("\n", "⏎").replace("|", "\\|")
        lines.append(f"| `{name}` | {known.families} | `{call}` |")
    return "\n".join(lines) + "\n"


def test_the_table_is_current() -> None:
    check_table(PAGE, "test_tools_page.py", table())
