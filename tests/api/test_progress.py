"""How much of a long prompt is read, over real sockets. The scripted engine reads 400 tokens in two seconds."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from tests.api.process import Server
from tests.http.wire import Wire, as_json
from tests.waiting import until
from websockets.sync.client import connect

SSE = {"accept": "text/event-stream"}
NUM_TOKENS = 400
BODY = {"prompt": "x" * NUM_TOKENS, "max_tokens": 3, "seed": 1}
ASKED = BODY | {"return_progress": True}


@pytest.fixture(scope="module")
def slow() -> Iterator[Server]:
    with contextlib.closing(Server("scripted:prefill_tokens_per_s=200,eos_after=3", "--heartbeat-s", "60")) as started:
        yield started.wait_ready()


def _blocks(wire: Wire) -> Iterator[dict[str, str]]:
    """Yield the events of an answer, each as the fields of its lines."""
    rest = b""
    while piece := wire.chunk():
        *blocks, rest = (rest + piece).split(b"\n\n")
        yield from (dict(line.split(": ", 1) for line in block.decode().splitlines()) for block in blocks)


def _begin(server: Server, path: str, body: dict[str, Any]) -> Wire:
    wire = server.wire()
    wire.send("POST", path, body, SSE)
    assert wire.head() == 200
    return wire


def _require_grows(reports: list[dict[str, Any]], num_tokens: int = NUM_TOKENS) -> None:
    """Require that a prompt without cached tokens is read from its beginning to its end."""
    assert len(reports) > 2
    assert len(reports) < 40  # each of 400 tokens would be one without a limit
    assert {report["total"] for report in reports} == {num_tokens}
    assert {report["cache"] for report in reports} == {0}
    for name in ("processed", "time_ms"):
        numbers = [report[name] for report in reports]
        assert numbers == sorted(numbers)
    assert 0 < reports[1]["processed"] <= num_tokens


def test_the_native_wire_reports_before_the_first_event(slow: Server) -> None:
    with _begin(slow, "/v1/streams", ASKED) as wire:
        events = list(_blocks(wire))
    assert "x-tailrace-ignored" not in wire.headers
    kinds = [event.get("event", "text") for event in events]
    num_reports = kinds.count("progress")
    assert kinds == ["progress"] * num_reports + ["text"] * 3 + ["done"]
    reports = events[:num_reports]
    assert all("id" not in report for report in reports)  # a client that breaks off here begins at the beginning
    _require_grows([as_json(report["data"]) for report in reports])
    assert [event["id"].rpartition("-")[2] for event in events[num_reports:]] == ["1", "2", "3", "4"]


def test_nobody_gets_it_who_has_not_asked(slow: Server) -> None:
    with _begin(slow, "/v1/streams", BODY) as wire:
        stream_id = wire.headers["x-stream-id"]
        with slow.wire() as other:
            other.send("GET", f"/v1/streams/{stream_id}/events?return_progress=true")
            assert other.head() == 200
            asked = list(_blocks(other))
        events = list(_blocks(wire))
    assert "progress" not in [event.get("event") for event in events]
    assert asked[0]["event"] == "progress"
    assert [event for event in asked if event.get("event") != "progress"] == events


def test_a_late_reader_gets_what_is_true_now(slow: Server) -> None:
    stream_id = slow.create(BODY)
    until(lambda: slow.state(stream_id).get("prompt_progress", {}).get("processed", 0) > NUM_TOKENS // 4)
    with slow.wire() as wire:
        wire.send("GET", f"/v1/streams/{stream_id}/events?return_progress=true")
        assert wire.head() == 200
        events = list(_blocks(wire))
    assert events[0]["event"] == "progress"
    assert as_json(events[0]["data"])["processed"] > NUM_TOKENS // 4
    assert "prompt_progress" not in slow.state(stream_id)
    again = slow.http.get(f"/v1/streams/{stream_id}/events?return_progress=true").text
    assert "progress" not in again


def test_openai_chats_have_llama_cpps_chunks(slow: Server) -> None:
    body = {"messages": [{"role": "user", "content": BODY["prompt"]}], "max_tokens": 3, "stream": True}
    with _begin(slow, "/v1/chat/completions", body | {"return_progress": True}) as wire:
        *chunks, last = [event["data"] for event in _blocks(wire)]
    assert last == "[DONE]"
    found = [as_json(chunk) for chunk in chunks]
    reports = [chunk for chunk in found if "prompt_progress" in chunk]
    assert found[: len(reports)] == reports
    _require_grows([report["prompt_progress"] for report in reports], reports[0]["prompt_progress"]["total"])
    deltas = [chunk["choices"][0]["delta"] for chunk in found]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert [delta.get("role") for delta in deltas].count("assistant") == 1
    assert all(delta == {} for delta in deltas[1 : len(reports)])


def test_openais_client_reads_them(slow: Server) -> None:
    """Its helper joins the deltas: a role that comes twice would be `assistantassistant`."""
    with OpenAI(base_url=f"{slow.url}/v1", api_key="none", max_retries=0) as client:
        asked = client.chat.completions.stream(
            model="scripted",
            messages=[{"role": "user", "content": "x" * NUM_TOKENS}],
            max_tokens=9,  # more than it has: the helper raises if the length ends an answer
            extra_body={"return_progress": True},
        )
        with asked as stream:
            chunks = [event.chunk for event in stream if event.type == "chunk"]
            message = stream.get_final_completion().choices[0].message
    reports = [chunk.model_extra["prompt_progress"] for chunk in chunks if chunk.model_extra]
    _require_grows(reports, reports[0]["total"])
    assert message.role == "assistant"
    assert message.content


def test_completions_too(slow: Server) -> None:
    with _begin(slow, "/v1/completions", ASKED | {"stream": True}) as wire:
        *chunks, _ = [event["data"] for event in _blocks(wire)]
    reports = [as_json(chunk) for chunk in chunks if "prompt_progress" in chunk]
    _require_grows([report["prompt_progress"] for report in reports])
    assert {report["choices"][0]["text"] for report in reports} == {""}


def test_two_prompts_are_summed(slow: Server) -> None:
    body = {"prompt": ["x" * 200, "y" * 200], "n": 2, "max_tokens": 1, "stream": True, "return_progress": True}
    with _begin(slow, "/v1/completions", body) as wire:
        *chunks, _ = [event["data"] for event in _blocks(wire)]
    reports = [as_json(chunk)["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk]
    _require_grows(reports)
    assert max(report["processed"] for report in reports) > 200


def test_a_prompt_whose_engine_died_is_read_from_its_beginning(slow: Server) -> None:
    with _begin(slow, "/v1/streams", ASKED) as wire:
        events = _blocks(wire)
        first: list[int] = []
        for event in events:
            first.append(as_json(event["data"])["processed"])
            if first[-1] > NUM_TOKENS // 4:
                break
        slow.worker().send_signal(signal.SIGKILL)
        rest = list(events)
    reports = [as_json(event["data"])["processed"] for event in rest if event.get("event") == "progress"]
    assert min(reports) < first[-1]  # it begins again
    assert reports[-1] > first[-1]
    kinds = [event.get("event", "text") for event in rest[len(reports) :]]
    assert kinds == ["text"] * 3 + ["done"]  # and none between the tokens


def test_a_prompt_whose_server_died_is_read_by_the_next_one(tmp_path: Path) -> None:
    source, flags = "scripted:prefill_tokens_per_s=200,eos_after=3", ("--data-dir", str(tmp_path))
    with contextlib.closing(Server(source, *flags)) as first:
        stream_id = first.wait_ready().create(BODY)
        until(lambda: first.state(stream_id).get("prompt_progress", {}).get("processed", 0) > 0)
        first.send_signal(signal.SIGKILL)
        first.wait()
    with contextlib.closing(Server(source, *flags)) as second, second.wait_ready().wire() as wire:
        wire.send("GET", f"/v1/streams/{stream_id}/events?return_progress=true")
        assert wire.head() == 200
        events = list(_blocks(wire))
    kinds = [event.get("event", "text") for event in events]
    assert kinds == ["progress"] * kinds.count("progress") + ["text"] * 3 + ["done"]
    assert kinds[0] == "progress"
    assert [event["id"] for event in events if "id" in event] == [f"{stream_id}-{seq}" for seq in range(1, 5)]


def test_a_stream_that_is_replayed_says_nothing() -> None:
    """It has events, and its prompt is read again after the death of its engine."""
    source, body = "scripted:prefill_tokens_per_s=400,tokens_per_s=10", ASKED | {"max_tokens": 20}
    with contextlib.closing(Server(source)) as paced, _begin(paced.wait_ready(), "/v1/streams", body) as wire:
        events, kinds = _blocks(wire), list[str]()
        for event in events:
            kinds.append(event.get("event", "text"))
            if kinds.count("text") == 5:
                paced.worker().send_signal(signal.SIGKILL)
        ids = event["id"]
    num_reports = kinds.count("progress")
    assert kinds == ["progress"] * num_reports + ["text"] * 20 + ["done"]
    assert num_reports > 1
    assert ids.endswith("-21")
    assert as_json(event["data"])["continuity"] == "replayed"


def test_a_socket_has_frames_without_a_number(slow: Server) -> None:
    with connect(f"ws://127.0.0.1:{slow.port}/v1/ws") as socket:
        socket.send(json.dumps({"type": "create", "id": "a", **ASKED}))
        created = json.loads(socket.recv())
        assert created == {"type": "created", "id": "a", "stream_id": created["stream_id"]}
        with connect(f"ws://127.0.0.1:{slow.port}/v1/ws") as other:
            other.send(json.dumps({"type": "follow", "stream_id": created["stream_id"]}))
            frames = [json.loads(socket.recv())]
            while frames[-1]["type"] != "done":
                frames.append(json.loads(socket.recv()))
            quiet = [json.loads(other.recv())["type"] for _ in range(5)]
    kinds = [frame["type"] for frame in frames]
    reports = frames[: kinds.count("progress")]
    assert kinds == ["progress"] * len(reports) + ["delta"] * 3 + ["done"]
    assert all(frame["id"] == "a" and "seq" not in frame for frame in reports)
    _require_grows(reports)
    assert [frame["seq"] for frame in frames[len(reports) :]] == [1, 2, 3, 4]
    assert quiet == ["following", "delta", "delta", "delta", "done"]


def test_a_socket_names_an_engine_that_cannot_say_it(server: Server) -> None:
    with connect(f"ws://127.0.0.1:{server.port}/v1/ws") as socket:
        socket.send(json.dumps({"type": "create", **ASKED}))
        assert json.loads(socket.recv())["ignored"] == ["return_progress"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/streams", ASKED),
        ("/v1/completions", ASKED | {"stream": True}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, "stream": True}),
    ],
)
def test_an_engine_that_cannot_say_it_is_named(server: Server, path: str, body: dict[str, Any]) -> None:
    with _begin(server, path, body | {"return_progress": True}) as wire:
        events = list(_blocks(wire))
    assert wire.headers["x-tailrace-ignored"] == "return_progress"
    assert not [event for event in events if "progress" in event.get("event", "") + event["data"]]


def test_an_answer_in_one_piece_has_no_place_for_it(slow: Server) -> None:
    answer = slow.post("/v1/completions", {"prompt": "Hi", "max_tokens": 1, "return_progress": True})
    assert answer.status_code == 200
    assert answer.headers["x-tailrace-ignored"] == "return_progress"


def test_a_wrong_value_is_refused(slow: Server) -> None:
    for answer in (
        slow.post("/v1/streams", BODY | {"return_progress": "yes"}),
        slow.http.get("/v1/streams/abc/events?return_progress=yes"),
    ):
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "return_progress"
