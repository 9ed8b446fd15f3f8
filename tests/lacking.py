"""Prints at the end of a run which tests were skipped because this machine lacks something."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import NoReturn

import pytest

__all__ = ["lack", "reason", "told"]

_BEGIN = "not on this machine: "
_REASONS = (re.compile(rf"{_BEGIN}([^:]+)"), re.compile(r"could not import '([^']+)'"))


def lack(what: str, why: str = "") -> NoReturn:
    """Skip the running test because `what` is missing. `what` has no colon."""
    __tracebackhide__ = True  # so that the report names the place that calls this
    pytest.skip(reason(what, why))


def reason(what: str, why: str = "") -> str:
    """As `lack`, for marks."""
    return f"{_BEGIN}{what}: {why}" if why else f"{_BEGIN}{what}"


def told(skips: Iterable[tuple[str, str]]) -> str:
    """The line, from the names of skipped tests and why each was; "" if nothing is lacking."""
    files: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for name, why in skips:
        for pattern in _REASONS:
            if found := pattern.search(why):
                files[found[1]][name.partition("::")[0]] += 1
    if not files:
        return ""
    parts = []
    for what, counts in sorted(files.items()):
        tests = "1 test" if counts.total() == 1 else f"{counts.total()} tests"
        parts.append(f"{what} ({tests} of {', '.join(sorted(counts))})")
    return f"Not on this machine, so skipped: {'; '.join(parts)}."
