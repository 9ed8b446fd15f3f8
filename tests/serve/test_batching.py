"""`@serve.batch`, row by row of a table of the behaviour of Ray Serve's decorator."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import re
import subprocess
import sys
import weakref
from collections.abc import AsyncIterator, Callable
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import numpy as np
import pytest
from tests.serve.batches import LONG_S, Endless, Pairs, Recorder, catch, drain, start, together, within
from tests.waiting import idle, turn

from tailrace.serve.exceptions import RayServeException
from tailrace_outer.serve import context
from tailrace_outer.serve.batching import batch


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
    await idle()
    assert recorder.batches == [["a"]]
    rest = [start(recorder.run("bad")), start(recorder.run("b"))]
    await idle()
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
        await idle()
    assert await within(call) == "a!"


async def test_row_05_more_than_one_batch_at_once() -> None:
    recorder = Recorder(max_batch_size=2, batch_wait_timeout_s=10 * LONG_S)
    assert await together(*map(recorder.run, range(10))) == [f"{n}!" for n in range(10)]
    assert recorder.batches == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]


async def test_row_06_long_timeout() -> None:
    recorder = Recorder(max_batch_size=3, batch_wait_timeout_s=LONG_S)
    for items in (["a", "b", "c"], ["a", "bad", "c"]):
        calls = [start(recorder.run(item)) for item in items[:2]]
        await idle()
        assert not any(call.done() for call in calls)
        calls.append(start(recorder.run(items[2])))
        results = await together(*calls, return_exceptions=True)
        if "bad" in items:
            assert [type(result) for result in results] == [ZeroDivisionError] * 3
        else:
            assert results == ["a!", "b!", "c!"]


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
    await idle()
    first.cancel()
    await idle()
    assert first.cancelled()
    assert not second.done()
    assert recorder.cancelled == []
    second.cancel()
    await idle()
    assert second.cancelled()
    recorder.gate.set()
    assert await together(recorder.run("c"), recorder.run("d")) == ["c!", "d!"]


async def test_row_08_one_leaves_and_the_other_gets_its_result() -> None:
    recorder = Recorder(asyncio.Event(), max_batch_size=2, batch_wait_timeout_s=LONG_S)
    assert recorder.gate is not None
    first, second = start(recorder.run("a")), start(recorder.run("b"))
    await idle()
    first.cancel()
    await idle()
    recorder.gate.set()
    assert await within(second) == "b!"
    assert recorder.batches == [["a", "b"]]


@pytest.mark.parametrize("num_turns", range(6))
async def test_row_09_cancellation_around_an_error(num_turns: int) -> None:
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, complaint: complaints.append(complaint))
    recorder = Recorder(max_batch_size=1)
    call = start(recorder.run("bad"))
    await turn(num_turns)
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
    await idle()
    recorder.run.set_max_batch_size(4)  # while it accumulates: not used
    recorder.run.set_batch_wait_timeout_s(0)
    await idle()
    assert recorder.batches == []
    calls += [start(recorder.run("b")), start(recorder.run("c"))]
    assert await together(*calls) == ["a!", "b!", "c!"]
    assert recorder.batches == [["a", "b"], ["c"]]  # the second with the new wait


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
        assert re.search(r"run got 2 elements and returned \d; a function with @serve.batch returns", str(error))


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
        await idle()
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


async def test_row_25_one_callers_error_plain() -> None:
    @batch(max_batch_size=3, batch_wait_timeout_s=LONG_S)
    async def run(items: list[int]) -> list[Any]:
        return [ValueError(item) if item == 1 else item for item in items]

    results = await together(*map(run, range(3)), return_exceptions=True)
    assert results[0::2] == [0, 2]
    assert isinstance(results[1], ValueError)


async def test_row_27_all_gone_plain(caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder(asyncio.Event(), max_batch_size=2, batch_wait_timeout_s=LONG_S)
    calls = [start(recorder.run(item)) for item in "ab"]
    await idle()
    for call in calls:
        assert recorder.cancelled == []
        call.cancel()
        await idle()
    assert recorder.cancelled == [["a", "b"]]
    assert caplog.records == []  # that is no fault of anybody's


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
    """An object without a dictionary, weak references and a hash."""

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
    await idle()
    assert not any(call.done() for call in calls)  # together they are no batch
    calls += [start(one.run("c")), start(other.run("d"))]
    assert await together(*calls) == ["onea", "otherb", "onec", "otherd"]


async def test_row_32_instances_are_collected() -> None:
    says: list[str] = []
    one = Slotted("one", says)
    await together(one.run("a"), one.run("b"))
    abandoned = start(one.run("c"))
    await idle()
    abandoned.cancel()
    await asyncio.wait([abandoned])
    del one, abandoned
    await idle()
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
    await idle()
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
        """An argument whose deletion a test can notice."""

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


def test_a_decorated_class_can_be_sent_to_another_process() -> None:
    source = (
        "import asyncio\n"
        "from tailrace_outer.serve.batching import batch\n"
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
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert printed.stdout == "['aa', 'bb', 'cc']\n", printed.stderr
