"""The clients of the `websockets` library, and a client that breaks the protocol, with a real server."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import psutil
import pytest
from tests.api.oracle import Answer
from tests.api.process import Server
from tests.clients.json_socket import open_socket, receive_json, send_json, wait_close
from tests.http.frames import (
    CLOSE,
    TEXT,
    FrameWire,
    frame,
)
from tests.http.wire import as_json, sse_data
from tests.waiting import LONG_S
from websockets.asyncio.client import connect as connect_async
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection

FINISHED = "<<Response Finished>>"

# As printed in the tutorial.
SCRIPT = """
from websockets.sync.client import connect

with connect("ws://localhost:8000") as websocket:
    websocket.send("Space the final")
    while True:
        received = websocket.recv()
        if received == "<<Response Finished>>":
            break
        print(received, end="")
    print("\\n")

    websocket.send(" These are the voyages")
    while True:
        received = websocket.recv()
        if received == "<<Response Finished>>":
            break
        print(received, end="")
    print("\\n")
"""


def _follow(socket: ClientConnection, name: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the deltas and the end of one stream. The socket has no other frames."""
    deltas: list[dict[str, Any]] = []
    while True:
        found = receive_json(socket)
        assert found["id"] == name
        if found["type"] != "delta":
            return deltas, found
        deltas.append(found)


def _frames(answer: Answer, name: str, stream_id: str) -> list[dict[str, Any]]:
    """Convert events of the native wire to the frames of a socket."""
    frames = []
    for seq, event in enumerate(answer.native(stream_id), 1):
        (fields,) = map(as_json, sse_data(event))
        kind = fields.get("status", "delta")
        frames.append({"type": kind, "id": name, "stream_id": stream_id, "seq": seq, **fields})
    return frames


# The tutorial


def test_the_script_of_the_tutorial(paced: Server) -> None:
    server = paced
    script = SCRIPT.replace("localhost:8000", f"localhost:{server.port}")
    environment = {"PATH": ""}
    with subprocess.Popen(
        [sys.executable, "-u", "-c", script], stdout=subprocess.PIPE, text=True, env=environment
    ) as ran:  # fmt: skip
        assert ran.stdout is not None
        first = ran.stdout.read(40)  # long before the answer is complete: 1,024 tokens take ten seconds
        ran.terminate()
        ran.stdout.close()
    assert len(first) == 40
    assert first.strip()


def test_the_script_of_the_tutorial_to_its_end(serve: Callable[..., Server]) -> None:
    server = serve("scripted:eos_after=25")
    script = SCRIPT.replace("localhost:8000", f"localhost:{server.port}")
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=LONG_S, check=True)
    first, between, second, rest = ran.stdout.split("\n", 3)
    assert first
    assert second
    assert first != second
    assert (between, rest) == ("", "\n")


def test_a_frame_is_a_token_of_a_conversation(serve: Callable[..., Server]) -> None:
    server = serve("scripted:eos_after=25")
    words = set(Answer("any", 2000).texts)
    with open_socket(server, "/") as socket:
        for prompt in ("Space the final", " These are the voyages", "🌊"):
            socket.send(prompt)
            frames = []
            while (received := socket.recv(timeout=LONG_S)) != FINISHED:
                frames.append(received)
            assert len(frames) == 12 + 3  # words, and characters of four tokens each
            assert set(frames) <= words - {""}


async def test_the_asynchronous_client(serve: Callable[..., Server]) -> None:
    server = serve("scripted:eos_after=9")
    async with connect_async(f"ws://127.0.0.1:{server.port}/", proxy=None) as socket:
        await socket.send("Hello")
        async for received in socket:
            assert received
            if received == FINISHED:
                break
    assert socket.close_code == 1000


@pytest.mark.deep
def test_leaving_frees_the_engine(serve: Callable[..., Server]) -> None:
    server = serve("scripted:tokens_per_s=50", "--max-concurrent-requests", "1")
    for how in ("close", "vanish"):
        wire = FrameWire(server.port)
        wire.open("/")
        wire.send_bytes(frame(TEXT, b"A long story"))
        assert wire.frame()[0] == TEXT
        if how == "close":
            wire.send_bytes(frame(CLOSE))
            assert wire.closing() == (0, "")
        wire.close()
        deadline_s = time.monotonic() + LONG_S
        while server.post("/v1/streams", {"prompt": "x", "max_tokens": 1}).status_code == 429:
            assert time.monotonic() < deadline_s
        deadline_s = time.monotonic() + LONG_S
        while server.post("/v1/completions", {"prompt": "x", "max_tokens": 1}).status_code == 429:
            assert time.monotonic() < deadline_s


