"""The message about skipped tests at the end of a run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.missing import missing_reason, missing_summary
from tests.waiting import LONG_S

ROOT = Path(__file__).parent.parent


def test_missing_programs_are_named_with_their_tests() -> None:
    skips = [
        ("tests/a.py::test_one[x]", f"Skipped: {missing_reason('nginx')}"),
        ("tests/a.py::test_two", f"Skipped: {missing_reason('nginx', 'it is a proxy')}"),
        ("tests/b.py::test_one", f"Skipped: {missing_reason('nginx')}"),
        ("tests/b.py::test_two", "Skipped: could not import 'torch': No module named 'torch'"),
        ("tests/b.py::test_three", "Skipped: not among its capabilities"),
    ]
    line = "Not on this machine, so skipped: nginx (3 tests of tests/a.py, tests/b.py); torch (1 test of tests/b.py)."
    assert missing_summary(skips) == line
    assert missing_summary(skips[4:]) == ""


def test_it_is_the_last_line(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "from tests.conftest import pytest_terminal_summary\nfrom tests.missing import skip_missing\n"
        "def test_a(): skip_missing('a Babbage engine', 'it is slow')\n"
    )
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "--rootdir", str(tmp_path), str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LONG_S,
        check=False,
    )
    *_, line, _ = done.stdout.strip().splitlines()
    assert line == "Not on this machine, so skipped: a Babbage engine (1 test of test_it.py).", done.stdout
