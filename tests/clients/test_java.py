"""The JDK's own clients."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.api.oracle import Answer
from tests.api.process import Server
from tests.http.wire import as_json, sse_data, sse_ids
from tests.missing import missing_reason

_SOURCE = Path(__file__).with_name("java") / "Client.java"
_RUN_S = 55

_MISSING_JDK = missing_reason("a JDK of version 17", "openjdk-17-jdk in Debian")

pytestmark = pytest.mark.skipif(shutil.which("javac") is None, reason=_MISSING_JDK)


@pytest.fixture(scope="module")
def classes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the compiled client."""
    folder = tmp_path_factory.mktemp("java")
    subprocess.run(["javac", "-d", str(folder), str(_SOURCE)], check=True, timeout=_RUN_S)
    return folder


def _run(classes: Path, server: Server, verb: str, **body: object) -> str:
    command = ["java", "-Xshare:auto", "-XX:TieredStopAtLevel=1", "-cp", str(classes), "Client"]
    done = subprocess.run(
        [*command, server.url, verb, json.dumps(body)], capture_output=True, text=True, timeout=_RUN_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_answers_without_streaming(server: Server, classes: Path) -> None:
    lines = _run(classes, server, "whole", prompt="Java.", max_tokens=20, seed=4).splitlines()
    assert lines[::2] == ["200 HTTP_1_1"] * 2
    for body in lines[1::2]:
        assert as_json(body)["choices"][0]["text"] == Answer("Java.", 20, 4).text


def test_a_stream_by_lines_and_after_a_reconnect(server: Server, classes: Path) -> None:
    answer = Answer("Java.", 200, 4)
    output = _run(classes, server, "stream", prompt="Java.", max_tokens=200, seed=4).encode()
    stream_id = sse_ids(output)[0].rpartition("-")[0]
    whole = b"".join(answer.native(stream_id))
    assert (sse_ids(output), sse_data(output)) == (sse_ids(whole), sse_data(whole))


def test_a_web_socket(server: Server, classes: Path) -> None:
    output = _run(classes, server, "websocket", type="create", prompt="Java.", max_tokens=50, seed=4)
    created, *frames = [as_json(line) for line in output.splitlines()]
    assert created["type"] == "created"
    assert "".join(frame["text"] for frame in frames[:-1]) == Answer("Java.", 50, 4).text
    assert frames[-1]["status"] == "done"
