"""`@serve.batch`, row by row of the table of what Ray Serve's own decorator does, or should do."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import logging
import re
import subprocess
import sys
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, TypeVar

import cloudpickle  # type: ignore[import-untyped]
import httpx
import numpy as np
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from tailrace.serve import context
from tailrace.serve.batching import Batch, Member, batch
from tailrace.serve.exceptions import BackPressureError, RayServeException

# Decorated functions are the user's own, of any type: hence the Anys here.

T = TypeVar("T")

LONG_S = 1000.0  # a wait that no test sees the end of


async def within(awaitable: Awaitable[T]) -> T:
    async with asyncio.timeout(20):
        return await awaitable


async def together(*awaitables: Awaitable[Any], return_exceptions: bool = False) -> list[Any]:
    async with asyncio.timeout(20):
        return list(await asyncio.gather(*awaitables, return_exceptions=return_exceptions))


async def turns(count: int = 20) -> None:
    """Let everything happen that can happen without waiting."""
    for _ in range(count):
        await asyncio.sleep(0)


async def drain(stream: AsyncIterator[Any]) -> list[Any]:
    return [item async for item in stream]


async def catch(stream: AsyncIterator[Any]) -> tuple[list[Any], BaseException | None]:
    """Its items, and how it ended."""
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


async def plain(items: list[Any]) -> list[Any]:
    return items


async def streaming(items: list[Any]) -> AsyncIterator[list[Any]]:
    yield items


class Methods:
    async def plain(self, items: list[Any]) -> list[Any]:
        return items


def sync_function(items: list[Any]) -> list[Any]:
    return items


@pytest.mark.parametrize("function", [plain, streaming, Methods.plain])
@pytest.mark.parametrize("options", [None, {}, {"max_batch_size": 5, "batch_wait_timeout_s": 0.1}])
def test_row_01_decorates(function: Callable[..., Any], options: dict[str, Any] | None) -> None:
    decorated = batch(function) if options is None else batch(**options)(function)
    assert decorated.__wrapped__ is function
    assert decorated.__name__ == function.__name__


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"max_batch_size": 0}, ValueError),
        ({"max_batch_size": -3}, ValueError),
        ({"max_batch_size": 1.1}, TypeError),
        ({"max_batch_size": "a"}, TypeError),
        ({"max_batch_size": 1.0}, None),
        ({"batch_wait_timeout_s": -0.1}, ValueError),
        ({"batch_wait_timeout_s": float("nan")}, ValueError),
        ({"batch_wait_timeout_s": 0}, None),
        ({"batch_wait_timeout_s": 0.0}, None),
        ({"batch_wait_timeout_s": "a"}, TypeError),
        ({"max_concurrent_batches": 0}, TypeError),
        ({"max_concurrent_batches": 1.5}, TypeError),
        ({"batch_size_fn": 3}, TypeError),
        ({"max_queued": 0}, ValueError),
        ({"max_queued": "a"}, TypeError),
        ({"continuous": True}, TypeError),
    ],
)
def test_row_01_validation(options: dict[str, Any], error: type[Exception] | None) -> None:
    if error is None:
        assert batch(**options)(plain)._get_max_batch_size() in (1, 10)
    else:
        with pytest.raises(error):
            batch(**options)(plain)


@pytest.mark.parametrize("decorate", [batch, batch(), batch(max_batch_size=3), batch(None, 3, 0.1, 1)])
def test_row_01_needs_async_def(decorate: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match="async def"):
        decorate(sync_function)


async def test_row_02_size_one_does_not_wait() -> None:
    recorder = Recorder(max_batch_size=1, batch_wait_timeout_s=LONG_S)
    assert await within(recorder.run("a")) == "a!"
    with pytest.raises(ZeroDivisionError):
        await within(recorder.run("bad"))


async def test_row_03_zero_timeout() -> None:
    recorder = Recorder(asyncio.Event(), max_batch_size=2, batch_wait_timeout_s=0)
    assert recorder.gate is not None
    first = start(recorder.run("a"))
    await turns()
    assert recorder.batches == [["a"]]
    rest = [start(recorder.run("bad")), start(recorder.run("b"))]
    await turns()
    recorder.gate.set()
    assert await within(first) == "a!"
    results = await together(*rest, return_exceptions=True)
    assert [type(result) for result in results] == [ZeroDivisionError, ZeroDivisionError]
    assert recorder.batches == [["a"], ["bad", "b"]]


async def test_row_04_timeout_and_empty_queue() -> None:
    recorder = Recorder(max_batch_size=10, batch_wait_timeout_s=0.02)
    for _ in range(2):
        recorder.run.set_batch_wait_timeout_s(0.02)
        assert await within(recorder.run("alone")) == "alone!"
        await asyncio.sleep(0.05)  # longer than the wait: no timer of that time may send those who come now
        recorder.run.set_batch_wait_timeout_s(LONG_S)
        calls = [start(recorder.run(n)) for n in range(9)]
        await asyncio.sleep(0.05)
        assert not any(call.done() for call in calls)
        calls.append(start(recorder.run(9)))
        assert await together(*calls) == [f"{n}!" for n in range(10)]
    assert recorder.batches == [["alone"], [*range(10)]] * 2


async def test_row_04_a_timer_that_is_early(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    call_at = loop.call_at
    recorder = Recorder(max_batch_size=10, batch_wait_timeout_s=0.05)
    call = start(recorder.run("a"))
    with monkeypatch.context() as patch:
        patch.setattr(loop, "call_at", lambda when, *args, **kwargs: call_at(when - 0.04, *args, **kwargs))
        await turns()
    assert await within(call) == "a!"


async def test_row_05_more_than_one_batch_at_once() -> None:
    recorder = Recorder(max_batch_size=2, batch_wait_timeout_s=10 * LONG_S)
    assert await together(*map(recorder.run, range(10))) == [f"{n}!" for n in range(10)]
    assert recorder.batches == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]


async def test_row_06_long_timeout() -> None:
    recorder = Recorder(max_batch_size=3, batch_wait_timeout_s=LONG_S)
    for items in (["a", "b", "c"], ["a", "bad", "c"]):
        calls = [start(recorder.run(item)) for item in items[:2]]
        await turns()
        assert not any(call.done() for call in calls)
        calls.append(start(recorder.run(items[2])))
        results = await together(*calls, return_exceptions=True)
        if "bad" in items:
            assert [type(result) for result in results] == [ZeroDivisionError] * 3
        else:
            assert results == ["a!", "b!", "c!"]


class Pairs:
    """One function in every form, with its arguments in every form."""

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


@batch(max_batch_size=4, batch_wait_timeout_s=LONG_S)
async def pairs(left: list[str], right: list[int]) -> list[str]:
    return [one * other for one, other in zip(left, right, strict=True)]


@pytest.mark.parametrize(
    "function",
    [pairs, Pairs().method, Pairs().of_class, Pairs().static],
    ids=["function", "method", "class", "static"],
)
async def test_row_07_arguments(function: Callable[..., Any]) -> None:
    calls = [function("a", 1), function("b", right=2), function(left="c", right=3), function(right=4, left="d")]
    assert await together(*calls) == ["a", "bb", "ccc", "dddd"]


async def test_row_08_cancellation_plain() -> None:
    recorder = Recorder(asyncio.Event(), max_batch_size=2, batch_wait_timeout_s=LONG_S)
    assert recorder.gate is not None
    first, second = start(recorder.run("a")), start(recorder.run("b"))
    await turns()
    first.cancel()
    await turns()
    assert first.cancelled()
    assert not second.done()
    assert recorder.cancelled == []
    second.cancel()
    await turns()
    assert second.cancelled()
    recorder.gate.set()
    assert await together(recorder.run("c"), recorder.run("d")) == ["c!", "d!"]


async def test_row_08_cancellation_stream() -> None:
    gate = asyncio.Event()

    @batch(max_batch_size=2, batch_wait_timeout_s=LONG_S)
    async def run(items: list[str]) -> AsyncIterator[list[str]]:
        await gate.wait()
        yield items

    first, second = start(drain(run("a"))), start(drain(run("b")))
    await turns()
    first.cancel()
    await turns()
    assert first.cancelled()
    assert not second.done()
    second.cancel()
    await turns()
    assert second.cancelled()
    gate.set()
    assert await together(drain(run("c")), drain(run("d"))) == [["c"], ["d"]]


async def test_row_08_one_leaves_and_the_other_gets_its_result() -> None:
    recorder = Recorder(asyncio.Event(), max_batch_size=2, batch_wait_timeout_s=LONG_S)
    assert recorder.gate is not None
    first, second = start(recorder.run("a")), start(recorder.run("b"))
    await turns()
    first.cancel()
    await turns()
    recorder.gate.set()
    assert await within(second) == "b!"
    assert recorder.batches == [["a", "b"]]


@pytest.mark.parametrize("num_turns", range(6))
async def test_row_09_cancellation_around_an_error(num_turns: int) -> None:
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, complaint: complaints.append(complaint))
    recorder = Recorder(max_batch_size=1)
    call = start(recorder.run("bad"))
    await turns(num_turns)
    call.cancel()
    await asyncio.wait([call])
    assert call.cancelled() or isinstance(call.exception(), ZeroDivisionError)
    assert await within(recorder.run("a")) == "a!"
    del call
    gc.collect()
    assert complaints == []


async def test_row_10_setters() -> None:
    recorder = Recorder(max_batch_size=2, batch_wait_timeout_s=LONG_S)
    run = recorder.run
    assert (run._get_max_batch_size(), run._get_batch_wait_timeout_s()) == (2, LONG_S)
    await together(*map(run, "ab"))
    run.set_max_batch_size(3)
    run.set_batch_wait_timeout_s(2 * LONG_S)
    assert (run._get_max_batch_size(), run._get_batch_wait_timeout_s()) == (3, 2 * LONG_S)
    await together(*map(run, "cde"))
    run.set_batch_wait_timeout_s(0)
    await together(*map(run, "fg"))
    assert recorder.batches == [["a", "b"], ["c", "d", "e"], ["f", "g"]]
    wrong: list[tuple[Callable[[Any], None], Any, type[Exception]]] = [
        (run.set_max_batch_size, 0, ValueError),
        (run.set_max_batch_size, 1.5, TypeError),
        (run.set_max_batch_size, "a", TypeError),
        (run.set_batch_wait_timeout_s, -1, ValueError),
        (run.set_batch_wait_timeout_s, "a", TypeError),
    ]
    for setter, value, error in wrong:
        with pytest.raises(error):
            setter(value)
    assert (run._get_max_batch_size(), run._get_batch_wait_timeout_s()) == (3, 0)


async def test_row_10_setters_through_instances() -> None:
    one, other = Pairs(), Pairs()
    before = one.method._get_max_batch_size()
    one.method.set_max_batch_size(2)
    try:
        assert other.method._get_max_batch_size() == 2
        assert await together(other.method("a", 1), other.method("b", 2)) == ["a", "bb"]
    finally:
        Pairs.method.set_max_batch_size(before)


async def test_row_11_earliest_settings_hold() -> None:
    recorder = Recorder(max_batch_size=3, batch_wait_timeout_s=LONG_S)
    recorder.run.set_max_batch_size(2)  # before: used
    calls = [start(recorder.run("a"))]
    await turns()
    recorder.run.set_max_batch_size(4)  # while it accumulates: not used
    recorder.run.set_batch_wait_timeout_s(0)
    await turns()
    assert recorder.batches == []
    calls += [start(recorder.run("b")), start(recorder.run("c"))]
    assert await together(*calls) == ["a!", "b!", "c!"]
    assert recorder.batches == [["a", "b"], ["c"]]  # the second with the new wait


@pytest.mark.parametrize("num_yields", [0, 2, 5])
async def test_row_12_generator(num_yields: int) -> None:
    instance = Pairs()
    instance.num_yields = num_yields
    run = instance.stream
    streams = [run("a", 1), run("b", right=2), run(left="c", right=3), run(right=4, left="d")]
    assert all(isinstance(stream, AsyncIterator) for stream in streams)
    results = await together(*map(drain, streams))
    assert results == [[f"{text}{n}" for n in range(num_yields)] for text in ("a", "bb", "ccc", "dddd")]


async def test_row_12_call_is_queued_before_it_is_read() -> None:
    done = asyncio.Event()

    @batch(max_batch_size=2, batch_wait_timeout_s=LONG_S)
    async def run(items: list[str]) -> AsyncIterator[list[str]]:
        yield items
        done.set()

    streams = [run("a"), run("b")]
    await within(done.wait())
    assert [await drain(stream) for stream in streams] == [["a"], ["b"]]


@pytest.mark.parametrize("fault", ["error", "length", "no length"])
async def test_row_13_generator_exceptions(fault: str) -> None:
    @batch(max_batch_size=2, batch_wait_timeout_s=LONG_S)
    async def run(items: list[str]) -> AsyncIterator[Any]:
        for step in range(5):
            if step == 2 and fault == "error":
                raise ZeroDivisionError("bad")
            yield None if step == 2 and fault == "no length" else items * (2 if step == 2 else 1)

    streams = [run("a"), run("b")]
    expected = {"error": ZeroDivisionError, "length": RayServeException, "no length": TypeError}[fault]
    for name, stream in zip("ab", streams, strict=True):
        items, error = await within(catch(stream))
        assert items == [name, name]
        assert type(error) is expected
        if fault == "length":
            assert re.search(r"run was called with 2 and gave \d; a function with @serve.batch gives", str(error))
        assert await drain(stream) == []


@pytest.mark.parametrize("sentinel", [StopIteration, StopAsyncIteration])
async def test_row_14_early_termination(sentinel: Any) -> None:
    after: list[str] = []

    @batch(max_batch_size=4, batch_wait_timeout_s=LONG_S)
    async def run(ends: list[int]) -> AsyncIterator[list[Any]]:
        for step in range(5):
            yield [sentinel if step == end else ("late" if step > end else step) for end in ends]
        after.append("last yield")  # of no use to anybody, and yet asked for more than once

    results = await together(*(drain(run(end)) for end in range(4)))
    assert results == [[*range(end)] for end in range(4)]
    await turns()
    assert after == []


async def test_row_14_what_stands_behind_the_last_yield_runs() -> None:
    after = asyncio.Event()

    @batch(max_batch_size=1)
    async def run(items: list[Any]) -> AsyncIterator[list[Any]]:
        yield [StopIteration]
        await asyncio.sleep(0)
        after.set()

    assert await within(drain(run("a"))) == []
    await within(after.wait())


async def test_row_15_setters_while_streaming() -> None:
    step, sizes = asyncio.Semaphore(0), []

    @batch(max_batch_size=2, batch_wait_timeout_s=LONG_S)
    async def run(items: list[str]) -> AsyncIterator[list[str]]:
        sizes.append(len(items))
        for _ in range(2):
            await step.acquire()
            yield items

    streams = [run("a"), run("b")]
    await turns()
    step.release()
    assert await within(anext(streams[0])) == "a"
    run.set_max_batch_size(3)
    streams += [run("c"), run("d"), run("e")]
    for _ in range(3):
        step.release()
    results = await together(*map(drain, streams))
    assert results == [["a"], ["b", "b"], ["c", "c"], ["d", "d"], ["e", "e"]]
    assert sizes == [2, 3]


@pytest.mark.parametrize("straight", [True, False], ids=["straight", "through another generator"])
async def test_row_16_streaming_response(straight: bool) -> None:
    class Textbot:
        @batch(max_batch_size=4, batch_wait_timeout_s=LONG_S)
        async def generate(self, prompts: list[str]) -> AsyncIterator[list[Any]]:
            for _ in range(10):
                yield prompts if straight else [{"text": prompt} for prompt in prompts]

        async def answer(self, request: Request) -> StreamingResponse:
            items = self.generate(request.query_params["prompt"])
            texts = items if straight else (item["text"] async for item in items)
            return StreamingResponse(texts, media_type="text/plain")

    app = Starlette(routes=[Route("/", Textbot().answer)])
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test") as client:
        prompts = ["a", "b", "c", "d"]
        answers = await together(*(client.get("/", params={"prompt": prompt}) for prompt in prompts))
    assert [(answer.status_code, answer.text) for answer in answers] == [(200, prompt * 10) for prompt in prompts]


async def test_row_17_batches_and_concurrent_batches() -> None:
    recorder = Recorder(asyncio.Event(), max_batch_size=5, batch_wait_timeout_s=LONG_S, max_concurrent_batches=2)
    assert recorder.gate is not None
    calls = [start(recorder.run(n)) for n in range(20)]
    await turns()
    assert [len(items) for items in recorder.batches] == [5, 5]  # and no third one
    recorder.gate.set()
    assert await together(*calls) == [f"{n}!" for n in range(20)]
    assert len(recorder.batches) == 4


async def some_items() -> AsyncIterator[int]:
    yield 1


@pytest.mark.parametrize(
    "result", [42, None, (n for n in range(2)), some_items()], ids=lambda value: type(value).__name__
)
async def test_row_18_no_length(result: Any) -> None:
    @batch(max_batch_size=2, batch_wait_timeout_s=LONG_S)
    async def run(items: list[str]) -> Any:
        return result

    results = await together(run("a"), run("b"), return_exceptions=True)
    assert [type(result) for result in results] == [TypeError, TypeError]


@pytest.mark.parametrize("result", [[], [1], [1, 2, 3], "abc"])
async def test_row_18_wrong_length(result: Any) -> None:
    @batch(max_batch_size=2, batch_wait_timeout_s=LONG_S)
    async def run(items: list[str]) -> Any:
        return result

    results = await together(run("a"), run("b"), return_exceptions=True)
    for error in results:
        assert isinstance(error, RayServeException)
        assert re.search(r"run was called with 2 and gave \d; a function with @serve.batch gives", str(error))


@pytest.mark.parametrize("streams", [False, True], ids=["unary", "streaming"])
async def test_row_19_clients_drop(streams: bool) -> None:
    gate = asyncio.Event()

    @batch(max_batch_size=3, batch_wait_timeout_s=0)
    async def unary(items: list[str]) -> list[str]:
        await gate.wait()
        return items

    @batch(max_batch_size=3, batch_wait_timeout_s=0)
    async def streaming(items: list[str]) -> AsyncIterator[list[str]]:
        for _ in range(3):
            await gate.wait()
            yield items

    def call(item: str) -> Any:
        return drain(streaming(item)) if streams else unary(item)

    dropped = [asyncio.wait_for(call(item), 0.005) for item in "abc"]
    results = await together(*dropped, return_exceptions=True)
    assert [type(result) for result in results] == [TimeoutError] * 3
    gate.set()
    assert await within(call("d")) == (["d"] * 3 if streams else "d")


async def test_row_20_observability() -> None:
    recorder = Recorder(asyncio.Event(), max_batch_size=1)
    assert recorder.gate is not None
    run = recorder.run
    assert await run._is_batching_task_alive()
    assert run._get_curr_iteration_start_times().start_times == ()
    assert run._get_curr_iteration_start_times().min_start_time is None
    assert await run._get_handling_task_stack() == ""
    rounds: list[Any] = []
    for _ in range(2):
        recorder.gate.clear()
        call = start(run("a"))
        await turns()
        rounds.append(run._get_curr_iteration_start_times())
        assert "await self.gate.wait()" in await run._get_handling_task_stack()
        recorder.gate.set()
        await within(call)
        await asyncio.sleep(0.001)
    assert rounds[1].min_start_time > rounds[0].max_start_time
    assert rounds[0].mean_start_time == rounds[0].max_start_time
    assert await run._is_batching_task_alive()


async def test_row_21_request_contexts() -> None:
    context.set_request_context(context.RequestContext(request_id="of whoever decorates"))
    seen: list[list[context.RequestContext]] = []
    inside: list[context.RequestContext] = []
    both = asyncio.Barrier(2)

    @batch(max_batch_size=3, batch_wait_timeout_s=LONG_S, max_concurrent_batches=2)
    async def run(items: list[int]) -> list[int]:
        await both.wait()
        seen.append(context.get_batch_request_contexts())
        inside.append(context.get_request_context())
        return items

    async def request(number: int) -> Any:
        context.set_request_context(context.RequestContext(route="/", request_id=str(number)))
        result = await run(number)
        assert context.get_request_context().request_id == str(number)
        assert context.get_batch_request_contexts() == []
        return result

    assert await together(*map(request, range(6))) == [*range(6)]
    assert [[entry.request_id for entry in entries] for entries in sorted(seen, key=str)] == [
        ["0", "1", "2"],
        ["3", "4", "5"],
    ]
    assert inside == [context.RequestContext()] * 2


async def test_row_21_no_callers_variables() -> None:
    variable = contextvars.ContextVar("variable", default="nobody")
    variable.set("app")

    @batch(max_batch_size=1)
    async def run(items: list[str]) -> list[str]:
        return [variable.get()]

    variable.set("caller")
    assert await within(run("a")) == "app"


def total(items: list[Any]) -> Any:
    if "bad" in items:
        raise ZeroDivisionError("bad")
    if "stop" in items:
        raise StopIteration  # which no future takes
    return sum(items)


@pytest.mark.parametrize(
    ("sizes", "batches"),
    [
        ([2, 3, 5, 1], [[2, 3, 5], [1]]),
        ([6, 6, 3, 4], [[6], [6, 3], [4]]),  # order is kept, although 6, 4 would fit
        ([9, 1, 10, 1], [[9, 1], [10], [1]]),
        ([1, 1, 1], [[1, 1, 1]]),
    ],
)
async def test_row_22_batch_size_fn(sizes: list[int], batches: list[list[int]]) -> None:
    recorder = Recorder(max_batch_size=10, batch_wait_timeout_s=0, batch_size_fn=total)
    assert await together(*map(recorder.run, sizes)) == [f"{size}!" for size in sizes]
    assert recorder.batches == batches


async def test_row_22_number_of_calls_by_default() -> None:
    recorder = Recorder(max_batch_size=2, batch_wait_timeout_s=LONG_S)
    await together(*map(recorder.run, [100, 100]))
    assert recorder.batches == [[100, 100]]


async def test_row_22_sizes_of_objects() -> None:
    def nodes(graphs: list[dict[str, list[int]]]) -> int:
        return sum(len(graph["nodes"]) for graph in graphs)

    recorder = Recorder(max_batch_size=4, batch_wait_timeout_s=LONG_S, batch_size_fn=nodes)
    graphs = [{"nodes": [0] * count} for count in (1, 3, 4)]
    await together(*map(recorder.run, graphs))
    assert recorder.batches == [graphs[:2], graphs[2:]]


async def test_row_22_what_does_not_fit_sends_the_batch_before_it() -> None:
    recorder = Recorder(max_batch_size=10, batch_wait_timeout_s=LONG_S, batch_size_fn=total)
    first = start(recorder.run(6))
    await turns()
    assert recorder.batches == []
    second = start(recorder.run(5))
    assert await within(first) == "6!"
    await turns()
    assert recorder.batches == [[6]]
    assert await within(recorder.run(5)) == "5!"
    assert await within(second) == "5!"
    assert recorder.batches == [[6], [5, 5]]


async def test_row_22_too_large_for_any_batch() -> None:
    recorder = Recorder(max_batch_size=10, batch_wait_timeout_s=LONG_S, batch_size_fn=total)
    calls = [start(recorder.run(size)) for size in (11, 4, 12, 6)]
    results = await together(*calls, return_exceptions=True)
    assert [type(result) for result in results] == [RuntimeError, str, RuntimeError, str]
    assert "12" in str(results[2])
    assert recorder.batches == [[4, 6]]


async def test_row_22_leaving_makes_room() -> None:
    recorder = Recorder(asyncio.Event(), max_batch_size=10, batch_wait_timeout_s=0, batch_size_fn=total)
    assert recorder.gate is not None
    calls = [start(recorder.run(10))]
    await turns()
    calls += [start(recorder.run(size)) for size in (6, 5, 3)]  # 6 is full, since 5 does not fit
    await turns()
    calls.pop(1).cancel()
    await turns()
    recorder.gate.set()
    await together(*calls)
    assert recorder.batches == [[10], [5, 3]]


@pytest.fixture
def bound() -> Iterator[Callable[[int | None], None]]:
    yield context.set_max_ongoing_requests
    context.set_max_ongoing_requests(None)


@pytest.mark.parametrize(("limit", "num_warnings"), [(None, 0), (3, 1), (4, 0), (5, 0)])
async def test_row_23_warning_on_creation(
    bound: Callable[[int | None], None], caplog: pytest.LogCaptureFixture, limit: int | None, num_warnings: int
) -> None:
    bound(limit)
    recorder = Recorder(max_batch_size=2, max_concurrent_batches=2, batch_wait_timeout_s=0)
    with caplog.at_level(logging.WARNING, "tailrace.serve"):
        await within(recorder.run("a"))
        await turns()
        await within(recorder.run("a"))  # a queue that was idle is no new one
    assert len(caplog.records) == num_warnings
    assert all("max_ongoing_requests=3" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize(("size", "num_warnings"), [(1, 0), (2, 0), (3, 1)])
async def test_row_23_warning_on_setting(
    bound: Callable[[int | None], None], caplog: pytest.LogCaptureFixture, size: int, num_warnings: int
) -> None:
    bound(4)
    recorder = Recorder(max_batch_size=1, max_concurrent_batches=2)
    with caplog.at_level(logging.WARNING, "tailrace.serve"):
        recorder.run.set_max_batch_size(size)
    assert len(caplog.records) == num_warnings


# Row 24, a queue for each multiplexed model, comes with multiplexing.


async def test_row_25_one_callers_error_plain() -> None:
    @batch(max_batch_size=3, batch_wait_timeout_s=LONG_S)
    async def run(items: list[int]) -> list[Any]:
        return [ValueError(item) if item == 1 else item for item in items]

    results = await together(*map(run, range(3)), return_exceptions=True)
    assert results[0::2] == [0, 2]
    assert isinstance(results[1], ValueError)


async def test_row_25_one_callers_error_stream() -> None:
    @batch(max_batch_size=2, batch_wait_timeout_s=LONG_S)
    async def run(items: list[int]) -> AsyncIterator[list[Any]]:
        yield items
        yield [ValueError("mine"), 1]
        yield items

    streams = [run(0), run(1)]
    (failed, error), others = await together(catch(streams[0]), drain(streams[1]))
    assert (failed, type(error)) == ([0], ValueError)
    assert others == [1, 1, 1]
    assert await drain(streams[0]) == []


async def test_row_26_an_instance_of_a_sentinel_is_an_item() -> None:
    instances = [StopIteration("a"), StopAsyncIteration("b")]

    @batch(max_batch_size=2, batch_wait_timeout_s=LONG_S)
    async def stream(items: list[Any]) -> AsyncIterator[list[Any]]:
        yield items

    @batch(max_batch_size=2, batch_wait_timeout_s=LONG_S)
    async def plain(items: list[Any]) -> list[Any]:
        return items

    assert await together(*(drain(stream(item)) for item in instances)) == [[item] for item in instances]
    assert await together(*map(plain, instances)) == instances


async def test_row_27_all_gone_plain(caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder(asyncio.Event(), max_batch_size=2, batch_wait_timeout_s=LONG_S)
    calls = [start(recorder.run(item)) for item in "ab"]
    await turns()
    for call in calls:
        assert recorder.cancelled == []
        call.cancel()
        await turns()
    assert recorder.cancelled == [["a", "b"]]
    assert caplog.records == []  # that is no fault of anybody's


class Endless:
    """A generator that says how it was ended."""

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


@pytest.mark.parametrize("way", ["aclose", "drop", "cancel"])
@pytest.mark.parametrize("awaits", [True, False], ids=["at await", "at yield"])
async def test_row_27_all_gone_stream(way: str, awaits: bool) -> None:
    endless = Endless(awaits=awaits)
    streams: list[Any] = [endless.run(item) for item in "ab"]
    assert [await within(anext(stream)) for stream in streams] == ["a", "b"]
    await turns(200)  # in which it comes to wait, or to be far enough ahead
    while streams:
        assert endless.ended_by == []
        if way == "aclose":
            await streams[0].aclose()
        elif way == "cancel":
            reading = start(drain(streams[0]))
            await turns(200)
            reading.cancel()
            await asyncio.wait([reading])
        del streams[0]
        gc.collect()
        await turns()
    assert endless.ended_by == [asyncio.CancelledError if awaits else GeneratorExit]


async def test_row_27_all_finished_and_still_going() -> None:
    ended = asyncio.Event()

    @batch(max_batch_size=1)
    async def run(items: list[Any]) -> AsyncIterator[list[Any]]:
        try:
            while True:
                yield [StopIteration]
        finally:
            ended.set()

    assert await within(drain(run("a"))) == []
    await within(ended.wait())


async def test_row_27_gone_before_the_function_starts() -> None:
    endless = Endless(awaits=True)
    endless.run.set_max_batch_size(1)
    try:
        stream = endless.run("a")
        await turns(1)  # its batch has a task, which has not run yet
        await stream.aclose()
        await turns()
        assert endless.num_yields == 0
        stream = endless.run("b")
        assert await within(anext(stream)) == "b"
        await stream.aclose()
    finally:
        endless.run.set_max_batch_size(2)


async def test_row_28_a_generator_waits_for_its_readers() -> None:
    endless = Endless(awaits=False)
    streams = [endless.run(item) for item in "ab"]
    await turns(300)
    assert endless.num_yields == 64
    for count in range(1, 11):  # one that reads is enough
        assert await within(anext(streams[0])) == "a"
        await turns()
        assert endless.num_yields == 64 + count
    for _ in range(64):
        await within(anext(streams[0]))
        await turns(3)
    assert endless.num_yields == 64 + 74
    for stream in streams:
        await stream.aclose()


async def test_row_28_too_slow_a_reader_is_failed() -> None:
    endless = Endless(awaits=False)
    slow, fast = endless.run("slow"), endless.run("fast")
    for _ in range(5000):
        await within(anext(fast))
    items, error = await within(catch(slow))
    assert items == []
    assert isinstance(error, BackPressureError)
    assert "This reader is too slow" in str(error)
    assert await within(anext(fast)) == "fast"
    await fast.aclose()


async def test_row_29_arrivals_fill_a_batch_while_the_function_is_busy() -> None:
    recorder = Recorder(asyncio.Event(), max_batch_size=4, batch_wait_timeout_s=0)
    assert recorder.gate is not None
    calls = []
    for n in range(7):
        calls.append(start(recorder.run(n)))
        await turns()
    recorder.gate.set()
    assert await together(*calls) == [f"{n}!" for n in range(7)]
    assert recorder.batches == [[0], [1, 2, 3, 4], [5, 6]]


async def test_row_30_batch_size_fn_raises() -> None:
    recorder = Recorder(max_batch_size=3, batch_wait_timeout_s=LONG_S, batch_size_fn=total)
    calls = [recorder.run(1), recorder.run("bad"), recorder.run("no number"), recorder.run("stop"), recorder.run(2)]
    results = await together(*calls, return_exceptions=True)
    assert [type(result) for result in results] == [str, ZeroDivisionError, TypeError, RuntimeError, str]
    assert recorder.batches == [[1, 2]]


async def test_row_30_batch_size_fn_and_keywords() -> None:
    recorder = Recorder(max_batch_size=3, batch_wait_timeout_s=LONG_S, batch_size_fn=total)
    assert await together(recorder.run(items=1), recorder.run(2)) == ["1!", "2!"]


async def test_row_31_the_function_raises_cancelled_error() -> None:
    @batch(max_batch_size=2, batch_wait_timeout_s=LONG_S)
    async def plain(items: list[str]) -> list[str]:
        raise asyncio.CancelledError

    @batch(max_batch_size=2, batch_wait_timeout_s=LONG_S)
    async def stream(items: list[str]) -> AsyncIterator[list[str]]:
        yield items
        raise asyncio.CancelledError

    results = await together(plain("a"), plain("b"), return_exceptions=True)
    assert [type(result) for result in results] == [asyncio.CancelledError] * 2
    ends = await together(catch(stream("a")), catch(stream("b")))
    assert [(items, type(error)) for items, error in ends] == [
        (["a"], asyncio.CancelledError),
        (["b"], asyncio.CancelledError),
    ]


class Slotted:
    """Without a dictionary, without weak references, and without a hash."""

    __slots__ = ("name", "says")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, name: str, says: list[str]) -> None:
        self.name = name
        self.says = says

    def __eq__(self, other: object) -> bool:
        return True

    def __del__(self) -> None:
        self.says.append(f"{self.name} is gone")

    @batch(max_batch_size=2, batch_wait_timeout_s=LONG_S)
    async def run(self, items: list[str]) -> list[str]:
        return [self.name + item for item in items]


async def test_row_32_a_queue_for_each_instance() -> None:
    says: list[str] = []
    one, other = Slotted("one", says), Slotted("other", says)
    calls = [start(one.run("a")), start(other.run("b"))]
    await turns()
    assert not any(call.done() for call in calls)  # together they are no batch
    calls += [start(one.run("c")), start(other.run("d"))]
    assert await together(*calls) == ["onea", "otherb", "onec", "otherd"]


async def test_row_32_instances_are_collected() -> None:
    says: list[str] = []
    one = Slotted("one", says)
    await together(one.run("a"), one.run("b"))
    abandoned = start(one.run("c"))
    await turns()
    abandoned.cancel()
    await asyncio.wait([abandoned])
    del one, abandoned
    await turns()
    gc.collect()
    assert says == ["one is gone"]
    instance = Endless(awaits=True)
    streams = [instance.run("a"), instance.run("b")]
    await within(anext(streams[0]))
    alive = weakref.ref(instance)
    del instance
    gc.collect()
    assert alive() is not None  # its batch runs
    del streams
    await turns()
    gc.collect()
    assert alive() is None


def test_row_32_a_queue_for_each_event_loop() -> None:
    recorder = Recorder(max_batch_size=2, batch_wait_timeout_s=0)

    asyncio.run(within(recorder.run("a")))
    assert asyncio.run(within(recorder.run("b"))) == "b!"
    assert recorder.batches == [["a"], ["b"]]


def test_row_32_what_a_closed_event_loop_leaves_behind() -> None:
    @batch(max_batch_size=2, batch_wait_timeout_s=LONG_S)
    async def run(items: list[str]) -> AsyncIterator[list[str]]:
        yield items

    class Lost:
        """An argument that can be watched."""

    lost = Lost()

    async def call(item: Any) -> Any:
        return run(item)

    async def use() -> Any:
        return await together(drain(run("a")), drain(run("b")))

    stream, alive = asyncio.run(call(lost)), weakref.ref(lost)
    del lost
    gc.collect()
    assert alive() is not None
    assert asyncio.run(use()) == [["a"], ["b"]]
    del stream
    gc.collect()
    assert alive() is None


async def test_row_32_methods_of_base_classes() -> None:
    class Base:
        @batch(max_batch_size=1)
        async def run(self, items: list[str]) -> list[str]:
            return [type(self).__name__ + item for item in items]

    class Derived(Base):
        @batch(max_batch_size=1)
        async def run(self, items: list[str]) -> list[str]:
            return [await super().run(items[0])]

    assert await within(Derived().run("a")) == "Deriveda"


async def test_row_33_arrays() -> None:
    array = np.arange(3)

    @batch(max_batch_size=2, batch_wait_timeout_s=LONG_S)
    async def stream(items: list[Any]) -> AsyncIterator[Any]:
        yield [array, StopIteration]
        yield np.zeros((2, 3))

    @batch(max_batch_size=2, batch_wait_timeout_s=LONG_S)
    async def plain(items: list[Any]) -> Any:
        return np.ones((2, 3))

    first, second = await together(drain(stream(0)), drain(stream(1)))
    assert [list(item) for item in first] == [[0, 1, 2], [0, 0, 0]]
    assert second == []
    assert [list(result) for result in await together(plain(0), plain(1))] == [[1, 1, 1]] * 2


async def test_row_34_different_arity() -> None:
    @batch(max_batch_size=3, batch_wait_timeout_s=LONG_S)
    async def run(items: list[str], times: Any = 2, *more: Any, end: Any = "", **others: Any) -> list[Any]:
        return list(zip(items, times, *more, end, others.get("mark", items), strict=True))

    results = await together(run("a"), run("b", 3, 4), run("c", end=".", mark="!"))
    assert results == [("a", 2, None, "", None), ("b", 3, 4, "", None), ("c", 2, None, ".", "!")]


async def test_row_34_a_call_that_does_not_fit() -> None:
    recorder = Recorder(max_batch_size=2, batch_wait_timeout_s=LONG_S)
    calls = [recorder.run("a"), recorder.run(), recorder.run("x", "y"), recorder.run(nothing=1), recorder.run("b")]
    results = await together(*calls, return_exceptions=True)
    assert [type(result) for result in results] == [str, TypeError, TypeError, TypeError, str]
    assert recorder.batches == [["a", "b"]]
    with pytest.raises(TypeError):
        Endless(awaits=True).run()  # a generator says so at once


async def test_row_35_bare_on_a_generator() -> None:
    decorated = batch(streaming)
    assert await within(drain(decorated("a"))) == ["a"]


async def test_max_queued() -> None:
    recorder = Recorder(asyncio.Event(), max_batch_size=1, max_queued=2)
    assert recorder.gate is not None
    calls = [start(recorder.run(item)) for item in "abcd"]
    await turns()
    assert [call.done() for call in calls] == [False, False, False, True]
    assert isinstance(calls[3].exception(), BackPressureError)  # one runs, two wait
    calls.pop(2).cancel()
    await turns()
    calls[2] = start(recorder.run("e"))  # has the place of the one that left
    await turns()
    recorder.gate.set()
    assert await together(*calls) == ["a!", "b!", "e!"]


async def test_max_queued_of_a_generator_is_said_at_the_call() -> None:
    @batch(max_batch_size=10, batch_wait_timeout_s=LONG_S, max_queued=1)
    async def run(items: list[str]) -> AsyncIterator[list[str]]:
        yield items

    waiting = run("a")
    with pytest.raises(BackPressureError):
        run("b")
    await waiting.aclose()
    await run("c").aclose()  # there is room again


async def test_those_who_leave_while_they_wait_take_no_place() -> None:
    recorder = Recorder(max_batch_size=2, batch_wait_timeout_s=LONG_S)
    gone, first = start(recorder.run("gone")), start(recorder.run.__wrapped__("unused"))
    await first
    recorder.batches.clear()
    await turns()
    gone.cancel()
    await turns()
    stays = start(recorder.run("a"))
    await turns()
    assert not stays.done()
    assert await within(recorder.run("b")) == "b!"
    assert await within(stays) == "a!"
    assert recorder.batches == [["a", "b"]]


async def test_one_reader_at_a_time() -> None:
    endless = Endless(awaits=True)
    stream, other = endless.run("a"), endless.run("b")
    await within(anext(stream))
    reading = start(drain(stream))
    await turns()
    with pytest.raises(RuntimeError):
        await anext(stream)
    await stream.aclose()  # which ends the reading
    assert await within(reading) == []
    await other.aclose()


async def test_an_error_that_nobody_is_there_to_see_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    @batch(max_batch_size=1)
    async def run(items: list[Any]) -> AsyncIterator[list[Any]]:
        yield [StopIteration]
        raise ZeroDivisionError("behind the last yield")

    assert await within(drain(run("a"))) == []
    await turns()
    assert ["behind the last yield" in str(record.exc_info) for record in caplog.records] == [True]


def test_a_decorated_class_can_be_sent_to_another_process() -> None:
    source = (
        "import asyncio\n"
        "from tailrace.serve.batching import batch\n"
        "class Sent:\n"
        "    @batch(max_batch_size=2, batch_wait_timeout_s=1000)\n"
        "    async def run(self, items):\n"
        "        return [item + item for item in items]\n"
        "async def use(kind):\n"
        "    one = kind()\n"
        "    kind.run.set_max_batch_size(3)\n"
        "    return await asyncio.gather(one.run('a'), one.run('b'), one.run('c'))\n"
    )
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(source, names)
    assert asyncio.run(names["use"](names["Sent"])) == ["aa", "bb", "cc"]
    sent = cloudpickle.dumps((names["use"], names["Sent"])).hex()
    program = (
        f"import asyncio, pickle; use, kind = pickle.loads(bytes.fromhex('{sent}')); print(asyncio.run(use(kind)))"
    )
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=False)
    assert printed.stdout == "['aa', 'bb', 'cc']\n", printed.stderr


class Steps:
    """A continuous batch that takes a step whenever it is told to, and counts for each member up to its argument."""

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
            await turns()


async def test_continuous_calls_come_and_go() -> None:
    steps = Steps(max_batch_size=2, batch_wait_timeout_s=0)
    calls = [start(drain(steps.run("a", end=3)))]
    await turns()
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
    await turns()
    await streams[0].aclose()
    await steps.steps()
    assert steps.members == [["a", "b"], ["b", "c"]]
    assert (steps.joined[1], steps.left[1]) == (["c"], ["a"])
    assert await within(anext(streams[1])) == 0
    for stream in streams[1:]:
        assert steps.ended == []
        await stream.aclose()
        await turns()
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


async def test_continuous_goes_on_with_nobody_there() -> None:
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
    await turns(300)  # it is paused now
    other = run("other")
    assert [await within(anext(other)) for _ in range(100)] == ["other"] * 100
    await turns(300)  # and again
    quick = run("quick")  # for which there is no room
    await turns()
    await other.aclose()
    assert [await within(anext(quick)) for _ in range(100)] == ["quick"] * 100
    await quick.aclose()
    assert await within(anext(slow)) == "slow"
    await slow.aclose()


async def test_continuous_calls_join_in_order() -> None:
    steps = Steps(max_batch_size=2, batch_wait_timeout_s=0)
    calls = [start(drain(steps.run(name, end=0 if name == "a" else 1))) for name in "abcdef"]
    await turns()
    await steps.steps(6)
    await together(*calls)
    assert [name for names in steps.joined for name in names] == list("abcdef")


async def test_continuous_with_sizes() -> None:
    steps = Steps(max_batch_size=10, batch_wait_timeout_s=0, batch_size_fn=total)
    calls = [start(catch(steps.run(size, end=1))) for size in (6, 11, 3, 2)]
    await turns()
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
