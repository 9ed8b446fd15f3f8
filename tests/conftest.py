"""Servers for every test that wants one: a real `tailrace serve`, at the other end of a socket."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator

import pytest
from tests.server.process import Server

# A shell starts what it runs in the background with Ctrl-C ignored, and so would be everything that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """The scripted engine at full speed, one server for a module. A traceback in its log fails the module."""
    with contextlib.closing(Server("scripted")) as running:
        yield running.wait_ready()


@pytest.fixture(scope="module")
def paced() -> Iterator[Server]:
    """One whose streams can be caught in the middle: a hundred tokens a second each."""
    with contextlib.closing(Server("scripted:tokens_per_s=100")) as running:
        yield running.wait_ready()


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    """Starts servers of the test's own: `serve("scripted:tokens_per_s=5", "--max-sequences", "1")`."""
    with contextlib.ExitStack() as running:

        def start(source: str = "scripted", *flags: str) -> Server:
            server = Server(source, *flags)
            running.callback(server.close)
            return server.wait_ready()

        yield start
