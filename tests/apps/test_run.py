"""`tailrace run` from the view of a user: one app with many features, over real sockets."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from httpx_sse import connect_sse
from tests.apps.process import AppServer, Forgiving, write
from tests.processes import wait_ended
from tests.waiting import LONG_S, until
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

_APP = """
import asyncio, os, signal, sys, threading, time
from fastapi import BackgroundTasks, FastAPI, WebSocket, WebSocketDisconnect
from pydantic import BaseModel
from starlette.responses import StreamingResponse
from tailrace import serve

web = FastAPI()
left = []


@serve.deployment(
    max_ongoing_requests=3,
    max_queued_requests=1,
    backpressure_config={"status_code": 503, "retry_after_s": 7},
)
class Adder:
    def __init__(self, n):
        self.n = n

    def add(self, x):
        return x + self.n

    async def count(self, k):
        try:
            for number in range(k):
                await asyncio.sleep(0.01)
                yield number + self.n
        finally:
            open("counted", "a").write("left ")

    async def wait(self):
        await asyncio.sleep(500)

    def fail(self):
        raise KeyError("a key")

    def pid(self):
        return os.getpid()


class Question(BaseModel):
    text: str


@serve.deployment(num_replicas=1, max_ongoing_requests=20, ray_actor_options={"num_cpus": 1})
@serve.ingress(web)
class Bot:
    def __init__(self, adder, *, greeting):
        self.loop = asyncio.get_running_loop()
        self.adder = adder
        self.greeting = greeting

    @web.post("/")
    def hello(self, prompt: str) -> StreamingResponse:
        assert threading.current_thread() is not threading.main_thread()
        return StreamingResponse(self.words(prompt), media_type="text/plain", headers={"x-bot": self.greeting})

    async def words(self, prompt):
        for word in prompt.split():
            yield word + " "
            await asyncio.sleep(0.01)

    @web.get("/endless-words")
    async def endless_words(self):
        async def words():
            try:
                while True:
                    yield "word "
                    await asyncio.sleep(0.01)
            except (asyncio.CancelledError, GeneratorExit):  # as it waits, or as its words do
                open("cancelled", "a").write("words ")
                raise
        return StreamingResponse(words(), media_type="text/plain")

    @web.post("/question")
    async def question(self, question: Question):
        return {"length": len(question.text)}

    @web.get("/add")
    async def add(self, x: int):
        return await self.adder.add.remote(x)

    @web.get("/add-in-thread")
    def add_in_thread(self, x: int):
        return self.adder.add.remote(self.adder.add.remote(x)).result(timeout_s=20)

    @web.get("/count")
    async def count(self, k: int):
        async def lines():
            async for number in self.adder.options(stream=True).count.remote(k):
                yield f"{number}\\n"
        return StreamingResponse(lines(), media_type="text/plain")

    @web.get("/child-pid")
    async def child_pid(self):
        return [os.getpid(), await self.adder.pid.remote()]

    @web.get("/child-fails")
    async def child_fails(self):
        try:
            await self.adder.fail.remote()
        except KeyError as error:
            return {"caught": str(error)}

    @web.get("/child-waits")
    async def child_waits(self):
        await self.adder.wait.remote()

    @web.get("/wrong")
    async def wrong(self, how: str):
        try:
            if how == "stream":
                async for _ in self.adder.options(stream=True).add.remote(1):
                    pass
            else:
                await self.adder.count.remote(1)
        except TypeError as error:
            return str(error)

    @web.get("/stream")
    async def stream(self, n: int, fail: bool = False, data: bool = False):
        async def items():
            try:
                for number in range(n):
                    yield {"number": number} if data else f"w{number} "
                    await asyncio.sleep(0.01)
                if fail:
                    raise RuntimeError("the model fell over")
            finally:
                open("closed", "a").write("stream ")
        return serve.stream(items())

    @web.get("/endless")
    async def endless(self):
        async def items():
            try:
                while True:
                    yield "on "
                    await asyncio.sleep(0.01)
            finally:
                open("endless", "w").write("closed")
        return serve.stream(items())

    @web.get("/sse-dies")
    async def sse_dies(self, how: str):
        async def events():
            yield "data: one\\n\\n"
            await asyncio.sleep(0.05)
            if how == "raise":
                raise ValueError("in the middle")
            os._exit(9)
        return StreamingResponse(events(), media_type="text/event-stream")

    @web.get("/big")
    async def big(self, num_bytes: int):
        async def chunks():
            sent = 0
            while sent < num_bytes:
                open("sent", "w").write(str(sent))
                yield b"x" * 65536
                sent += 65536
        return StreamingResponse(chunks())

    @serve.batch(max_batch_size=4, batch_wait_timeout_s=0.5)
    async def doubled(self, numbers):
        return [[2 * number, len(numbers)] for number in numbers]

    @web.get("/doubled")
    async def double(self, x: int):
        return await self.doubled(x)

    @web.get("/afterwards")
    async def afterwards(self, tasks: BackgroundTasks):
        async def note():
            await asyncio.sleep(0.3)
            open("afterwards", "w").write("done")
        tasks.add_task(note)
        return "answered"

    @web.get("/fails")
    async def fails(self):
        raise ValueError("ouch")

    @web.get("/dies")
    async def dies(self):
        os.kill(os.getpid(), signal.SIGKILL)

    @web.get("/exits")
    async def exits(self):
        sys.exit(4)

    @web.get("/slow")
    async def slow(self):
        open("slow", "w").write("begun")
        try:
            await asyncio.sleep(500)
        except asyncio.CancelledError:
            open("slow", "w").write("cancelled")
            raise

    @web.websocket("/chat")
    async def chat(self, ws: WebSocket):
        await ws.accept()
        try:
            while True:
                text = await ws.receive_text()
                if text == "die":
                    os._exit(1)
                if text == "raise":
                    raise ValueError("in a socket")
                if text == "end":
                    return
                await ws.send_text("echo " + text)
        except WebSocketDisconnect:
            open("left", "w").write("disconnected")

    @web.websocket("/refused")
    async def refused(self, ws: WebSocket):
        raise RuntimeError("before it was accepted")

    def __del__(self):
        open("torn-down", "w").write("yes")


