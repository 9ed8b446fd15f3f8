"""Shows answers of servers as text, and lets Ctrl-C stop them."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TextIO

from tailrace.wording import printable_text

if TYPE_CHECKING:
    import asyncio

__all__ = ["PlainScreen", "until_interrupted"]


class PlainScreen:
    """Prints the text as it arrives, without control characters. Does not print reasoning."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._is_in_line = False

    def show(self, piece: str) -> None:
        if text := printable_text(piece):
            self._out.write(text)
            self._out.flush()
            self._is_in_line = not text.endswith("\n")

    def think(self, piece: str) -> None:
        pass

    def read(self, progress: Mapping[str, Any]) -> None:
        pass

    def close(self) -> None:
        if self._is_in_line:
            self._out.write("\n")
        self._out.flush()


async def until_interrupted(task: asyncio.Future[None]) -> bool:
    """Wait for a task, which SIGINT cancels. Returns whether it ended normally."""
    import asyncio  # imported late, for `tailrace --help`

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, task.cancel)
    try:
        await task
    except asyncio.CancelledError:
        current = asyncio.current_task()
        if current is not None and current.cancelling():
            raise
        return False
    finally:
        loop.remove_signal_handler(signal.SIGINT)
    return True
