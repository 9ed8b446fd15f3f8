"""docs/architecture.md: its table of the modules that a chat uses is what `bench/hops.py` measures, and its table of
packages has the order that import-linter checks."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

from tests.waiting import LONG_S

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "architecture.md").read_text("utf-8")
_ROUNDED = 10


def _measured() -> dict[str, int]:
    """Return the number of functions of each module that a streamed chat uses."""
    printed = subprocess.run(
        [sys.executable, "bench/hops.py"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=LONG_S
    ).stdout
    return {path: int(number) for number, path in re.findall(r"^ *(\d+) (\S+)\.py$", printed, re.MULTILINE)}


def _listed() -> set[str]:
    """Return the modules in the table: the lists of a row belong to its packages, in order."""
    (table,) = re.findall(r"^\| package \| modules \|\n\|---\|---\|\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    found = set()
    for packages, modules in re.findall(r"^\| (.*) \| (.*) \|$", table, re.MULTILINE):
        for package, names in zip(packages.split(", "), modules.split("; "), strict=True):
            folder = "" if package == "top level" else package.strip("`") + "/"
            found |= {folder + name for name in re.findall(r"`(\w+)`", names)}
    return found


def test_the_packages_are_in_the_order_that_is_checked() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]["contracts"]
    (layers,) = (one["layers"] for one in contracts if one.get("containers") == ["tailrace"])
    heights = {name.strip(): height for height, layer in enumerate(layers) for name in layer.split("|")}
    (table,) = re.findall(
        r"^\| package \| holds \|\n\|---\|---\|\n((?:\|.*\n)+)", PAGE.split("`src/tailrace_kit`")[0], re.M
    )
    listed = [
        name for cell in re.findall(r"^\| (.*?) \|", table, re.M) for name in re.findall(r"`(\w+)(?:\.py)?`", cell)
    ]
    assert set(listed) == heights.keys() - {"__main__"}
    assert [heights[name] for name in listed] == sorted(heights[name] for name in listed)


def test_the_table_names_the_modules_that_a_chat_uses() -> None:
    measured = _measured()
    assert _listed() == set(measured)
    shown = re.search(r"uses the (\d+) modules in this table and about (\d+) functions", " ".join(PAGE.split()))
    assert shown is not None
    assert int(shown[1]) == len(measured)
    assert abs(int(shown[2]) - sum(measured.values())) <= _ROUNDED
