"""Adapters by name: as models on all wires, in the journal, and beside several models."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner
from tests.api.process import TAILRACE, Server, environment
from tests.testing.redis_server import own_redis
from tests.waiting import LONG_S, until

from tailrace.cli import main
from tailrace_outer.scripted.scripted_engine import scripted_token

Serve = Callable[..., Server]
MESSAGES = [{"role": "user", "content": "Hi"}]


def expected(prompt: str, adapter: str, count: int = 8) -> list[int]:
    return [scripted_token(tuple(prompt.encode()), 0, at, adapter=adapter) for at in range(count)]


def flags(*named: str, path: Path = Path("/tmp")) -> list[str]:
    return [word for name in named for word in ("--adapter", f"{name}={path}")]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server("scripted", *flags("poet", "org/law", path=tmp_path_factory.mktemp("adapter")))
    yield server.wait_ready()
    server.close()


def test_a_stream_has_the_adapter_that_it_names(server: Server) -> None:
    for model, adapter in ((None, ""), ("scripted", ""), ("default", ""), ("poet", "poet"), ("org/law", "org/law")):
        body: dict[str, Any] = {"prompt": "Hi", "max_tokens": 8, "seed": 0}  # Any: what JSON can be
        stream_id = server.create(body | ({"model": model} if model else {}))
        state = server.wait_state(stream_id, "done")
        assert state["model"] == (adapter or "scripted")
        assert server.post("/v1/streams", body | {"model": "nobody"}).status_code == 404
        events = server.http.get(f"/v1/streams/{stream_id}/events").text
        for token_id in expected("Hi", adapter):
            assert f'"token_ids":[{token_id}]' in events


def test_every_wire_chooses_one(server: Server) -> None:
    texts: dict[str, set[str]] = {"scripted": set(), "poet": set()}
    sampled = {"seed": 0, "max_tokens": 8}
    for name, found in texts.items():
        chat = {"model": name, "messages": MESSAGES, **sampled}
        asked = server.post("/v1/chat/completions", chat).json()
        assert asked["model"] == name
        found.add(asked["choices"][0]["message"]["content"])
        ollama = {"model": f"{name}:latest", "messages": MESSAGES, "stream": False}
        asked = server.post("/api/chat", ollama | {"options": {"seed": 0, "num_predict": 8}}).json()
        assert asked["model"] == name
        found.add(asked["message"]["content"])
        asked = server.post("/v1/messages", {"model": name, "messages": MESSAGES, "max_tokens": 8}).json()
        assert asked["model"] == name
        asked = server.post("/v1/responses", {"model": name, "input": "Hi", "max_output_tokens": 16}).json()
        assert asked["model"] == name
    assert [len(found) for found in texts.values()] == [1, 1]
    assert texts["poet"] != texts["scripted"]


def test_texts_of_wires_without_chats(server: Server) -> None:
    def plain(name: str) -> tuple[str, str]:
        body = {"text_input": "Hi", "seed": 0, "max_tokens": 8}
        triton = server.post(f"/v2/models/{name}/generate", body).json()
        assert triton["model_name"] == name
        parameters: dict[str, object] = {"seed": 0, "max_new_tokens": 8, "do_sample": True}
        if name != "scripted":
            parameters["adapter_id"] = name
        tgi = server.post("/generate", {"inputs": "Hi", "parameters": parameters}).json()
        completion = server.post("/v1/completions", {"model": name, "prompt": "Hi", "seed": 0, "max_tokens": 8}).json()
        assert tgi["generated_text"] == completion["choices"][0]["text"]
        return str(triton["text_output"]), str(tgi["generated_text"])

    for one, other in zip(plain("poet"), plain("scripted"), strict=True):
        assert one != other


def test_an_unknown_one_is_refused(server: Server) -> None:
    for path, body, status in (
        ("/generate", {"inputs": "Hi", "parameters": {"adapter_id": "nobody"}}, 422),
        ("/v1/chat/completions", {"model": "nobody", "messages": MESSAGES}, 404),
        ("/api/chat", {"model": "nobody", "messages": MESSAGES}, 404),
        ("/v2/models/nobody/generate", {"text_input": "Hi"}, 404),
    ):
        answer = server.post(path, body)
        assert answer.status_code == status, (path, answer.text)
        assert "There is no such model here. GET /v1/models lists the models." in answer.text


def test_lists_show_them_with_their_model(server: Server) -> None:
    listed = server.http.get("/v1/models").json()["data"]
    assert [(one["id"], one.get("parent")) for one in listed] == [
        ("scripted", None), ("poet", "scripted"), ("org/law", "scripted"),
    ]  # fmt: skip
    assert server.http.get("/v1/models/poet").json()["parent"] == "scripted"
    tags = server.http.get("/api/tags").json()["models"]
    assert [(one["name"], one["details"]["parent_model"]) for one in tags] == [
        ("scripted:latest", ""), ("poet:latest", "scripted"), ("org/law:latest", "scripted"),
    ]  # fmt: skip
    shown = server.post("/api/show", {"model": "poet"}).json()
    assert shown["details"]["parent_model"] == "scripted"
    assert [one["name"] for one in server.post("/v2/repository/index", {}).json()] == ["scripted", "poet", "org/law"]
    assert server.http.get("/info").json()["models"] == ["scripted", "poet", "org/law"]


def test_streams_go_on_with_their_adapter_after_both_deaths(serve: Serve, tmp_path: Path) -> None:
    def begin(*named: str) -> Server:
        return serve("scripted:tokens_per_s=100", *flags(*named), "--data-dir", str(tmp_path))

    server = begin("poet", "gone")
    body = {"prompt": "Hi", "max_tokens": 200, "seed": 0}
    ids = {name: server.create({"model": name, **body}) for name in ("scripted", "poet", "gone")}

    def wait_some(least: int) -> None:
        for stream_id in ids.values():
            while len(server.state(stream_id)["text"]) < least:
                time.sleep(0.02)

    wait_some(20)
    (worker,) = psutil.Process(server.process.pid).children()
    worker.kill()
    wait_some(200)
    server.send_signal(signal.SIGKILL)
    server.wait()

    server = begin("poet")
    server.wait_line("2 streams go on")
    for name, adapter in (("scripted", ""), ("poet", "poet")):
        assert server.wait_state(ids[name], "done")["model"] == name
        events = server.http.get(f"/v1/streams/{ids[name]}/events").text
        assert '"continuity":"replayed"' in events
        tokens = [line for line in events.splitlines() if '"token_ids"' in line]
        assert len(tokens) == 200
        for line, token_id in zip(tokens, expected("Hi", adapter, 200), strict=True):
            assert f'"token_ids":[{token_id}]' in line
    assert server.state(ids["gone"])["status"] == "interrupted"


@pytest.mark.deep
def test_a_stream_goes_on_with_its_adapter_on_another_server(tmp_path: Path) -> None:
    """It waits for one that has its adapter."""
    with own_redis(tmp_path / "redis") as (url, _):

        def server(name: str, *named: str) -> Server:
            own = ("--journal", url, "--lease-s", "3", "--data-dir", str(tmp_path / name))
            return Server("scripted:tokens_per_s=100", *flags(*named), *own)

        with closing(server("first", "poet", "law")) as first, closing(server("second", "law")) as second:
            first.wait_ready()
            second.wait_ready()
            body = {"prompt": "Hi", "max_tokens": 300, "seed": 0}
            ids = {name: first.create({"model": name, **body}) for name in ("poet", "law")}
            until(lambda: all(len(first.state(stream_id)["text"]) >= 20 for stream_id in ids.values()))
            first.send_signal(signal.SIGKILL)
            first.wait()
            assert second.wait_state(ids["law"], "done")["model"] == "law"
            assert second.state(ids["poet"])["status"] == "running"
            with closing(server("third", "poet")) as third:
                third.wait_ready()
                assert third.wait_state(ids["poet"], "done")["model"] == "poet"
                events = {name: third.http.get(f"/v1/streams/{ids[name]}/events").text for name in ids}
    for name, text in events.items():
        assert '"continuity":"replayed"' in text
        tokens = [line for line in text.splitlines() if '"token_ids"' in line]
        for line, token_id in zip(tokens, expected("Hi", name, 300), strict=True):
            assert f'"token_ids":[{token_id}]' in line


def test_each_model_may_have_its_own(serve: Serve, tmp_path: Path) -> None:
    own = ("--set", f"b.adapter=poet={tmp_path},{tmp_path}", "--load", "all")
    server = serve("--model=a=scripted", "--model", "b=scripted", *own)
    listed = server.http.get("/v1/models").json()["data"]
    assert [(one["id"], one.get("parent")) for one in listed] == [("a", None), ("b", None), ("poet", "b")]
    assert server.wait_state(server.create({"model": "poet", "prompt": "Hi"}), "done")["model"] == "poet"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--adapter", "poet=/nowhere"], "The adapter /nowhere cannot be used: there is no such file or directory."),
        pytest.param(
            flags("scripted"), "The adapter scripted has the name of another model or adapter.", marks=pytest.mark.deep
        ),
        pytest.param(flags("default"), "An adapter cannot have the name default", marks=pytest.mark.deep),
        ([*flags("poet"), "--model", "b=scripted"], "The adapter poet has the name of another model or adapter."),
        ([*flags("poet"), "--set", "scripted.engine=llamacpp"], "llamacpp cannot run"),
    ],
)
def test_one_that_cannot_be_served_ends_the_start(arguments: list[str], reason: str) -> None:
    ran = subprocess.run(
        [TAILRACE, "serve", "scripted", "--port", "0", *arguments],
        capture_output=True, text=True, check=False, timeout=LONG_S, env=environment(),
    )  # fmt: skip
    assert ran.returncode == 1
    assert reason in ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (flags("poet", "poet"), "--adapter has the name poet twice."),
        (["--adapter", "/tmp", "--adapter", "/tmp"], "--adapter has two paths without a name."),
    ],
)
def test_a_name_twice_is_a_mistake_of_the_command_line(arguments: list[str], reason: str) -> None:
    ran = CliRunner().invoke(main, ["serve", "scripted", "--port", "0", *arguments])
    assert (ran.exit_code, ran.stdout) == (2, "")
    assert reason in ran.stderr


def test_flags_and_the_variable_have_the_same_meaning() -> None:
    def shown(arguments: list[str], variables: dict[str, str]) -> str:
        ran = CliRunner().invoke(main, ["config", "--changed", *arguments], env=variables)
        assert ran.exit_code == 0, ran.output
        return ran.stdout.split()[1]

    both = "poet=./poems,law=./law"
    assert shown(["--adapter", "poet=./poems", "--adapter", "law=./law"], {}) == both
    assert shown([], {"TAILRACE_ADAPTER": both}) == both