class Other:
    @web.get("/other")
    def other(self):
        return "not this class's"


app = Bot.bind(Adder.bind(10), greeting="hello")
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("app")
    write(path, "bot.py", _APP)
    return path


@pytest.fixture(scope="module")
def bot(directory: Path) -> Iterator[AppServer]:
    with contextlib.closing(Forgiving("bot:app", directory=directory)) as server:
        yield server.wait_ready()


def _wait_file(path: Path, text: str) -> None:
    deadline_s = time.monotonic() + LONG_S
    while not path.exists() or text not in path.read_text():
        assert time.monotonic() < deadline_s, f"{path.name} never held {text}"
        time.sleep(0.02)


@contextlib.contextmanager
def _asked(bot: AppServer, path: str) -> Iterator[None]:
    """Send a request, and disconnect at the end of the block."""
    with socket.create_connection(("127.0.0.1", bot.port)) as asking:
        asking.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        yield


def _wait_restart(bot: AppServer) -> None:
    """Wait until the process that a test has killed is replaced."""
    deadline_s = time.monotonic() + LONG_S
    while bot.http.get("/-/readyz").status_code != 200:
        assert time.monotonic() < deadline_s, bot.log
        time.sleep(0.05)


def test_methods_are_routes_and_text_is_streamed(bot: AppServer) -> None:
    with bot.http.stream("POST", "/", params={"prompt": "one two three"}) as answer:
        assert answer.headers["content-type"].startswith("text/plain")
        assert answer.headers["x-bot"] == "hello"
        assert list(answer.iter_text()) == ["one ", "two ", "three "]


def test_bodies_are_validated_by_the_app(bot: AppServer) -> None:
    assert bot.post("/question", {"text": "why"}).json() == {"length": 3}
    assert bot.post("/question", {}).status_code == 422


def test_routes_of_other_classes_are_dropped(bot: AppServer) -> None:
    assert bot.http.get("/other").status_code == 404


def test_deployments_call_each_other(bot: AppServer) -> None:
    assert bot.http.get("/add?x=5").json() == 15
    assert bot.http.get("/add-in-thread?x=1").json() == 21
    assert bot.http.get("/count?k=3").text == "10\n11\n12\n"
    assert bot.http.get("/child-fails").json() == {"caught": "'a key'"}


def test_deployments_have_processes_of_their_own(bot: AppServer) -> None:
    pids = set(bot.http.get("/child-pid").json())
    assert len(pids) == 2
    assert pids <= {child.pid for child in psutil.Process(bot.process.pid).children(recursive=True)}


@pytest.mark.parametrize("how", ["stream", "plain"])
def test_calling_a_generator_in_the_wrong_way(bot: AppServer, how: str) -> None:
    assert "stream=True" in bot.http.get("/wrong", params={"how": how}).json()


def test_a_disconnect_cancels_a_plain_answer(bot: AppServer, directory: Path) -> None:
    """The answer is endless: on a busy machine a long one could end before the disconnect."""
    with bot.http.stream("GET", "/endless-words") as answer:
        assert answer.status_code == 200
        next(answer.iter_raw())
    _wait_file(directory / "cancelled", "words")


