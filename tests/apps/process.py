"""A real `tailrace run` process, and apps for it."""

from __future__ import annotations

import contextlib
import textwrap
from pathlib import Path

from tests.api.process import Server
from tests.waiting import LONG_S

__all__ = ["AppServer", "Forgiving", "write"]


class AppServer(Server):
    """A `Server` that runs an app in a directory."""

    verb = "run"
    patience_s = 3.0  # an app drains for 20 s, and what its tests leave running need not end
    listening = r"runs at http://127\.0\.0\.1:([0-9]+)"

    def __init__(self, target: str, *flags: str, directory: Path) -> None:
        super().__init__(target, *flags, directory=directory)

    def wait_ready(self, *, timeout_s: float = LONG_S) -> AppServer:
        super().wait_ready(timeout_s=timeout_s)
        return self


class Forgiving(AppServer):
    """A server whose app raises on purpose: its log may contain tracebacks."""

    def close(self) -> None:
        with contextlib.suppress(AssertionError):
            super().close()


def write(directory: Path, name: str, source: str) -> Path:
    """Write a module."""
    path = directory / name
    path.write_text(textwrap.dedent(source), "utf-8")
    return path
