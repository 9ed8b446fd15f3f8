"""A server starts, loads its model, is overloaded, drains, is killed and restarts."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest
from tests.api.forks import run_text
from tests.api.oracle import Answer, chat_ids
from tests.api.process import TAILRACE, Server, environment
from tests.http.wire import Wire, as_json, sse_data
from tests.processes import is_alive, wait_ended
from tests.waiting import LONG_S, until

SSE = {"accept": "text/event-stream"}
LONG = {"prompt": "Long.", "max_tokens": 5_000, "seed": 1}
CHAT = {"messages": [{"role": "user", "content": "Long."}], "max_tokens": 5_000}
TGI = {"inputs": "Long.", "parameters": {"max_new_tokens": 5_000}}
PLAIN = "/?prompt=Long.&max_tokens=5000"
RELEASED = re.compile(
    rb'event: released\ndata: {"status":"released","error":{"code":"draining",[^\n]*"retryable":true,'
    rb'"stream_id":"([^"]+)","last_seq":([0-9]+)}}\nid: \1-\2\n\n\Z'
)

# One request of each wire: path, body, and whether it streams.
REQUESTS: dict[str, tuple[str, dict[str, Any] | None]] = {
    "native": ("/v1/streams", LONG),
    "chat": ("/v1/chat/completions", {**CHAT, "stream": True}),
    "chat-whole": ("/v1/chat/completions", CHAT),
    "text": ("/v1/completions", {**LONG, "stream": True}),
    "text-whole": ("/v1/completions", LONG),
    "tgi": ("/", {**TGI, "stream": True}),
    "generate-stream": ("/generate_stream", TGI),
    "generate": ("/generate", TGI),
    "plain": (PLAIN, None),
}


both_signals = pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)


def _begin(server: Server, name: str) -> Wire:
    """Send a request of this wire; for streams, read the first piece."""
    path, body = REQUESTS[name]
    wire = server.wire()
    wire.send("POST", path, body, SSE if name == "native" else None)
    if name not in ("chat-whole", "text-whole", "generate"):
        assert wire.head() == 200
    return wire


def _begun(server: Server, name: str) -> Wire:
    wire = _begin(server, name)
    if wire.status:
        assert wire.chunk()
    return wire


def _overloaded(wire: Wire, name: str, status: int, code: str) -> None:
    """Assert that an answer is a temporary refusal in the wire's format."""
    is_tgi = name in ("tgi", "generate", "generate-stream")
    assert wire.head() == (429 if is_tgi else status)  # its clients repeat a 503 at once and for ever
    assert int(wire.headers["retry-after"]) >= 1
    found = as_json(wire.body())
    if is_tgi:
        assert found.items() >= {"error": "Model is overloaded", "error_type": "overloaded"}.items()
    else:
        assert found["error"]["code"] == code
        assert found["error"]["type"] == ("rate_limit_error" if status == 429 else "server_error")


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_text([TAILRACE, "serve", *arguments], environment())


# Starting


def test_a_used_port_is_an_error_of_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ran = _run("scripted", "--port", str(port))
    assert ran.returncode == 1
    assert ran.stdout == ""
    assert ran.stderr.count("\n") == 1
    assert f"127.0.0.1:{port}" in ran.stderr
    assert "--port" in ran.stderr


@pytest.mark.parametrize(
    "model", ["smolm2", "./nowhere.gguf", "hf:nonsense", "scripted:fast", "scripted:tokens_per_s=x", ""]
)
def test_a_missing_model_is_an_error_of_one_line(model: str) -> None:
    ran = _run(model, "--port", "0")
    assert ran.returncode == 1
    assert ran.stdout == ""
    assert ran.stderr.startswith("tailrace: ")
    assert ran.stderr.count("\n") == 1


@both_signals
@pytest.mark.parametrize("has_worker", [False, True], ids=["vocabulary", "engine"])
def test_a_signal_while_it_loads_is_a_quick_and_clean_exit(number: signal.Signals, has_worker: bool) -> None:
    server = Server("scripted")
    server.wait_line("Loading")
    while has_worker and not psutil.Process(server.process.pid).children():
        time.sleep(0.001)  # no line says so, and it is not long until it is loaded
    server.send_signal(number)
    assert server.wait(timeout_s=LONG_S) == 130
    server.close()
    assert "Error" not in server.log


