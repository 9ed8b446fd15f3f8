"""Live reads of durable streams and streams of tokens: long polls and server-sent events."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from starlette.responses import Response
from starlette.types import Message
from tests.api.process import Server
from tests.plugins.durable_streams.durable_servers import BEGINNING, JSON, KINDS, TEXT, durable_server, new_path
from tests.streams import virtual_time

from tailrace.errors import LeaseLost, TailraceError
from tailrace.streams import StreamLog
from tailrace.types import Record, TextDelta
from tailrace_plugins.durable_streams.durable_live import LongPoll, Tail
from tailrace_plugins.durable_streams.durable_store import DurableStore
from tailrace_plugins.durable_streams.operations import Creation, ProducerBatch
from tailrace_plugins.durable_streams.page import Page
from tailrace_plugins.durable_streams.token_streams import DurableTokenStream


@pytest.fixture
def path() -> str:
    return new_path()


@pytest.fixture(scope="module", params=KINDS)
def target(request: pytest.FixtureRequest) -> Iterator[Server]:
    server = durable_server(request.param, source="scripted:tokens_per_s=100", flags=("--durable-poll-s", "0.3"))
    try:
        yield server.wait_ready()
    finally:
        server.close()


@pytest.fixture(scope="module")
def door(target: Server) -> httpx.Client:
    return target.http


def events(text: str) -> list[tuple[str, str]]:
    """Return the type and the data of each event."""
    parsed = []
    for block in text.split("\n\n"):
        lines = [line.partition(":") for line in block.split("\n") if not line.startswith(":")]
        kind = [text.strip() for name, _, text in lines if name == "event"]
        data = "\n".join(text.removeprefix(" ") for name, _, text in lines if name == "data")
        parsed += [(kind[0], data)] if kind else []
    return parsed


def test_a_long_poll_waits_for_new_content(door: httpx.Client, path: str) -> None:
    tail = door.put(path, headers=TEXT).headers["stream-next-offset"]
    live = {"offset": tail, "live": "long-poll"}
    idle = door.get(path, params=live)
    assert (idle.status_code, idle.headers["stream-next-offset"], idle.headers["stream-up-to-date"]) == (
        204,
        tail,
        "true",
    )
    writer = threading.Timer(0.05, lambda: door.post(path, headers=TEXT, content="now"))
    writer.start()
    while (answer := door.get(path, params=live)).status_code == 204:
        pass
    assert (answer.status_code, answer.text) == (200, "now")
    cursor = int(answer.headers["stream-cursor"])
    later = door.get(path, params=live | {"cursor": cursor})
    assert int(later.headers["stream-cursor"]) > cursor
    writer.join()
    door.post(path, headers={"stream-closed": "true"})
    live["offset"] = answer.headers["stream-next-offset"]
    closed = door.get(path, params=live)
    assert (closed.status_code, closed.headers["stream-closed"]) == (204, "true")


def test_events_follow_a_stream_to_its_end(door: httpx.Client, path: str) -> None:
    door.put(path, headers=TEXT, content=" one\r\ntwo")
    with door.stream("GET", path, params={"offset": "-1", "live": "sse"}) as answer:
        assert answer.headers["content-type"] == "text/event-stream"
        pieces = answer.iter_text()
        received = next(pieces)
        door.post(path, headers=TEXT | {"stream-closed": "true"}, content="event: control\n\ndata: {}")
        received += "".join(pieces)
    assert [kind for kind, _ in events(received)] == ["data", "control"] * 2
    assert [data for kind, data in events(received) if kind == "data"] == [" one\ntwo", "event: control\n\ndata: {}"]
    first, last = (json.loads(data) for kind, data in events(received) if kind == "control")
    assert (first["upToDate"], last["streamClosed"], "streamCursor" in last) == (True, True, False)
    assert last["streamNextOffset"] == door.head(path).headers["stream-next-offset"]


def test_deleting_a_stream_ends_its_readers(door: httpx.Client, path: str) -> None:
    door.put(path, headers=TEXT)
    with door.stream("GET", path, params={"offset": "-1", "live": "sse"}) as answer:
        pieces = answer.iter_text()
        next(pieces)
        door.delete(path)
        assert not events("".join(pieces))


def test_events_are_followed_for_a_minute() -> None:
    """Comments are sent in quiet times, so that no proxy closes the connection."""

    async def scenario() -> list[Message]:
        store, sent = DurableStore(budget_bytes=10_000), list[Message]()
        stream, _ = store.create(b"a", Creation("text/plain"), b"")

        async def receive() -> Message:
            never: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
            return await never

        async def send(message: Message) -> None:
            sent.append(message)

        asyncio.get_running_loop().call_later(25, store.append, b"a", ProducerBatch(b"late", "text/plain"))
        await Tail(stream, 0, lambda: 7, {}, heartbeat_s=10)({"type": "http"}, receive, send)
        assert stream.num_readers == 0
        return sent

    begun, *chunks, last = virtual_time.run(scenario())
    assert begun["type"] == "http.response.start"
    assert last == {"type": "http.response.body"}
    bodies = [chunk["body"] for chunk in chunks]
    assert [body for body in bodies if body != b": hb\n"] == [
        b'event: control\ndata:{"streamNextOffset":"%s","streamCursor":"7","upToDate":true}\n\n' % BEGINNING.encode(),
        b"event: data\ndata:late\n\nevent: control\n"
        b'data:{"streamNextOffset":"0000000000000001_0000000000000004","streamCursor":"7","upToDate":true}\n\n',
    ]
    assert bodies.count(b": hb\n") == 6


def test_tokens_can_be_read_and_not_written(target: Server, door: httpx.Client) -> None:
    stream_id = target.create({"prompt": "Tell me of rivers.", "max_tokens": 30})
    path = f"/v1/durable/streams/{stream_id}"
    messages: list[Any] = []
    offset, is_closed = "-1", False
    while not is_closed:
        answer = door.get(path, params={"offset": offset, "live": "long-poll"})
        messages += answer.json() if answer.status_code == 200 else []
        offset, is_closed = answer.headers["stream-next-offset"], "stream-closed" in answer.headers
    *deltas, end = messages
    states = [target.wait_state(stream_id, "done") for _ in range(2)]  # of each server: one may be an event behind
    assert ["".join(delta["text"] for delta in deltas)] * 2 == [state["text"] for state in states]
    assert (len(deltas), end["status"]) == (30, "done")

    native = door.get(f"/v1/streams/{stream_id}/events").text
    assert [
        json.loads(line.removeprefix("data: ")) for line in native.split("\n") if line.startswith("data: ")
    ] == messages
    assert door.get(path).json() == messages
    followed = events(door.get(path, params={"offset": BEGINNING, "live": "sse"}).text)
    assert [message for kind, data in followed if kind == "data" for message in json.loads(data)] == messages

    for method in ("PUT", "POST", "DELETE"):
        refused = door.request(method, path, headers=JSON, content=b"[]")
        assert (refused.status_code, refused.headers["allow"]) == (405, "GET, HEAD, OPTIONS")
    assert door.put("/v1/durable/tests/forked", headers={"stream-forked-from": path}).status_code == 403
    assert door.get("/v1/durable/streams/none").status_code == 404
    beyond = door.get(path, params={"offset": "9" * 16 + "_" + "0" * 16})
    assert (beyond.status_code, beyond.json()["error"]["param"]) == (400, "offset")
    assert door.get(path).json() == messages


def test_the_requests_of_tanstack_s_adapter(door: httpx.Client) -> None:
    """A run, a second server that takes it over, and a reader.

    Source: `durableStream` of @tanstack/ai-durable-stream 0.1.6, packages/ai-durable-stream/src/durable-stream.ts of
    https://github.com/TanStack/ai, with `server` .../v1/durable. Its package is not on npm.
    """
    run = f"run-{new_path().rpartition('/')[2]}"
    url = f"/v1/durable/streams/runs%2F{run}"

    def append(producer: str, seqs: list[int]) -> httpx.Response:
        stamp = {"producer-id": producer, "producer-epoch": "0", "producer-seq": "0"}
        records = [{"v": 1, "seq": seq, "chunk": {"type": "TEXT_MESSAGE_CONTENT", "delta": "word "}} for seq in seqs]
        return door.post(url, headers=JSON | stamp, content=json.dumps(records))

    def window(offset: str) -> tuple[list[int], dict[str, Any]]:
        """Return the records up to the first control event that has all of them."""
        seqs: list[int] = []
        with door.stream("GET", url, params={"offset": offset, "live": "sse"}) as answer:
            assert answer.status_code == 200
            kind = ""
            for line in answer.iter_lines():
                name, _, data = line.partition(":")
                if name == "event":
                    kind = data.strip()
                elif name == "data" and kind == "data":
                    seqs += [record["seq"] for record in json.loads(data)]
                elif name == "data" and (control := json.loads(data)).get("upToDate"):
                    return seqs, control
        raise AssertionError("The stream ended without a control event.")

    made = door.put(url, headers=JSON)
    assert (made.status_code, "stream-next-offset" in made.headers) == (201, True)
    first = append("one", [1, 2])
    again = append("one", [1, 2])  # its answer was lost
    assert (first.status_code, again.status_code) == (200, 204)
    assert first.headers["stream-next-offset"] == again.headers["stream-next-offset"]

    assert door.put(url, headers=JSON).status_code == 200
    seqs, control = window("-1")
    assert (seqs, control["streamNextOffset"]) == ([1, 2], first.headers["stream-next-offset"])
    assert control["streamCursor"].isdigit()
    assert append("two", [3]).status_code == 200
    closed = door.post(url, headers={"stream-closed": "true"})
    assert (closed.status_code, closed.headers["stream-closed"]) == (204, "true")

    for offset, expected in (("-1", [1, 2, 3]), (first.headers["stream-next-offset"], [3])):
        seqs, control = window(offset)
        assert (seqs, control["streamClosed"]) == (expected, True)
    assert [record["seq"] for record in door.get(f"/v1/durable/streams/runs/{run}").json()] == [1, 2, 3]
    forked = {"stream-forked-from": f"/streams/runs/{run}"}
    assert door.put(new_path(), headers=forked).status_code == 201
    assert door.put(f"/v1/durable/streams/{run}", headers=JSON).status_code == 405  # as the id of a model's stream
    assert door.delete(url).status_code == 204


def test_a_long_poll_on_a_stream_that_goes_on_elsewhere_is_refused() -> None:
    """An empty answer would bring the client back at once."""
    log = StreamLog(Record("s", 0.0), [TextDelta("a", (1,))])
    log.release(LeaseLost("Another server continues this stream."))
    stream = DurableTokenStream(log)
    answered: list[Page] = []

    def answer(page: Page) -> Any:
        answered.append(page)
        return Response()

    async def poll(position: int) -> None:
        async def receive() -> Message:
            await asyncio.Event().wait()
            raise AssertionError

        async def send(message: Message) -> None: ...

        await LongPoll(stream, position, answer, 60.0)({"type": "http", "method": "GET"}, receive, send)

    virtual_time.run(poll(0))  # what is there can be read
    assert [len(page.pieces) for page in answered] == [1]
    with pytest.raises(TailraceError) as refused:
        virtual_time.run(poll(1))
    assert (refused.value.code, refused.value.status, refused.value.retry_after_s) == ("lease_lost", 503, 1.0)
    assert refused.value.message == "Another server continues this stream."
