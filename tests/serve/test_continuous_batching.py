"""Continuous batches: calls join a running batch, and leave it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.serve.batches import LONG_S, catch, drain, start, together, total, within
from tests.waiting import idle

from tailrace_outer.serve import context
from tailrace_outer.serve.batching import Batch, Member, batch


class Steps:
    """A continuous batch that a test steps. It counts for each member up to the member's argument."""

    def __init__(self, **options: Any) -> None:
        self.step = asyncio.Semaphore(0)
        self.joined: list[list[Any]] = []
        self.left: list[list[Any]] = []
        self.members: list[list[Any]] = []
        self.contexts: list[int] = []
        self.runs = 0
        self.ended: list[str] = []

        @batch(continuous=True, **options)
        async def run(current: Batch) -> AsyncIterator[dict[Member, Any]]:
            self.runs += 1
            counts: dict[Member, int] = {}
            try:
                while current:
                    for member in current.joined:
                        counts[member] = 0
                    for member in current.left:
                        del counts[member]
                    assert set(counts) == set(current.members)
                    self.joined.append([member.args[0] for member in current.joined])
                    self.left.append([member.args[0] for member in current.left])
                    self.members.append([member.args[0] for member in current.members])
                    self.contexts.append(len(context.get_batch_request_contexts()))
                    await self.step.acquire()
                    items: dict[Member, Any] = {}
                    for member, count in counts.items():
                        items[member] = StopIteration if count == member.kwargs.get("end") else count
                        counts[member] += 1
                    yield items
                self.ended.append("empty")
            except asyncio.CancelledError:
                self.ended.append("cancelled")
                raise

        self.run = run

    async def steps(self, count: int = 1) -> None:
        for _ in range(count):
            self.step.release()
            await idle()


async def test_continuous_calls_come_and_go() -> None:
    steps = Steps(max_batch_size=2, batch_wait_timeout_s=0)
    calls = [start(drain(steps.run("a", end=3)))]
    await idle()
    await steps.steps()
    calls.append(start(drain(steps.run("b", end=2))))
    await steps.steps()
    calls.append(start(drain(steps.run("c", end=1))))  # there is no room until a has ended
    await steps.steps(6)
    assert await together(*calls) == [[0, 1, 2], [0, 1], [0]]
    assert steps.joined == [["a"], [], ["b"], [], ["c"], []]
    assert steps.left == [[], [], [], [], ["a"], ["b"]]
    assert steps.members == [["a"], ["a"], ["a", "b"], ["a", "b"], ["b", "c"], ["c"]]
    assert steps.contexts == [1, 1, 2, 2, 2, 1]
    assert (steps.runs, steps.ended) == (1, ["empty"])


async def test_continuous_one_leaves() -> None:
    steps = Steps(max_batch_size=2, batch_wait_timeout_s=0)
    streams = [steps.run(name) for name in "abc"]
    await idle()
    await streams[0].aclose()
    await steps.steps()
    assert steps.members == [["a", "b"], ["b", "c"]]
    assert (steps.joined[1], steps.left[1]) == (["c"], ["a"])
    assert await within(anext(streams[1])) == 0
    for stream in streams[1:]:
        assert steps.ended == []
        await stream.aclose()
        await idle()
    assert steps.ended == ["cancelled"]


async def test_continuous_starts_again_for_those_who_wait() -> None:
    runs = []

    @batch(max_batch_size=1, batch_wait_timeout_s=LONG_S, continuous=True)
    async def run(current: Batch) -> AsyncIterator[dict[Member, Any]]:
        runs.append(current.members)
        yield {member: member.args for member in current.members}
        # and returns, although one is open and the other waits

    streams = [run(1, 2), run()]
    assert await together(*map(drain, streams)) == [[(1, 2)], [()]]
    assert [len(members) for members in runs] == [1, 1]


async def test_continuous_items_and_errors_of_one() -> None:
    @batch(max_batch_size=3, batch_wait_timeout_s=LONG_S, continuous=True)
    async def run(current: Batch) -> AsyncIterator[dict[Member, Any]]:
        first, second, third = current.members
        yield {first: "one"}
        yield {first: "two", second: ValueError("mine"), third: StopAsyncIteration}
        assert current.left == (second, third)
        assert current.members == (first,)
        yield {first: "three", second: "late", third: "late"}
        raise ZeroDivisionError("bad")

    ends = await together(*(catch(run(n)) for n in range(3)))
    assert [items for items, _ in ends] == [["one", "two", "three"], [], []]
    assert [type(error) for _, error in ends] == [ZeroDivisionError, ValueError, type(None)]


@pytest.mark.parametrize("wrong", [None, ["a"], {"a": 1}], ids=["nothing", "a list", "no members"])
async def test_continuous_yields_a_mapping_of_members(wrong: Any) -> None:
    @batch(continuous=True, batch_wait_timeout_s=0)
    async def run(current: Batch) -> AsyncIterator[Any]:
        yield wrong

    with pytest.raises(TypeError, match="continuous batch yields"):
        await within(drain(run("a")))


async def test_a_continuous_batch_goes_on_without_members() -> None:
    seen, ended = [], asyncio.Event()

    @batch(continuous=True, batch_wait_timeout_s=0)
    async def run(current: Batch) -> AsyncIterator[dict[Member, Any]]:
        try:
            while True:
                seen.append(bool(current))
                yield dict.fromkeys(current.members, StopIteration)
        finally:
            ended.set()

    assert await within(drain(run("a"))) == []
    await within(ended.wait())
    assert seen == [True, False]
    assert await within(drain(run("b"))) == []


async def test_continuous_newcomers_do_not_wait_for_slow_readers() -> None:
    @batch(max_batch_size=2, batch_wait_timeout_s=0, continuous=True)
    async def run(current: Batch) -> AsyncIterator[dict[Member, Any]]:
        while current:
            yield {member: member.args[0] for member in current.members}

    slow = run("slow")
    await idle()  # it is paused now
    other = run("other")
    assert [await within(anext(other)) for _ in range(100)] == ["other"] * 100
    await idle()  # and again
    quick = run("quick")  # for which there is no room
    await idle()
    await other.aclose()
    assert [await within(anext(quick)) for _ in range(100)] == ["quick"] * 100
    await quick.aclose()
    assert await within(anext(slow)) == "slow"
    await slow.aclose()


async def test_continuous_calls_join_in_order() -> None:
    steps = Steps(max_batch_size=2, batch_wait_timeout_s=0)
    calls = [start(drain(steps.run(name, end=0 if name == "a" else 1))) for name in "abcdef"]
    await idle()
    await steps.steps(6)
    await together(*calls)
    assert [name for names in steps.joined for name in names] == list("abcdef")


async def test_continuous_with_sizes() -> None:
    steps = Steps(max_batch_size=10, batch_wait_timeout_s=0, batch_size_fn=total)
    calls = [start(catch(steps.run(size, end=1))) for size in (6, 11, 3, 2)]
    await idle()
    await steps.steps(4)
    ends = await together(*calls)
    assert [(items, type(error)) for items, error in ends] == [
        ([0], type(None)),
        ([], RuntimeError),
        ([0], type(None)),
        ([0], type(None)),
    ]
    assert steps.members == [[6, 3], [6, 3], [2], [2]]


def test_continuous_needs_one_argument() -> None:
    async def two(items: Batch, more: Any) -> AsyncIterator[dict[Member, Any]]:
        yield {}

    with pytest.raises(TypeError):
        batch(continuous=True)(two)
