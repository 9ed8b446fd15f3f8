"""Generators end when their client disconnects. The garbage collector is off in these apps, so that it does not end
them."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.apps.process import AppServer, Forgiving, write
from tests.waiting import LONG_S
from websockets.sync.client import connect

# The Batchbot of Ray Serve's tutorial, word for word but for its model: a streamer that blocks the event loop.
_BATCHBOT = """
import asyncio, gc, time
from queue import Empty, Queue
from typing import List
from fastapi import FastAPI
from starlette.responses import StreamingResponse
from tailrace import serve

gc.disable()
fastapi_app = FastAPI()


class RawStreamer:
    def __init__(self, timeout: float = None):
        self.q = Queue()
        self.stop_signal = None
        self.timeout = timeout

    def put(self, values):
        self.q.put(values)

    def end(self):
        self.q.put(self.stop_signal)

    def __iter__(self):
        return self

    def __next__(self):
        result = self.q.get(timeout=self.timeout)
        if result == self.stop_signal:
            raise StopIteration()
        else:
            return result


@serve.deployment
@serve.ingress(fastapi_app)
class Batchbot:
    def __init__(self):
        self.loop = asyncio.get_running_loop()

    @fastapi_app.post("/")
    async def handle_request(self, prompt: str) -> StreamingResponse:
        return StreamingResponse(self.run_model(prompt), media_type="text/plain")

    @serve.batch(max_batch_size=2, batch_wait_timeout_s=0.1)
    async def run_model(self, prompts: List[str]):
        streamer = RawStreamer()
        self.loop.run_in_executor(None, self.generate_text, prompts, streamer)
        on_prompt_tokens = True
        async for decoded_token_batch in self.consume_streamer(streamer):
            if not on_prompt_tokens:
                yield decoded_token_batch
            else:
                on_prompt_tokens = False

    def generate_text(self, prompts, streamer):
        streamer.put(prompts)
        for number in range(10 if prompts[0] == "short" else 3000):
            time.sleep(0.01)  # the model
            streamer.put([f"{number} " for _ in prompts])
        streamer.end()

    async def consume_streamer(self, streamer: RawStreamer):
        while True:
            try:
                for token_batch in streamer:
                    yield list(token_batch)
                break
            except Empty:
                await asyncio.sleep(0.001)


app = Batchbot.bind()
"""


def _ask_and_leave(server: AppServer, request: str, *, expected: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=LONG_S) as leaving:
        leaving.sendall(f"{request} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n".encode())
        seen = b""
        while expected not in seen:
            more = leaving.recv(4096)
            assert more, seen
            seen += more


def test_a_batch_ends_when_its_clients_disconnect(tmp_path: Path, run: Callable[..., AppServer]) -> None:
    write(tmp_path, "batchbot.py", _BATCHBOT)
    server = run("batchbot:app").wait_ready()
    for _ in range(2):
        _ask_and_leave(server, "POST /?prompt=long", expected=b"3 ")
    answer = httpx.post(f"{server.url}/?prompt=short", timeout=LONG_S, trust_env=False)
    assert answer.text == "".join(f"{number} " for number in range(10))


_GENERATORS = """
import asyncio, contextlib, gc, threading
from fastapi import FastAPI, WebSocket
from starlette.responses import StreamingResponse
from tailrace import serve
from tailrace.serve.huggingface import TokenStream

gc.disable()
api = FastAPI()
ended = []


async def inner(name):
    try:
        for number in range(10_000):
            yield f"{number} "
            await asyncio.sleep(0.01)
    finally:
        ended.append(name)


async def outer(name):
    generator = inner(name)
    cycle = [generator]
    cycle.append(cycle)  # only the collector would find it
    async for text in generator:
        yield text


def plain():
    import time
    try:
        for number in range(10_000):
            yield f"{number} "
            time.sleep(0.01)
    finally:
        ended.append("plain")


async def background():
    async for text in inner("background"):
        if text == "50 ":
            break
    ended.append("background went on")


@contextlib.asynccontextmanager
async def resource():
    state = ["open"]
    try:
        yield state
    finally:
        state[0] = "closed"


shared, managers, opened, tasks, begun_here = [], [], [], [], []

left = threading.Event()


class Tokenizer:
    eos_token_id = None

    def decode(self, ids, **options):
        return " ".join(map(str, ids)) + " "


def generate(streamer):
    for number in range(2000):  # more than may be unread
        streamer.put([number])
    streamer.end()
    ended.append("generate")