def test_an_engine_that_dies_disturbs_neither_chat_nor_streams(serve: Callable[..., Server]) -> None:
    server = serve("scripted:tokens_per_s=100")
    with open_socket(server, "/") as chat, open_socket(server) as socket:
        chat.send("A long story")
        chat.recv(timeout=LONG_S)
        send_json(socket, type="create", id="a", prompt="Now <|crash|>", max_tokens=50)
        assert receive_json(socket)["type"] == "created"
        deltas, end = _follow(socket, "a")
        assert len(deltas) == 3
        assert (end["type"], end["error"]["code"]) == ("error", "poison_request")
        assert chat.recv(timeout=LONG_S)
        send_json(socket, type="create", id="a", prompt="Next.", max_tokens=5, seed=1)
        created = receive_json(socket)
        deltas, end = _follow(socket, "a")
        assert [*deltas, end] == _frames(Answer("Next.", 5, 1), "a", created["stream_id"])


# Many streams


def test_streams_side_by_side_are_exact(server: Server) -> None:
    with open_socket(server) as socket:
        heard: dict[str, list[dict[str, Any]]] = {}
        ids = {}
        for seed in range(16):
            send_json(socket, type="create", id=f"s{seed}", prompt="Side by side.", max_tokens=50, seed=seed)
        while len(heard) < 16 or any(frames[-1]["type"] != "done" for frames in heard.values()):
            found = receive_json(socket)
            if found["type"] == "created":
                ids[found["id"]] = found["stream_id"]
            else:
                heard.setdefault(found["id"], []).append(found)
        for seed in range(16):
            name = f"s{seed}"
            assert heard[name] == _frames(Answer("Side by side.", 50, seed), name, ids[name])
    # They are streams like any other.
    answer = Answer("Side by side.", 50, 3).native(ids["s3"])
    assert server.http.get(f"/v1/streams/{ids['s3']}/events").content == b"".join(answer)


def test_a_stream_of_http_is_followed_and_its_number_goes_back_and_forth(paced: Server) -> None:
    answer = Answer("There and back.", 40, 7)
    stream_id = paced.create({"prompt": "There and back.", "max_tokens": 40, "seed": 7})
    frames: list[dict[str, Any]] = []
    while not frames or frames[-1]["type"] == "delta":
        with open_socket(paced) as socket:  # cut after every seventh event
            send_json(socket, type="follow", id="a", last_event_id=f"{stream_id}-{len(frames)}")
            assert receive_json(socket)["type"] == "following"
            for _ in range(7):
                frames.append(receive_json(socket))
                if frames[-1]["type"] != "delta":
                    break
    assert frames == _frames(answer, "a", stream_id)
    events = paced.http.get(f"/v1/streams/{stream_id}/events", headers={"last-event-id": f"{stream_id}-20"})
    assert events.content == b"".join(answer.native(stream_id)[20:])
    with open_socket(paced) as socket:
        send_json(socket, type="follow", id="a", stream_id=stream_id, after=41)
        assert receive_json(socket)["type"] == "ended"


def test_cancelling_on_one_socket_ends_the_stream_on_all(paced: Server) -> None:
    with open_socket(paced) as one, open_socket(paced) as other:
        send_json(one, type="create", id="a", prompt="Long.", max_tokens=5000, seed=1)
        stream_id = receive_json(one)["stream_id"]
        send_json(other, type="follow", id="b", stream_id=stream_id)
        assert receive_json(other)["type"] == "following"
        send_json(other, type="cancel", id="b")
        for socket in (one, other):
            while (found := receive_json(socket))["type"] in ("delta", "status"):
                pass
            assert found["type"] == "cancelled"
    assert paced.state(stream_id)["status"] == "cancelled"


def test_what_was_said_before_closing_is_heard(paced: Server) -> None:
    stream_id = paced.create({"prompt": "Long.", "max_tokens": 5000})
    with FrameWire(paced.port) as wire:
        wire.open("/v1/ws")
        command = json.dumps({"type": "cancel", "stream_id": stream_id}).encode()
        wire.send_bytes(frame(TEXT, command) + frame(CLOSE, b"\x03\xe8"))
        assert wire.closing()[0] == 1000
    assert paced.wait_state(stream_id, "cancelled")


