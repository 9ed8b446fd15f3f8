"""`--access-log`: one line for each request with its result, without content of requests or answers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import httpx
import pytest
from starlette.responses import PlainTextResponse
from tests.api.process import Server
from tests.http.frames import TEXT, FrameWire, frame
from tests.waiting import LONG_S
from websockets.sync.client import connect

from tailrace.http.access_log import AccessLog
from tailrace.settings import Settings

SECRET = "a-secret-word"
_LINE = re.compile(
    r"tailrace: (?P<time>\S+Z) (?P<client>127\.0\.0\.1:[0-9]+) (?P<method>[A-Z]+) (?P<path>/\S*) "
    r"(?P<status>[0-9]+) (?P<rest>.*)\n"
)


@pytest.fixture(scope="module")
def logged() -> Iterator[Server]:
    with closing(Server("scripted:tokens_per_s=200", "--access-log")) as server:
        yield server.wait_ready()


def _line(server: Server, pattern: str) -> dict[str, str]:
    """Wait for a line that contains this text, and return its fields."""
    found = _LINE.fullmatch(server.wait_line(pattern).string)
    assert found is not None, server.log
    return {**found.groupdict(), **dict(pair.split("=", 1) for pair in found["rest"].split(" "))}


def _chat(stream: bool, count: int) -> dict[str, Any]:  # Any: of JSON
    return {"messages": [{"role": "user", "content": SECRET}], "max_tokens": count, "stream": stream}


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer(logged: Server, stream: bool) -> None:
    answer = logged.post("/v1/chat/completions", _chat(stream, 12))
    line = _line(logged, f"stream={answer.headers['x-stream-id']} ")
    assert (line["method"], line["path"], line["status"]) == ("POST", "/v1/chat/completions", "200")
    assert (line["wire"], line["tokens"], line["end"]) == ("openai", "12", "done")
    assert line["request"] == answer.headers["x-request-id"]
    assert 0 < float(line["first_ms"]) <= float(line["total_ms"])


def test_a_query_with_a_prompt_is_not_shown(logged: Server) -> None:
    answer = logged.http.post(f"/?prompt={SECRET}&max_tokens=3")
    line = _line(logged, f"stream={answer.headers['x-stream-id']} ")
    assert (line["path"], line["wire"], line["tokens"]) == ("/", "plain", "3")


def test_a_client_that_leaves(logged: Server) -> None:
    with logged.http.stream(
        "POST", "/v1/completions", json={"prompt": SECRET, "max_tokens": 2000, "stream": True}
    ) as answer:
        next(answer.iter_raw())
    line = _line(logged, f"stream={answer.headers['x-stream-id']} ")
    assert (line["status"], line["end"]) == ("200", "client_left")
    assert 0 < int(line["tokens"]) < 2000


def test_refusals_and_odd_paths(logged: Server) -> None:
    logged.post("/v1/completions", {"prompt": SECRET, "max_tokens": "many"}, X_Request_Id="refused-1")
    assert _line(logged, "request=refused-1 ")["end"] == "refused"
    logged.http.get("/no/%0Asuch%20p%C3%A4th%1b?prompt=" + SECRET, headers={"x-request-id": "refused-2"})
    line = _line(logged, "request=refused-2 ")
    assert (line["status"], line["path"], line["end"]) == ("404", "/no/%0Asuch%20p%C3%A4th%1B", "refused")
    logged.http.get("/" + "x" * 3000, headers={"x-request-id": "refused-3"})
    assert len(_line(logged, "request=refused-3 ")["path"]) == 200


def test_a_websocket(logged: Server) -> None:
    with connect(
        f"ws://127.0.0.1:{logged.port}/v1/ws", additional_headers={"x-request-id": "socket-1"}, proxy=None
    ) as ws:
        ws.ping().wait(LONG_S)
    line = _line(logged, "request=socket-1 ")
    assert (line["method"], line["path"], line["status"]) == ("WEBSOCKET", "/v1/ws", "101")


def test_no_part_of_a_prompt_was_logged(logged: Server) -> None:
    logged.http.get("/livez", headers={"x-request-id": "last-1"})
    logged.wait_line("request=last-1 ")
    assert SECRET not in logged.log
    lines = [line for line in logged.log.splitlines(keepends=True) if " request=" in line]
    assert all(_LINE.fullmatch(line) for line in lines)
    names = [re.search("request=([^ ]+)", line) for line in lines]
    assert len({name[1] for name in names if name}) == len(lines), "a request has two lines"


def test_it_is_off_unless_asked_for(server: Server) -> None:
    server.http.get("/livez", headers={"x-request-id": "quiet-1"})
    server.http.get("/livez")
    assert "quiet-1" not in server.log


def test_json_lines(serve: Callable[..., Server]) -> None:
    server = serve("scripted", "--access-log", "--log-format", "json", "--log-level", "error")
    answer = server.post("/v1/completions", {"prompt": SECRET, "max_tokens": 5})
    line = json.loads(server.wait_line('"path": "/v1/completions"').string)
    assert line["logger"] == "tailrace.access"
    assert line["level"] == "info"
    assert (line["status"], line["tokens"], line["stream"]) == (200, 5, answer.headers["x-stream-id"])
    assert isinstance(line["total_ms"], float)


def test_the_log_level(serve: Callable[..., Server]) -> None:
    quiet, warned = serve("scripted", "--log-level", "error"), serve("scripted", "--log-level", "info")
    for server in (quiet, warned):
        server.worker().kill()
        server.wait_line("The engine stopped: killed by SIGKILL")
        httpx.post(
            server.url + "/v1/completions", json={"prompt": "a", "max_tokens": 1}, timeout=LONG_S, trust_env=False
        )
    warned.wait_line("Another engine is ready")
    assert "Another engine is ready" not in quiet.log


def test_no_level_shows_the_content_of_websocket_frames(serve: Callable[..., Server]) -> None:
    server = serve("scripted", "--log-level", "debug")
    with FrameWire(server.port) as socket:
        socket.open("/v1/ws")
        socket.send_bytes(frame(TEXT, b'{"type":"create","prompt":"a-secret-word","max_tokens":1}'))
        assert b"created" in socket.frame()[1]
        assert b"done" in socket.frame()[1] + socket.frame()[1]
    server.close()
    assert SECRET not in server.log


async def test_only_the_setting_turns_it_on(caplog: pytest.LogCaptureFixture) -> None:
    """Other programs that run the server, such as Ray, set up logs themselves."""
    caplog.set_level("INFO")
    app = AccessLog(PlainTextResponse("Hi."), Settings())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
        for is_on in (False, True, False):
            app.use(Settings(access_log=is_on))
            caplog.clear()
            assert (await client.get("/")).text == "Hi."
            assert [one.name for one in caplog.records if one.name == "tailrace.access"] == ["tailrace.access"] * is_on
