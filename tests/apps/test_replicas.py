"""A deployment with two processes: how requests are distributed, and how failed processes are replaced."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.apps.process import AppServer, Forgiving, write
from tests.waiting import LONG_S

_APP = """
import asyncio, os, time
from fastapi import FastAPI
from starlette.responses import StreamingResponse
from tailrace import serve

api = FastAPI()


@serve.deployment(
    num_replicas=2, max_ongoing_requests=2, max_queued_requests=3,
    health_check_period_s=0.1, health_check_timeout_s=1.5,
)
@serve.ingress(api)
class Pair:
    def __init__(self, greeting):
        self.greeting = greeting
        self.is_sick = False
        self.num = self.most = 0

    def check_health(self):
        if self.is_sick:
            raise RuntimeError("I do not feel well")

    @api.get("/hold")
    async def hold(self, key: str):
        self.num += 1
        self.most = max(self.most, self.num)
        open(f"held-{key}-{os.getpid()}", "w").close()
        try:
            while not os.path.exists(f"free-{key}"):
                await asyncio.sleep(0.01)
        finally:
            self.num -= 1
        return {"pid": os.getpid(), "most": self.most, "greeting": self.greeting}

    @api.get("/note")
    async def note(self, n: int):
        with open("notes", "a") as notes:
            notes.write(f"{n} ")

    @api.get("/sick")
    async def sick(self):
        self.is_sick = True
        return os.getpid()

    @api.get("/block")
    async def block(self):
        time.sleep(50)  # on the loop

    @api.get("/events")
    async def events(self, key: str):
        async def events():
            yield "data: begun\\n\\n"
            await self.hold(key)
            yield "data: ended\\n\\n"
        return StreamingResponse(events(), media_type="text/event-stream")


def build(args: dict):
    return Pair.bind(args["greeting"])
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pair")
    write(path, "pair.py", _APP)
    return path


@pytest.fixture(scope="module")
def pair(directory: Path) -> Iterator[AppServer]:
    with contextlib.closing(Forgiving("pair:build", "greeting=a=b", directory=directory)) as server:
        yield server.wait_ready()


def _wait(is_so: Callable[[], Any], what: str) -> None:  # Any: something, when it is
    deadline_s = time.monotonic() + LONG_S
    while not is_so():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.02)


def _gauge(server: AppServer, name: str) -> float:
    for line in server.http.get("/-/metrics").text.splitlines():
        if line.startswith(f"tailrace_app_{name}{{"):
            return float(line.split()[-1])
    raise AssertionError(name)


class _Asking:
    """A request in its own thread."""

    def __init__(self, server: AppServer, path: str) -> None:
        self.text = ""
        self.is_cut = False  # it broke off
        self._answer: httpx.Response | None = None
        self._url = server.url + path
        self._thread = threading.Thread(target=self._ask)
        self._thread.start()

    def _ask(self) -> None:
        with httpx.stream("GET", self._url, timeout=LONG_S, trust_env=False) as answer:
            try:
                for piece in answer.iter_text():
                    self.text += piece
            except httpx.RemoteProtocolError:
                self.is_cut = True
            self._answer = answer

    def wait(self) -> httpx.Response:
        self._thread.join(LONG_S)
        assert self._answer is not None
        return self._answer

    def json(self) -> Any:  # Any: JSON
        self.wait()
        return json.loads(self.text)


def _held(directory: Path, key: str) -> list[Path]:
    return list(directory.glob(f"held-{key}-*"))


def _waits(server: AppServer, num_requests: int) -> bool:
    return _gauge(server, "waiting") == num_requests


def _hold(server: AppServer, directory: Path, *keys: str) -> list[_Asking]:
    """Occupy one slot for each key."""
    asking = [_Asking(server, f"/hold?key={key}") for key in keys]
    for key in keys:
        _wait(partial(_held, directory, key), f"{key} was never begun")
    return asking


def _free(directory: Path, *keys: str) -> None:
    for key in keys:
        (directory / f"free-{key}").touch()


def _wait_whole(server: AppServer, *, restarts: int) -> None:
    def is_whole() -> bool:
        state = server.http.get("/-/readyz").json()["apps"]["default"]["Pair"]
        return bool(state == {"processes": 2, "of": 2, "restarts": restarts})

    _wait(is_whole, server.log)


