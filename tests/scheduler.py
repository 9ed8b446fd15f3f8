"""Which process runs which file of tests, and in which order."""

from __future__ import annotations

from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

__all__ = ["FileScheduler", "is_short"]

_SHORT = frozenset({"access", "admission", "conversations", "dialects", "generation", "schemas", "streams", "text"})


def is_short(test: str) -> bool:
    """Return whether a test is in a folder whose files take seconds at most: they wait for no other process.

    These files come last, so that no process is left with a long one when the others have ended.
    """
    return test.removeprefix("tests/").split("/")[0] in _SHORT


class FileScheduler(LoadFileScheduling):  # type: ignore[misc]  # the library is untyped
    """`--dist loadfile` that continues when a process of tests has died.

    With xdist's own scheduler (3.8) such a run waits for ever. It gives the dead process's finished files to other
    processes, which never report their end, and a new process may get a single test, which it only runs when another
    one follows. It also repeats the test in which the process died without a limit; here it is one that failed, so that
    `--reruns` and `--max-suite-reruns` apply.
    """

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
        file, tests = self.workqueue.popitem(last=False)
        assigned = self.assigned_work.setdefault(node, {}).setdefault(file, {})
        assigned.update(tests)
        numbers = {test: number for number, test in enumerate(self.registered_collections[node])}
        node.send_runtest_some([numbers[test] for test, is_done in tests.items() if not is_done])

    def _reschedule(self, node: WorkerController) -> None:
        if node.shutting_down:
            return
        while self.workqueue and self._pending_of(self.assigned_work[node]) <= 2:
            self._assign_work_unit(node)
        if not self.workqueue:
            node.shutdown()