@both_signals
@pytest.mark.parametrize("line", ["Loading", "Listening"])
def test_a_storm_of_signals_leaves_no_traceback(number: signal.Signals, line: str) -> None:
    server = Server("scripted:tokens_per_s=50")
    server.wait_line(line)
    wire = _begun(server.wait_ready(), "native") if line == "Listening" else None
    while server.process.poll() is None:
        server.send_signal(number)
        time.sleep(0.002)
    if wire is not None:
        wire.close()
    server.close()
    assert server.wait() in (0, 130)


# Stopping


@both_signals
def test_a_signal_lets_streams_finish_and_refuses_new_ones(
    serve: Callable[..., Server], number: signal.Signals
) -> None:
    server = serve("scripted:tokens_per_s=50", "--drain-s", "1.5")
    short = Answer("Short.", 40, seed=2)
    wire = server.wire()  # connected before, and kept alive
    assert wire.request("GET", "/health")[0] == 200
    short_id = server.create({"prompt": "Short.", "max_tokens": 40, "seed": 2})
    with server.wire() as finishing, _begun(server, "native") as parked, _begun(server, "chat") as chat:
        finishing.send("GET", f"/v1/streams/{short_id}/events")
        assert finishing.head() == 200
        os.killpg(server.process.pid, number)  # a Ctrl-C reaches the worker too
        server.wait_line("Stopping; 3 streams")
        for name, (path, body) in REQUESTS.items():
            wire.send("POST", path, body)
            _overloaded(wire, name, 503, "draining")
        assert wire.request("GET", "/health")[0] == 503
        assert wire.request("GET", f"/v1/streams/{short_id}")[0] == 200  # what is there can still be read
        with server.wire() as newcomer:
            newcomer.send("POST", "/v1/streams", LONG)
            _overloaded(newcomer, "native", 503, "draining")
        assert finishing.body() == b"".join(short.native(short_id))
        # What somebody may come back for waits in the journal, and its reader is told when to ask again.
        assert RELEASED.search(parked.body())
        *_, failure, done = sse_data(chat.body())
        assert as_json(failure)["error"]["code"] == "interrupted"
        assert done == "[DONE]"
    wire.close()
    assert server.wait(timeout_s=LONG_S) == 0
    assert server.log.rstrip().endswith("Stopped.")


def test_requests_are_accepted_until_load_balancers_have_seen_the_shutdown(serve: Callable[..., Server]) -> None:
    server = serve("scripted", "--shutdown-delay-s", "600", "--drain-s", "600")
    assert server.http.get("/readyz").status_code == 200
    server.send_signal(signal.SIGTERM)
    until(lambda: server.http.get("/readyz").status_code == 503)
    assert server.http.get("/readyz").json()["state"] == "draining"
    answer = server.post("/v1/completions", {"prompt": "Late.", "max_tokens": 3, "seed": 1})
    assert answer.json()["choices"][0]["text"] == Answer("Late.", 3, seed=1).text
    server.send_signal(signal.SIGTERM)  # somebody does not want to wait
    assert server.wait() == 0


def test_without_streams_it_stops_at_once(serve: Callable[..., Server]) -> None:
    server = serve("scripted", "--drain-s", "600")
    idle = server.wire()
    assert idle.request("GET", "/health")[0] == 200  # and is kept alive
    server.send_signal(signal.SIGTERM)
    assert server.wait() == 0
    idle.close()


@both_signals
def test_a_second_signal_leaves_at_once(serve: Callable[..., Server], number: signal.Signals) -> None:
    server = serve("scripted:tokens_per_s=50", "--drain-s", "600")
    worker = server.worker()
    with _begun(server, "native") as wire:
        server.send_signal(number)
        server.wait_line("Stopping; 1 stream has")
        server.send_signal(number)
        body, _ = wire.rest()
        assert server.wait() == 0
    assert RELEASED.search(body)
    assert not is_alive(worker)


