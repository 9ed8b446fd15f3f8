"""The event loop that every process of ours runs on."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

__all__ = ["first_error", "run"]


def run(main: Coroutine[Any, Any, None]) -> None:  # Any: as in the type
    """Run to the end, on uvloop where there is one: faster, and it waits for children without a thread for each."""
    try:
        import uvloop
    except ImportError:
        asyncio.run(main)
    else:
        uvloop.run(main)


def first_error(error: BaseException) -> BaseException:
    """What went wrong first, out of the groups that task groups raise."""
    return first_error(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error
