"""The schedules that `make test` runs, in parts: a file runs in one process, and several files run at the same time."""

from __future__ import annotations

from collections.abc import Iterable

from tests.simulation.schedule import run

__all__ = ["SHARE", "check"]

SHARE = 80  # seeds; every kind of schedule is in each share


def check(seeds: Iterable[int]) -> None:
    for seed in seeds:
        outcome = run(seed)
        assert not outcome.violation, outcome
