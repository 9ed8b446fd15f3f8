"""Servers that share a Redis keep the laws, whatever goes wrong."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from tests.simulation.defects import (
    EVERY_BATCH,
    EVERY_LATE,
    EVERY_OUTLIVED,
    EVERY_TOOLS,
    FIRST_LATE,
    FIRST_OUTLIVED,
    FIRST_WITH_BATCH,
    FIRST_WITH_TOOLS,
)
from tests.simulation.schedule import run

_SEEDS = 320  # about 8 s of a processor
_WITH_BATCH = _LATE = _OUTLIVED = 60
_WITH_TOOLS = 100
_SHARES = [0, *(pytest.param(share, marks=pytest.mark.deep) for share in (1, 2, 3))]
_REPEATED = [
    *range(5000, 5010),
    *range(FIRST_WITH_BATCH, FIRST_WITH_BATCH + 5 * EVERY_BATCH, EVERY_BATCH),
    *range(FIRST_WITH_TOOLS, FIRST_WITH_TOOLS + 5 * EVERY_TOOLS, EVERY_TOOLS),
]


@pytest.mark.parametrize("share", _SHARES)
def test_no_law_is_broken(share: int) -> None:
    """`make simulate` tries other seeds."""
    size = _SEEDS // len(_SHARES)
    for seed in range(size * share, size * (share + 1)):  # every kind of schedule is in each share
        outcome = run(seed)
        assert not outcome.violation, outcome


@pytest.mark.parametrize("share", _SHARES)
def test_no_law_of_batches_is_broken(share: int) -> None:
    for number in range(share, _WITH_BATCH, len(_SHARES)):
        outcome = run(FIRST_WITH_BATCH + EVERY_BATCH * number)
        assert not outcome.violation, outcome


@pytest.mark.parametrize("share", _SHARES)
def test_no_law_of_tool_loops_is_broken(share: int) -> None:
    for number in range(share, _WITH_TOOLS, len(_SHARES)):
        outcome = run(FIRST_WITH_TOOLS + EVERY_TOOLS * number)
        assert not outcome.violation, outcome


@pytest.mark.parametrize("share", _SHARES)
def test_no_law_is_broken_by_late_commands(share: int) -> None:
    for number in range(share, _LATE, len(_SHARES)):
        outcome = run(FIRST_LATE + EVERY_LATE * number)
        assert not outcome.violation, outcome


@pytest.mark.parametrize("share", _SHARES)
def test_no_law_is_broken_by_commands_of_dead_servers(share: int) -> None:
    for number in range(share, _OUTLIVED, len(_SHARES)):
        outcome = run(FIRST_OUTLIVED + EVERY_OUTLIVED * number)
        assert not outcome.violation, outcome


def test_a_seed_runs_the_same_again() -> None:
    """In another process, where nothing has the same hash and the same place in memory."""
    program = f"from tests.simulation.schedule import run; print([run(seed).digest for seed in {_REPEATED!r}])"
    environment = {**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    printed = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, check=True, text=True
    ).stdout
    assert printed == f"{[run(seed).digest for seed in reversed(_REPEATED)][::-1]}\n"
