"""Servers for all tests: a real `tailrace serve` behind a socket."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import logging
import os
import signal
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import settings
from tests.api.forks import fork_workers
from tests.api.process import Server
from tests.by_file import BY_FILE, FileRunner, hands_out_files, kept_objects
from tests.examples import EXAMPLES
from tests.missing import missing_summary
from tests.scheduler import FileScheduler, UnreadFileScheduler, turn_of
from tests.second_tries import speak_only_of_failures
from tests.trust import read_certificates_late
from xdist.remote import Producer
from xdist.workermanage import WorkerController

# Where Python is told to keep no bytecode, each server that tests start compiles all its modules again: half of the
# processor time of a start. For this process, and for those that it starts:
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# The threads with which torch computes wait for each other by spinning. Next to other processes on few cores, its tests
# would take two or three times the processor time. For this process, and for those that it starts:
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Tests make many objects, of which few are garbage that Python must look for. With its own threshold of 700, that takes
# a tenth of the time of these processes.
gc.set_threshold(5_000)

read_certificates_late()
fork_workers()

# A shell starts what it runs in the background with Ctrl-C ignored, and so would be everything that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)


_STDERR = pytest.StashKey[int]()
_REPORTED = pytest.StashKey[Path]()


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    config.stash[_STDERR] = os.dup(2)  # pytest captures the descriptor itself from now on
    speak_only_of_failures(config)
    if reported := getattr(config, "workerinput", {}).get(BY_FILE):
        config.pluginmanager.register(FileRunner(Path(reported)))
    # No example has a time of its own: a busy machine, or measuring coverage, makes any of them slow. Tests have a
    # limit. `make test` tries a third of the examples: all of them take as long as a third of the tests that wait for
    # nothing. Each run tries others, except where CI is set: hypothesis takes the same ones there.
    part = 3 if config.getoption("markexpr") == "not deep" else 1
    settings.register_profile("tailrace", deadline=None, max_examples=EXAMPLES // part)
    settings.load_profile("tailrace")


@pytest.hookimpl(trylast=True)
def pytest_exception_interact(node: pytest.Item | pytest.Collector) -> None:
    """End a process whose fixtures hang after a failed test. pytest does this only before the test has failed."""
    limit_s = float(node.config.getini("faulthandler_timeout"))
    if limit_s > 0 and isinstance(node, pytest.Item):
        exits = node.config.getini("faulthandler_exit_on_timeout")
        faulthandler.dump_traceback_later(limit_s, exit=exits, file=node.config.stash[_STDERR])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> FileScheduler | None:
    if _REPORTED in config.stash:
        return UnreadFileScheduler(config, log, config.stash[_REPORTED])
    return FileScheduler(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: WorkerController) -> None:
    config = node.config
    if not hands_out_files(config):
        return
    if _REPORTED not in config.stash:
        directory = TemporaryDirectory(prefix="tailrace-tests-")
        config.add_cleanup(directory.cleanup)
        config.stash[_REPORTED] = Path(directory.name)
    node.workerinput[BY_FILE] = str(config.stash[_REPORTED])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: turn_of(item.nodeid))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Iterator[None]:
    """Print a summary at the very end, so that skipped and repeated tests are noticed."""
    yield
    failed = {report.nodeid for report in terminalreporter.stats.get("rerun", ())}
    passed = [report.nodeid for report in terminalreporter.stats.get("passed", ()) if report.when == "call"]
    if late := [name for name in passed if name in failed]:
        terminalreporter.section("PASSED ONLY AT THE SECOND TRY", red=True, bold=True)
        terminalreporter.write_line("Each is a defect of the test or of the product: CONTRIBUTING.md.", red=True)
        for name in late:
            terminalreporter.write_line(name, red=True)
    skipped = terminalreporter.stats.get("skipped", ())
    if line := missing_summary((report.nodeid, report.longrepr[-1]) for report in skipped):  # path, line and reason
        terminalreporter.write_line(line, yellow=True, bold=True)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    with kept_objects():
        return (yield)


@pytest.fixture(autouse=True)
def _log_levels() -> Iterator[None]:
    """Restore the log levels that a command of `tailrace` sets. Otherwise a later test would miss log records."""
    before = {logger: logger.level for logger in _loggers()}
    yield
    for logger in _loggers():
        if logger.level != before.get(logger, logging.NOTSET):  # setting a level clears a cache of all loggers
            logger.setLevel(before.get(logger, logging.NOTSET))


def _loggers() -> list[logging.Logger]:
    names = [name for name in logging.root.manager.loggerDict if name.startswith("tailrace")]
    return [logging.root, *map(logging.getLogger, names)]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A server with the scripted engine at full speed, for one module. A traceback in its log fails the module."""
    with contextlib.closing(Server("scripted")) as running:
        yield running.wait_ready()


@pytest.fixture(scope="module")
def paced() -> Iterator[Server]:
    """A server with 100 tokens per second for each stream, so that tests can act in the middle."""
    with contextlib.closing(Server("scripted:tokens_per_s=100")) as running:
        yield running.wait_ready()


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    """Return a function that starts servers: `serve("scripted:tokens_per_s=5", "--max-sequences", "1")`."""
    with contextlib.ExitStack() as running:

        def start(source: str = "scripted", *flags: str) -> Server:
            server = Server(source, *flags)
            running.callback(server.close)
            return server.wait_ready()

        yield start
