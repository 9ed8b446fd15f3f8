"""Prints the coverage of each package of [tool.coverage.run], and fails if one is below its floor. It runs after pytest
in `make coverage`. `fail_under` there is the floor of all packages together.
"""

from __future__ import annotations

import sys
from pathlib import Path

import coverage

SOURCE = Path(__file__).parent.parent / "src"
FLOOR = 80  # percent of the lines of a package


def measured() -> dict[str, tuple[int, int]]:
    """Return how many lines of each package tests reach, and how many there are."""
    measurement = coverage.Coverage()
    measurement.load()
    packages = measurement.get_option("run:source_pkgs")
    assert isinstance(packages, list)
    counts = dict.fromkeys(packages, (0, 0))
    for path in measurement.get_data().measured_files():
        module = ".".join(Path(path).relative_to(SOURCE).with_suffix("").parts)
        _, lines, _, missing, _ = measurement.analysis2(path)
        for package, (num_reached, num_lines) in counts.items():
            if f"{module}.".startswith(f"{package}."):
                counts[package] = num_reached + len(lines) - len(missing), num_lines + len(lines)
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
