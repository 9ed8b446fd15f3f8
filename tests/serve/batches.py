"""Batched functions for tests, and ways to wait for their calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from typing import Any, TypeVar

from tailrace_outer.serve.batching import batch

__all__ = ["LONG_S", "Endless", "Pairs", "Recorder", "T", "catch", "drain", "start", "together", "total", "within"]

# Decorated functions are the user's own, of any type: hence the Anys here.

T = TypeVar("T")

LONG_S = 1000.0  # a wait that no test sees the end of


async def within(awaitable: Awaitable[T]) -> T:
    async with asyncio.timeout(120):
        return await awaitable


async def together(*awaitables: Awaitable[Any], return_exceptions: bool = False) -> list[Any]:
    async with asyncio.timeout(120):
        return list(await asyncio.gather(*awaitables, return_exceptions=return_exceptions))


async def drain(stream: AsyncIterator[Any]) -> list[Any]:
    return [item async for item in stream]


async def catch(stream: AsyncIterator[Any]) -> tuple[list[Any], BaseException | None]:
    """Return the items of a generator, and how it ended."""
    items = []
    try:
        async for item in stream:
            items.append(item)  # noqa: PERF401  # they are wanted although an error follows
    except (Exception, asyncio.CancelledError) as error:
        return items, error
    return items, None


def start(awaitable: Any) -> asyncio.Task[Any]:
    return asyncio.ensure_future(awaitable)


class Recorder:
    """A batched function that records its batches, and waits at a gate if there is one."""

    def __init__(self, gate: asyncio.Event | None = None, **options: Any) -> None:
        self.batches: list[list[Any]] = []
        self.cancelled: list[list[Any]] = []
        self.gate = gate

        @batch(**options)
        async def run(items: list[Any]) -> list[Any]:
            self.batches.append(items)
            try:
                if self.gate is not None:
                    await self.gate.wait()
            except asyncio.CancelledError:
                self.cancelled.append(items)
                raise
            if "bad" in items:
                raise ZeroDivisionError("bad")
            return [f"{item}!" for item in items]

        self.run = run


class Pairs:
    """One batched function, as every kind of method."""

    @batch(max_batch_size=4, batch_wait_timeout_s=LONG_S)
    async def method(self, left: list[str], right: list[int]) -> list[str]:
        return [one * other for one, other in zip(left, right, strict=True)]

    @classmethod
    @batch(max_batch_size=4, batch_wait_timeout_s=LONG_S)
    async def of_class(cls, left: list[str], right: list[int]) -> list[str]:
        return [one * other for one, other in zip(left, right, strict=True)]

    @staticmethod
    @batch(max_batch_size=4, batch_wait_timeout_s=LONG_S)
    async def static(left: list[str], right: list[int]) -> list[str]:
        return [one * other for one, other in zip(left, right, strict=True)]

    @batch(max_batch_size=4, batch_wait_timeout_s=LONG_S)
    async def stream(self, left: list[str], right: list[int]) -> AsyncIterator[list[str]]:
        for step in range(self.num_yields):
            yield [one * other + str(step) for one, other in zip(left, right, strict=True)]

    num_yields = 0


def total(items: list[Any]) -> Any:
    if "bad" in items:
        raise ZeroDivisionError("bad")
    if "stop" in items:
        raise StopIteration  # which no future takes
    return sum(items)


class Endless:
    """A generator that records how it was ended."""

    def __init__(self, *, awaits: bool) -> None:
        self.gate = asyncio.Event()
        self.awaits = awaits
        self.num_yields = 0
        self.ended_by: list[type[BaseException]] = []

    @batch(max_batch_size=2, batch_wait_timeout_s=LONG_S)
    async def run(self, items: list[Any]) -> AsyncIterator[list[Any]]:
        try:
            while True:
                self.num_yields += 1
                yield items
                if self.awaits:
                    await self.gate.wait()
        except BaseException as error:
            self.ended_by.append(type(error))
            raise
