"""Which thread of anyio a task waits for."""

from __future__ import annotations

import asyncio
from typing import Any

__all__ = ["task_in_thread"]


def task_in_thread(task: asyncio.Task[Any]) -> asyncio.Future[Any] | None:  # Any: whatever it returns
    """Return the future of the anyio thread that a task waits for, or None. Routes without `async` run in such threads.

    Cancelling the task would end it and free its slot while the thread still works. Neither anyio nor asyncio can tell
    whether a task waits for a thread, so this inspects the task's coroutines.
    """
    awaited: Any = task.get_coro()  # Any: a coroutine, or another awaitable
    while awaited is not None:
        code = getattr(awaited, "cr_code", None)
        if code is not None and code.co_name == "run_sync_in_worker_thread":
            return getattr(task, "_fut_waiter", None)
        awaited = getattr(awaited, "cr_await", None)
    return None
