"""Prints the coverage of each package of [tool.coverage.run], and fails if one is below its floor. It runs after pytest
in `make coverage`. `fail_under` there is the floor of all packages together.
"""

from __future__ import annotations

import json
import sys
import tempfile
import tomllib
from pathlib import Path

import coverage

ROOT = Path(__file__).parent.parent
FLOOR = 80  # percent of the lines of a package


def measured() -> dict[str, tuple[int, int]]:
    """Return how many lines of each package tests reach, and how many there are."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["coverage"]["run"]
    measurement = coverage.Coverage()
    measurement.load()
    with tempfile.NamedTemporaryFile("r", suffix=".json") as report:
        measurement.json_report(outfile=report.name)
        files = json.load(report)["files"]
    counts = dict.fromkeys(settings["source_pkgs"], (0, 0))
    for path, found in files.items():
        module = ".".join(Path(path).with_suffix("").parts[1:])  # below src
        for package, (reached, lines) in counts.items():
            if f"{module}.".startswith(f"{package}."):
                summary = found["summary"]
                counts[package] = reached + summary["covered_lines"], lines + summary["num_statements"]
    return counts


def main() -> int:
    shares = {package: 100 * reached / lines if lines else 0.0 for package, (reached, lines) in measured().items()}
    for package, share in sorted(shares.items(), key=lambda item: item[1]):
        sys.stdout.write(f"{share:5.1f} %  {package}\n")
    below = [package for package, share in shares.items() if share < FLOOR]
    if below:
        sys.stderr.write(f"Tests reach less than {FLOOR} % of {', '.join(below)}.\n")
    return 1 if below else 0


if __name__ == "__main__":
    raise SystemExit(main())