@serve.deployment
@serve.ingress(api)
class Main:
    async def __init__(self):
        global asyncio_loop, begun_early
        asyncio_loop = asyncio.get_running_loop()
        begun_early = inner("begun early")
        await anext(begun_early)

    @api.get("/outer")
    async def outer(self):
        return StreamingResponse(outer("outer"), media_type="text/plain")

    @api.get("/plain")
    async def plain(self):
        generator = plain()
        cycle = [generator]
        cycle.append(cycle)
        return StreamingResponse(generator, media_type="text/plain")

    @api.get("/failing")
    async def failing(self):
        generator = inner("failing")
        cycle = [generator]
        cycle.append(cycle)
        async for text in generator:
            raise KeyError(text)

    @api.get("/streamer")
    def streamer(self):
        streamer = TokenStream(Tokenizer())
        asyncio_loop.run_in_executor(None, generate, streamer)
        ended.append("streamer made")
        left.wait(100)  # still in its thread when the client leaves
        return StreamingResponse(streamer, media_type="text/plain")

    @api.get("/left")
    async def left(self):
        left.set()

    @api.get("/begin-and-wait")
    async def begin_and_wait(self):
        begun_here.append(inner("begun here"))
        await anext(begun_here[0])
        await anext(begun_early)
        ended.append("begun")
        await asyncio.sleep(500)

    @api.get("/begun")
    async def begun(self):
        return [await anext(begun_early), await anext(begun_here[0], "closed")]

    @api.get("/next")
    async def next(self):
        # one generator for several requests, and one behind a context manager that the first of them enters
        if not shared:
            manager = resource()
            shared.extend([inner("shared"), await manager.__aenter__(), manager])
        return await anext(shared[0]) + shared[1][0]

    @api.get("/enter-and-wait")
    async def enter_and_wait(self):
        managers.append(resource())
        opened.append(await managers[-1].__aenter__())
        open("entered", "w").close()
        await asyncio.sleep(500)

    @api.get("/opened")
    async def opened(self):
        return opened

    @api.get("/background")
    async def background(self):
        tasks.append(asyncio.create_task(background()))
        await asyncio.sleep(0.05)

    @api.websocket("/ws")
    async def ws(self, ws: WebSocket):
        await ws.accept()
        async for text in outer("ws"):
            await ws.send_text(text)

    @api.get("/ended")
    async def ended(self):
        return ended


app = Main.bind()
"""


@pytest.fixture(scope="module")
def generators(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AppServer]:
    directory = tmp_path_factory.mktemp("generators")
    write(directory, "app.py", _GENERATORS)
    with contextlib.closing(Forgiving("app:app", directory=directory)) as server:
        yield server.wait_ready()


def _wait_ended(server: AppServer, name: str) -> list[Any]:
    deadline_s = time.monotonic() + LONG_S
    while name not in (ended := server.http.get("/ended").json()):
        assert time.monotonic() < deadline_s, (name, ended)
        time.sleep(0.02)
    return list(ended)


@pytest.mark.parametrize("name", ["outer", "plain"])
def test_a_generator_ends_when_its_client_leaves(generators: AppServer, name: str) -> None:
    _ask_and_leave(generators, f"GET /{name}", expected=b"1 ")
    _wait_ended(generators, name)


def test_a_generator_of_a_request_that_fails_ends(generators: AppServer) -> None:
    assert generators.http.get("/failing").status_code == 500
    _wait_ended(generators, "failing")


def test_generators_kept_for_later_requests_stay_open(generators: AppServer) -> None:
    assert [generators.http.get("/next").json() for _ in range(3)] == ["0 open", "1 open", "2 open"]


def test_a_shared_generator_belongs_to_the_first_request(generators: AppServer) -> None:
    with generators.wire() as wire:
        wire.send("GET", "/begin-and-wait")
        _wait_ended(generators, "begun")
    _wait_ended(generators, "begun here")
    assert generators.http.get("/begun").json() == ["2 ", "closed"]  # the constructor began the first


def test_a_streamer_ends_when_the_client_leaves_before_it_is_read(generators: AppServer) -> None:
    with generators.wire() as wire:
        wire.send("GET", "/streamer")
        _wait_ended(generators, "streamer made")
    generators.http.get("/left")
    _wait_ended(generators, "generate")


def test_a_resource_stays_open_when_the_client_leaves(generators: AppServer) -> None:
    with generators.wire() as wire:
        wire.send("GET", "/enter-and-wait")
        _wait_for(lambda: generators.http.get("/opened").json() == [["open"]])
    _wait_for(lambda: 'tailrace_app_ongoing{app="default",deployment="Main"} 0.0' in _metrics(generators))
    assert generators.http.get("/opened").json() == [["open"]]


def _metrics(server: AppServer) -> str:
    return server.http.get("/-/metrics").text


def _wait_for(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + LONG_S
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def test_a_generator_of_a_socket_ends_when_its_client_leaves(generators: AppServer) -> None:
    with connect(generators.url.replace("http", "ws") + "/ws") as ws:
        assert ws.recv() == "0 "
    _wait_ended(generators, "ws")


def test_a_task_that_a_request_leaves_running_keeps_its_generators(generators: AppServer) -> None:
    generators.http.get("/background")
    _wait_ended(generators, "background went on")
    _wait_ended(generators, "background")
