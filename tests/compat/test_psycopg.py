from __future__ import annotations

import inspect

import psycopg
from psycopg import waiting
from psycopg.waiting import Ready
from tests.compat.checked import check_versions, parameters


def test_versions() -> None:
    check_versions("psycopg", "3.2.13", "3.3", tests="tests/records")


def test_names() -> None:
    """A socket without news has to wake the exchange: `Ready.NONE`."""
    assert parameters(psycopg.Connection.wait)[:2] == ["self", "gen"]
    assert not Ready.NONE
    assert "READY_NONE" in inspect.getsource(waiting.wait_selector)
