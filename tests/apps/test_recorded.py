"""Recorded answers: the apps of the tutorial and of the articles, resumed at any point."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from httpx_sse import connect_sse
from hypothesis import given
from hypothesis import strategies as st
from tests.apps.process import AppServer, Forgiving, write
from tests.waiting import LONG_S

from tailrace.streams import StreamLog
from tailrace.types import End, Failure, Payload, Record, Usage, new_stream_id
from tailrace_outer.apps.events import BodyPieces, RecordedEncoder, is_recordable

_APP = """
import asyncio, gzip, os
from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse, StreamingResponse
from starlette.background import BackgroundTask
from tailrace import serve

app = FastAPI()


async def words(*pieces, key=None):
    for number, piece in enumerate(pieces):
        while number and key and not os.path.exists(f"free-{key}"):
            await asyncio.sleep(0.01)
        yield piece
        await asyncio.sleep(0.001)


async def endless():
    try:
        while True:
            yield "on "
            await asyncio.sleep(0.01)
    finally:
        open("ended", "w").close()


async def cut_short(die):
    yield "data: 1\\n\\n"
    yield "data: "
    await asyncio.sleep(0.05)
    if die:
        os._exit(3)
    raise ValueError("in the middle of an event")


async def raising():
    yield "data: 1\\n\\n"
    raise ValueError("the model fell over")


@app.post("/plain")
async def plain(key: str):
    return StreamingResponse(words("Dögs ", "are ", "the ", "best.", key=key), media_type="text/plain")


@app.get("/events")
async def events(key: str):
    first, second = 'data: {"text": "a"}\\n\\n', ("event: x\\nid: 7\\nda", "ta: b\\r\\n\\r\\n")
    pieces = words(first, *second, ": ping\\n\\n", "data: [DONE]\\n\\n", key=key)
    return StreamingResponse(pieces, media_type="text/event-stream")


@app.get("/query-stream/")  # the first article's: labelled as events, and none
async def numbers():
    return StreamingResponse(words(*map(str, range(20, 40))), media_type="text/event-stream")


@app.get("/endless")
async def endless_words():
    return StreamingResponse(endless(), media_type="text/plain")


@app.get("/raises")
async def raises(plain: bool = False):
    return StreamingResponse(raising(), media_type="text/plain" if plain else "text/event-stream")


@app.get("/cut-short")
async def is_cut_short(die: bool = False):
    return StreamingResponse(cut_short(die), media_type="text/event-stream")


@app.get("/headers")
async def with_headers():
    response = StreamingResponse(words("a", "b"), media_type="text/plain")
    response.set_cookie("a", "1")
    response.set_cookie("b", "2")
    response.headers["Cache-Control"] = "max-age=5"
    return response


@app.get("/coded")
async def coded():
    body = gzip.compress(b"coded")
    return StreamingResponse(words(body[:9], body[9:]), media_type="text/plain", headers={"Content-Encoding": "gzip"})


@app.get("/length-resumable")
async def length_resumable():
    return serve.resumable(PlainTextResponse("whole"))


@app.get("/background")
async def background():
    async def later():
        await asyncio.sleep(0.1)
        open("later", "w").close()

    return StreamingResponse(words("a", "b"), media_type="text/plain", background=BackgroundTask(later))


@app.get("/json")
async def json():
    return {"a": 1}


@app.get("/image")
async def image():
    return StreamingResponse(words(b"\\x89PNG", b"\\xff\\x00"), media_type="image/png")


@app.get("/image-resumable")
async def image_resumable():
    return serve.resumable(StreamingResponse(words(b"\\x89PNG", b"\\xff\\x00"), media_type="image/png"), linger_s=5)


@app.get("/not-found")
async def not_found():
    return StreamingResponse(words("a", "b"), 404)


@app.post("/echo")
async def echo(request: Request):
    return StreamingResponse(request.stream(), media_type="text/plain")
"""

_DOGS = "Dögs are the best."


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("recorded")
    write(directory, "plain.py", _APP)
    return directory


@pytest.fixture(scope="module")
def server(directory: Path) -> Iterator[AppServer]:
    with contextlib.closing(Forgiving("plain:app", "--resumable", "--linger-s", "30", directory=directory)) as server:
        yield server.wait_ready()


@pytest.fixture
def http(server: AppServer) -> httpx.Client:
    return server.http


def _leave_after_one(http: httpx.Client, method: str, path: str) -> tuple[str, bytes]:
    """Read the first piece and disconnect. Returns the stream's id and the piece."""
    with http.stream(method, path) as answer:
        assert answer.status_code == 200
        return answer.headers["x-stream-id"], next(answer.iter_raw())


