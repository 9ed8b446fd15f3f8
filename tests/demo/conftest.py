"""A demo shared by a module, and demos for single tests."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from tests.demo.process import Demo


@pytest.fixture(scope="module")
def demo() -> Iterator[Demo]:
    """Without a model. Its servers may be killed: the next one comes by itself."""
    with contextlib.closing(Demo("--offline")) as running:
        running.wait_ready()
        yield running
