"""Skips tests for which this machine lacks something, and lists them at the end of a run."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from importlib.util import find_spec
from typing import NoReturn

import pytest

__all__ = ["missing_reason", "missing_summary", "needs", "skip_missing"]

_BEGIN = "not on this machine: "
_REASONS = (re.compile(rf"{_BEGIN}([^:]+)"), re.compile(r"could not import '([^']+)'"))


def skip_missing(what: str, why: str = "") -> NoReturn:
    """Skip the running test because `what` is missing. `what` has no colon."""
    __tracebackhide__ = True  # so that the report names the place that calls this
    pytest.skip(missing_reason(what, why))


def missing_reason(what: str, why: str = "") -> str:
    """Return the reason of `skip_missing`, for marks."""
    return f"{_BEGIN}{what}: {why}" if why else f"{_BEGIN}{what}"


def needs(*packages: str) -> pytest.MarkDecorator:
    """Return a mark that skips tests for which a package is missing. It imports none, as `pytest.importorskip` would:
    every process of a test run collects all tests, and importing torch takes two seconds."""
    missing = [package for package in packages if find_spec(package) is None]
    return pytest.mark.skipif(bool(missing), reason=missing_reason(", ".join(missing)))


def missing_summary(skips: Iterable[tuple[str, str]]) -> str:
    """Return a line about the skipped tests, given as names and reasons; "" if nothing is missing."""
    files: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for test, reason in skips:
        for pattern in _REASONS:
            if found := pattern.search(reason):
                files[found[1]][test.partition("::")[0]] += 1
    if not files:
        return ""
    parts = []
    for what, counts in sorted(files.items()):
        tests = "1 test" if counts.total() == 1 else f"{counts.total()} tests"
        parts.append(f"{what} ({tests} of {', '.join(sorted(counts))})")
    return f"Not on this machine, so skipped: {'; '.join(parts)}."
