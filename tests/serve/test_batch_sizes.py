"""`@serve.batch`: the size of batches, the limit of waiting calls, and their order. Rows of the same table as in
`test_batching.py`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator

import pytest
from tests.serve.batches import LONG_S, Recorder, start, together, total, within
from tests.waiting import idle

from tailrace.serve.exceptions import BackPressureError
from tailrace_outer.serve import context


async def test_row_17_batches_and_concurrent_batches() -> None:
    recorder = Recorder(asyncio.Event(), max_batch_size=5, batch_wait_timeout_s=LONG_S, max_concurrent_batches=2)
    assert recorder.gate is not None
    calls = [start(recorder.run(n)) for n in range(20)]
    await idle()
    assert [len(items) for items in recorder.batches] == [5, 5]  # and no third one
    recorder.gate.set()
    assert await together(*calls) == [f"{n}!" for n in range(20)]
    assert len(recorder.batches) == 4


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


async def test_row_22_a_call_that_does_not_fit_starts_the_batch_before_it() -> None:
    recorder = Recorder(max_batch_size=10, batch_wait_timeout_s=LONG_S, batch_size_fn=total)
    first = start(recorder.run(6))
    await idle()
    assert recorder.batches == []
    second = start(recorder.run(5))
    assert await within(first) == "6!"
    await idle()
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


async def test_row_22_cancelled_calls_free_space() -> None:
    recorder = Recorder(asyncio.Event(), max_batch_size=10, batch_wait_timeout_s=0, batch_size_fn=total)
    assert recorder.gate is not None
    calls = [start(recorder.run(10))]
    await idle()
    calls += [start(recorder.run(size)) for size in (6, 5, 3)]  # 6 is full, since 5 does not fit
    await idle()
    calls.pop(1).cancel()
    await idle()
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
        await idle()
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


async def test_row_29_arrivals_fill_a_batch_while_the_function_is_busy() -> None:
    recorder = Recorder(asyncio.Event(), max_batch_size=4, batch_wait_timeout_s=0)
    assert recorder.gate is not None
    calls = []
    for n in range(7):
        calls.append(start(recorder.run(n)))
        await idle()
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


async def test_max_queued() -> None:
    recorder = Recorder(asyncio.Event(), max_batch_size=1, max_queued=2)
    assert recorder.gate is not None
    calls = [start(recorder.run(item)) for item in "abcd"]
    await idle()
    assert [call.done() for call in calls] == [False, False, False, True]
    assert isinstance(calls[3].exception(), BackPressureError)  # one runs, two wait
    calls.pop(2).cancel()
    await idle()
    calls[2] = start(recorder.run("e"))  # has the place of the one that left
    await idle()
    recorder.gate.set()
    assert await together(*calls) == ["a!", "b!", "e!"]


async def test_calls_cancelled_while_waiting_use_no_slot() -> None:
    recorder = Recorder(max_batch_size=2, batch_wait_timeout_s=LONG_S)
    gone, first = start(recorder.run("gone")), start(recorder.run.__wrapped__("unused"))
    await first
    recorder.batches.clear()
    await idle()
    gone.cancel()
    await idle()
    stays = start(recorder.run("a"))
    await idle()
    assert not stays.done()
    assert await within(recorder.run("b")) == "b!"
    assert await within(stays) == "a!"
    assert recorder.batches == [["a", "b"]]