@pytest.mark.deep
def test_overload_is_refused_in_a_frame_and_the_chat_waits(serve: Callable[..., Server]) -> None:
    server = serve("scripted:eos_after=20,tokens_per_s=200", "--max-concurrent-requests", "1")
    with open_socket(server) as socket, open_socket(server, "/") as chat:
        send_json(socket, type="create", id="a", prompt="Long.", max_tokens=5_000, ignore_eos=True)
        assert receive_json(socket)["type"] == "created"
        send_json(socket, type="create", id="b", prompt="Long.")
        chat.send("Hello")
        while (found := receive_json(socket))["type"] != "refused":
            assert found["type"] == "delta"
        assert (found["id"], found["error"]["code"]) == ("b", "overloaded")
        assert found["retry_after_s"] >= 1
        send_json(socket, type="cancel", id="a")
        frames = []
        while (received := chat.recv(timeout=LONG_S)) != FINISHED:
            frames.append(received)
        assert len(frames) > 10


# Slow ones, and the end


def test_a_stalled_reader_does_not_delay_others(server: Server) -> None:
    """The stream is larger than the kernel's buffers. The reader gets all of it in the end."""
    count = 20_000
    slow = Answer("Slow.", count, 1)
    memory = psutil.Process(server.process.pid).memory_info
    stream_id = server.create({"prompt": "Slow.", "max_tokens": count, "seed": 1})
    server.wait_state(stream_id, "done")
    with FrameWire(server.port, receive_bytes=65_536) as wire:
        wire.open("/v1/ws")
        before_bytes = memory().rss
        wire.send_bytes(frame(TEXT, json.dumps({"type": "follow", "id": "a", "stream_id": stream_id}).encode()))
        with open_socket(server) as socket:
            for seed in range(5):
                send_json(socket, type="create", id="b", prompt="Quick.", max_tokens=50, seed=seed)
                quick_id = receive_json(socket)["stream_id"]
                deltas, end = _follow(socket, "b")
                assert [*deltas, end] == _frames(Answer("Quick.", 50, seed), "b", quick_id)
        assert memory().rss - before_bytes < 5 * 2**20
        heard: list[dict[str, Any]] = []
        while not heard or heard[-1]["type"] in ("following", "delta"):
            heard.append(as_json(wire.frame()[1]))
    assert heard[1:] == _frames(slow, "a", stream_id)


def test_a_socket_goes_away_with_its_server(serve: Callable[..., Server]) -> None:
    server = serve("scripted:tokens_per_s=50", "--drain-s", "1.0")
    answer = Answer("Short.", 25, 2)
    with ExitStack() as stack:
        idle, chat, streaming = (stack.enter_context(open_socket(server, path)) for path in ("/", "/", "/v1/ws"))
        chat.send("A long story")
        chat.recv(timeout=LONG_S)
        send_json(streaming, type="create", id="a", prompt="Short.", max_tokens=25, seed=2)
        send_json(streaming, type="create", id="b", prompt="Long.", max_tokens=5000, seed=2)
        created, _ = receive_json(streaming), receive_json(streaming)
        server.send_signal(signal.SIGTERM)
        server.wait_line("Stopping; 3 streams")
        with pytest.raises(InvalidStatus) as refused:
            open_socket(server)
        assert refused.value.response.status_code == 503
        assert refused.value.response.headers["retry-after"] == "5"
        send_json(streaming, type="create", id="c", prompt="Too late.")
        heard: dict[str, list[dict[str, Any]]] = {"a": [], "b": [], "c": []}
        with suppress(ConnectionClosed):
            while True:
                found = receive_json(streaming)
                heard[found["id"]].append(found)
        assert heard["a"] == _frames(answer, "a", created["stream_id"])
        assert heard["b"][-1]["type"] == "released"  # the rest is to be had from the next server
        assert heard["b"][-1]["seq"] == heard["b"][-2]["seq"]
        assert [found["error"]["code"] for found in heard["c"]] == ["draining"]
        for socket in (idle, chat, streaming):
            assert wait_close(socket)[0] == 1012
    assert server.wait(timeout_s=LONG_S) == 0
