"""Servers that share a Redis keep the laws of batches, and those of streams when commands come late."""

from __future__ import annotations

import pytest
from tests.simulation.defects import EVERY_BATCH, EVERY_LATE, FIRST_LATE, FIRST_WITH_BATCH
from tests.simulation.shares import check

_WITH_BATCH = 100  # schedules
_LATE = 80
shares = pytest.mark.parametrize("share", range(4))


@shares
def test_no_law_of_batches_is_broken(share: int) -> None:
    check(FIRST_WITH_BATCH + EVERY_BATCH * number for number in range(share, _WITH_BATCH, 4))


@shares
def test_no_law_is_broken_by_late_commands(share: int) -> None:
    check(FIRST_LATE + EVERY_LATE * number for number in range(share, _LATE, 4))
