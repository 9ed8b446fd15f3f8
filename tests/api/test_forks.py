"""Servers of tests are forks: without that, `make test` takes half as long again, and nothing else would show it."""

from __future__ import annotations

import os

import pytest
from tests.api.forks import Fork
from tests.api.process import Server

_IS_OFF = os.environ.get("TESTS_FORK") == "0"


@pytest.mark.skipif(_IS_OFF, reason="TESTS_FORK=0")
def test_a_server_and_its_worker_are_forks(server: Server) -> None:
    assert isinstance(server.process, Fork)
    assert server.worker().cmdline()[-1] == "", "what is left of the name of the process that was forked"