def test_without_a_journal_unfinished_streams_are_interrupted(serve: Callable[..., Server]) -> None:
    server = serve("scripted:tokens_per_s=50", "--journal", "memory")
    with _begun(server, "native") as wire:
        server.send_signal(signal.SIGTERM)
        body, is_complete = wire.rest()
    assert is_complete
    assert as_json(sse_data(body)[-1])["error"]["code"] == "interrupted"


def test_killing_the_server_ends_the_worker(serve: Callable[..., Server]) -> None:
    server = serve("scripted:tokens_per_s=50")
    worker = server.worker()
    with _begun(server, "native"):
        server.send_signal(signal.SIGKILL)
        server.wait()
        wait_ended([worker])


# A worker that dies


def test_a_killed_worker_is_replaced_and_all_answers_continue(serve: Callable[..., Server]) -> None:
    server = serve("scripted:tokens_per_s=50")
    fields = {"max_tokens": 60, "seed": 1}
    user = [{"role": "user", "content": "Long."}]
    asked: dict[str, tuple[str, dict[str, Any]]] = {
        "native": ("/v1/streams", {"prompt": "Long.", **fields}),
        "chat": ("/v1/chat/completions", {"messages": user, "stream": True, **fields}),
        "text-whole": ("/v1/completions", {"prompt": "Long.", **fields}),
        "tgi": ("/generate_stream", {"inputs": "Long.", "parameters": {"max_new_tokens": 60, "seed": 1}}),
    }
    wires = {name: server.wire() for name in asked}
    for name, (path, body) in asked.items():
        wires[name].send("POST", path, body, SSE if name == "native" else None)
    assert wires["native"].head() == 200
    assert wires["native"].chunk()
    server.worker().send_signal(signal.SIGKILL)
    ends = {}
    for name, wire in wires.items():
        if not wire.status:
            assert wire.head() == 200
        ends[name], is_complete = wire.rest()
        assert is_complete
        wire.close()
    answer = Answer("Long.", 60, seed=1)
    *native, end = map(as_json, sse_data(ends["native"]))
    assert "".join(delta["text"] for delta in native) in answer.text
    assert (end["status"], end["continuity"]) == ("done", "replayed")
    *chat, done = sse_data(ends["chat"])
    assert done == "[DONE]"
    content = "".join(as_json(chunk)["choices"][0]["delta"].get("content", "") for chunk in chat)
    assert content == Answer(chat_ids("Long."), 60, seed=1).text
    assert as_json(ends["text-whole"])["choices"][0]["text"] == answer.text
    assert as_json(sse_data(ends["tgi"])[-1])["generated_text"] == answer.text
    assert server.http.get("/health").status_code == 200
    until(lambda: server.log.count("killed by SIGKILL") == 1)


@pytest.mark.parametrize(
    ("control", "flags"),
    [("<|crash|>", ()), pytest.param("<|garbage|>", (), marks=pytest.mark.deep), ("<|stall|>", ("--stall-s", "1"))],
    ids=["crash", "raise", "stall"],
)
def test_an_engine_that_misbehaves_is_replaced(
    serve: Callable[..., Server], control: str, flags: tuple[str, ...]
) -> None:
    server = serve("scripted:tokens_per_s=100", *flags)
    neighbour = Answer("Neighbour.", 120, seed=3)
    neighbour_id = server.create({"prompt": neighbour.prompt, "max_tokens": 120, "seed": 3})
    with server.wire() as culprit:
        culprit.send("POST", "/v1/streams", {"prompt": f"Now {control}", "max_tokens": 50, "seed": 1}, SSE)
        assert culprit.head() == 200
        *deltas, end = sse_data(culprit.body())
        assert len(deltas) == 3
        assert as_json(end)["error"]["code"] == "poison_request"
    replayed = server.http.get(f"/v1/streams/{neighbour_id}/events").content
    assert sse_data(replayed)[:-1] == sse_data(b"".join(neighbour.native(neighbour_id)))[:-1]
    assert as_json(sse_data(replayed)[-1])["continuity"] == "replayed"
    answer = Answer("Next.", 9, seed=4)
    answered = server.post("/v1/completions", {"prompt": "Next.", "max_tokens": 9, "seed": 4})
    assert answered.json()["choices"][0]["text"] == answer.text


