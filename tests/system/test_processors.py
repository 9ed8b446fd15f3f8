"""The processors of a process: those of the machine, of its mask, and of its container's quota."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tailrace.system.processors import usable_processors


def _groups(directory: Path, path: str, quotas: dict[str, str]) -> tuple[Path, Path]:
    """Write control groups with these limits. Returns their directory, and the file that says where a process is."""
    groups, membership = directory / "groups", directory / "membership"
    for group, quota in quotas.items():
        (groups / group).mkdir(parents=True, exist_ok=True)
        (groups / group / "cpu.max").write_text(quota)
    membership.write_text(f"1:name=systemd:/elsewhere\n0::{path}\n")
    return groups, membership


@pytest.fixture(autouse=True)
def eight_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)


@pytest.mark.parametrize(
    ("path", "quotas", "expected"),
    [
        ("/", {"": "200000 100000\n"}, 2),  # as a container sees its own limit
        ("/", {"": "250000 100000\n"}, 2),
        ("/", {"": "50000 100000\n"}, 1),
        ("/", {"": "max 100000\n"}, 8),
        ("/", {"": "9000000 100000\n"}, 8),
        ("/pods/a/one", {"pods": "max 100000", "pods/a": "300000 100000", "pods/a/one": "max 100000"}, 3),
        ("/a/b", {"a": "100000 100000", "a/b": "400000 100000"}, 1),  # the least of those around it
        ("/a", {"b": "100000 100000"}, 8),  # another group's
        ("/a", {"a": "nonsense"}, 8),
    ],
)
def test_a_quota(tmp_path: Path, path: str, quotas: dict[str, str], expected: int) -> None:
    assert usable_processors(*_groups(tmp_path, path, quotas)) == expected


def test_a_system_without_control_groups(tmp_path: Path) -> None:
    assert usable_processors(tmp_path / "none", tmp_path / "none") == 8


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no masks of processors")
def test_a_mask() -> None:
    code = """
import os
from tailrace.system.processors import usable_processors
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
print(usable_processors())
"""
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "1"
