"""Directories of processes that may be killed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tailrace_kit.scratch import scratch_directory

_HOLD = """
import sys, time
from pathlib import Path
from tailrace_kit.scratch import scratch_directory
with scratch_directory("test-", Path(sys.argv[1])) as directory:
    (directory / "file").write_text("x")
    print(directory, flush=True)
    time.sleep(60)
"""


def _age(directory: Path) -> None:
    before_s = time.time() - 3600
    os.utime(directory, (before_s, before_s))


def test_it_is_gone_at_the_end(tmp_path: Path) -> None:
    with pytest.raises(KeyError), scratch_directory("test-", tmp_path / "new") as directory:  # noqa: PT012
        (directory / "file").write_text("x")
        raise KeyError
    assert list((tmp_path / "new").iterdir()) == []


def test_it_may_be_renamed_meanwhile(tmp_path: Path) -> None:
    with scratch_directory("test-", tmp_path) as directory:
        directory.rename(tmp_path / "kept")
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_only_directories_of_dead_processes_are_removed(tmp_path: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", _HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    held = Path(holder.stdout.readline().strip())
    _age(held)
    (tmp_path / "other").mkdir()
    _age(tmp_path / "other")
    with scratch_directory("test-", tmp_path):
        assert (held / "file").is_file(), "its process lives"
    holder.kill()
    holder.communicate()
    with scratch_directory("test-", tmp_path) as new:
        assert sorted(tmp_path.iterdir()) == sorted([new, tmp_path / "other"])