def test_a_failing_sequence_affects_no_other(paced: Server) -> None:
    answer = Answer("Neighbour.", 60, seed=3)
    stream_id = paced.create({"prompt": "Neighbour.", "max_tokens": 60, "seed": 3})
    with paced.wire() as wire:
        status, body = wire.request("POST", "/v1/streams", {"prompt": "<|fail|>", "max_tokens": 50}, SSE)
        assert status == 200
        assert as_json(sse_data(body)[-1])["error"]["code"] == "sequence_failed"
    with paced.wire() as wire:
        assert wire.request("GET", f"/v1/streams/{stream_id}/events")[1] == b"".join(answer.native(stream_id))


# Load


def test_overload_is_refused_and_running_streams_are_not_affected(serve: Callable[..., Server]) -> None:
    server = serve("scripted:tokens_per_s=100", "--max-concurrent-requests", "4")
    admitted = [(seed, server.create({"prompt": "In.", "max_tokens": 100, "seed": seed})) for seed in range(4)]
    for name, (path, body) in REQUESTS.items():
        with server.wire() as wire:
            wire.send("POST", path, body)
            _overloaded(wire, name, 429, "overloaded")
    for seed, stream_id in admitted:
        with server.wire() as wire:
            body_of_stream = wire.request("GET", f"/v1/streams/{stream_id}/events")[1]
        assert body_of_stream == b"".join(Answer("In.", 100, seed).native(stream_id))
    assert server.post("/v1/streams", {"prompt": "In.", "max_tokens": 1}).status_code == 201


def test_a_wait_that_is_too_long_ends_in_an_error(serve: Callable[..., Server]) -> None:
    server = serve("scripted:tokens_per_s=100", "--max-sequences", "1", "--queue-s", "0.3")
    running = server.create(LONG)
    wires = {name: _begin(server, name) for name in REQUESTS}
    for name, wire in wires.items():
        with wire:
            if not wire.status:
                _overloaded(wire, name, 429, "queue_timeout")
                continue
            body, is_complete = wire.rest()
            assert is_complete == (name != "plain")
            if name == "plain":
                assert body == b""
            elif name == "native":
                assert as_json(sse_data(body)[0])["error"]["code"] == "queue_timeout"
            else:
                assert "error" in as_json(sse_data(body)[0])
    assert server.state(running)["status"] == "running"


def test_sixty_four_streams_at_once_are_exact(server: Server) -> None:
    def one(seed: int) -> bool:
        answer = Answer(f"Stream {seed}.", 200, seed)
        body = {"prompt": f"Stream {seed}.", "max_tokens": 200, "seed": seed}
        with server.wire() as wire:
            status, content = wire.request("POST", "/v1/streams", body, SSE)
            return status == 200 and content == b"".join(answer.native(wire.headers["x-stream-id"]))

    with ThreadPoolExecutor(64) as pool:
        assert all(pool.map(one, range(64)))


@pytest.mark.deep
def test_a_reader_that_does_not_read_affects_no_other(server: Server) -> None:
    """The stream is larger than the kernel's buffers. The reader gets all of it in the end."""
    count = 40_000
    slow = Answer("Slow.", count, seed=1)
    stream_id = server.create({"prompt": "Slow.", "max_tokens": count, "seed": 1})
    with server.wire(receive_bytes=4096) as wire:
        wire.send("GET", f"/v1/streams/{stream_id}/events")
        assert wire.head() == 200
        for seed in range(20):
            body = {"prompt": "Quick.", "max_tokens": 20, "seed": seed}
            text = server.post("/v1/completions", body).json()["choices"][0]["text"]
            assert text == Answer("Quick.", 20, seed).text
        assert server.wait_state(stream_id, "done", timeout_s=LONG_S)["usage"]["completion_tokens"] == count
        assert wire.body() == b"".join(slow.native(stream_id))


def test_a_client_that_leaves_before_its_answer_leaves_no_trace(server: Server) -> None:
    for name in REQUESTS:
        _begin(server, name).close()
    with server.wire() as wire:
        wire.send_bytes(b"POST /v1/streams HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n")
    with server.wire() as wire:
        wire.send("POST", "/v1/streams", b"{", {"content-length": "100"})
    threads = [threading.Thread(target=_begin(server, "chat").close) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200
