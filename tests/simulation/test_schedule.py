"""Servers that share a Redis keep the laws, whatever goes wrong. `make simulate` tries other seeds.

In `make test`, tests/simulation takes a minute of a processor, for 320 of these schedules and those of the other files.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from tests.simulation.defects import EVERY_BATCH, EVERY_TOOLS, FIRST_WITH_BATCH, FIRST_WITH_TOOLS
from tests.simulation.schedule import run
from tests.simulation.shares import SHARE, check

_REPEATED = [
    *range(5000, 5010),
    *range(FIRST_WITH_BATCH, FIRST_WITH_BATCH + 5 * EVERY_BATCH, EVERY_BATCH),
    *range(FIRST_WITH_TOOLS, FIRST_WITH_TOOLS + 5 * EVERY_TOOLS, EVERY_TOOLS),
]


@pytest.mark.parametrize("share", range(4))  # the next four, in `make test-deep`: test_more_schedules.py
def test_no_law_is_broken(share: int) -> None:
    check(range(SHARE * share, SHARE * (share + 1)))


def test_a_seed_runs_the_same_again() -> None:
    """In another process, where nothing has the same hash and the same place in memory."""
    program = f"from tests.simulation.schedule import run; print([run(seed).digest for seed in {_REPEATED!r}])"
    environment = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    printed = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, check=True, text=True
    ).stdout
    assert printed == f"{[run(seed).digest for seed in reversed(_REPEATED)][::-1]}\n"
