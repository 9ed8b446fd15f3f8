"""Errors that clients see for bad values and failing apps, and errors that the authors of apps see."""

from __future__ import annotations

import contextlib
import json
import re
import signal
from collections.abc import Iterator

import httpx
import psutil
import pytest
from httpx_sse import connect_sse
from tests.apps.process import Forgiving, write

_APP = """
import tailrace
from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, StreamingResponse
from tailrace import serve

web = FastAPI()


class Thing:
    __slots__ = ()


@serve.deployment
@serve.ingress(web)
class Teller:
    def __init__(self):
        self.model = tailrace.engine("scripted")

    @web.post("/stream")
    async def stream(self, request: Request):
        return serve.stream(self.model.stream("A river is", **(await request.json())))

    @web.post("/plain")
    async def plain(self, request: Request):
        return StreamingResponse(self.model.stream("A river is", **(await request.json())), media_type="text/plain")

    @web.post("/late")
    async def late(self, request: Request):
        async def words(asked):
            yield "so: "
            async for piece in self.model.stream("A river is", **asked):
                yield piece
        return serve.stream(words(await request.json()))

    @web.get("/text")
    async def text(self):
        return serve.stream("abc")

    @web.get("/raises")
    async def raises(self):
        raise KeyError("a secret")

    @web.get("/thing")
    async def thing(self):
        return {"a": Thing()}

    @web.get("/own-thing")
    async def own_thing(self):
        return JSONResponse({"a": Thing()})


@serve.deployment
class Bare:
    def __init__(self):
        self.model = tailrace.engine("scripted")

    async def __call__(self, request):
        match request.url.path.rpartition("/")[2]:
            case "stream":
                return serve.stream(self.model.stream("A river is", **(await request.json())))
            case "raises":
                raise KeyError("a secret")
            case "thing":
                return {"a": Thing()}


own = FastAPI()


@own.exception_handler(Exception)
async def explain(request, error):
    return JSONResponse({"mine": type(error).__name__}, 500)


@own.get("/raises")
async def raises():
    raise KeyError("a secret")


@serve.deployment
class Batching:
    @serve.batch(max_batch_size=1)
    async def doubled(self, items):
        return items * 2

    async def __call__(self, request):
        return await self.doubled(1)


teller, bare, batching = Teller.bind(), Bare.bind(), Batching.bind()
"""

_PLAN = """
applications:
  - {name: teller, import_path: "telling:teller"}
  - {name: bare, route_prefix: /bare, import_path: "telling:bare"}
  - {name: own, route_prefix: /own, import_path: "telling:own"}
  - {name: batching, route_prefix: /batching, import_path: "telling:batching"}
"""

_FAILED = {
    "message": "The app failed; the app's log has details.",
    "type": "server_error",
    "code": "app_failed",
    "param": None,
}


@pytest.fixture(scope="module")
def apps(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forgiving]:
    directory = tmp_path_factory.mktemp("telling")
    write(directory, "telling.py", _APP)
    (directory / "apps.yaml").write_text(_PLAN)
    with contextlib.closing(Forgiving("apps.yaml", directory=directory)) as server:
        server.wait_ready()
        yield server


@pytest.fixture
def http(apps: Forgiving) -> httpx.Client:
    return apps.http


@pytest.mark.parametrize("path", ["/stream", "/plain", "/bare/stream"])
def test_input_is_checked_before_the_engine(http: httpx.Client, path: str) -> None:
    for body, code, param in (
        ('{"temperature": "hot"}', "invalid_request", "temperature"),
        ('{"temperature": -1}', "invalid_request", "temperature"),
        ('{"temperature": NaN}', "invalid_request", "temperature"),
        ('{"top_p": 5}', "invalid_request", "top_p"),
        ('{"max_tokens": 0}', "invalid_request", "max_tokens"),
        ('{"seed": "abc"}', "invalid_request", "seed"),
        ('{"max_token": 4}', "unsupported_parameter", "max_token"),
    ):
        answer = http.post(path, content=body)
        assert answer.status_code == 400
        told = answer.json()["error"]
        assert (told["code"], told["param"], told["type"]) == (code, param, "invalid_request_error")
    assert http.post(path, content='{"max_tokens": 2}').status_code == 200


def test_a_refusal_after_the_headers_is_an_event(http: httpx.Client) -> None:
    with connect_sse(http, "POST", "/late", content='{"top_p": 5}') as events:
        *_, last = events.iter_sse()
    assert last.event == "error"
    message = "top_p: Expected `float` <= 1.0."
    assert json.loads(last.data)["error"] == {"code": "invalid_request", "message": message, "retryable": False}


def test_a_text_cannot_be_streamed_as_letters(apps: Forgiving) -> None:
    assert apps.http.get("/text").status_code == 500
    apps.wait_line(r"TypeError: serve\.stream takes a generator or a list of items\.")


@pytest.mark.parametrize("path", ["/raises", "/bare/raises", "/thing", "/bare/thing", "/batching"])
def test_failures_have_one_shape(http: httpx.Client, path: str) -> None:
    answer = http.get(path)
    assert (answer.status_code, answer.json()) == (500, {"error": _FAILED})


def test_an_app_may_format_its_own_errors(http: httpx.Client) -> None:
    assert http.get("/own/raises").json() == {"mine": "KeyError"}


@pytest.mark.parametrize(
    ("path", "line", "where"),
    [
        ("/bare/thing", "TypeError: Bare returned a dict, which is not text, .* Thing is not", "__call__"),
        ("/thing", "ValueError: .*'Thing' object", "thing"),
        ("/own-thing", "TypeError: Object of type Thing is not JSON serializable", "own_thing"),
    ],
)
def test_values_that_json_does_not_have_are_named_with_route_and_type(
    apps: Forgiving, path: str, line: str, where: str
) -> None:
    """If a framework fails, the error also names a line of the user's code."""
    apps.http.get(path)
    apps.wait_line(f"GET {path} raised {line}")
    apps.wait_line(rf'telling\.py", line [0-9]+, in {where}$')
    assert re.search(rf'GET {path} raised .*\nTraceback .*\n  File ".*telling\.py", line', apps.log)


def test_a_batch_of_another_length_names_its_function(apps: Forgiving) -> None:
    apps.http.get("/batching")
    apps.wait_line(r"Batching\.doubled got 1 elements and returned 2; a function with @serve\.batch returns a list")
    assert "Ray" not in apps.log


def test_a_stream_of_the_model_survives_its_engine(apps: Forgiving) -> None:
    with connect_sse(apps.http, "POST", "/stream", content='{"max_tokens": 400, "ignore_eos": true}') as events:
        shown = events.iter_sse()
        seen = [next(shown) for _ in range(5)]
        for process in psutil.Process(apps.process.pid).children(recursive=True):
            if "tailrace.engines.worker" in process.cmdline():
                process.send_signal(signal.SIGKILL)
        seen += shown
    assert seen[-1].event == "done"
    assert [event.id.rpartition("-")[2] for event in seen] == [str(seq) for seq in range(1, len(seen) + 1)]