def test_requests_go_to_the_least_busy_process(pair: AppServer, directory: Path) -> None:
    asking = _hold(pair, directory, "a", "b", "c", "d")
    _free(directory, "a", "b", "c", "d")
    answers = [one.json() for one in asking]
    assert sorted(pids := [answer["pid"] for answer in answers]) == sorted([*set(pids), *set(pids)])
    assert max(answer["most"] for answer in answers) == 2
    assert answers[0]["greeting"] == "a=b"


def test_waiting_requests_are_served_in_order_and_more_are_refused(pair: AppServer, directory: Path) -> None:
    holding = _hold(pair, directory, "e", "f", "g", "h")
    waiting = []
    for number in range(3):
        waiting.append(_Asking(pair, f"/note?n={number}"))
        _wait(partial(_waits, pair, number + 1), "it does not wait")
    refused = pair.http.get("/note?n=9")
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert refused.json()["error"]["code"] == "overloaded"
    _free(directory, "f")
    assert {one.wait().status_code for one in waiting} == {200}
    assert (directory / "notes").read_text() == "0 1 2 "
    _free(directory, "e", "g", "h")
    for one in holding:
        one.wait()


def test_a_request_cancelled_while_waiting_never_starts(pair: AppServer, directory: Path) -> None:
    (directory / "notes").write_text("")
    holding = _hold(pair, directory, "i", "j", "k", "l")
    for body in (b"", b"the beginning of one"):
        with socket.create_connection(("127.0.0.1", pair.port)) as leaving:
            head = f"GET /note?n=7 HTTP/1.1\r\nHost: localhost\r\nContent-Length: {100 * len(body)}\r\n\r\n"
            leaving.sendall(head.encode() + body)
            _wait(partial(_waits, pair, 1), "it does not wait")
        _wait(partial(_waits, pair, 0), "it waits on")
    _free(directory, "i", "j", "k", "l")
    for one in holding:
        one.wait()
    assert (directory / "notes").read_text() == ""
    assert _gauge(pair, "ongoing") == 0


def test_a_killed_process_is_replaced_while_the_other_serves(pair: AppServer, directory: Path) -> None:
    (one,) = _hold(pair, directory, "m")
    pid = int(_held(directory, "m")[0].name.rpartition("-")[2])
    os.kill(pid, signal.SIGKILL)
    assert one.json()["error"]["code"] == "app_unavailable"
    _free(directory, "n")
    assert pair.http.get("/hold?key=n").json()["pid"] != pid
    pair.wait_line(r"Pair: its process is lost \(killed by SIGKILL\); starting another\.")
    _wait_whole(pair, restarts=1)


def test_a_process_that_fails_its_health_check_is_replaced(pair: AppServer) -> None:
    before = _gauge(pair, "restarts_total")
    pair.http.get("/sick")
    pair.wait_line(r"Pair: its process is lost \(unhealthy 3 times in a row\)", timeout_s=LONG_S)
    pair.wait_line("RuntimeError: I do not feel well")
    _wait_whole(pair, restarts=int(before) + 1)


@pytest.mark.deep
def test_a_process_with_a_blocked_loop_is_replaced_and_logs_where(pair: AppServer, directory: Path) -> None:
    before = _gauge(pair, "restarts_total")
    streams = [_Asking(pair, "/events?key=o") for _ in range(2)]
    _wait(lambda: len(_held(directory, "o")) == 2, "one in each process")
    blocked = _Asking(pair, "/block")
    assert (blocked.wait().status_code, blocked.json()["error"]["code"]) == (503, "app_unavailable")
    _wait(lambda: any(stream.is_cut for stream in streams), "its stream hangs")
    _free(directory, "o")
    ends = sorted((stream.is_cut, stream.text) for stream in streams if stream.wait())
    assert [is_cut for is_cut, _ in ends] == [False, True]
    assert ends[0][1] == "data: begun\n\ndata: ended\n\n"
    assert ends[1][1].startswith("data: begun\n\n\n\nevent: error\ndata: ")
    assert "app_unavailable" in ends[1][1]
    pair.wait_line(r"the event loop has been blocked for 1\.5 s")
    pair.wait_line(re.escape("time.sleep(50)  # on the loop"))
    _wait_whole(pair, restarts=int(before) + 1)
