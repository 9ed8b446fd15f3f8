"""tailrace's own wire, over real sockets: a resumed stream has the same bytes as one that is read at once."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from tests.api.oracle import Answer, chat_ids
from tests.api.process import Server
from tests.http.wire import Wire, as_json, sse_data, sse_ids
from tests.waiting import LONG_S

SSE = {"accept": "text/event-stream"}
ANSWER = Answer("Tell me of rivers.", 24, seed=7)
BODY = {"prompt": ANSWER.prompt, "max_tokens": ANSWER.count, "seed": ANSWER.seed}
LAST = ANSWER.count + 1  # the terminal event


def _events(server: Server, stream_id: str, after: str = "", **headers: str) -> httpx.Response:
    named = {name.replace("_", "-"): text for name, text in headers.items()}
    return server.http.get(f"/v1/streams/{stream_id}/events{after}", headers=named)


def _follow(server: Server, stream_id: str, after: int = 0) -> Wire:
    wire = server.wire()
    wire.send("GET", f"/v1/streams/{stream_id}/events", headers={"last-event-id": f"{stream_id}-{after}"})
    assert wire.head() == 200
    return wire


@contextlib.contextmanager
def _begin(server: Server, body: dict[str, Any]) -> Iterator[Wire]:
    """Create a stream that its client reads from the beginning."""
    with server.wire() as wire:
        wire.send("POST", "/v1/streams", body, SSE)
        assert wire.head() == 200
        yield wire


def _error(answer: httpx.Response) -> tuple[int, str]:
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "code", "param"}
    assert answer.headers["content-length"] == str(len(answer.content))
    return answer.status_code, error["code"]


@pytest.fixture(scope="module")
def finished(server: Server) -> str:
    """Return the id of a finished stream."""
    stream_id = server.create(BODY)
    assert _events(server, stream_id).content == b"".join(ANSWER.native(stream_id))
    return stream_id


def test_creation_is_201_with_a_location_and_the_state(server: Server) -> None:
    answer = server.post("/v1/streams", BODY)
    assert answer.status_code == 201
    state = answer.json()
    stream_id = state["id"]
    assert len(stream_id) == 22
    assert answer.headers["location"] == f"/v1/streams/{stream_id}"
    assert answer.headers["x-stream-id"] == stream_id
    assert answer.headers["content-type"] == "application/json"
    assert state["status"] in ("queued", "running")
    assert state["model"] == "scripted"
    assert abs(state["created"] - time.time()) < 60
    assert state["last_event_id"] == f"{stream_id}-0"
    assert state["events_url"] == f"/v1/streams/{stream_id}/events"
    assert state["cancel_url"] == f"/v1/streams/{stream_id}/cancel"
    assert state["expires_in_s"] is None
    assert server.http.get(state["events_url"]).content == b"".join(ANSWER.native(stream_id))


def test_accept_streams_at_once_with_headers_for_proxies(server: Server) -> None:
    with server.wire() as wire:
        wire.send("POST", "/v1/streams", BODY, SSE)
        assert wire.head() == 200
        stream_id = wire.headers["x-stream-id"]
        assert wire.headers["location"] == f"/v1/streams/{stream_id}/events"
        assert wire.headers["content-location"] == f"/v1/streams/{stream_id}"
        assert wire.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert wire.headers["cache-control"] == "no-cache, no-transform"
        assert wire.headers["x-accel-buffering"] == "no"
        assert wire.headers["transfer-encoding"] == "chunked"
        assert not {"content-length", "connection", "content-encoding", "server"} & set(wire.headers)
        assert wire.body() == b"".join(ANSWER.native(stream_id))
        assert wire.request("GET", f"/v1/streams/{stream_id}/events")[0] == 200  # the connection is as good as new


def test_a_chat_is_rendered_with_the_template(server: Server) -> None:
    answer = Answer(chat_ids("Hello, river!"), 12, seed=1)
    body = {"messages": [{"role": "user", "content": "Hello, river!"}], "max_tokens": 12, "seed": 1}
    stream_id = server.create(body)
    assert _events(server, stream_id).content == b"".join(answer.native(stream_id))


def test_bytes_are_ascii_lines_that_end_in_lf(server: Server, finished: str) -> None:
    body = _events(server, finished).content
    assert body.isascii()
    assert b"\r" not in body
    assert sse_ids(body) == [f"{finished}-{seq}" for seq in range(1, LAST + 1)]
    assert len(sse_data(body)) == LAST
    assert "".join(as_json(line).get("text", "") for line in sse_data(body)) == ANSWER.text


@pytest.mark.parametrize("how", ["header", "number", "id", "header over query"])
def test_an_ended_stream_resumes_after_every_event(server: Server, finished: str, how: str) -> None:
    events = ANSWER.native(finished)
    for seq in range(LAST + 1):
        event_id = f"{finished}-{seq}"
        if how == "header":
            answer = _events(server, finished, last_event_id=event_id)
        elif how == "number":
            answer = _events(server, finished, f"?after={seq}")
        elif how == "id":
            answer = _events(server, finished, f"?after={event_id}")
        else:
            answer = _events(server, finished, "?after=3", last_event_id=event_id)
        assert answer.status_code == (200 if seq < LAST else 204), seq
        assert answer.content == b"".join(events[seq:]), seq
        assert answer.headers["x-stream-id"] == finished


def test_a_running_stream_resumes_after_every_event(paced: Server) -> None:
    """At each event another reader resumes after it, while the first one continues."""
    stream_id = paced.create(BODY)
    followers = []
    undisturbed = b""
    with _follow(paced, stream_id) as reader:
        for seq, event in enumerate(reader.events(), 1):
            undisturbed += event
            if seq < LAST:
                followers.append((undisturbed, _follow(paced, stream_id, seq)))
    assert undisturbed == b"".join(ANSWER.native(stream_id))
    assert len(followers) == ANSWER.count
    for already_read, follower in followers:
        with follower:
            assert already_read + follower.body() == undisturbed


def test_a_reader_cut_off_at_every_byte_loses_and_repeats_nothing(server: Server, finished: str) -> None:
    """An EventSource keeps the complete events of a broken body, and resumes after the last id."""
    whole = _events(server, finished).content
    for length in range(0, len(whole), 5):
        kept = whole[: whole[:length].rfind(b"\n\n") + 2] if b"\n\n" in whole[:length] else b""
        last_event_id = (sse_ids(kept) or [""])[-1]
        rest = _events(server, finished, last_event_id=last_event_id)
        assert kept + rest.content == whole


def test_many_readers_see_the_same_bytes(paced: Server) -> None:
    stream_id = paced.create(BODY)
    wires = [_follow(paced, stream_id) for _ in range(40)]
    expected = b"".join(ANSWER.native(stream_id))
    for wire in wires:
        with wire:
            assert wire.body() == expected


def test_a_cursor_ahead_of_a_stream_is_wrong_when_it_has_ended_too(server: Server, finished: str) -> None:
    for answer in (
        _events(server, finished, f"?after={LAST + 1}"),
        _events(server, finished, last_event_id=f"{finished}-99"),
    ):
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "seq_out_of_range"


def test_a_cursor_must_be_of_this_stream_and_not_ahead_of_it(paced: Server) -> None:
    stream_id = paced.create({**BODY, "max_tokens": 10_000})
    other_id = paced.create({**BODY, "max_tokens": 1})
    assert _error(_events(paced, stream_id, last_event_id=f"{stream_id}-9000")) == (400, "seq_out_of_range")
    assert _error(_events(paced, stream_id, "?after=9000")) == (400, "seq_out_of_range")
    assert _error(_events(paced, stream_id, last_event_id=f"{other_id}-1")) == (409, "foreign_cursor")
    assert _error(_events(paced, stream_id, f"?after={other_id}-1")) == (409, "foreign_cursor")
    for malformed in (
        "-1",
        "+1",
        "1.5",
        "01",
        f"{stream_id}-",
        f"{stream_id}-x",
        "9" * 16,
        f"{stream_id}-" + "9" * 400,
    ):
        assert _error(_events(paced, stream_id, last_event_id=malformed)) == (400, "seq_out_of_range")
    assert _error(_events(paced, "A" * 22)) == (404, "unknown_stream")
    assert paced.http.delete(f"/v1/streams/{stream_id}").status_code == 204


def test_cancelling_ends_the_stream_for_everybody_and_twice_is_once(paced: Server) -> None:
    stream_id = paced.create({**BODY, "max_tokens": 10_000})
    reader = _follow(paced, stream_id)
    first = reader.event()
    answer = paced.http.post(f"/v1/streams/{stream_id}/cancel")
    assert answer.status_code == 200
    state = answer.json()
    assert state["status"] == "cancelled"
    rest = reader.body()
    reader.close()
    *deltas, end = sse_data(first + rest)
    assert b"event: cancelled\n" in rest
    assert as_json(end) == {"status": "cancelled", "usage": state["usage"]}
    expected = Answer(ANSWER.prompt, 10_000, ANSWER.seed)
    assert [as_json(delta)["token_ids"][0] for delta in deltas] == expected.token_ids[: len(deltas)]
    assert state["usage"]["completion_tokens"] == len(deltas)
    assert state["text"] == "".join(expected.texts[: len(deltas)])
    again = paced.http.post(f"/v1/streams/{stream_id}/cancel").json()
    assert {**again, "expires_in_s": 0} == {**state, "expires_in_s": 0}


def test_cancelling_an_ended_stream_has_no_effect(server: Server, finished: str) -> None:
    state = server.http.post(f"/v1/streams/{finished}/cancel").json()
    assert state["status"] == "done"
    assert _events(server, finished).content == b"".join(ANSWER.native(finished))


def test_deleting_ends_a_stream_and_removes_it(paced: Server) -> None:
    stream_id = paced.create({**BODY, "max_tokens": 10_000})
    with _follow(paced, stream_id) as reader:
        reader.event()
        assert paced.http.delete(f"/v1/streams/{stream_id}").status_code == 204
        assert b"event: cancelled\n" in reader.body()  # who was reading learns how it ended
    path = f"/v1/streams/{stream_id}"
    for method, url in (("GET", path), ("GET", path + "/events"), ("POST", path + "/cancel"), ("DELETE", path)):
        assert _error(paced.http.request(method, url)) == (410, "stream_expired")
    resumed = paced.post("/v1/streams", BODY, last_event_id=f"{stream_id}-1")
    assert _error(resumed) == (410, "stream_expired")


def test_the_state_carries_the_text_so_far(paced: Server) -> None:
    answer = Answer("State.", 40, seed=3)
    stream_id = paced.create({"prompt": "State.", "max_tokens": 40, "seed": 3})
    with _follow(paced, stream_id) as reader:
        for _ in range(10):
            reader.event()
        state = paced.state(stream_id)
        assert state["status"] == "running"
        seen = int(state["last_event_id"].rpartition("-")[2])
        assert seen >= 10
        assert state["text"] == "".join(answer.texts[:seen])
        assert "usage" not in state
        reader.body()
    state = paced.state(stream_id)
    assert state["status"] == "done"
    assert state["text"] == answer.text
    assert state["usage"] == answer.usage
    assert state["last_event_id"] == f"{stream_id}-41"
    assert 0 < state["expires_in_s"] <= 900


def test_the_same_key_and_body_are_the_same_stream(server: Server) -> None:
    first = server.create(BODY, idempotency_key="key-1")
    assert server.create(BODY, idempotency_key="key-1") == first
    assert server.create(dict(reversed(BODY.items())), idempotency_key="key-1") == first  # an object has no order
    answer = server.post("/v1/streams", BODY, idempotency_key="key-1", **SSE)
    assert answer.content == b"".join(ANSWER.native(first))
    assert server.create(BODY, idempotency_key="key-2") != first
    assert server.create(BODY) != first


def test_the_same_chat_in_another_order_of_fields_is_the_same_body(server: Server) -> None:
    one = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
    other = {"max_tokens": 2, "messages": [{"content": "Hello", "role": "user"}]}
    first = server.create(one, idempotency_key="key-order")
    assert server.create(other, idempotency_key="key-order") == first


def test_the_same_key_with_another_body_is_409(server: Server) -> None:
    server.create(BODY, idempotency_key="key-3")
    answer = server.post("/v1/streams", {**BODY, "seed": 8}, idempotency_key="key-3")
    assert _error(answer) == (409, "idempotency_conflict")


@pytest.mark.parametrize("prompt", ["short", "long " * 8000], ids=["short", "tokenised in a thread"])
def test_twenty_at_once_with_one_key_are_one_generation(serve: Callable[..., Server], prompt: str) -> None:
    """There is one slot, so a second generation would be refused."""
    server = serve("scripted:tokens_per_s=100", "--max-concurrent-requests", "1")
    body = {"prompt": prompt, "max_tokens": 50, "seed": 1}
    wires = [server.wire() for _ in range(20)]
    for wire in wires:
        wire.send("POST", "/v1/streams", body, {"idempotency-key": "twins"})
    answers = []
    for wire in wires:
        with wire:
            answers.append((wire.head(), as_json(wire.body())))
    assert {status for status, _ in answers} == {201}
    (stream_id,) = {state["id"] for _, state in answers}
    assert _events(server, stream_id).content == b"".join(Answer(prompt, 50, seed=1).native(stream_id))


def test_a_key_may_be_used_again_after_a_refusal(server: Server) -> None:
    assert _error(server.post("/v1/streams", {**BODY, "prompt": "x" * 70_000}, idempotency_key="key-4"))[0] == 400
    stream_id = server.create(BODY, idempotency_key="key-4")
    assert _events(server, stream_id).content == b"".join(ANSWER.native(stream_id))


def test_a_repeated_post_with_a_cursor_resumes_and_never_generates(server: Server, finished: str) -> None:
    for seq in (0, 1, 13, LAST - 1):
        answer = server.post("/v1/streams", BODY, last_event_id=f"{finished}-{seq}", **SSE)
        assert answer.status_code == 200
        assert answer.headers["x-stream-id"] == finished
        assert answer.content == b"".join(ANSWER.native(finished)[seq:])
    assert server.post("/v1/streams", BODY, last_event_id=f"{finished}-{LAST}").status_code == 204
    assert _error(server.post("/v1/streams", BODY, last_event_id=f"{'B' * 22}-4")) == (404, "unknown_stream")
    assert _error(server.post("/v1/streams", BODY, last_event_id="4")) == (400, "seq_out_of_range")


def test_head_answers_without_a_body(paced: Server) -> None:
    stream_id = paced.create({**BODY, "max_tokens": 10_000})
    with paced.wire() as wire:
        wire.send("HEAD", f"/v1/streams/{stream_id}/events")
        assert wire.head() == 200
        assert wire.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert "content-length" not in wire.headers
        assert wire.request("GET", "/health")[0] == 200  # nothing of a body came in between
    assert paced.http.delete(f"/v1/streams/{stream_id}").status_code == 204


def test_heartbeats_are_comments_between_events(serve: Callable[..., Server]) -> None:
    server = serve("scripted:tokens_per_s=2", "--heartbeat-s", "0.2", "--max-sequences", "1")
    running = server.create({"prompt": "a", "max_tokens": 3, "seed": 1})
    waiting = server.create({"prompt": "b", "max_tokens": 1, "seed": 1})
    with _follow(server, running) as first, _follow(server, waiting) as second:
        bodies = first.body(), second.body()
    for body, answer, stream_id in zip(bodies, (Answer("a", 3, 1), Answer("b", 1, 1)), (running, waiting), strict=True):
        assert body.count(b": hb\n") >= 3
        assert b"hb\n\n" not in body  # a blank line after it would be an event to some clients
        events = body.split(b"\n\n")
        assert [event.lstrip(b": hb\n") for event in events] == [
            event.removesuffix(b"\n\n") for event in [*answer.native(stream_id), b""]
        ]
    assert bodies[1].startswith(b": hb\n")  # a long queue is a silence like any other


def test_a_stream_continues_after_a_disconnect(paced: Server) -> None:
    with paced.wire() as wire:
        wire.send("POST", "/v1/streams", BODY, SSE)
        assert wire.head() == 200
        stream_id = wire.headers["x-stream-id"]
        first = wire.event()
    assert paced.wait_state(stream_id, "done", "cancelled")["text"] == ANSWER.text
    assert first + _events(paced, stream_id, "?after=1").content == b"".join(ANSWER.native(stream_id))


def test_a_disconnect_cancels_with_on_disconnect_cancel(paced: Server) -> None:
    with paced.wire() as wire:
        wire.send("POST", "/v1/streams", {**BODY, "max_tokens": 10_000, "on_disconnect": "cancel"}, SSE)
        assert wire.head() == 200
        stream_id = wire.headers["x-stream-id"]
        wire.event()
    assert paced.wait_state(stream_id, "cancelled")


def test_a_stream_without_readers_is_cancelled(paced: Server) -> None:
    body = {**BODY, "max_tokens": 10_000, "linger_s": 0.3}
    never_read = paced.create(body)
    with _begin(paced, body) as wire:
        left = wire.headers["x-stream-id"]
        wire.event()
    with _begin(paced, body) as reader:
        read = reader.headers["x-stream-id"]
        paced.wait_state(never_read, "cancelled")
        paced.wait_state(left, "cancelled")
        reader.event()
        assert paced.state(read)["status"] == "running"
    paced.wait_state(read, "cancelled")


def test_an_ended_stream_expires(serve: Callable[..., Server]) -> None:
    server = serve("scripted", "--retention-s", "0.5")
    stream_id = server.create(BODY, idempotency_key="once")
    assert _events(server, stream_id).status_code == 200
    deadline_s = time.monotonic() + LONG_S
    while (answer := _events(server, stream_id)).status_code == 200 and time.monotonic() < deadline_s:
        time.sleep(0.02)  # the passing of time is what is under test
    assert _error(answer) == (410, "stream_expired")
    assert server.create(BODY, idempotency_key="once") != stream_id


def test_two_choices_are_two_seeds(server: Server) -> None:
    stream_id = server.create({**BODY, "n": 2})
    deltas = [as_json(line) for line in sse_data(_events(server, stream_id).content)][:-1]
    texts = []
    for choice in (0, 1):
        mine = [delta for delta in deltas if delta.get("choice", 0) == choice]
        expected = Answer(ANSWER.prompt, ANSWER.count, ANSWER.seed + choice)
        assert [delta["token_ids"] for delta in mine] == [[token_id] for token_id in expected.token_ids]
        assert [delta.get("finish_reason") for delta in mine] == [None] * (ANSWER.count - 1) + ["length"]
        texts.append(expected.text)
    state = server.state(stream_id)
    assert state["choices"] == texts
    assert state["text"] == texts[0]
    assert state["usage"]["completion_tokens"] == 2 * ANSWER.count


def test_stop_strings_and_logprobs(server: Server) -> None:
    answer = Answer(ANSWER.prompt, 60, ANSWER.seed)
    stop = answer.text[30:34]
    shown = answer.text[: answer.text.index(stop)]
    stream_id = server.create({**BODY, "max_tokens": 60, "stop": [stop, "never"], "logprobs": True})
    *deltas, end = (as_json(line) for line in sse_data(_events(server, stream_id).content))
    assert "".join(delta["text"] for delta in deltas) == shown
    assert deltas[-1]["finish_reason"] == "stop"
    assert deltas[-1]["stop"] == stop
    assert all(delta["logprobs"] == [-0.5] * len(delta["token_ids"]) for delta in deltas)
    assert end["status"] == "done"


def test_create_and_cancel_race_and_leave_no_stream(paced: Server) -> None:
    def one(_: int) -> str:
        stream_id = paced.create({**BODY, "max_tokens": 10_000})
        with _follow(paced, stream_id) as reader:
            assert paced.http.post(f"/v1/streams/{stream_id}/cancel").json()["status"] == "cancelled"
            return reader.body().decode().rpartition("event: ")[2].partition("\n")[0]

    with ThreadPoolExecutor(20) as pool:
        assert set(pool.map(one, range(60))) == {"cancelled"}
