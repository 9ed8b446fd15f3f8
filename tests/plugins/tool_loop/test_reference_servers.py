"""The reference servers of MCP, unmodified from npm: their tools are called through the tool loop."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from openai.types.responses import Response
from openai.types.responses.response_output_item import McpListTools
from tests.api.process import Server
from tests.clients.installed import node, packages
from tests.plugins.tool_loop.tool_servers import Json, Tools, asks_of, calls_of
from tests.testing.redis_server import free_port
from tests.waiting import until

pytest.importorskip("mcp")

pytestmark = pytest.mark.timeout(300)  # the first one has them installed

_PACKAGES = Path(__file__).with_name("reference_servers")
_ENTITY: Json = {"name": "Arno", "entityType": "river", "observations": ["It bends."]}
_NOTE = "Rivers bend.\nLakes: “no”.\n"
_CALLS: dict[str, tuple[str, Json]] = {  # by what the user writes
    "sum": ("everything__get-sum", {"a": 2, "b": 40}),
    "no sum": ("everything__get-sum", {"a": "two"}),
    "weather": ("everything__get-structured-content", {"location": "Chicago"}),
    "image": ("everything__get-tiny-image", {}),
    "environment": ("everything__get-env", {}),
    "remote echo": ("remote__echo", {"message": "over HTTP"}),
    "learn": ("memory__create_entities", {"entities": [_ENTITY]}),
    "recall": ("memory__read_graph", {}),
    "write": ("files__write_file", {"path": "note.txt", "content": _NOTE}),
    "read": ("files__read_text_file", {"path": "note.txt"}),
    "outside": ("files__read_text_file", {"path": "/etc/passwd"}),
}


def _program(name: str) -> list[str]:
    package = packages(_PACKAGES) / "node_modules" / "@modelcontextprotocol" / f"server-{name}"
    return [str(node()), str(package / "dist" / "index.js")]


class Rig:
    """A server with the reference servers, one of them over HTTP, and a model that calls what the user names."""

    def __init__(self, path: Path, port: int) -> None:
        self.folder = path / "files"
        self.folder.mkdir()
        self.tools = Tools(path, [])
        programs = {name: _program(name) for name in ("everything", "memory", "filesystem")}
        stdio = {name: {"command": command[0], "args": command[1:]} for name, command in programs.items()}
        self.tools.servers = {
            "everything": stdio["everything"],
            "memory": stdio["memory"] | {"env": {"MEMORY_FILE_PATH": str(path / "memory.jsonl")}},
            "files": {"command": programs["filesystem"][0], "args": [programs["filesystem"][1], str(self.folder)]},
            "remote": {"url": f"http://127.0.0.1:{port}/mcp"},
        }
        self.tools.write()
        rules: list[Json] = [
            {"when": f"^Do: {what}$", "calls": [{"name": name, "arguments": self._arguments(given)}]}
            for what, (name, given) in _CALLS.items()
        ]
        rules += [{"when": "<tool_response>", "say": "The tool has answered."}, {"when": ".", "say": "Hello."}]
        (path / "script.json").write_text(json.dumps({"rules": rules}))
        self.server: Server = self.tools.start()

    def _arguments(self, given: Json) -> Json:
        """Relative paths are of the tools' folder."""
        return given | ({"path": str(self.folder / given["path"])} if "path" in given else {})


@contextlib.contextmanager
def _over_http() -> Iterator[int]:
    port = free_port()
    variables = os.environ | {"PORT": str(port)}
    command = [*_program("everything"), "streamableHttp"]

    def listens() -> bool:
        assert running.poll() is None
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    with subprocess.Popen(command, env=variables, stderr=subprocess.DEVNULL) as running:
        try:
            until(listens)
            yield port
        finally:
            running.kill()


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with _over_http() as port, pytest.MonkeyPatch.context() as patch:
        patch.setenv("SECRET_API_KEY", "hidden")
        rig = Rig(tmp_path_factory.mktemp("reference"), port)
        with contextlib.closing(rig.server):
            yield rig


def _do(client: OpenAI, what: str, **more: Any) -> Response:  # Any: what the client takes
    label = _CALLS[what][0].partition("__")[0]
    tool: Any = {"type": "mcp", "server_label": label, "require_approval": "never"} | more.pop("tool", {})
    response: Response = client.responses.create(
        model="scripted", input=more.pop("input", f"Do: {what}"), tools=[tool], **more
    )
    return response


def _output(client: OpenAI, what: str) -> str:
    response = _do(client, what)
    (call,) = calls_of(response)
    assert (call.status, call.error) == ("completed", None)
    assert response.output_text == "The tool has answered."
    return call.output or ""


def test_everything(client: OpenAI) -> None:
    listed = _do(client, "sum").output[0]
    assert isinstance(listed, McpListTools)
    names = {tool.name for tool in listed.tools}
    assert names >= {"echo", "get-sum", "get-env", "get-structured-content", "get-tiny-image"}
    assert not names & {"get-roots-list", "trigger-sampling-request"}  # for clients that say that they can do it
    assert _output(client, "sum") == "The sum of 2 and 40 is 42."
    assert json.loads(_output(client, "weather"))["conditions"] == "Light rain / drizzle"
    before, image, after = _output(client, "image").splitlines()
    assert image == "[image: not shown]"
    assert before
    assert after
    assert "SECRET_API_KEY" not in json.loads(_output(client, "environment"))
    response = _do(client, "no sum")
    (call,) = calls_of(response)
    assert call.status == "failed"
    assert call.error is not None
    assert "number" in json.dumps(call.error.model_dump())
    assert response.output_text == "The tool has answered."  # the model has read what was wrong


def test_everything_over_http(client: OpenAI) -> None:
    assert _output(client, "remote echo") == "Echo: over HTTP"


def test_the_memory_is_there_in_the_next_response(client: OpenAI) -> None:
    assert json.loads(_output(client, "learn")) == [_ENTITY]
    assert json.loads(_output(client, "recall"))["entities"] == [_ENTITY]


def test_a_file_is_written_when_the_user_allows_it(rig: Rig, client: OpenAI) -> None:
    tool = {"require_approval": {"never": {"read_only": True}}}
    asked = _do(client, "write", tool=tool)
    (ask,) = asks_of(asked)
    assert not calls_of(asked)
    assert not list(rig.folder.iterdir())
    answer = [{"type": "mcp_approval_response", "approval_request_id": ask.id, "approve": True}]
    (call,) = calls_of(_do(client, "write", tool=tool, input=answer, previous_response_id=asked.id))
    assert call.status == "completed"
    assert (rig.folder / "note.txt").read_text() == _NOTE
    (call,) = calls_of(_do(client, "read", tool=tool))  # it only reads
    assert call.output == _NOTE
    (call,) = calls_of(_do(client, "outside", tool=tool))
    assert call.status == "failed"
    assert call.error is not None
    assert "Access denied" in json.dumps(call.error.model_dump())
