"""Ends of requests, of the server and of apps; reloads, and apps that fail to restart."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from httpx_sse import connect_sse
from tests.apps.process import AppServer, Forgiving, write
from tests.processes import wait_ended
from tests.testing.redis_server import prefix_of, shared_url
from tests.waiting import LONG_S

_APP = """
import asyncio, os
from fastapi import FastAPI
from starlette.responses import StreamingResponse
from tailrace import serve
from tailrace_outer.serve.handles import _connected

api = FastAPI()


def census():
    return {"channels": _connected().link.num_channels, "tasks": len(asyncio.all_tasks())}


@serve.deployment(max_ongoing_requests=50)
class Child:
    async def wait(self):
        open("child-waits", "a").write(".")
        await asyncio.sleep(500)

    async def census(self):
        return census()

    async def __del__(self):
        open("torn-down", "a").write("child ")


@serve.deployment(max_ongoing_requests=100)
@serve.ingress(api)
class Main:
    def __init__(self, child):
        self.child = child

    @api.get("/wait")
    async def wait(self):
        await asyncio.sleep(500)

    @api.get("/child-waits")
    async def child_waits(self):
        await self.child.wait.remote()

    @api.get("/census")
    async def census(self):
        return [census(), await self.child.census.remote()]

    @api.get("/words")
    async def words(self, key: str):
        async def words():
            yield "one "
            while not os.path.exists(f"free-{key}"):
                await asyncio.sleep(0.01)
            yield "two"
        return StreamingResponse(words(), media_type="text/plain")

    @api.get("/stream")
    async def stream(self, n: int):
        async def items():
            for number in range(n):
                yield f"w{number}"
                await asyncio.sleep(0.01)
        return serve.stream(items())

    async def __del__(self):
        open("torn-down", "a").write("main ")
        while os.path.exists("teardown-hangs"):
            await asyncio.sleep(0.01)


app = Main.bind(Child.bind())
"""


def _wait(is_so: Callable[[], Any], what: object) -> None:  # Any: something, when it is
    deadline_s = time.monotonic() + LONG_S
    while not is_so():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.02)


def _ask_and_leave(server: AppServer, path: str) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as leaving:
        leaving.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())


def _signal_all(server: AppServer) -> None:
    """Send a signal to all processes, as Ctrl-C in a terminal does."""
    for process in psutil.Process(server.process.pid).children(recursive=True):
        process.send_signal(signal.SIGINT)
    server.process.send_signal(signal.SIGINT)


@pytest.mark.parametrize("home", ["disk", pytest.param("redis", marks=pytest.mark.deep)])
def test_the_life_of_a_server(tmp_path: Path, run: Callable[..., AppServer], home: str) -> None:
    """Cancelled requests release everything, a drain lets answers finish, and the journal has old streams after a
    restart."""
    write(tmp_path, "app.py", _APP)
    data = ["--data-dir", str(tmp_path / "data")]
    if home == "redis":
        data += ["--journal", f"{shared_url()}?prefix={prefix_of(tmp_path)}"]
    server = run("app:app", *data).wait_ready()
    before = server.http.get("/census").json()
    for number in range(200):
        _ask_and_leave(server, "/child-waits" if number % 2 else "/wait")
    _wait(lambda: "tailrace_app_requests_total{" in server.http.get("/-/metrics").text, "nobody was counted")
    _wait(lambda: _ongoing(server) == {0.0}, server.log)
    _wait(lambda: server.http.get("/census").json() == before, (before, server.http.get("/census").json()))

    with connect_sse(server.http, "GET", "/stream", params={"n": 2}) as events:
        finished = events.response.headers["content-location"]
        seen = [event.data for event in events.iter_sse()]
    with contextlib.ExitStack() as answers:
        plain = answers.enter_context(server.http.stream("GET", "/words", params={"key": "a"}))
        pieces = plain.iter_text()
        assert next(pieces) == "one "
        endless = answers.enter_context(connect_sse(server.http, "GET", "/stream", params={"n": 1_000_000}))
        events_left = endless.iter_sse()
        next(events_left)
        unfinished = endless.response.headers["content-location"]
        _signal_all(server)
        server.wait_line("Stopping; 2 requests may finish.")
        late = server.http.get("/wait")
        assert (late.status_code, late.headers["retry-after"]) == (503, "5")
        (tmp_path / "free-a").touch()
        assert "".join(pieces) == "two"
        server.process.send_signal(signal.SIGINT)  # for the one that has no end
        with contextlib.suppress(httpx.RemoteProtocolError):  # in a hurry it may not get to read that
            *_, last = events_left
            assert last.event == "interrupted"
    assert server.wait() == 0
    assert "Traceback" not in server.log

    again = run("app:app", *data, "--retention-s", "1000").wait_ready()
    assert again.http.get(finished).json()["status"] == "done"
    with connect_sse(again.http, "GET", finished + "/events") as events:
        assert [event.data for event in events.iter_sse()] == seen
    assert again.http.get(unfinished).json()["status"] == "interrupted"
    with connect_sse(again.http, "GET", unfinished + "/events") as events:
        *_, last = events.iter_sse()
    assert last.event == "interrupted"

    (tmp_path / "torn-down").unlink(missing_ok=True)
    (tmp_path / "teardown-hangs").touch()
    head = psutil.Process(again.process.pid)
    children, family = head.children(), head.children(recursive=True)
    again.process.send_signal(signal.SIGTERM)
    _wait(lambda: (tmp_path / "torn-down").exists(), "no teardown")
    again.process.send_signal(signal.SIGTERM)  # nobody waits for a teardown that hangs
    assert again.wait(timeout_s=LONG_S) == 0
    assert not [child for child in children if child.is_running()]
    wait_ended(family)  # what theirs had started


def _ongoing(server: AppServer) -> set[float]:
    lines = server.http.get("/-/metrics").text.splitlines()
    found = {
        float(line.split()[-1]) for line in lines if line.startswith(("tailrace_app_ongoing{", "tailrace_app_wai"))
    }
    assert found
    return found


_SLOW = """
from tailrace import serve

