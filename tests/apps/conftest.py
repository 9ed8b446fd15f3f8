"""Apps that run for a module of tests."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.apps.process import AppServer
from tests.checkpoints import smollm2_dir, tiny_gpt2_dir

__all__ = ["run", "smollm2_dir", "tiny_gpt2_dir"]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., AppServer]]:
    """Return a function that starts apps in the temporary directory: `run("bot:app", "--reload")`."""
    with contextlib.ExitStack() as running:

        def start(target: str, *flags: str, directory: Path = tmp_path) -> AppServer:
            server = AppServer(target, *flags, directory=directory)
            running.callback(server.close)
            return server

        yield start
