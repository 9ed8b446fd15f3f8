"""docs/performance.md has the size of the code. TAILRACE_REGENERATE=1 writes it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.generated import check_table, table_in
from tests.waiting import LONG_S

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "performance.md"
_SIZE = re.compile(r"([\w`]+) (?:\| )?([\d,]+) \((\d+)\)")  # of a package or of its part: lines, and modules
_SHARE = 0.03


def _sizes(table: str) -> dict[tuple[str, str], tuple[int, int]]:
    """Return lines and modules of each part, by its package and its name."""
    found = {}
    for row in re.findall(r"^\| `tailrace.*$", table, re.MULTILINE):
        package = row.split("`")[1]
        for name, lines, modules in _SIZE.findall(row):
            found[package, name] = int(lines.replace(",", "")), int(modules)
    return found


def _members(table: str) -> list[str]:
    return re.findall(r"^\| `[A-Z].*$", table, re.MULTILINE)


def _are_close(shown: str, counted: str) -> bool:
    old, new = _sizes(shown), _sizes(counted)
    return (
        old.keys() == new.keys()
        and _members(shown) == _members(counted)
        and all(
            abs(one - other) <= max(least, _SHARE * other)
            for name in new
            for one, other, least in zip(old[name], new[name], (30, 2), strict=True)
        )
    )


def test_the_page_has_the_size_of_the_code() -> None:
    counted = subprocess.run(
        [sys.executable, "bench/code_size.py"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=LONG_S
    ).stdout
    assert len(_sizes(counted)) > 50
    assert len(_members(counted)) == 6
    shown = table_in(PAGE, "test_performance_page.py")
    is_kept = _are_close(shown, counted) and not os.environ.get("TAILRACE_REGENERATE")
    check_table(PAGE, "test_performance_page.py", shown if is_kept else counted)
