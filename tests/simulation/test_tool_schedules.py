"""Servers that share a Redis keep the laws of tool loops, and those of streams when commands of dead servers come."""

from __future__ import annotations

import pytest
from tests.simulation.defects import EVERY_OUTLIVED, EVERY_TOOLS, FIRST_OUTLIVED, FIRST_WITH_TOOLS
from tests.simulation.shares import check

_WITH_TOOLS = 120  # schedules
_OUTLIVED = 80
shares = pytest.mark.parametrize("share", range(4))


@shares
def test_no_law_of_tool_loops_is_broken(share: int) -> None:
    check(FIRST_WITH_TOOLS + EVERY_TOOLS * number for number in range(share, _WITH_TOOLS, 4))


@shares
def test_no_law_is_broken_by_commands_of_dead_servers(share: int) -> None:
    check(FIRST_OUTLIVED + EVERY_OUTLIVED * number for number in range(share, _OUTLIVED, 4))
