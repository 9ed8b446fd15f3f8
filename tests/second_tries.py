"""What the processes of tests say to each other so that a test that failed runs once more."""

from __future__ import annotations

import pytest

__all__ = ["speak_only_of_failures"]


def speak_only_of_failures(config: pytest.Config) -> None:
    """Let pytest-rerunfailures ask the first process only about tests that failed.

    For each test, a process asks how often the test has failed elsewhere and how many tests ran again so far, and says
    how often it may run again. The other side reads byte by byte. That takes longer than a short test does: 1.1 ms of
    processor time for each of thousands of tests. The count that all processes share is asked for when a test has
    failed, and the first process knows itself how often a test may run again.
    """
    shared = getattr(config, "failures_db", None)
    if shared is None:  # the library is not there
        return
    if hasattr(config, "workerinput"):
        shared.get_test_failures = lambda _test: 0
        shared.set_test_reruns = lambda _test, _reruns: None
        shared.get_suite_reruns = lambda: 0
    else:
        shared.get_test_reruns = lambda _test: config.getoption("reruns") or 0
