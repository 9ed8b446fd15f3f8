"""How the room tells what it is doing, without knowing what a terminal is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

__all__ = ["NoProgress", "Progress", "task"]


class Progress(Protocol):
    """One task at a time: `start`, any number of `advance`, `done`. `message` may come at any moment."""

    def start(self, label: str, total_bytes: int | None) -> None: ...

    def advance(self, num_bytes: int) -> None:
        """So many bytes more. Zero is a sign of life: a slow task sends it so that a display can tell the time."""

    def done(self) -> None:
        """The task is over, well or not; what went wrong comes as an exception."""

    def message(self, text: str) -> None: ...


class NoProgress:
    """Tells nobody."""

    def start(self, label: str, total_bytes: int | None) -> None: ...

    def advance(self, num_bytes: int) -> None: ...

    def done(self) -> None: ...

    def message(self, text: str) -> None: ...


@contextmanager
def task(progress: Progress, label: str, total_bytes: int | None) -> Iterator[None]:
    """A task that is `done` however the block is left, Ctrl-C included."""
    progress.start(label, total_bytes)
    try:
        yield
    finally:
        progress.done()
