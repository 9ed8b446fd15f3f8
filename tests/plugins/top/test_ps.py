"""`tailrace ps` and `tailrace logs` with real servers."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.api.forks import run_text
from tests.api.oracle import Answer
from tests.api.process import TAILRACE, Server, environment
from tests.client.openai_server import OpenAIServer
from tests.waiting import until

from tailrace.testing import Chaos, Flow, Line
from tailrace.wording import printable_text

_ENDLESS = {"prompt": "Hi.", "max_tokens": 60_000}


def _run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return run_text([TAILRACE, *arguments], environment() | variables)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    running = Server("scripted:tokens_per_s=100", "--model", "other=scripted").wait_ready()
    yield running
    running.close()


def test_models_and_streams(server: Server) -> None:
    shown = _run("ps", "--url", server.url)
    assert shown.returncode == 0
    assert shown.stderr == "No streams are running.\n"
    stream_id = server.create(_ENDLESS)
    found = json.loads(_run("ps", "--json", TAILRACE_PORT=str(server.port)).stdout)
    assert found["models"] == [{"name": "scripted", "state": "loaded"}, {"name": "other", "state": "not loaded"}]
    assert [(stream["id"], stream["status"], stream["model"]) for stream in found["streams"]] == [
        (stream_id, "running", "scripted")
    ]
    assert stream_id in _run("ps", "--url", server.url).stdout
    server.post(f"/v1/streams/{stream_id}/cancel", {})
    server.wait_state(stream_id, "cancelled")
    assert json.loads(_run("ps", "--json", "--url", server.url).stdout)["streams"] == []


def test_the_text_of_a_stream(server: Server) -> None:
    stream_id = server.create({"prompt": "Hi.", "max_tokens": 60, "seed": 7})
    text = printable_text(Answer("Hi.", 60, 7).text)
    text += "" if text.endswith("\n") else "\n"
    with Chaos(server.port, [Line(to_client=Flow(end_after_bytes=3000, end="reset"))]) as chaos:
        followed = _run("logs", "-f", stream_id, "--url", chaos.url)
    assert (followed.returncode, followed.stdout) == (0, text)
    assert _run("logs", stream_id, "--url", server.url).stdout == text
    assert _run("logs", "--follow", stream_id, "--url", server.url).stdout == text


def test_one_of_several_answers(server: Server) -> None:
    stream_id = server.create({"prompt": "Hi.", "max_tokens": 20, "seed": 7, "n": 2})
    texts = server.wait_state(stream_id, "done")["choices"]
    for choice, flags in ((2, ["-f"]), (2, []), (1, ["-f"])):
        ran = _run("logs", stream_id, "--choice", str(choice), "--url", server.url, *flags)
        assert ran.stdout.rstrip("\n") == printable_text(texts[choice - 1]).rstrip("\n")
    assert "This stream has only 2 answers." in _run("logs", stream_id, "--choice", "3", "--url", server.url).stderr


def test_ending_the_command_does_not_stop_the_stream(server: Server) -> None:
    stream_id = server.create(_ENDLESS)
    following = subprocess.Popen(
        [TAILRACE, "logs", "-f", stream_id, "--url", server.url], env=environment(), stdout=subprocess.PIPE, bufsize=0
    )
    assert following.stdout is not None
    following.stdout.read(20)
    following.send_signal(2)
    following.communicate(timeout=50)
    assert following.returncode == 130
    assert server.state(stream_id)["status"] == "running"
    server.post(f"/v1/streams/{stream_id}/cancel", {})


def test_unknown_streams(server: Server) -> None:
    for stream_id in ("A" * 22, "../models", "?"):
        ran = _run("logs", stream_id, "--url", server.url)
        assert ran.returncode == 1
        assert ran.stderr.startswith("tailrace: ")
        assert "Traceback" not in ran.stderr
    with OpenAIServer() as foreign:
        for verb in (["ps"], ["logs", "A" * 22]):
            ran = _run(*verb, "--url", foreign.url)
            assert ran.returncode == 1
            assert "is not tailrace" in ran.stderr


@pytest.mark.deep
def test_an_owner_sees_their_own_streams(tmp_path: Path) -> None:
    database = f"sqlite:///{tmp_path / 'records.sqlite'}"
    alice, bob = (_run("keys", "create", name, "--database", database).stdout.strip() for name in ("alice", "bob"))
    locked = Server("scripted:tokens_per_s=50", "--database", database).wait_ready()
    until(lambda: locked.http.get("/v1/models", headers={"x-api-key": alice}).status_code == 200)
    stream_id = locked.create(_ENDLESS, x_api_key=alice)
    for key, ids in ((alice, [stream_id]), (bob, [])):
        found = json.loads(_run("ps", "--json", "--url", locked.url, TAILRACE_KEY=key).stdout)
        assert [stream["id"] for stream in found["streams"]] == ids
    assert "--key or TAILRACE_KEY" in _run("ps", "--url", locked.url).stderr
    assert _run("logs", stream_id, "--url", locked.url, TAILRACE_KEY=bob).returncode == 1
    locked.close()
