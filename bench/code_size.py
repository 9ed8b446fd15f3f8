"""Counts the modules and lines of each package of tailrace, and the members of its main interfaces:
`python bench/code_size.py`.

It prints the tables of docs/performance.md. Lines are those of Python, with comments and empty ones. The members of a
class are the names of its body that have no underscore.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import tailrace
from tailrace.assembly.served import Served
from tailrace.dialects.facts import ServerFacts, StreamFacts
from tailrace.engines.interface import Engine
from tailrace.generation.run import Run
from tailrace.streams.log_store import LogStore

_SOURCE = Path(tailrace.__file__).parents[1]
_PACKAGES = ("tailrace", "tailrace_outer", "tailrace_plugins", "tailrace_kit")
_INTERFACES: tuple[type, ...] = (LogStore, Served, StreamFacts, ServerFacts, Run, Engine)


def _row(package: str) -> str:
    modules, lines = Counter[str](), Counter[str]()
    for path in (_SOURCE / package).rglob("*.py"):
        part = path.relative_to(_SOURCE / package).parts[0].removesuffix(".py")
        part = "top level" if part.startswith("__") else part
        modules[part] += 1
        lines[part] += len(path.read_text("utf-8").splitlines())
    parts = "; ".join(f"{part} {num_lines:,} ({modules[part]})" for part, num_lines in lines.most_common())
    return f"| `{package}` | {lines.total():,} ({modules.total()}) | {parts} |"


def _members(interface: type) -> int:
    return sum(not name.startswith("_") for name in {*vars(interface), *interface.__annotations__})


def main() -> None:
    print("| package | lines (modules) | of its parts |\n|---|---|---|")
    for package in _PACKAGES:
        print(_row(package))
    print("\n| interface | members |\n|---|---|")
    for interface in _INTERFACES:
        print(f"| `{interface.__name__}` | {_members(interface)} |")


if __name__ == "__main__":
    main()