@serve.deployment(max_ongoing_requests=1, graceful_shutdown_timeout_s=1)
class Slow:
    async def __call__(self, request):
        import asyncio
        await asyncio.sleep(500)

@serve.deployment
class Loading:
    def __init__(self):
        import time
        open("loading", "w").close()
        time.sleep(500)

app = Slow.bind()
loading = Loading.bind()
"""


def test_a_long_wait_is_an_error_and_a_drain_has_a_limit(tmp_path: Path, run: Callable[..., AppServer]) -> None:
    write(tmp_path, "slow.py", _SLOW)
    server = run("slow:app", "--queue-s", "2").wait_ready()
    statuses: list[int] = []
    first = threading.Thread(target=lambda: statuses.append(httpx.get(server.url, timeout=LONG_S).status_code))
    first.start()
    _wait(lambda: _ongoing(server) == {0.0, 1.0}, "it was not begun")
    late = server.http.get("/")
    assert (late.status_code, late.json()["error"]["code"]) == (503, "queue_timeout")
    server.process.send_signal(signal.SIGTERM)
    assert server.wait() == 0
    first.join()
    assert statuses == [503]


def test_a_signal_while_an_app_loads(tmp_path: Path, run: Callable[..., AppServer]) -> None:
    write(tmp_path, "slow.py", _SLOW)
    server = run("slow:loading")
    _wait(lambda: (tmp_path / "loading").exists(), server.log)
    head = psutil.Process(server.process.pid)
    children, family = head.children(), head.children(recursive=True)
    _signal_all(server)
    assert server.wait(timeout_s=LONG_S) == 130
    assert not [child for child in children if child.is_running()]
    wait_ended(family)  # what theirs had started


_FRAGILE = """
import os
from tailrace import serve

@serve.deployment
class Fragile:
    def __init__(self):
        if os.path.exists("begun"):
            raise OSError("the weights are gone")
        open("begun", "w").close()

    def __call__(self, request):
        os._exit(3)

app = Fragile.bind()
"""


@pytest.mark.deep
def test_an_app_that_does_not_start_again_refuses_and_does_not_hang(tmp_path: Path) -> None:
    write(tmp_path, "fragile.py", _FRAGILE)
    with contextlib.closing(Forgiving("fragile:app", directory=tmp_path)) as server:
        server.wait_ready()
        assert server.http.get("/").status_code == 503
        waited = httpx.get(server.url, timeout=LONG_S, trust_env=False)  # comes while it is being tried
        assert (waited.status_code, waited.json()["error"]["code"]) == (503, "app_unavailable")
        now = server.http.get("/")
        assert (now.status_code, now.headers["retry-after"]) == (503, "30")
        assert server.http.get("/-/healthz").status_code == 503
        _wait(lambda: server.log.count("the weights are gone") >= 3, server.log)
        (tmp_path / "begun").unlink()
        _wait(lambda: server.http.get("/-/healthz").status_code == 200, server.log)


def test_reload(tmp_path: Path) -> None:
    """The socket stays open. An invalid version is reported, and the next valid version is loaded."""
    source = """
        from tailrace import serve

        @serve.deployment
        def version(request):
            open("requests.log", "a").write("one more")  # what the app writes is no change of it
            return "WORD"

        app = version.bind()
        """
    path = write(tmp_path, "app.py", source.replace("WORD", "first"))
    with contextlib.closing(Forgiving("app:app", "--reload", directory=tmp_path)) as server:
        server.wait_ready()
        assert server.http.get("/").text == "first"
        path.write_text("app = 1 / 0\n")
        server.wait_line("waiting for a file to change")
        server.wait_line("ZeroDivisionError")
        broken = server.http.get("/")
        assert (broken.status_code, broken.headers["retry-after"]) == (503, "1")
        assert server.http.get("/-/healthz").status_code == 503
        write(tmp_path, "app.py", source.replace("WORD", "second"))
        _wait(lambda: server.http.get("/").text == "second", server.log)
        _wait(lambda: server.log.count("runs at http") == 2, server.log)
        server.process.send_signal(signal.SIGINT)
        assert server.wait() == 0
        assert "Stopped." in server.log


def test_reload_reads_the_config_file_again(tmp_path: Path) -> None:
    """The file may be invalid for some time."""
    plan = "applications: [{import_path: app:build, args: {word: WORD}}]"
    write(
        tmp_path,
        "app.py",
        """
        from tailrace import serve

        def build(arguments):
            word = arguments["word"]

            @serve.deployment(name="say")
            def answered(request):
                return word

            return answered.bind()
        """,
    )
    path = write(tmp_path, "plan.yaml", plan.replace("WORD", "first"))
    with contextlib.closing(Forgiving("plan.yaml", "--reload", directory=tmp_path)) as server:
        server.wait_ready()
        assert server.http.get("/").text == "first"
        path.write_text("applications: nothing")
        server.wait_line("`applications` should be a list")
        path.write_text(plan.replace("WORD", "second"))
        _wait(lambda: server.http.get("/").text == "second", server.log)
