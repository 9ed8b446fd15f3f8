"""Reports where user code blocks the event loop."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import traceback

__all__ = ["LoopWatch"]

_BLOCKED_S = 5.0


class LoopWatch:
    """A thread that checks that the loop responds, and prints the loop thread's stack if it does not."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._ended = threading.Event()

    def begin(self, *, blocked_s: float = _BLOCKED_S) -> None:
        self._blocked_s = min(blocked_s, _BLOCKED_S)
        threading.Thread(target=self._run, daemon=True, name="tailrace-watch").start()

    def end(self) -> None:
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.is_set():
            alive = threading.Event()
            try:
                self._loop.call_soon_threadsafe(alive.set)
            except RuntimeError:  # the loop is closed
                return
            since_s = time.monotonic()
            if not alive.wait(self._blocked_s):
                self._report()
                alive.wait()
                seconds = time.monotonic() - since_s
                sys.stderr.write(f"tailrace: the event loop responds again, after {seconds:.0f} s or more.\n")
            self._ended.wait(self._blocked_s)

    def _report(self) -> None:
        frame = sys._current_frames().get(self._loop_thread)
        where = "".join(traceback.format_stack(frame)[-3:]) if frame is not None else ""
        sys.stderr.write(
            f"tailrace: the event loop has been blocked for {self._blocked_s:g} s, and all requests with it. Run "
            f"slow code in a thread (asyncio.to_thread). The loop is here:\n{where}"
        )