def test_plain_text_resumes_at_a_byte(http: httpx.Client, directory: Path) -> None:
    stream_id, seen = _leave_after_one(http, "POST", "/plain?key=a")
    assert seen == "Dögs ".encode()
    state = http.get(f"/v1/streams/{stream_id}").json()
    assert (state["status"], state["last_event_id"]) == ("running", f"{stream_id}-6")
    (directory / "free-a").touch()
    rest = http.get(f"/v1/streams/{stream_id}/events", params={"after": len(seen)})
    assert rest.headers["content-type"] == "text/plain; charset=utf-8"
    assert seen + rest.content == _DOGS.encode()
    for num_bytes in range(len(_DOGS.encode())):
        again = http.post("/plain?key=a", headers={"last-event-id": f"{stream_id}-{num_bytes}"})
        assert again.content == _DOGS.encode()[num_bytes:]
    assert http.get(f"/v1/streams/{stream_id}").json()["items"] == ["Dögs ", "are ", "the ", "best."]


def test_positions_at_and_after_the_end(http: httpx.Client, directory: Path) -> None:
    (directory / "free-b").touch()
    answer = http.post("/plain?key=b")
    assert answer.content == _DOGS.encode()
    events = answer.headers["location"]
    size = len(answer.content)
    assert http.get(events, params={"after": size}).status_code == 204
    beyond = http.get(events, params={"after": size + 1})
    assert (beyond.status_code, beyond.json()["error"]["code"]) == (400, "seq_out_of_range")


def test_events_of_an_app_get_ids(http: httpx.Client, directory: Path) -> None:
    (directory / "free-c").touch()
    with connect_sse(http, "GET", "/events?key=c") as source:
        stream_id = source.response.headers["x-stream-id"]
        seen = [(event.event, event.data, event.id) for event in source.iter_sse()]
    ids = [f"{stream_id}-{number}" for number in (1, 2, 4)]  # the third is a comment
    assert seen == [("message", '{"text": "a"}', ids[0]), ("x", "b", ids[1]), ("message", "[DONE]", ids[2])]
    for number, last_id in enumerate(ids[:2], 1):
        with connect_sse(http, "GET", "/events?key=c", headers={"last-event-id": last_id}) as source:
            assert [(event.event, event.data, event.id) for event in source.iter_sse()] == seen[number:]
    assert http.get("/events?key=c", headers={"last-event-id": ids[-1]}).status_code == 204


def test_an_event_stream_continues_after_a_disconnect(http: httpx.Client, directory: Path) -> None:
    stream_id, seen = _leave_after_one(http, "GET", "/events?key=d")
    assert seen == f'data: {{"text": "a"}}\nid: {stream_id}-1\n\n'.encode()
    (directory / "free-d").touch()
    with connect_sse(http, "GET", f"/v1/streams/{stream_id}/events", params={"after": 1}) as source:
        assert [event.data for event in source.iter_sse()] == ["b", "[DONE]"]


def test_a_body_without_events_is_not_changed(http: httpx.Client) -> None:
    """This is the app and the client of the first article."""
    answer = http.get("/query-stream/")
    whole = "".join(map(str, range(20, 40)))
    assert answer.text == whole
    assert http.get(answer.headers["location"], params={"after": 7}).text == whole[7:]


def test_a_stream_is_cancelled_by_request(http: httpx.Client, directory: Path) -> None:
    stream_id, _ = _leave_after_one(http, "GET", "/endless")
    assert http.get(f"/v1/streams/{stream_id}").json()["status"] == "running"
    assert http.post(f"/v1/streams/{stream_id}/cancel").json()["status"] == "cancelled"
    _wait_for(directory / "ended")
    with pytest.raises(httpx.RemoteProtocolError):  # what is not complete does not look complete
        http.get(f"/v1/streams/{stream_id}/events")


def _wait_for(path: Path) -> None:
    deadline_s = time.monotonic() + LONG_S
    while not path.exists():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def test_failures_are_reported_in_the_form_of_the_answer(http: httpx.Client) -> None:
    with connect_sse(http, "GET", "/raises") as source:
        *_, last = source.iter_sse()
    assert (last.event, json.loads(last.data)["error"]["code"]) == ("error", "app_failed")
    with pytest.raises(httpx.RemoteProtocolError):
        http.get("/raises?plain=1")


@pytest.mark.parametrize(("die", "code"), [(0, "app_failed"), (1, "app_unavailable")])
def test_an_event_cut_by_a_failure_is_dropped(http: httpx.Client, die: int, code: str) -> None:
    with connect_sse(http, "GET", "/cut-short", params={"die": die}) as source:
        first, last = source.iter_sse()
    assert (first.event, first.data) == ("message", "1")
    assert (last.event, json.loads(last.data)["error"]["code"]) == ("error", code)
    again = http.get(source.response.headers["location"], params={"after": first.id})
    assert again.text.startswith("event: error\n")


