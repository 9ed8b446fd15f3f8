"""A stopped process: requests that it has not started run in another process, the others end with an error."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from tests.apps.process import Forgiving, write
from tests.waiting import LONG_S

_APP = """
import asyncio, os
from starlette.requests import Request
from tailrace import serve


@serve.deployment(num_replicas=2, max_ongoing_requests=20, health_check_period_s=0.5, health_check_timeout_s=2)
class Echo:
    async def __call__(self, request: Request):
        word = request.query_params["word"]
        with open("begun", "a") as begun:
            begun.write(f"{os.getpid()} {word}\\n")
        if word == "dies":
            os._exit(3)
        if word != "dies":
            while not os.path.exists("go"):
                await asyncio.sleep(0.01)
        body = await request.body()
        return f"{word} {len(body)} {os.getpid()}"


app = Echo.bind()
"""


def _wait(is_so: Callable[[], Any], what: object) -> None:  # Any: something, when it is
    deadline_s = time.monotonic() + LONG_S
    while not is_so():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.02)


def _is_whole(server: Forgiving, *, restarts: int) -> bool:
    state = server.http.get("/-/readyz").json()["apps"]["default"]["Echo"]
    return bool(state == {"processes": 2, "of": 2, "restarts": restarts})


@pytest.mark.deep
def test_a_suspended_process(tmp_path: Path) -> None:
    write(tmp_path, "echo.py", _APP)
    server = Forgiving("echo:app", directory=tmp_path)
    answers: dict[str, httpx.Response] = {}

    def ask(word: str, num_bytes: int) -> None:
        query = {"word": word.rstrip("0123456789")}
        answers[word] = httpx.post(server.url, params=query, content=b"a" * num_bytes, timeout=LONG_S, trust_env=False)

    def begin(word: str, num_bytes: int = 0) -> threading.Thread:
        thread = threading.Thread(target=ask, args=[word, num_bytes])
        thread.start()
        return thread

    def begun(word: str) -> list[int]:
        lines = (tmp_path / "begun").read_text().splitlines() if (tmp_path / "begun").exists() else []
        return [int(line.split()[0]) for line in lines if line.endswith(f" {word}")]

    try:
        server.wait_ready()
        threads = [begin("waits1"), begin("waits2")]  # one in each process
        _wait(lambda: len(begun("waits")) == 2, server.log)
        stopped, _ = begun("waits")
        psutil.Process(stopped).send_signal(signal.SIGSTOP)
        threads += [begin(f"echo{number}", 1_000_000 * (number % 2)) for number in range(8)]
        server.wait_line(r"Echo: its process is lost \(unhealthy 3 times in a row\); starting another\.")
        _wait(lambda: len(begun("echo")) == 8, server.log)
        (tmp_path / "go").touch()
        for thread in threads:
            thread.join()
        statuses = sorted(answers[f"waits{number}"].status_code for number in (1, 2))
        assert statuses == [200, 503], "one was begun in the process that was stopped"
        for number in range(8):
            answer = answers[f"echo{number}"]
            assert answer.status_code == 200, answer.text
            assert answer.text.startswith(f"echo {1_000_000 * (number % 2)} ")
            assert not answer.text.endswith(f" {stopped}")
        assert len(begun("echo")) == 8, "each was begun once"
        _wait(lambda: _is_whole(server, restarts=1), server.log)
        assert httpx.post(server.url, params={"word": "dies"}, trust_env=False).status_code == 503
        assert len(begun("dies")) == 1, "a request that ends its process is not tried again"
    finally:
        for child in psutil.Process(server.process.pid).children():
            os.kill(child.pid, signal.SIGCONT)
        server.close()


_ONE_AT_ONCE = """
import asyncio, os
from tailrace import serve


@serve.deployment(num_replicas=2, max_ongoing_requests=1, health_check_period_s=2)
class One:
    def check_health(self):
        if os.path.exists("ill") and open("ill").read() == str(os.getpid()):
            raise RuntimeError("this process is ill")

    async def __call__(self, request):
        await asyncio.sleep(0.05)
        return str(os.getpid())


app = One.bind()
"""


@pytest.mark.deep
def test_an_unhealthy_process_gets_no_request_while_another_is_healthy_and_busy(tmp_path: Path) -> None:
    write(tmp_path, "one.py", _ONE_AT_ONCE)
    with contextlib.closing(Forgiving("one:app", directory=tmp_path)) as server:
        server.wait_ready()
        with ThreadPoolExecutor(8) as clients:

            def asked() -> list[str]:
                """Return the process that answered, for each of eight concurrent requests."""
                return list(
                    clients.map(lambda _: httpx.get(server.url, timeout=LONG_S, trust_env=False).text, range(8))
                )

            ill, healthy = sorted(set(asked()))
            (tmp_path / "ill").write_text(ill)
            server.wait_line("this process is ill")
            assert set(asked()) == {healthy}
            (tmp_path / "ill").unlink()
            _wait(lambda: set(asked()) == {ill, healthy}, server.log)
