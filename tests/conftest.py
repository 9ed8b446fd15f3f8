"""Servers for every test that wants a real one: `tailrace serve` on the scripted engine, at the other end of a socket."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.server.process import Server


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """The scripted engine at full speed, one server for a module. A traceback in its log fails the module."""
    running = Server("scripted")
    try:
        yield running.wait_ready()
    finally:
        running.close()


@pytest.fixture(scope="module")
def paced() -> Iterator[Server]:
    """One whose streams can be caught in the middle: a hundred tokens a second each."""
    running = Server("scripted:tokens_per_s=100")
    try:
        yield running.wait_ready()
    finally:
        running.close()


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    """Starts servers of the test's own: `serve("scripted:tokens_per_s=5", "--max-sequences", "1")`."""
    started: list[Server] = []

    def start(source: str = "scripted", *flags: str) -> Server:
        started.append(Server(source, *flags))
        return started[-1].wait_ready()

    yield start
    for running in started:
        running.process.poll()
    errors = []
    for running in started:
        try:
            running.close()
        except AssertionError as error:
            errors.append(error)
    assert not errors, errors