def test_a_long_cut_event_ends_before_the_error() -> None:
    record = Record(stream_id=new_stream_id(), created_s=1.0, model="app", memo=b"", linger_s=1.0)
    log: StreamLog[Payload] = StreamLog(record)
    log.extend([Payload(b"data: 1\n\n")])
    log.extend([Payload(b"data: " + b"x" * 2**20)])
    log.extend([End("error", Usage(0, 0), Failure("app_failed", "The app failed."))])
    encoder = RecordedEncoder(log, "text/event-stream")
    body = b"".join(encoder.encode(seq, event) for seq, event in enumerate(log.events, 1))
    assert b"x\n\nevent: error\ndata: " in body


def test_headers_of_the_app_are_kept(http: httpx.Client) -> None:
    answer = http.get("/headers")
    assert "x-stream-id" in answer.headers
    assert [value.partition(";")[0] for value in answer.headers.get_list("set-cookie")] == ["a=1", "b=2"]
    assert answer.headers.get_list("cache-control") == ["max-age=5"]
    assert answer.headers.get_list("content-type") == ["text/plain; charset=utf-8"]


def test_work_in_the_background_is_finished(http: httpx.Client, directory: Path) -> None:
    assert http.get("/background").text == "ab"
    _wait_for(directory / "later")


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/json", 200), ("/image", 200), ("/not-found", 404), ("/coded", 200), ("/length-resumable", 200)
    ],
)  # fmt: skip
def test_answers_that_are_not_recorded(http: httpx.Client, path: str, status: int) -> None:
    answer = http.get(path)
    assert answer.status_code == status
    assert "x-stream-id" not in answer.headers


def test_an_answer_that_begins_before_the_request_ends_is_not_recorded(server: AppServer) -> None:
    with server.wire() as wire:
        wire.send("POST", "/echo", b"", {"transfer-encoding": "chunked", "content-length": ""})
        wire.send_bytes(b"3\r\nabc\r\n")
        wire.head()
        assert "x-stream-id" not in wire.headers


def test_a_route_may_ask_for_itself(directory: Path, run: Callable[..., AppServer]) -> None:
    http = run("plain:app", directory=directory).wait_ready().http
    answer = http.get("/image-resumable")
    assert (answer.content, answer.headers["content-type"]) == (b"\x89PNG\xff\x00", "image/png")
    assert "x-tailrace-stream" not in answer.headers
    assert http.get(answer.headers["location"], params={"after": 2}).content == b"NG\xff\x00"
    assert "x-stream-id" not in http.get("/query-stream/").headers


@given(st.lists(st.sampled_from(["data: a", "\n", "\r\n", "\r", "id: 3", ": c", "event: e", "x", "\n\n"])), st.data())
def test_pieces_are_the_same_however_the_body_is_cut(parts: list[str], data: st.DataObject) -> None:
    body = "".join(["data: 0\n\n", *parts]).encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(body)), max_size=4)))
    pieces, cut = _pieces([body]), _pieces([body[a:b] for a, b in zip([0, *cuts], [*cuts, len(body)], strict=True)])
    assert _lines(cut) == _lines(pieces)
    assert len(cut) == len(pieces)


def _lines(pieces: list[bytes]) -> list[bytes]:
    return [line for line in b"".join(pieces).splitlines() if line]


def _pieces(chunks: list[bytes]) -> list[bytes]:
    cutting = BodyPieces("text/event-stream")
    return [*(piece for chunk in chunks for piece in cutting.feed(chunk)), *cutting.end()]


def test_pieces_of_events() -> None:
    assert _pieces([b"data: 1\n\ndata", b": 2\r\n", b"\r\n\n\ndata: 3\n"]) == [
        b"data: 1\n\n", b"data: 2\r\n\r\n", b"data: 3\n"
    ]  # fmt: skip
    assert _pieces([b"\n\n", b"Hello", b"\n\nworld"]) == [b"\n\nHello", b"\n\nworld"]
    assert _pieces([b"d", b"ata ", b"is"]) == [b"data ", b"is"]
    long = b"data: " + b"x" * 2**20
    assert _pieces([long, b"y\n\ndata: 2\n\n"]) == [long, b"y\n\n", b"data: 2\n\n"]


def test_which_types_are_recorded() -> None:
    for kind in (
        "",
        "text/plain",
        "TEXT/HTML; charset=x",
        "application/x-ndjson",
        "application/json",
        "application/ld+json",
    ):
        assert is_recordable(kind), kind
    for kind in ("image/png", "application/octet-stream", "application/jsonp", "video/mp4"):
        assert not is_recordable(kind), kind
