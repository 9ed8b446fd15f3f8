"""`@serve.batch` on generators, row by row of the same table as in `test_batching.py`."""

from __future__ import annotations

import asyncio
import gc
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route
from tests.serve.batches import LONG_S, Endless, Pairs, catch, drain, start, together, within
from tests.waiting import idle, turn

from tailrace.serve.exceptions import BackPressureError, RayServeException
from tailrace_outer.serve.batching import batch


async def test_row_08_cancellation_stream() -> None:
    gate = asyncio.Event()

    @batch(max_batch_size=2, batch_wait_timeout_s=LONG_S)
    async def run(items: list[str]) -> AsyncIterator[list[str]]:
        await gate.wait()
        yield items

    first, second = start(drain(run("a"))), start(drain(run("b")))
    await idle()
    first.cancel()
    await idle()
    assert first.cancelled()
    assert not second.done()
    second.cancel()
    await idle()
    assert second.cancelled()
    gate.set()
    assert await together(drain(run("c")), drain(run("d"))) == [["c"], ["d"]]


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
            assert re.search(r"run got 2 elements and returned \d; a function with @serve.batch returns", str(error))
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
    await idle()
    assert after == []


async def test_row_14_code_after_the_last_yield_runs() -> None:
    after = asyncio.Event()

    @batch(max_batch_size=1)
    async def run(items: list[Any]) -> AsyncIterator[list[Any]]:
        yield [StopIteration]
        await turn()
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
    await idle()
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


@pytest.mark.parametrize("way", ["drop", *(pytest.param(one, marks=pytest.mark.deep) for one in ("aclose", "cancel"))])
@pytest.mark.parametrize("awaits", [True, False], ids=["at await", "at yield"])
async def test_row_27_all_gone_stream(way: str, awaits: bool) -> None:
    endless = Endless(awaits=awaits)
    streams: list[Any] = [endless.run(item) for item in "ab"]
    assert [await within(anext(stream)) for stream in streams] == ["a", "b"]
    await idle()  # in which it comes to wait, or to be far enough ahead
    while streams:
        assert endless.ended_by == []
        if way == "aclose":
            await streams[0].aclose()
        elif way == "cancel":
            reading = start(drain(streams[0]))
            await turn(200)  # in which it reads
            reading.cancel()
            await asyncio.wait([reading])
        del streams[0]
        gc.collect()
        await idle()
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
        await turn()  # its batch has a task, which has not run yet
        await stream.aclose()
        await idle()
        assert endless.num_yields == 0
        stream = endless.run("b")
        assert await within(anext(stream)) == "b"
        await stream.aclose()
    finally:
        endless.run.set_max_batch_size(2)


async def test_row_28_a_generator_waits_for_its_readers() -> None:
    endless = Endless(awaits=False)
    streams = [endless.run(item) for item in "ab"]
    await idle()
    assert endless.num_yields == 64
    for count in range(1, 11):  # one that reads is enough
        assert await within(anext(streams[0])) == "a"
        await idle()
        assert endless.num_yields == 64 + count
    for _ in range(64):
        await within(anext(streams[0]))
        await idle()
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
    assert "The reader is too slow" in str(error)
    assert await within(anext(fast)) == "fast"
    await fast.aclose()


async def test_a_full_queue_of_a_generator_raises_at_the_call() -> None:
    @batch(max_batch_size=10, batch_wait_timeout_s=LONG_S, max_queued=1)
    async def run(items: list[str]) -> AsyncIterator[list[str]]:
        yield items

    waiting = run("a")
    with pytest.raises(BackPressureError):
        run("b")
    await waiting.aclose()
    await run("c").aclose()  # there is room again


async def test_one_reader_at_a_time() -> None:
    endless = Endless(awaits=True)
    stream, other = endless.run("a"), endless.run("b")
    await within(anext(stream))
    reading = start(drain(stream))
    await idle()
    with pytest.raises(RuntimeError):
        await anext(stream)
    await stream.aclose()  # which ends the reading
    assert await within(reading) == []
    await other.aclose()


async def test_an_error_without_a_reader_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    @batch(max_batch_size=1)
    async def run(items: list[Any]) -> AsyncIterator[list[Any]]:
        yield [StopIteration]
        raise ZeroDivisionError("behind the last yield")

    assert await within(drain(run("a"))) == []
    await idle()
    assert ["behind the last yield" in str(record.exc_info) for record in caplog.records] == [True]
