"""The order and the end of a run: tests that passed only at the second try are named, and hanging ones are ended."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from tests.scheduler import turn_of
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

_HANGS_AFTER_A_FAILURE = """
import threading
import pytest

@pytest.fixture
def hangs():
    yield
    threading.Event().wait()

def test_fails(hangs):
    assert False
"""

_DIES = """
import os
import pytest

@pytest.mark.parametrize("number", range(3))
def test_first(number):
    pass

def test_dies():
    os._exit(1)

def test_dies_once():
    if not os.path.exists("died"):
        open("died", "w").close()
        os._exit(1)

def test_last():
    pass
"""


def _tries() -> list[str]:
    (line,) = (line for line in (ROOT / "Makefile").read_text().splitlines() if line.startswith("TRIES := "))
    return shlex.split(line.removeprefix("TRIES := "))


def _run(directory: Path, tests: str, *flags: str) -> subprocess.CompletedProcess[str]:
    (directory / "test_it.py").write_text(tests)
    command = [sys.executable, "-m", "pytest", "-n", "1", "--dist", "loadfile", "-p", "tests.conftest", *flags]
    return subprocess.run(
        [*command, "-p", "no:cacheprovider", "--rootdir", str(directory), str(directory)],
        cwd=ROOT, capture_output=True, text=True, timeout=LONG_S, check=False,
    )  # fmt: skip


@pytest.mark.deep
def test_tests_that_pass_at_the_second_try_are_named_and_hanging_ones_are_not_repeated(tmp_path: Path) -> None:
    output = _run(tmp_path, _TESTS, *_tries()).stdout
    *_, title, meaning, name, counts = output.strip().splitlines()
    assert "PASSED ONLY AT THE SECOND TRY" in title, output
    assert meaning.startswith("Each is a defect")
    assert name == "test_it.py::test_late"
    assert "2 failed, 2 passed, 2 rerun" in counts
    assert "the first try" in output


@pytest.mark.deep
def test_a_run_continues_after_a_process_of_tests_died(tmp_path: Path) -> None:
    for number in range(4):
        (tmp_path / f"test_a{number}.py").write_text("def test_quick(): pass")
    done = _run(tmp_path, _DIES.replace("died", str(tmp_path / "died")), *_tries())
    assert done.stdout.count("crashed while running 'test_it.py::test_dies'") >= 1, done.stdout
    assert "1 failed, 9 passed, 2 rerun" in done.stdout, done.stdout


def test_files_that_cannot_be_imported_are_errors_and_the_others_run(tmp_path: Path) -> None:
    (tmp_path / "test_broken.py").write_text("import nothing_of_this_name")
    (tmp_path / "test_needs.py").write_text("import pytest; pytest.importorskip('nothing_of_this_name')")
    done = _run(tmp_path, "def test_one(): pass")
    assert done.returncode == 1
    assert "ModuleNotFoundError: No module named 'nothing_of_this_name'" in done.stdout
    assert "1 passed, 1 skipped, 1 error" in done.stdout, done.stdout


@pytest.mark.deep
def test_files_without_tests_are_in_any_folder(tmp_path: Path) -> None:
    for name, source in (
        ("a/test_a.py", "def test_a(): pass"),
        ("a/test_none.py", ""),
        ("b/test_b.py", "def test_b(): pass"),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(source)
    done = _run(tmp_path, "def test_one(): pass")
    assert "3 passed" in done.stdout, done.stdout


@pytest.mark.deep
@pytest.mark.parametrize("chosen", ["deep", "not deep"])
def test_tests_are_chosen_by_their_marks(tmp_path: Path, chosen: str) -> None:
    marked = "import pytest\n\n@pytest.mark.deep\ndef test_deep(): pass\n\ndef test_other(): pass\n"
    done = _run(tmp_path, marked, "-m", chosen)
    assert "1 passed" in done.stdout, done.stdout


@pytest.mark.deep
def test_a_fixture_that_hangs_after_a_failure_ends_its_process(tmp_path: Path) -> None:
    done = _run(
        tmp_path, _HANGS_AFTER_A_FAILURE, "-o", "faulthandler_timeout=1", "-o", "faulthandler_exit_on_timeout=true"
    )
    assert 'test_it.py", line 8 in hangs' in done.stderr, done.stderr
    assert "crashed while running 'test_it.py::test_fails'" in done.stdout


def test_long_files_come_first_and_those_that_wait_for_nothing_last(request: pytest.FixtureRequest) -> None:
    tests = (
        "transport/test_http_edge.py",
        "generation/test_eye.py",
        "test_house.py",
        "text/calls/test_call_formats.py",
    )
    assert [turn_of(f"tests/{test}::test_one") for test in tests] == [0, 0, 1, 2]
    turns = [turn_of(test.nodeid) for test in request.session.items]
    assert turns == sorted(turns)
