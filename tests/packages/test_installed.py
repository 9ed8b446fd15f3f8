"""What is installed is what the checkout says."""

from __future__ import annotations

import tomllib
from importlib.metadata import entry_points
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def test_every_entry_point_is_installed() -> None:
    """Otherwise nothing sees a new plugin, and its tests pass without it."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        written = tomllib.load(file)["project"]["entry-points"]
    missing = [
        f"{group}: {name}"
        for group, points in written.items()
        for name, value in points.items()
        if not any(point.value == value for point in entry_points(group=group, name=name))
    ]
    assert not missing, f"Run `make install`: pyproject.toml has {', '.join(missing)}, and the installation does not."
