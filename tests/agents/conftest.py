"""The folder in which an agent works."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def work(tmp_path: Path) -> Path:
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "pebble.txt").write_text("A pebble.\n")
    return folder
