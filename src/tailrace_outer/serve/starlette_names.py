"""Which plain generator Starlette iterates in a thread."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from types import AsyncGeneratorType, GeneratorType
from typing import Any

from starlette.concurrency import iterate_in_threadpool

__all__ = ["plain_generator"]

_IN_THREAD = iterate_in_threadpool.__code__


def plain_generator(generator: AsyncGenerator[Any, Any]) -> GeneratorType[Any, Any, Any] | None:  # Any: its items
    """Return the plain generator that Starlette iterates in a thread. Python has no hook for these."""
    if not isinstance(generator, AsyncGeneratorType) or generator.ag_code is not _IN_THREAD:
        return None
    iterator = generator.ag_frame.f_locals.get("iterator") if generator.ag_frame is not None else None
    return iterator if isinstance(iterator, GeneratorType) else None
