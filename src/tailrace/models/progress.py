"""The interface to report progress, independent of a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

__all__ = ["NoProgress", "Progress", "task"]


class Progress(Protocol):
    """One task at a time: `start`, any number of `advance`, `done`. `message` may come at any moment."""

    def start(self, label: str, total_bytes: int | None) -> None: ...

    def advance(self, num_bytes: int) -> None:
        """Report more bytes. Slow tasks also report zero, so that a display can update its clock."""

    def done(self) -> None:
        """The task has ended, with or without success. Failures are exceptions."""

    def message(self, text: str) -> None: ...


class NoProgress:
    """Reports nothing."""

    def start(self, label: str, total_bytes: int | None) -> None: ...

    def advance(self, num_bytes: int) -> None: ...

    def done(self) -> None: ...

    def message(self, text: str) -> None: ...


@contextmanager
def task(progress: Progress, label: str, total_bytes: int | None) -> Iterator[None]:
    """Run a block as a task. `done` is always called, also after Ctrl-C."""
    progress.start(label, total_bytes)
    try:
        yield
    finally:
        progress.done()
