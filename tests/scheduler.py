"""Which process runs which file of tests, and in which order."""

from __future__ import annotations

import json
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tests.by_file import FILES, reported_path
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

__all__ = ["FileScheduler", "UnreadFileScheduler", "turn_of"]

# Large libraries that tests import in their own process, and what those files have: torch takes five to ten seconds of
# a processor, the clients of APIs three.
_LARGE = {
    "torch": (
        "import torch", "smollm2_dir", "tests.seeing", "tests/serve", "tests/plugins/transformers", "tiny_gpt2_dir",
        "tiny_tools_dir",
    ),
    "clients": (
        "import anthropic", "import openai", "tests/agents", "tests/clients", "tests/differential",
        "tests/plugins/batches", "tests/plugins/tool_loop",
    ),
}  # fmt: skip
# Files whose tests wait for a minute altogether, for limits of time.
_LONG = frozenset(
    f"tests/{file}.py"
    for file in (
        "api/test_bad_input", "generation/test_eye", "plugins/tool_loop/test_shared_ends",
        "plugins/tool_loop/test_tool_sockets", "redis/test_shared_store", "transport/test_http_edge",
    )
)  # fmt: skip
_SHORT = frozenset({"access", "admission", "conversations", "dialects", "generation", "schemas", "streams", "text"})


def turn_of(test: str) -> int:
    """Return when a test comes: 0 for files that take long, 2 for folders whose files take seconds at most, since they
    wait for no other process, and 1 for the others.

    So no process is left with a long file when the others have ended.
    """
    file = test.partition("::")[0]
    return 0 if file in _LONG else 2 if file.removeprefix("tests/").split("/")[0] in _SHORT else 1


@cache
def _large_of(file: str) -> str:
    """Return which of the large libraries a file needs, or an empty text."""
    path = Path(__file__).parents[1] / file
    text = path.read_text("utf-8") if path.exists() else ""
    return next((name for name, words in _LARGE.items() if any(word in file or word in text for word in words)), "")


class FileScheduler(LoadFileScheduling):  # type: ignore[misc]  # the library is untyped
    """`--dist loadfile` that continues when a process of tests has died.

    With xdist's own scheduler (3.8) such a run waits for ever. It gives the dead process's finished files to other
    processes, which never report their end, and a new process may get a single test, which it only runs when another
    one follows. It also repeats the test in which the process died without a limit; here it is one that failed, so that
    `--reruns` and `--max-suite-reruns` apply.

    For each large library, one process gets the files that need it, before all others. Other processes get them if
    nothing else is left.
    """

    def __init__(self, *args: Any) -> None:  # Any: as the library's
        super().__init__(*args)
        self._with: dict[str, WorkerController] = {}

    def remove_node(self, node: WorkerController) -> str | None:
        files = self.assigned_work.pop(node)
        remaining = [(file, test) for file, tests in files.items() for test, is_done in tests.items() if not is_done]
        if not remaining:
            return None
        file, crashed = remaining[0]
        files[file][crashed] = True
        self.workqueue.update({file: tests for file, tests in files.items() if not all(tests.values())})
        for other in self.assigned_work:
            self._reschedule(other)
        return str(crashed)

    def mark_test_pending(self, item: str) -> None:
        """Run the test in which a process died once more."""
        self.workqueue.setdefault(self._split_scope(item), {})[item] = False

    def _assign_work_unit(self, node: WorkerController) -> None:
        for name in _LARGE:
            if self._with.get(name) not in self.assigned_work and node not in self._with.values():
                self._with[name] = node  # there was none, or it has died
        own = next((name for name, holder in self._with.items() if holder is node), "")
        file = min(self.workqueue, key=lambda file: (_large_of(file) != own, _large_of(file) != ""))
        tests = self.workqueue.pop(file)
        assigned = self.assigned_work.setdefault(node, {}).setdefault(file, {})
        assigned.update(tests)
        numbers = {test: number for number, test in enumerate(self.registered_collections[node])}
        node.send_runtest_some([numbers[test] for test, is_done in tests.items() if not is_done])

    def _reschedule(self, node: WorkerController) -> None:
        if node.shutting_down:
            return
        while self.workqueue and self._pending_of(self.assigned_work[node]) <= self._most_pending():
            self._assign_work_unit(node)
        if not self.workqueue:
            node.shutdown()

    def _most_pending(self) -> int:
        """Return how many tests a process has left when it gets more."""
        return 2


class UnreadFileScheduler(FileScheduler):
    """The same where processes get files instead of tests: tests/by_file.py. What it takes for a test is a file.

    The tests that a process has reported before it died do not run again, and what is said to have failed is the test
    in which it died.
    """

    def __init__(self, config: pytest.Config, log: Producer, reported: Path) -> None:
        super().__init__(config, log)
        self._reported = reported
        self._ended: defaultdict[str, set[str]] = defaultdict(set)  # tests by their files
        self._running: dict[str, str] = {}
        self._num_files_ended = 0
        config.pluginmanager.register(self)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._running[self._split_scope(nodeid)] = nodeid

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._ended[self._split_scope(nodeid)].add(self._running.pop(self._split_scope(nodeid)))

    def mark_test_complete(self, node: WorkerController, item_index: int, duration: float = 0) -> None:
        super().mark_test_complete(node, item_index, duration)
        self._num_files_ended += 1
        session = self.config.pluginmanager.get_plugin("session")
        # How many tests there are is not known: the progress that is shown is that of files.
        num_tests = sum(map(len, self._ended.values()))
        session.testscollected = max(num_tests * len(self.collection or ()) // self._num_files_ended, num_tests, 1)

    def remove_node(self, node: WorkerController) -> str | None:
        files = self.assigned_work.pop(node)
        unfinished = [file for file, tests in files.items() if not all(tests.values())]
        if not unfinished:
            return None
        self.workqueue.update({file: files[file] for file in unfinished})
        file = unfinished[0]
        if crashed := self._running.pop(file, ""):
            self._end(file, self._ended[file] | {crashed})
            return crashed
        return str(next(iter(self.workqueue.pop(file))))  # it was imported, or its fixtures were closed

    def mark_test_pending(self, item: str) -> None:
        file = self._split_scope(item)
        self._end(file, self._ended[file] - {item})
        self.workqueue.setdefault(file, {f"{file}::{FILES}": False})

    def _end(self, file: str, tests: set[str]) -> None:
        self._ended[file] = tests
        reported_path(self._reported, file).write_text(json.dumps(sorted(tests)), "utf-8")

    def _most_pending(self) -> int:
        return 1  # and the next one: the last test of a file says which fixtures the next file needs
