"""An Inferless folder under `tailrace run`: clients that disconnect early, and threads that fail during `infer`."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.apps.process import Forgiving, write
from tests.waiting import LONG_S

_SCHEMA = """
INPUT_SCHEMA = {"TEXT": {"datatype": "STRING", "required": True, "shape": [1], "example": ["good"]}}
IS_STREAMING_OUTPUT = True
"""
_APP = """
import os, threading, time
from queue import Queue


class InferlessPythonModel:
    def initialize(self):
        self.words = Queue()
        open("initialized", "a").write(".")

    def generate(self, text):
        self.words.put(f"{text} ")
        if text == "fail":
            raise MemoryError("8317")
        self.words.put(None)

    def infer(self, inputs, stream_output_handler):
        text = inputs["TEXT"]
        open("begun", "a").write(f"{text} ")
        if text == "late":
            while not os.path.exists("go"):
                time.sleep(0.01)
            for number in range(300):
                stream_output_handler.send_streamed_output({"OUT": f"{number} "})
        thread = threading.Thread(target=self.generate, args=[text])
        thread.start()
        while (word := self.words.get()) is not None:
            stream_output_handler.send_streamed_output({"OUT": word})
        thread.join()
        stream_output_handler.finalise_streamed_output()
"""
_PATH = "/v2/models/words/generate_stream"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("apps") / "words"
    path.mkdir()
    write(path, "app.py", _APP)
    write(path, "input_schema.py", _SCHEMA)
    return path


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Forgiving]:
    with closing(Forgiving("./words", directory=folder.parent)) as server:
        server.wait_ready()
        yield server


def _wait(is_so: Callable[[], Any], what: object) -> None:  # Any: something, when it is
    deadline_s = time.monotonic() + LONG_S
    while not is_so():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.02)


def _ask(server: Forgiving, text: str) -> httpx.Response:
    return server.http.post(_PATH, json={"TEXT": text}, timeout=LONG_S)


def _words(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
    return "".join(event["OUT"] for event in events)


def _leave(server: Forgiving, text: str, is_begun: Callable[[], Any]) -> None:
    body = json.dumps({"TEXT": text}).encode()
    with socket.create_connection(("127.0.0.1", server.port)) as leaving:
        head = f"POST {_PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        leaving.sendall(head.encode() + body)
        _wait(is_begun, server.log)


def _ongoing(server: Forgiving) -> float:
    lines = server.http.get("/-/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("tailrace_app_ongoing{"))


def test_a_client_that_disconnects_early_delays_no_other(server: Forgiving, folder: Path) -> None:
    """One client disconnects before `infer` sends anything, another one while it waits for its turn."""
    begun = folder / "begun"
    _leave(server, "late", begun.exists)
    _wait(lambda: _ongoing(server) == 0, server.log)
    _leave(server, "waits", lambda: _ongoing(server) == 1)
    _wait(lambda: _ongoing(server) == 0, server.log)
    (folder / "go").touch()
    assert _words(_ask(server, "good")) == "good "
    assert begun.read_text() == "late good "


@pytest.mark.deep
def test_an_app_whose_thread_failed_is_replaced(server: Forgiving, folder: Path) -> None:
    assert _words(_ask(server, "good")) == "good "
    failed = _ask(server, "fail")
    assert "MemoryError in a thread that infer has started" in failed.text
    _wait(lambda: server.http.get("/-/readyz").status_code == 503, server.log)
    server.wait_line(
        r"words: check_health raised RuntimeError: infer has not returned, and a thread that it started has failed "
        r"\(MemoryError\)\."
    )
    server.wait_line(r"words: its process is lost \(unhealthy 3 times in a row\); starting another\.", timeout_s=LONG_S)
    _wait(lambda: server.http.get("/-/readyz").status_code == 200, server.log)
    assert _words(_ask(server, "good")) == "good "
    assert (folder / "initialized").read_text() == ".."
