"""The end of a turn: clients that disconnect early, calls that fail, and blocked event loops."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.plugins.inferless.apps import Make, Reader, apps, events_of, served
from tests.plugins.inferless.test_streams import ASK, END, PATH, SEND, app_of
from tests.waiting import wait_until


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    with apps(tmp_path) as make:
        yield make


def _path_of(text: str) -> dict[str, Any]:
    return {"parameters": {"TEXT": text}}


_LATE = f"""
self.seen.append("begun")
if inputs["TEXT"] == "late":
    self.go = threading.Event()
    self.go.wait()
for number in range(300):
    {SEND}({{"OUT": number}})
{END}
"""


@pytest.mark.parametrize("kind", ["def", "async def"])
async def test_a_disconnect_before_the_first_event_frees_the_turn(make: Make, kind: str) -> None:
    app = app_of(make, _LATE, kind=kind)
    instance = app._loaded.instance
    async with served(app) as client:
        leaving = Reader(app, PATH, _path_of("late"))
        await wait_until(lambda: hasattr(instance, "go"))
        await leaving.leave()
        instance.go.set()
        answer = await client.post(PATH, json=ASK)
    assert [event["OUT"] for event in events_of(answer)] == list(range(300))


async def test_a_request_cancelled_while_waiting_never_starts(make: Make) -> None:
    app = app_of(make, _LATE)
    instance = app._loaded.instance
    async with served(app) as client:
        first, waiting = Reader(app, PATH, _path_of("late")), Reader(app, PATH, _path_of("late"))
        await wait_until(lambda: hasattr(instance, "go") and len(app._model._pending) >= 2)
        await waiting.leave()
        instance.go.set()
        assert (await first.event())["OUT"] == 0
        answer = await client.post(PATH, json=ASK)
        await first.leave()
    assert len(events_of(answer)) == 300
    assert instance.seen == ["begun"] * 2


async def test_a_request_that_waits_too_long_is_refused(make: Make, caplog: Any) -> None:
    app = app_of(make, _LATE, queue_s=1)
    instance = app._loaded.instance
    async with served(app) as client:
        holding = asyncio.create_task(client.post(PATH, json=_path_of("late")))
        await wait_until(lambda: hasattr(instance, "go"))
        refused = await client.post(PATH, json=ASK)
        assert refused.status_code == 503
        assert refused.json() == {"error": "The app was not free within 1 s."}
        assert refused.headers["retry-after"] == "5"
        instance.go.set()
        assert len(events_of(await holding)) == 300
    assert "a request was refused after 1 s: infer still runs for other requests" in caplog.text


_SHARED = f"""
import queue
if not hasattr(self, "words"):
    self.words = queue.Queue()
    self.may_go_on, self.has_failed = threading.Event(), threading.Event()
text = inputs["TEXT"]

def generate():
    for number in range(3):
        self.words.put(f"{{text}}{{number}}")
    if text != "good":
        self.may_go_on.wait()
    self.words.put(f"{{text}}3")
    self.words.put(None)

thread = threading.Thread(target=generate)
thread.start()
while (word := self.words.get()) is not None:
    {SEND}({{"OUT": word}})
    if text == "raises":
        self.has_failed.set()
        raise ValueError("8317")
    if text == "sends what is no JSON":
        self.has_failed.set()
        {SEND}({{"OUT": float("nan")}})
    if text == "returns":
        self.has_failed.set()
        return
thread.join()
{END}
"""
_ENDS = {
    "raises": {"error": "ValueError in infer; the app's log has details.", "retryable": False},
    "sends what is no JSON": {"error": "OUT: nan is not a valid number in JSON.", "retryable": False},
    "returns": {"finish": "incomplete"},
}


@pytest.mark.parametrize("kind", ["def", "async def"])
@pytest.mark.parametrize("how", _ENDS)
async def test_results_of_a_failed_request_do_not_reach_the_next_client(make: Make, how: str, kind: str) -> None:
    app = app_of(make, _SHARED, kind=kind)
    instance = app._loaded.instance
    async with served(app) as client:
        failed = await client.post(PATH, json=_path_of(how))  # is told while the thread goes on
        assert events_of(failed) == [{"OUT": f"{how}0"}, _ENDS[how]]
        following = asyncio.create_task(client.post(PATH, json=_path_of("good")))
        await wait_until(lambda: len(app._model._pending) >= 2)
        instance.may_go_on.set()
        assert events_of(await following) == [{"OUT": f"good{number}"} for number in range(4)]


async def test_the_apps_own_queues_are_not_cleared(make: Make) -> None:
    body = f"""
import queue
if not hasattr(self, "pool"):
    self.pool = queue.SimpleQueue()
    self.pool.put("a")
    self.pool.put("b")
name = self.pool.get()
try:
    {SEND}({{"OUT": name}})
    raise ValueError
finally:
    self.pool.put(name)
"""
    app = app_of(make, body)
    async with served(app) as client:
        names = [events_of(await client.post(PATH, json=ASK))[0]["OUT"] for _ in range(4)]
    assert names == ["a", "b", "a", "b"]


async def test_an_async_infer_with_a_loop_that_blocks_sends_each_event_at_once(make: Make) -> None:
    body = f"""
self.go = threading.Semaphore(0)
for number in range(3):
    {SEND}({{"OUT": number}})
    self.go.acquire()  # blocks the event loop that it runs on
{END}
"""
    app = app_of(make, body, kind="async def")
    async with served(app) as client:
        reader = Reader(app, PATH, ASK)
        for number in range(3):
            assert (await reader.event())["OUT"] == number
            assert (await client.get("/v2/health/ready")).status_code == 200
            app._loaded.instance.go.release()
        await reader.leave()


async def test_an_async_app_has_one_event_loop(make: Make) -> None:
    app = make(
        f"""
        import asyncio, threading

        class InferlessPythonModel:
            async def initialize(self):
                self.loop, self.thread = asyncio.get_running_loop(), threading.get_ident()

            async def infer(self, inputs, h):
                assert asyncio.get_running_loop() is self.loop
                await {SEND}({{"OUT": "a"}})
                await {END}

            def finalize(self):
                assert threading.get_ident() == self.thread
                self.is_finalized = True
        """,
        name="m",
    )
    async with served(app) as client:
        assert events_of(await client.post(PATH, json=ASK)) == [{"OUT": "a"}]
        assert app._loaded.instance.thread != threading.get_ident()
    assert app._loaded.instance.is_finalized


async def test_an_async_infer_that_is_cancelled_ends_before_the_next_begins(make: Make) -> None:
    body = f"""
self.seen.append("begins")
await {SEND}({{"OUT": "a"}})
if len(self.seen) > 1:
    return await {END}
try:
    await asyncio.Event().wait()
finally:
    await asyncio.sleep(0.05)
    self.seen.append("ends")
"""
    app = app_of(make, body, kind="async def")
    async with served(app) as client:
        reader = Reader(app, PATH, ASK)
        await reader.event()
        await reader.leave()
        assert events_of(await client.post(PATH, json=ASK)) == [{"OUT": "a"}]
    assert app._loaded.instance.seen == ["begins", "ends", "begins"]
