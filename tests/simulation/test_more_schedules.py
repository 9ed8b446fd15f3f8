"""More of the schedules of test_schedule.py."""

from __future__ import annotations

import pytest
from tests.simulation.shares import SHARE, check


@pytest.mark.deep
@pytest.mark.parametrize("share", range(4, 8))
def test_no_law_is_broken(share: int) -> None:
    check(range(SHARE * share, SHARE * (share + 1)))