def test_a_disconnect_cancels_calls_of_the_request(bot: AppServer, directory: Path) -> None:
    with bot.http.stream("GET", "/count", params={"k": 10_000}) as answer:
        next(answer.iter_raw())
    _wait_file(directory / "counted", "left")


def test_a_disconnect_before_the_answer_cancels(bot: AppServer, directory: Path) -> None:
    with _asked(bot, "/slow"):
        _wait_file(directory / "slow", "begun")
    _wait_file(directory / "slow", "cancelled")


def test_background_tasks_run_after_the_answer(bot: AppServer, directory: Path) -> None:
    assert bot.http.get("/afterwards").json() == "answered"
    _wait_file(directory / "afterwards", "done")


def test_a_stream_has_ids_and_can_be_read_again(bot: AppServer) -> None:
    with connect_sse(bot.http, "GET", "/stream", params={"n": 3}) as events:
        seen = list(events.iter_sse())
        path = events.response.headers["content-location"]
    assert [json.loads(event.data) for event in seen[:3]] == [{"text": f"w{n} "} for n in range(3)]
    assert (seen[3].event, json.loads(seen[3].data)) == ("done", {"status": "done"})
    with connect_sse(bot.http, "GET", path + "/events", headers={"last-event-id": seen[0].id}) as events:
        assert [(event.id, event.data) for event in events.iter_sse()] == [(e.id, e.data) for e in seen[1:]]
    again = bot.http.get("/stream?n=3", headers={"last-event-id": seen[1].id})  # as a client that reconnects does
    assert f"id: {seen[2].id}" in again.text
    assert f"id: {seen[1].id}" not in again.text
    assert bot.http.get(path + "/events", headers={"last-event-id": seen[3].id}).status_code == 204
    state = bot.http.get(path).json()
    assert (state["status"], state["items"]) == ("done", [{"text": f"w{n} "} for n in range(3)])
    assert bot.http.delete(path).status_code == 204
    assert bot.http.get(path).status_code == 410


def test_a_stream_of_anything_that_json_can_hold(bot: AppServer) -> None:
    with connect_sse(bot.http, "GET", "/stream", params={"n": 2, "data": True}) as events:
        assert [json.loads(event.data) for event in events.iter_sse()][:2] == [{"number": 0}, {"number": 1}]


def test_a_failed_stream_has_an_error_without_details(bot: AppServer) -> None:
    with connect_sse(bot.http, "GET", "/stream", params={"n": 1, "fail": True}) as events:
        *_, last = events.iter_sse()
    assert last.event == "error"
    assert json.loads(last.data)["error"]["code"] == "app_failed"
    assert "fell over" not in last.data
    bot.wait_line("RuntimeError: the model fell over")


def test_a_disconnect_does_not_cancel_a_stream_and_cancelling_does(bot: AppServer, directory: Path) -> None:
    with connect_sse(bot.http, "GET", "/endless") as events:
        path = events.response.headers["content-location"]
        next(events.iter_sse())
    assert bot.http.get(path).json()["status"] == "running"
    assert bot.http.post(path + "/cancel").json()["status"] == "cancelled"
    _wait_file(directory / "endless", "closed")
    with connect_sse(bot.http, "GET", path + "/events") as events:
        *_, last = events.iter_sse()
    assert last.event == "cancelled"


def test_a_slow_reader_slows_the_producer(bot: AppServer, directory: Path) -> None:
    """Backpressure reaches the generator through the front, and memory use does not grow."""
    with socket.create_connection(("127.0.0.1", bot.port)) as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.sendall(b"GET /big?num_bytes=1073741824 HTTP/1.1\r\nHost: localhost\r\n\r\n")
        _wait_file(directory / "sent", "")
        sizes: list[int] = []
        while len(sizes) < 20 or sizes[-1] != sizes[-10]:
            sizes.append(int((directory / "sent").read_text() or 0))
            time.sleep(0.1)
            assert sizes[-1] < 64 * 2**20, "nobody reads, and it went on"
    assert sizes[-1] > 0


def test_only_the_author_sees_exceptions(bot: AppServer) -> None:
    answer = bot.http.get("/fails")
    assert answer.status_code == 500
    assert "ouch" not in answer.text
    bot.wait_line("GET /fails raised ValueError: ouch")
    bot.wait_line(r'bot.py", line \d+, in fails')
    assert "site-packages" not in bot.log


@pytest.mark.parametrize("how", ["dies", "exits"])
def test_a_process_that_dies_is_replaced(bot: AppServer, how: str) -> None:
    answer = bot.http.get(f"/{how}")
    if how == "dies":
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "app_unavailable")
        assert answer.headers["retry-after"] == "1"
    else:
        assert answer.status_code == 500
    _wait_restart(bot)
    assert bot.http.get("/add?x=1").json() == 11


