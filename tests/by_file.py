"""Each process of a test run imports only the files whose tests it runs.

With xdist every process imports all files, to name all tests: 16 s of a processor in each of five. Here processes name
the files, and get files to run. One that gets a file collects it and runs its tests, which are reported as ever. Where
tests are chosen by their names, or by how they ended before, all is collected as pytest does it.
"""

from __future__ import annotations

import contextlib
import gc
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

__all__ = ["BY_FILE", "FILES", "FileRunner", "hands_out_files", "kept_objects", "reported_path"]

BY_FILE = "tailrace_by_file"  # what a process is told: the folder for the lists of what dead processes have reported
FILES = "tests"  # how the tests of a file are named as long as they are not known
_CHOICES = ("keyword", "lf", "failedfirst", "newfirst", "stepwise", "collectonly")


def hands_out_files(config: pytest.Config) -> bool:
    """Return whether the processes of this run are given files instead of tests."""
    chosen = any(config.getoption(choice, None) for choice in _CHOICES) or any("::" in given for given in config.args)
    # Files have no marks: another expression than these would choose none of them.
    may_be_any = config.getoption("markexpr", "") in ("", "not deep")
    return config.getoption("dist") == "loadfile" and may_be_any and not chosen


def reported_path(directory: Path, file: str) -> Path:
    """Return where those tests of a file are listed, as JSON, that a process reported before it died."""
    return directory / f"{file.replace('/', '+')}.json"


@contextlib.contextmanager
def kept_objects() -> Iterator[None]:
    """Exclude what is imported and collected here from garbage collection, since it lives until the end. While it is
    made, looking for garbage takes a fifth of the time."""
    gc.collect()  # what is frozen is not looked at again
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


class _Tests(pytest.Item):
    """The tests of a file that was not imported yet."""

    def runtest(self) -> None:
        raise NotImplementedError  # they run instead: FileRunner

    def reportinfo(self) -> tuple[Path, int, str]:
        return self.path, 0, self.name


class _Unread(pytest.File):
    def collect(self) -> Iterable[pytest.Item]:
        tests = _Tests.from_parent(self, name=FILES)
        tests.add_marker(pytest.mark.timeout(0))  # each test has its own
        yield tests


class FileRunner:
    """The plugin of a process that gets files. `reported` is the folder of `reported_path`."""

    def __init__(self, reported: Path) -> None:
        self._reported = reported

    @pytest.hookimpl(tryfirst=True)
    def pytest_pycollect_makemodule(self, module_path: Path, parent: pytest.Collector) -> pytest.Collector:
        return _Unread.from_parent(parent, path=module_path)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
        if not isinstance(item, _Tests):
            return None
        session = item.session
        position = session.items.index(item)
        hooks = item.config.hook
        tests = self._collect(item)
        if not tests:  # the last test left open what is for this file's folder, and the next file may be in another one
            hooks.pytest_runtest_setup(item=item)
            hooks.pytest_runtest_teardown(item=item, nextitem=nextitem)
        for test, following in zip(tests, [*tests[1:], nextitem], strict=False):
            if session.shouldfail or session.shouldstop:
                break
            session.items[position] = test  # xdist reports only the item that it has asked for
            hooks.pytest_runtest_protocol(item=test, nextitem=following)
        session.items[position] = item
        return True

    def _collect(self, file: _Tests) -> list[pytest.Item]:
        """Import a file. Return those of its tests that are chosen and were not reported yet."""
        assert file.parent is not None
        path = reported_path(self._reported, file.parent.nodeid)
        reported = set(json.loads(path.read_text("utf-8"))) if path.exists() else set()
        with kept_objects():
            module = pytest.Module.from_parent(file.parent.parent, path=file.path)
            tests = list(file.session.genitems(module))
            file.config.hook.pytest_collection_modifyitems(session=file.session, config=file.config, items=tests)
        return [test for test in tests if test.nodeid not in reported]
