"""Says where the event loop is blocked, since nothing else in this process can."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import traceback

__all__ = ["LoopWatch"]

_BLOCKED_S = 5.0


class LoopWatch:
    """A thread that asks the loop for a sign of life, and prints where its thread is when none comes."""

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
                self._tell()
                alive.wait()
                seconds = time.monotonic() - since_s
                sys.stderr.write(f"tailrace: the event loop runs again, after {seconds:.0f} s or more.\n")
            self._ended.wait(self._blocked_s)

    def _tell(self) -> None:
        frame = sys._current_frames().get(self._loop_thread)
        where = "".join(traceback.format_stack(frame)[-3:]) if frame is not None else ""
        sys.stderr.write(
            f"tailrace: the event loop has been blocked for {self._blocked_s:g} s, and with it everybody. Put what "
            f"takes long into a thread (asyncio.to_thread). It is here:\n{where}"
        )
