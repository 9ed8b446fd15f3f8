"""The message about tests that failed at first, at the end of a run."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from tests.waiting import LONG_S

pytest.importorskip("pytest_rerunfailures")

ROOT = Path(__file__).parent.parent
_TESTS = """
import pytest
from tests.conftest import pytest_terminal_summary

tries = []

@pytest.fixture(scope="module")
def begun():
    return []

def test_begins(begun):
    begun.append("once")

def test_late(begun):
    tries.append(begun)
    assert len(tries) == 2, "the first try"
    assert begun == ["once"]

def test_never():
    assert False

@pytest.mark.timeout(1)
def test_hangs():
    while True:
        pass
"""


def test_tests_that_pass_at_the_second_try_are_named_and_hanging_ones_are_not_repeated(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(_TESTS)
    (line,) = (line for line in (ROOT / "Makefile").read_text().splitlines() if line.startswith("TRIES := "))
    flags = shlex.split(line.removeprefix("TRIES := "))
    command = [sys.executable, "-m", "pytest", "-n", "1", "--dist", "loadfile", "-p", "tests.conftest", *flags]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=LONG_S, check=False,
    )  # fmt: skip
    *_, title, meaning, name, counts = done.stdout.strip().splitlines()
    assert "PASSED ONLY AT THE SECOND TRY" in title, done.stdout
    assert meaning.startswith("Each is a defect")
    assert name == "test_it.py::test_late"
    assert "2 failed, 2 passed, 2 rerun" in counts
    assert "the first try" in done.stdout
