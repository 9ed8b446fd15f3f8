"""MCP servers over HTTP: one of the official SDK, and some that mean harm."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import openai
import pytest
from openai import OpenAI
from openai.types.responses import Response
from tests.api.process import Server
from tests.plugins.tool_loop.tool_servers import Json, Tools, asks_of, calls_of, client_of
from tests.waiting import LONG_S, until

pytest.importorskip("mcp")

from tailrace_plugins.tool_loop.mcp_connections import McpConnection, http_transport

SUMS = Path(__file__).with_name("sums_server.py")


class _BadServer(BaseHTTPRequestHandler):
    """Its path says what it does: `/endless` answers without end, `/events` so in an event stream, `/away` redirects
    to an address inside, `/wrong` breaks off after the call, `/packed` compresses its answers, `/stuck` does not
    answer to the end of a session."""

    protocol_version = "HTTP/1.1"
    seen: ClassVar[list[str]] = []

    def do_POST(self) -> None:
        message = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.seen.append(f"{self.path} {message.get('method')}")
        method = message.get("method")
        if self.path == "/away":
            self.send_response(307)
            self.send_header("location", "http://127.0.0.1:9/inside")
            self.send_header("content-length", "0")
            self.end_headers()
        elif "id" not in message:
            self.send_response(202)
            self.send_header("content-length", "0")
            self.end_headers()
        elif method == "tools/call":
            self._misbehave()
        else:
            self._answer(message)

    def do_GET(self) -> None:
        self.send_response(405)
        self.send_header("content-length", "0")
        self.end_headers()

    def do_DELETE(self) -> None:
        self.rfile.read(1)  # until the client leaves

    def _answer(self, message: Json) -> None:
        results: Json = {
            "initialize": {
                "protocolVersion": "2025-06-18",
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "bad", "version": "1"},
            },
            "tools/list": {"tools": [{"name": "add", "inputSchema": {"type": "object"}}]},
        }
        answer: Json = {"jsonrpc": "2.0", "id": message["id"]}
        if message["method"] in results:
            answer["result"] = results[message["method"]]
        else:
            answer["error"] = {"code": -32601, "message": "There is no such method."}
        body = json.dumps(answer).encode()
        self.send_response(200)
        if self.path == "/packed":
            body = gzip.compress(body)
            self.send_header("content-encoding", "gzip")
        if self.path == "/stuck":
            self.send_header("mcp-session-id", "1")
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _misbehave(self) -> None:
        self.send_response(500 if self.path == "/wrong" else 200)
        kind = "text/event-stream" if self.path == "/events" else "application/json"
        self.send_header("content-type", kind)
        self.send_header("connection", "close")
        self.end_headers()
        with contextlib.suppress(OSError):
            while self.path != "/wrong":
                self.wfile.write(b": " + b"x" * 65_536 + b"\n\n")

    def log_message(self, *args: object) -> None:
        """Nothing is written."""


@contextlib.contextmanager
def _sums() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, str(SUMS), str(port)])

    def is_there() -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return True
        return False

    try:
        until(is_there)
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def bad_url() -> Iterator[str]:
    bad = ThreadingHTTPServer(("127.0.0.1", 0), _BadServer)
    bad.daemon_threads = True
    thread = threading.Thread(target=bad.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{bad.server_port}"
    bad.shutdown()
    bad.server_close()


@pytest.fixture(scope="module")
def server(bad_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with _sums() as url, pytest.MonkeyPatch.context() as patch:
        patch.setenv("SUMS_TOKEN", "the-token")
        tools = Tools(tmp_path_factory.mktemp("http"), [])
        rules = [
            {
                "when": r"Do: (\w+) (\w+) (\d+) (\d+)",
                "calls": [{"name": "$1__$2", "arguments": {"a": "$3", "b": "$4"}}],
            },
            {"when": r"<tool_response>\n([^\n]*)", "say": "It said: $1"},
            {"when": ".", "say": "Hello."},
        ]
        (tools.path / "script.json").write_text(json.dumps({"rules": rules}))
        tools.servers = {
            "sums": {"url": url, "headers": {"x-token": "${SUMS_TOKEN}"}},
            "closed": {"url": url},
            **{name: {"url": f"{bad_url}/{name}"} for name in ("endless", "events", "away", "wrong", "packed")},
        }
        tools.write()
        with contextlib.closing(tools.start("--mcp-call-s", "20")) as running:
            yield running
            assert "the-token" not in running.log


@pytest.fixture
def client(server: Server) -> Iterator[OpenAI]:
    with client_of(server) as client:
        yield client


def _ask(client: OpenAI, text: str, label: str, **more: Any) -> Response:  # Any: what the client takes
    tools: Any = [{"type": "mcp", "server_label": label, "require_approval": "never", **more}]
    return client.responses.create(model="scripted", input=text, tools=tools)


def test_a_server_of_the_official_sdk(client: OpenAI) -> None:
    response = _ask(client, "Do: sums add 2 3", "sums")
    (call,) = calls_of(response)
    assert (call.output, call.status) == ("5", "completed")
    assert response.output_text == "It said: 5"
    (call,) = calls_of(_ask(client, "Do: sums divide 1 0", "sums"))
    assert call.status == "failed"
    assert call.error is not None
    assert call.error.type == "mcp_tool_execution_error"
    only = _ask(client, "Do: sums add 2 3", "sums", allowed_tools={"read_only": True})
    assert calls_of(only)[0].output == "5"


@pytest.mark.parametrize("label", ["closed", "away", "packed"])
def test_a_server_that_does_not_let_us_in(client: OpenAI, label: str) -> None:
    with pytest.raises(openai.APIStatusError) as refused:
        _ask(client, "Hi.", label)
    assert refused.value.status_code == 424


async def test_a_session_whose_end_gets_no_answer(bad_url: str) -> None:
    connection = McpConnection("stuck", http_transport(f"{bad_url}/stuck", {}))
    assert [tool.name for tool in await connection.tools()] == ["add"]
    async with asyncio.timeout(LONG_S):
        await connection.closed()


@pytest.mark.parametrize("label", ["endless", "events", "wrong"])
def test_a_call_that_gets_no_end(client: OpenAI, label: str) -> None:
    before = len(_BadServer.seen)
    response = _ask(client, f"Do: {label} add 1 2", label)
    (call,) = calls_of(response)
    assert call.status == "failed"
    assert len(asks_of(response)) == 1
    assert [one for one in _BadServer.seen[before:] if "tools/call" in one] == [f"/{label} tools/call"]


@pytest.mark.deep
def test_the_default_model_is_forced_to_call(tmp_path: Path) -> None:
    with _sums() as url:
        tools = Tools(tmp_path, [])
        tools.servers = {"sums": {"url": url, "headers": {"x-token": "the-token"}}}
        tools.write()
        with contextlib.closing(Server("smollm2", *tools.flags).wait_ready()) as running, client_of(running) as client:
            given: Any = [{"type": "mcp", "server_label": "sums", "require_approval": "never"}]
            choice: Any = {"type": "mcp", "server_label": "sums", "name": "add"}
            response = client.responses.create(
                model="default", input="Add 2 and 3.", tools=given, tool_choice=choice, max_output_tokens=60
            )
            (call,) = calls_of(response)
            arguments = json.loads(call.arguments)
            assert call.output == str(arguments["a"] + arguments["b"])
            assert response.output_text
            streamed = list(
                client.responses.create(
                    model="default",
                    input="Add 2 and 3.",
                    tools=given,
                    tool_choice={"type": "mcp", "server_label": "sums"},
                    max_output_tokens=60,
                    stream=True,
                )
            )
            assert [event.sequence_number for event in streamed] == list(range(len(streamed)))
