"""What produces the events of a stream, as its log knows it."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["Ender", "Producer"]


class Producer:
    """What a log tells the run that produces its events. A method that is not overridden does nothing."""

    __slots__ = ()

    @property
    def status(self) -> str:
        """Return queued, running, or the status of its end."""
        return "running"

    def cancel(self) -> None:
        """End the stream as cancelled. Does nothing if it has ended."""

    def unread(self) -> None:
        """Called when the last reader has left."""

    def read(self) -> None:
        """Called when the first reader has come."""

    def ended(self) -> None:
        """Called when the terminal event can be read."""

    def lease_lost(self) -> None:
        """Called when another server writes the stream. The producer stops, and sends the readers away."""


class Ender(Producer):
    """The producer of a stream of which only the terminal event is missing. `on_end` is called when that can be
    read."""

    def __init__(self, on_end: Callable[[], None] = lambda: None) -> None:
        self._on_end = on_end

    def ended(self) -> None:
        self._on_end()
