"""Several models in one server: which model answers, when each is loaded, and what happens to its streams."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from anthropic import Anthropic
from click.testing import CliRunner
from tests.api.oracle import Answer
from tests.api.process import TAILRACE, Server, environment
from tests.missing import skip_missing
from tests.processes import wait_ended
from tests.waiting import LONG_S, until
from websockets.sync.client import connect

from tailrace.cli import main
from tailrace.errors import ModelError
from tailrace.models import NoProgress
from tailrace.models.resolve import resolve
from tailrace_outer.scripted.scripted_engine import CONTROL_TOKENS

Serve = Callable[..., Server]

# Their answers have lengths of their own, which tell them apart.
FIRST = "scripted:eos_after=7"
THREE = ("--model", "tiny=scripted:eos_after=3", "--model", "org/big=scripted:eos_after=5")
NAMES = ["scripted", "tiny", "org/big"]
MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def three() -> Iterator[Server]:
    server = Server(FIRST, *THREE)
    yield server.wait_ready()
    server.close()


def num_workers(server: Server) -> int:
    return len(psutil.Process(server.process.pid).children())


def wait_workers(server: Server, number: int) -> None:
    deadline_s = time.monotonic() + LONG_S
    while num_workers(server) != number:
        assert time.monotonic() < deadline_s, server.log
        time.sleep(0.02)  # a process that is gone tells nobody here


def num_answered(server: Server, model: str | None = None) -> int:
    answer = server.post("/v1/completions", {"prompt": "Hi"} | ({"model": model} if model is not None else {}))
    assert answer.status_code == 200, answer.text
    assert model in (None, "default", answer.json()["model"])
    return int(answer.json()["usage"]["completion_tokens"])


def test_a_model_is_loaded_for_its_first_request(serve: Serve) -> None:
    server = serve(FIRST, *THREE)
    assert "tiny will be loaded for its first request" in server.log
    assert num_workers(server) == 1
    assert num_answered(server) == num_answered(server, "default") == 7
    assert num_answered(server, "tiny") == 3
    assert num_workers(server) == 2
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda _: num_answered(server, "org/big"), range(8))) == [5] * 8
    server.wait_line("org/big was loaded")
    assert server.log.count("org/big was loaded") == 1
    assert num_workers(server) == 3


def test_load_all_loads_all_models_at_the_start(serve: Serve) -> None:
    server = serve("--model=tiny=scripted:eos_after=3", "--model", "big=scripted:eos_after=5", "--load", "all")
    assert num_workers(server) == 2
    assert "big is loaded" in server.log
    assert num_answered(server) == num_answered(server, "tiny") == 3
    assert num_answered(server, "big") == 5


def test_each_model_may_have_its_own_settings(serve: Serve) -> None:
    own = ("short.default_max_tokens=4", "short.idle-unload-s=0.3", "scripted.context_tokens=500")
    server = serve(
        "scripted", "--model", "short=scripted", "--default-max-tokens", "20", "--load", "all",
        *(word for text in own for word in ("--set", text)),
    )  # fmt: skip
    wait_workers(server, 1)  # the other one stays
    names = ("scripted", "short")
    chats = [server.post("/v1/chat/completions", {"model": name, "messages": MESSAGES}) for name in names]
    assert [chat.json()["usage"]["completion_tokens"] for chat in chats] == [20, 4]
    lengths = {one["id"]: one["max_model_len"] for one in server.http.get("/v1/models").json()["data"]}
    assert lengths["scripted"] == 500 < lengths["short"]


def test_a_window_for_all_models_is_at_most_that_of_each(serve: Serve, tmp_path: Path) -> None:
    script = tmp_path / "script.json"
    script.write_text('{"rules": [{"say": "Hello."}]}')
    server = serve("scripted", "--model", f"long=scripted:script={script}", "--context-tokens", "100000")
    lengths = {one["id"]: one["max_model_len"] for one in server.http.get("/v1/models").json()["data"]}
    assert (lengths["scripted"] <= 65_536, lengths["long"]) == (True, 100_000)


def test_every_wire_that_names_a_model_finds_it(three: Server) -> None:
    def answer(path: str, body: object) -> object:
        found = three.post(path, body)
        assert found.status_code == 200, (path, found.text)
        return found.json()

    def usage(path: str, body: Mapping[str, object], *way: str) -> object:
        value = answer(path, body)
        for name in way:
            assert isinstance(value, dict)
            value = value[name]
        return value

    chat = {"model": "tiny", "messages": MESSAGES}
    assert usage("/v1/chat/completions", chat, "usage", "completion_tokens") == 3
    assert usage("/v1/responses", {"model": "tiny", "input": "Hi"}, "usage", "output_tokens") == 3
    assert usage("/v1/messages", {**chat, "max_tokens": 50}, "usage", "output_tokens") == 3
    assert usage("/v1/messages/count_tokens", {**chat, "model": "org/big"}, "input_tokens")
    assert usage("/api/chat", {**chat, "stream": False}, "eval_count") == 3
    for name in ("tiny", "tiny:latest"):
        assert usage("/api/generate", {"model": name, "prompt": "Hi", "stream": False}, "eval_count") == 3
        assert usage("/api/show", {"model": name}, "model_info", "general.basename") == "tiny"
    assert usage("/api/generate", {"model": "org/big:latest", "prompt": "Hi", "stream": False}, "eval_count") == 5
    for name, served in (("tiny", "tiny"), ("big", "org/big"), ("default", "scripted"), ("tiny_" + "0" * 32, "tiny")):
        assert usage(f"/v2/models/{name}/generate", {"text_input": "Hi"}, "model_name") == served
        assert three.http.get(f"/v2/models/{name}/ready").json() == {"name": served, "ready": True}
    assert usage("/generate", {"inputs": "Hi", "parameters": {"details": True}}, "details", "generated_tokens") == 7
    state = three.wait_state(three.create({"model": "tiny", "prompt": "Hi"}), "done")
    assert (state["model"], state["usage"]["completion_tokens"]) == ("tiny", 3)


def test_sockets_name_models_too(three: Server) -> None:
    with connect(f"ws://127.0.0.1:{three.port}/v1/ws") as socket:
        for name in ("org/big", "nobody", "scripted"):
            socket.send(json.dumps({"type": "create", "id": name, "model": name, "prompt": "Hi"}))
        ends: dict[str, int] = {}
        refused: list[tuple[str, str]] = []
        while len(ends) < 2:
            frame = json.loads(socket.recv(LONG_S))
            if frame["type"] == "refused":
                refused.append((frame["id"], frame["error"]["code"]))
            elif "usage" in frame:
                ends[frame["id"]] = frame["usage"]["completion_tokens"]
    assert ends == {"org/big": 5, "scripted": 7}
    assert refused == [("nobody", "model_not_found")]


def test_all_lists_of_models_are_complete(three: Server) -> None:
    def get(path: str) -> dict[str, Any]:  # Any: of JSON
        return dict(three.http.get(path).json())

    assert [one["id"] for one in get("/v1/models")["data"]] == NAMES
    assert get("/v1/models/org/big")["id"] == "org/big"
    assert three.http.get("/v1/models/other").status_code == 404
    with Anthropic(base_url=three.url, api_key="unused", max_retries=0) as client:
        assert [one.id for one in client.models.list(limit=1)] == NAMES
        assert client.models.retrieve("org/big").id == "org/big"
    assert "scripted:latest" in [one["name"] for one in get("/api/ps")["models"]]
    assert [one["name"] for one in get("/api/tags")["models"]] == [f"{name}:latest" for name in NAMES]
    assert (get("/info")["model_id"], get("/info")["models"]) == ("scripted", NAMES)
    index = three.http.post("/v2/repository/index").json()
    assert [(one["name"], one["version"]) for one in index] == [(name, "1") for name in NAMES]
    assert index[0]["state"] == "READY"
    assert all(name in three.http.get("/").text for name in NAMES)


def test_an_unknown_name_is_404_on_every_wire(three: Server) -> None:
    for path, body in (
        ("/v1/completions", {"model": "scripte", "prompt": "Hi"}),
        ("/v1/chat/completions", {"model": "tiny:latest", "messages": MESSAGES}),
        ("/v1/messages", {"model": "big", "messages": MESSAGES, "max_tokens": 5}),
        ("/v1/streams", {"model": "TINY", "prompt": "Hi"}),
        ("/api/chat", {"model": "tiny:other", "messages": MESSAGES}),
        ("/v2/models/org/generate", {"text_input": "Hi"}),
    ):
        answer = three.post(path, body)
        assert (answer.status_code, "GET /v1/models lists" in answer.text) == (404, True), (path, answer.text)


def test_metrics_say_which_model(three: Server) -> None:
    num_answered(three, "tiny")
    text = three.http.get("/metrics").text
    for name in NAMES:
        assert f'tailrace_ready{{model="{name}"}} 1.0' in text
    assert re.search(r'tgi_request_count{model="tiny"} [1-9]', text)
    assert re.search(r'tgi_request_duration_count{model="tiny"} [1-9]', text)


@pytest.mark.deep
def test_a_dying_worker_ends_no_streams_of_other_models(serve: Serve) -> None:
    server = serve("scripted:tokens_per_s=100", "--model", "other=scripted:tokens_per_s=100", "--load", "all")
    ids = [
        server.create({"model": name, "prompt": "Hi", "seed": 4, "max_tokens": 60}) for name in ("scripted", "other")
    ]
    for worker in psutil.Process(server.process.pid).children():
        worker.kill()
    for stream_id in ids:
        assert server.wait_state(stream_id, "done")["text"] == Answer("Hi", 60, 4).text
    until(lambda: server.log.count("Starting another engine") == 2)


@pytest.fixture
def smollm2(tmp_path: Path) -> Path:
    """Return a link to the real model, which a test can remove."""
    try:
        path = resolve("smollm2", NoProgress()).path
    except ModelError as error:
        skip_missing("smollm2", error.message)
    link = tmp_path / "real.gguf"
    link.symlink_to(path)
    return link


@pytest.mark.deep
@pytest.mark.timeout(120)
def test_a_model_that_cannot_be_loaded_is_503_and_retried(serve: Serve, smollm2: Path) -> None:
    server = serve("scripted", "--model", f"real={smollm2}")
    target = smollm2.readlink()
    smollm2.unlink()
    answer = server.post("/v1/completions", {"model": "real", "prompt": "Hi", "max_tokens": 3})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_unavailable")
    assert "could not be loaded" in answer.json()["error"]["message"]
    assert str(smollm2) not in answer.text
    retry_s = int(answer.headers["retry-after"])
    server.wait_line("real was not loaded")
    assert num_answered(server, "scripted") > 0
    smollm2.symlink_to(target)
    time.sleep(retry_s)  # as it was told
    likeliest = {"model": "real", "prompt": "One, two, three,", "max_tokens": 4, "temperature": 0}
    tokens = server.post("/v1/completions", likeliest)
    assert "four" in tokens.json()["choices"][0]["text"]


@pytest.mark.deep
def test_an_unused_model_is_unloaded_and_loaded_again(serve: Serve) -> None:
    server = serve("scripted:tokens_per_s=100", "--model", "tiny=scripted:tokens_per_s=100", "--idle-unload-s", "0.6")
    stream_id = server.create({"model": "tiny", "prompt": "Hi", "max_tokens": 300, "seed": 1})
    wait_workers(server, 1)  # the first one is idle, and a stream runs on the other
    assert server.state(stream_id)["status"] == "running"
    assert server.http.get("/readyz").json()["state"] == "unloaded"
    assert server.http.get("/health").status_code == 200
    wait_workers(server, 0)
    state = server.wait_state(stream_id, "done")
    assert state["text"] == Answer("Hi", 300, 1).text
    assert server.post("/v1/completions", {"model": "nobody", "prompt": "Hi"}).status_code == 404
    assert num_workers(server) == 0
    for name in ("scripted", "tiny"):
        answer = server.post("/v1/completions", {"model": name, "prompt": "Hi", "max_tokens": 2})
        assert answer.json()["usage"]["completion_tokens"] == 2
    with connect(f"ws://127.0.0.1:{server.port}/") as socket:
        wait_workers(server, 0)
        socket.send("Hi")
        assert socket.recv(LONG_S)


_STALLED = Answer((256 + CONTROL_TOKENS.index("<|stall|>"),), 3, seed=1)


@pytest.mark.deep
def test_a_model_with_a_trial_is_not_unloaded(serve: Serve) -> None:
    """The client has disconnected, so only the trial shows that the engine is in use."""
    server = serve("scripted", "--idle-unload-s", "0.2", "--stall-s", "1")
    killer = {"prompt": "<|stall|>", "max_tokens": 5, "seed": 1}
    stream_id = server.create(killer)
    until(lambda: server.state(stream_id)["text"] == _STALLED.text)  # behind which the engine stalls
    server.http.delete(f"/v1/streams/{stream_id}")
    until(lambda: server.log.count("Starting another engine.") == 2)  # for the stall, and for the trial
    assert server.post("/v1/completions", killer).json()["error"]["code"] == "poison_request"
    assert num_answered(server) > 0


@pytest.mark.deep
def test_idle_models_are_unloaded_to_free_memory(serve: Serve) -> None:
    one = serve("scripted")
    worker_bytes = one.worker().memory_info().rss
    flags = ("--memory-bytes", str(int(worker_bytes + 40 * 2**20)))
    server = serve(
        "scripted:tokens_per_s=100",
        "--model", "b=scripted:tokens_per_s=100", "--model", "c=scripted:tokens_per_s=100", *flags,
    )  # fmt: skip
    ran = subprocess.run(
        [TAILRACE, "serve", "--port", "0", "--load", "all", "--model", "a=scripted", "--model", "b=scripted", *flags],
        capture_output=True, text=True, check=False, timeout=LONG_S, env=environment(),
    )  # fmt: skip
    assert ran.returncode == 1
    assert "--memory-bytes" in ran.stderr
    assert num_answered_tokens(server, "b") == 2
    server.wait_line("scripted is unloaded to make room")
    assert num_workers(server) == 1
    stream_id = server.create({"model": "b", "prompt": "Hi", "max_tokens": 5000})
    answer = server.post("/v1/completions", {"model": "c", "prompt": "Hi"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_unavailable")
    assert int(answer.headers["retry-after"]) >= 1
    assert server.state(stream_id)["status"] == "running"
    server.http.delete(f"/v1/streams/{stream_id}")
    deadline_s = time.monotonic() + LONG_S
    while server.post("/v1/completions", {"model": "c", "prompt": "Hi", "max_tokens": 2}).status_code != 200:
        assert time.monotonic() < deadline_s, server.log
        time.sleep(0.05)  # the engine lets a stream go within a step
    assert num_workers(server) == 1


def num_answered_tokens(server: Server, model: str) -> int:
    answer = server.post("/v1/completions", {"model": model, "prompt": "Hi", "max_tokens": 2})
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["completion_tokens"])


def test_streams_of_all_models_survive_the_server(serve: Serve, tmp_path: Path) -> None:
    def begin(*models: str) -> Server:
        flags = [text for name in models for text in ("--model", f"{name}=scripted:tokens_per_s=100")]
        return serve("scripted:tokens_per_s=100", *flags, "--load", "all", "--data-dir", str(tmp_path))

    server = begin("b", "gone")
    ids = {
        name: server.create({"model": name, "prompt": f"Hi, {name}", "max_tokens": 300, "seed": 3})
        for name in ("scripted", "b", "gone")
    }
    for stream_id in ids.values():
        while len(server.state(stream_id)["text"]) < 20:
            time.sleep(0.02)
    workers = psutil.Process(server.process.pid).children()
    assert len(workers) == 3
    server.send_signal(signal.SIGKILL)
    server.wait()
    wait_ended(workers)

    server = begin("b")
    server.wait_line("2 streams go on")
    for name in ("scripted", "b"):
        state = server.wait_state(ids[name], "done")
        assert (state["model"], state["text"]) == (name, Answer(f"Hi, {name}", 300, 3).text)
    assert server.state(ids["gone"])["status"] == "interrupted"
    events = server.http.get(f"/v1/streams/{ids['b']}/events").text
    assert '"continuity":"replayed"' in events


@pytest.mark.deep
def test_streams_of_a_model_without_memory_wait_for_it(serve: Serve, tmp_path: Path) -> None:
    flags = ("--model", "b=scripted:tokens_per_s=100", "--data-dir", str(tmp_path))
    server = serve("scripted:tokens_per_s=100", *flags, "--load", "all")
    worker_bytes = max(one.memory_info().rss for one in psutil.Process(server.process.pid).children())
    ids = [server.create({"model": name, "prompt": "Hi", "max_tokens": 300, "seed": 3}) for name in ("scripted", "b")]
    server.send_signal(signal.SIGKILL)
    server.wait()
    server = serve("scripted:tokens_per_s=100", *flags, "--memory-bytes", str(worker_bytes + 40 * 2**20))
    assert server.state(ids[1])["status"] == "queued"
    for stream_id in ids:
        assert server.wait_state(stream_id, "done")["text"] == Answer("Hi", 300, 3).text
    assert num_workers(server) == 1


@pytest.mark.deep
def test_a_model_whose_requests_can_wait_makes_room(serve: Serve) -> None:
    """A request in the background leaves the memory to a live one for another model, and goes on afterwards."""
    server = serve("scripted:tokens_per_s=50", "--model", "b=scripted", "--load", "all")
    worker_bytes = max(one.memory_info().rss for one in psutil.Process(server.process.pid).children())
    server = serve(
        "scripted:tokens_per_s=50", "--model", "b=scripted", "--memory-bytes", str(worker_bytes + 40 * 2**20)
    )
    body = {"prompt": "Hi", "max_tokens": 400, "seed": 3, "on_disconnect": "detach"}
    background = server.create(body, x_tailrace_priority="background")
    until(lambda: server.state(background)["text"] != "")
    answer = server.post("/v1/completions", {"model": "b", "prompt": "Hi", "max_tokens": 5, "seed": 1})
    assert answer.json()["choices"][0]["text"] == Answer("Hi", 5, 1).text
    assert server.state(background)["status"] in ("queued", "running")
    assert server.wait_state(background, "done")["text"] == Answer("Hi", 400, 3).text


@pytest.mark.deep
def test_draining_hands_over_the_streams_of_all_models(serve: Serve, tmp_path: Path) -> None:
    flags = ("--model", "b=scripted:tokens_per_s=100", "--data-dir", str(tmp_path))
    server = serve("scripted:tokens_per_s=100", *flags, "--load", "all")
    ids = [server.create({"model": name, "prompt": "Hi", "max_tokens": 300, "seed": 3}) for name in ("scripted", "b")]
    workers = psutil.Process(server.process.pid).children()
    server.send_signal(signal.SIGTERM)
    assert server.wait() == 0
    wait_ended(workers)
    assert "2 streams have" in server.log
    server = serve("scripted:tokens_per_s=100", *flags)
    for stream_id in ids:
        assert server.wait_state(stream_id, "done")["text"] == Answer("Hi", 300, 3).text


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--model", "a=scripted", "--model", "a=scripted"], "Two models"),
        (["scripted", "--model", "scripted=scripted"], "Two models"),
        (["--model", "=scripted"], "name"),
        (["--model", "a="], "name=source"),
        (["--model", "scripted"], "A single model needs no name: tailrace serve scripted"),
        (["--model", "a b=scripted"], "name"),
        (["--model", "ä=scripted"], "name"),
        (["--model", "a=scripted", "--model", "b=./nowhere.gguf"], "b: There is no"),
        (["--model", "a=scripted", "--model", "b=scripted:fast"], "b: The scripted"),
    ],
)
def test_a_model_that_cannot_be_served_is_an_error_of_one_line(arguments: list[str], word: str) -> None:
    ran = CliRunner().invoke(main, ["serve", "--port", "0", *arguments])
    assert ran.exit_code == 1
    assert ran.stdout == ""
    assert ran.stderr.count("\n") == 1
    assert word in ran.stderr


def test_a_setting_of_no_model_is_refused_with_the_models_there_are() -> None:
    ran = CliRunner().invoke(main, ["serve", "--port", "0", "--model", "a=scripted", "--set", "b.threads=2"])
    assert (ran.exit_code, ran.stdout) == (2, "")
    assert ran.stderr.endswith("tailrace: Invalid value for '--set': there is no model b; the models are a.\n")


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        pytest.param(
            "b.adapter=/nowhere",
            "The adapter /nowhere cannot be used: there is no such file or directory.",
            marks=pytest.mark.deep,
        ),
        pytest.param("b.adapter_scale=2", "--adapter-scale needs --adapter", marks=pytest.mark.deep),
        ("b.context_tokens=65537", "--context-tokens must be at most 65536"),
    ],
)
def test_a_setting_that_one_cannot_be_run_with_ends_the_start_by_its_name(setting: str, reason: str) -> None:
    ran = subprocess.run(
        [TAILRACE, "serve", "--port", "0", "--model", "a=scripted", "--model", "b=scripted", "--set", setting],
        capture_output=True, text=True, check=False, timeout=LONG_S, env=environment(),
    )  # fmt: skip
    assert ran.returncode == 1
    assert f"tailrace: b: {reason}" in ran.stderr


def test_the_environment_names_models_too() -> None:
    ran = subprocess.run(
        [TAILRACE, "serve", "--port", "0"],
        capture_output=True, text=True, check=False, timeout=LONG_S,
        env=environment() | {"TAILRACE_MODELS": "a=scripted b=./nowhere.gguf", "TAILRACE_MODEL": "./never.gguf"},
    )  # fmt: skip
    assert ran.returncode == 1
    assert ran.stderr.startswith("tailrace: b: There is no")
