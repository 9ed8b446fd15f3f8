"""The apps that `tailrace new` writes, which are those in examples/, run and answer."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from httpx_sse import connect_sse
from tests.apps.process import AppServer
from tests.missing import skip_missing
from tests.waiting import LONG_S
from websockets.sync.client import connect

from tailrace.cli import main
from tailrace.errors import ModelError
from tailrace.models import NoProgress
from tailrace.models.resolve import resolve

pytestmark = pytest.mark.timeout(120)  # a model is loaded

PROMPT = {"prompt": "What is a river?"}


@pytest.fixture(scope="module")
def _model() -> None:
    try:
        resolve("smollm2", NoProgress())
    except ModelError as error:
        skip_missing("smollm2", error.message)


@contextlib.contextmanager
def _running(kind: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[AppServer, str]]:
    """Create an app of this kind and run it with the printed command. Returns the server and the printed example
    commands."""
    monkeypatch.chdir(directory)
    output = CliRunner().invoke(main, ["new", kind, "mine"]).output
    run, attempt = (match[1] for match in re.finditer(r"^(?:Run|Try) it:  (.*)$", output, re.MULTILINE))
    with contextlib.closing(AppServer(shlex.split(run)[2], directory=directory)) as server:
        server.wait_ready(timeout_s=LONG_S)
        yield server, attempt.replace("127.0.0.1:8000", f"127.0.0.1:{server.port}")


def _try(attempt: str, *, num_bytes: int = -1) -> str:
    """Return the output of a command, or its beginning."""
    with subprocess.Popen(
        ["bash", "-c", "exec " + attempt], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as trying:
        assert trying.stdout is not None
        shown = trying.stdout.read(num_bytes)
        trying.terminate()
    return shown.decode()


@pytest.mark.deep
@pytest.mark.usefixtures("_model")
def test_textbot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with _running("textbot", tmp_path, monkeypatch) as (server, attempt):
        assert _try(attempt, num_bytes=20).isprintable()
        with server.http.stream("POST", "/", params=PROMPT) as answer:
            assert answer.headers["content-type"] == "text/plain; charset=utf-8"
            pieces = answer.iter_text()
            assert len([next(pieces) for _ in range(5)]) == 5
        assert server.http.post("/").status_code == 422


@pytest.mark.deep
@pytest.mark.usefixtures("_model")
def test_chatbot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with _running("chatbot", tmp_path, monkeypatch) as (server, attempt):
        assert attempt.startswith("python -m websockets ws://")
        with connect(server.url.replace("http", "ws")) as ws:
            ws.send("Say yes.")
            assert [str(piece) for piece in iter(lambda: ws.recv(LONG_S), "<<Response Finished>>")]
            ws.send("Say it again.")
            assert str(ws.recv(LONG_S))


@pytest.mark.deep
@pytest.mark.usefixtures("_model")
def test_batchbot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with _running("batchbot", tmp_path, monkeypatch) as (server, attempt):
        assert 'data: {"text":' in _try(attempt, num_bytes=40)
        with connect_sse(server.http, "POST", "/", params=PROMPT) as events:
            path = events.response.headers["content-location"]
            shown = events.iter_sse()
            seen = [next(shown) for _ in range(5)]
        assert server.http.post(path + "/cancel").json()["status"] == "cancelled"
        with connect_sse(server.http, "GET", path + "/events", headers={"last-event-id": seen[0].id}) as events:
            again = list(events.iter_sse())
        assert [(event.id, event.data) for event in again[:4]] == [(event.id, event.data) for event in seen[1:]]
        assert again[-1].event == "cancelled"


def test_inferless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with _running("inferless", tmp_path, monkeypatch) as (server, attempt):
        shown = [json.loads(line[6:]) for line in _try(attempt).splitlines() if line.startswith("data: ")]
        text = "".join(one["generated_text"] for one in shown)
        assert text == 'You wrote "To the sea". A model of yours would go on from there. '
        refused = server.post("/v2/models/mine/generate_stream", {"prompt": "a", "max_words": "many"})
        assert (refused.status_code, refused.json()["error"].partition(":")[0]) == (400, "max_words")