@pytest.mark.parametrize("how", ["raise", "die"])
def test_broken_events_end_with_an_error(bot: AppServer, how: str) -> None:
    seen = []
    with connect_sse(bot.http, "GET", "/sse-dies", params={"how": how}) as events:
        shown = events.iter_sse()
        seen += [next(shown), next(shown)]
        with pytest.raises(httpx.RemoteProtocolError, match="incomplete"):  # it is cut off visibly, too
            next(shown)
    assert [event.event for event in seen] == ["message", "error"]
    code = "app_failed" if how == "raise" else "app_unavailable"
    assert json.loads(seen[1].data)["error"]["code"] == code
    _wait_restart(bot)


def test_websockets(bot: AppServer, directory: Path) -> None:
    url = bot.url.replace("http", "ws") + "/chat"
    with connect(url) as ws:
        ws.send("hi")
        assert ws.recv() == "echo hi"
    _wait_file(directory / "left", "disconnected")
    for word, code in (("end", 1000), ("raise", 1011), ("die", 1012)):
        with connect(url) as ws:
            ws.send(word)
            with pytest.raises(ConnectionClosed) as closed:
                ws.recv()
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == code, word
    _wait_restart(bot)
    with pytest.raises(InvalidStatus) as refused:
        connect(bot.url.replace("http", "ws") + "/refused").__enter__()
    assert refused.value.response.status_code in (403, 500)


def test_too_many_requests_are_refused_at_once(bot: AppServer) -> None:
    """Three requests run and one waits. The fifth is refused, with the status that the deployment has chosen."""
    waiting = 'tailrace_app_waiting{app="default",deployment="Adder"} 1.0'
    with contextlib.ExitStack() as asking:
        for _ in range(4):
            asking.enter_context(_asked(bot, "/child-waits"))
        until(lambda: waiting in bot.http.get("/-/metrics").text)
        answer = bot.http.get("/child-waits")
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "7")
    assert answer.json()["error"]["code"] == "overloaded"
    until(lambda: waiting not in bot.http.get("/-/metrics").text)


def test_routes_of_the_front(bot: AppServer) -> None:
    assert bot.http.get("/add?x=1").status_code == 200
    assert bot.http.get("/-/routes").json() == {"/": "default"}
    assert bot.http.get("/-/healthz").text == "success"
    ready = bot.http.get("/-/readyz").json()
    assert ready["apps"]["default"]["Adder"]["of"] == 1
    assert re.search(r'tailrace_app_requests_total\{app="default",status="200"\} \d', bot.http.get("/-/metrics").text)


def test_calls_are_batched_and_counted(bot: AppServer) -> None:
    answers: list[list[int]] = []
    threads = [
        threading.Thread(target=lambda x=x: answers.append(bot.http.get(f"/doubled?x={x}").json())) for x in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(double for double, _ in answers) == [0, 2, 4, 6, 8, 10, 12, 14]
    assert max(size for _, size in answers) > 1
    samples = bot.http.get("/-/metrics").text
    assert re.search(r'tailrace_batch_size_sum\{app="default",deployment="Bot",function="Bot.doubled".*\} 8.0', samples)
    assert re.search(r'process_cpu_seconds_total\{app="default",deployment="Adder",process="0"\}', samples)


def test_bodies_have_a_limit(bot: AppServer) -> None:
    answer = bot.http.post("/question", content=b" " * 2_100_000, headers={"content-type": "application/json"})
    assert answer.status_code == 413


def test_hosts_and_origins_are_checked(bot: AppServer) -> None:
    assert bot.http.get("/add?x=1", headers={"host": "evil.example"}).status_code == 403
    assert bot.http.get("/add?x=1", headers={"origin": "https://evil.example"}).status_code == 403


def test_options_without_meaning_are_named_once(bot: AppServer) -> None:
    assert bot.log.count("ray_actor_options is ignored") == 1


def test_the_server_stops(directory: Path) -> None:
    """Ctrl-C lets answers finish and runs the teardown; no process remains."""
    server = AppServer("bot:app", directory=directory).wait_ready()
    with contextlib.closing(server), server.http.stream("POST", "/", params={"prompt": "word " * 100}) as answer:
        pieces = answer.iter_text()
        next(pieces)
        head = psutil.Process(server.process.pid)
        children, family = head.children(), head.children(recursive=True)
        server.process.send_signal(2)
        assert len(list(pieces)) == 99
        assert server.wait() == 0  # before it is closed, which would be a second signal
    assert (directory / "torn-down").exists(), server.log
    assert not [child for child in children if child.is_running()]
    wait_ended(family)  # what theirs had started
