"""The server for tests of bad input."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from tests.api.process import Server
from tests.api.refusals import CANARY
from tests.api.unaffected import STEADY, unaffected_stream


@pytest.fixture(scope="module")
def target() -> Iterator[Server]:
    """A server with a running stream, which the tests must not delay or change."""
    with contextlib.closing(Server(STEADY, "--default-max-tokens", "1")) as server:
        with unaffected_stream(server.wait_ready()):
            yield server
        assert CANARY not in server.log
