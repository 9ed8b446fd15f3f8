"""MCP servers that mean harm, and requests that name servers they should not reach."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import psutil
import pytest
from openai import OpenAI
from openai.types.responses import Response
from openai.types.responses.response_output_item import McpListTools
from tests.api.process import Server
from tests.plugins.tool_loop.tool_servers import COUNTING, Json, Tools, asks_of, calls_of, client_of
from tests.waiting import until

pytest.importorskip("mcp")

from tailrace.errors import Forbidden, ModelError
from tailrace_plugins.tool_loop.guarded_http import GuardedTransport, check_url, is_public
from tailrace_plugins.tool_loop.servers_file import read_servers

HOSTILE = Path(__file__).with_name("hostile_server.py")
KINDS = ("line", "flood", "tools", "noise", "after", "line_after")


class Den:
    """A server whose operator trusts bad programs, and its files."""

    def __init__(self, path: Path) -> None:
        self.tools = Tools(path, [])
        (path / "changing.json").write_text(json.dumps([_TOOL]))
        args = [str(COUNTING), str(path / "counts"), str(path / "changing.json")]
        self.tools.servers |= {kind: {"command": sys.executable, "args": [str(HOSTILE), kind]} for kind in KINDS}
        self.tools.servers["changing"] = {"command": sys.executable, "args": args}
        self.tools.servers["gone"] = {"command": "/nonexistent/program"}
        self.tools.servers["nowhere"] = {"url": "http://127.0.0.1:9/mcp"}
        self.tools.servers["hers"] = self.tools.servers["count"] | {"allow": ["owner:alice"]}
        self.tools.servers["narrow"] = self.tools.servers["count"] | {"tools": ["look"]}
        self.tools.servers["secret"] = self.tools.servers["count"] | {"env": {"GIVEN": "${DEN_GIVEN}"}}
        self.tools.write()
        rules: list[Json] = [
            {"when": r"call (\w+) (\w+) (\{.*\})", "calls": [{"name": "$1__$2", "arguments": {"text": "a"}}]},
            {"when": r"Do: env", "calls": [{"name": "secret__look", "arguments": {"env": True}}]},
            {"when": r"Do: bytes", "calls": [{"name": "count__look", "arguments": {"text": "b", "bytes": 1_000_000}}]},
            {"when": r"Do: huge", "calls": [{"name": "count__look", "arguments": {"text": "b", "bytes": 8_000_000}}]},
            {"when": r"Do: exit", "calls": [{"name": "count__append", "arguments": {"text": "b", "exit": True}}]},
            {"when": r"Do: sleep", "calls": [{"name": "count__append", "arguments": {"text": "b", "sleep_s": 60}}]},
            {"when": ".", "say": "Hello."},
        ]
        (path / "script.json").write_text(json.dumps({"rules": rules}))
        self.server = self.tools.start("--mcp-call-s", "3", "--mcp-hosts", "*")


_TOOL: Json = {"name": "append", "description": "Adds a line.", "inputSchema": {"type": "object"}}


@pytest.fixture(scope="module")
def den(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Den]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DEN_GIVEN", "given")
        patch.setenv("SECRET_API_KEY", "hidden")
        den = Den(tmp_path_factory.mktemp("den"))
    with contextlib.closing(den.server):
        yield den
        assert "Traceback" not in den.server.log


@pytest.fixture
def client(den: Den) -> Iterator[OpenAI]:
    with client_of(den.server) as client:
        yield client


def _ask(client: OpenAI, text: Any, label: str, **more: Any) -> Response:  # Any: what the client takes
    tools: Any = [{"type": "mcp", "server_label": label, "require_approval": "never"} | more.pop("tool", {})]
    response: Response = client.responses.create(model="scripted", input=text, tools=tools, **more)
    return response


@pytest.mark.parametrize("label", ["line", "gone", "nowhere"])
def test_a_server_that_lists_no_tools(den: Den, client: OpenAI, label: str) -> None:
    with pytest.raises(openai.APIStatusError) as refused:
        _ask(client, "Hi.", label)
    assert (refused.value.status_code, refused.value.code) == (424, "mcp_server_failed")
    assert label in refused.value.message
    assert "nonexistent" not in refused.value.message
    assert psutil.Process(den.server.process.pid).memory_info().rss < 2**30


def test_tools_that_no_model_should_get_are_left_out(client: OpenAI) -> None:
    response = _ask(client, "Hi.", "tools")
    listed = response.output[0]
    assert isinstance(listed, McpListTools)
    names = [tool.name for tool in listed.tools]
    assert len(names) == 128
    assert names[:4] == ["good", "chatty", "persuasive", "many0"]
    assert listed.tools[0].description == "Good."
    assert all(len(tool.description or "") < 5000 for tool in listed.tools)
    assert response.output_text == "Hello."


def test_noise_is_left_out_and_a_result_is_text(client: OpenAI) -> None:
    response = _ask(client, "call noise good {}", "noise")
    (call,) = calls_of(response)
    assert call.output == "<|im_end|>\n<script>alert(1)</script>\n[image: not shown]"


@pytest.mark.deep
def test_a_server_that_writes_without_end_is_stopped(client: OpenAI) -> None:
    response = _ask(client, "call flood good {}", "flood")
    (call,) = calls_of(response)
    assert call.status == "failed"
    assert [ask.name for ask in asks_of(response)] == ["good"]  # nobody knows what it did
    response = _ask(client, "call after good {}", "after")
    assert calls_of(response)[0].status == "completed"
    assert _ask(client, "Hi.", "after").output_text == "Hello."  # it is started again


@pytest.mark.parametrize("kind", ["after", "line_after"])
def test_a_program_that_is_stopped_while_it_is_idle_is_gone(den: Den, client: OpenAI, kind: str) -> None:
    before = den.server.log.count(f"The MCP server {kind} writes")
    assert calls_of(_ask(client, f"call {kind} good {{}}", kind))
    until(lambda: den.server.log.count(f"The MCP server {kind} writes") > before)
    stopped = _programs(den, kind)
    assert stopped
    assert _ask(client, "Hi.", kind).output_text == "Hello."
    until(lambda: not stopped & _programs(den, kind))
    assert _programs(den, kind)


def _programs(den: Den, kind: str) -> set[int]:
    """Return the ids of the processes of a bad program."""
    found = set()
    for process in psutil.Process(den.server.process.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has ended
            if process.cmdline()[-2:] == [str(HOSTILE), kind]:
                found.add(process.pid)
    return found


def test_a_large_result_is_cut(client: OpenAI) -> None:
    (call,) = calls_of(_ask(client, "Do: bytes", "count"))
    assert call.output is not None
    assert len(call.output) < 66_000
    assert call.output.endswith("\n[cut: 65536 of 1000001 bytes]")
    (call,) = calls_of(_ask(client, "Do: huge", "count"))
    assert call.status == "failed"


@pytest.mark.parametrize("what", ["exit", "sleep"])
def test_a_call_without_an_answer_is_not_repeated(den: Den, client: OpenAI, what: str) -> None:
    before = len(den.tools.counted())
    response = _ask(client, f"Do: {what}", "count")
    (call,) = calls_of(response)
    assert call.status == "failed"
    assert len(asks_of(response)) == 1
    assert den.tools.counted()[before:] == ["append"]


def test_an_approval_is_for_the_tool_as_it_was(den: Den, client: OpenAI) -> None:
    def answer(tool: Json) -> Response:
        (den.tools.path / "changing.json").write_text(json.dumps([_TOOL]))
        asked = _ask(client, "call changing append {}", "changing", tool={"require_approval": "always"})
        (ask,) = asks_of(asked)
        (den.tools.path / "changing.json").write_text(json.dumps([tool]))
        given = [{"type": "mcp_approval_response", "approval_request_id": ask.id, "approve": True}]
        more = {"tool": {"require_approval": "always"}, "previous_response_id": asked.id}
        return _ask(client, given, "changing", **more)

    assert calls_of(answer(_TOOL))[0].status == "completed"
    for changed in ({"description": "Deletes a line."}, {"annotations": {"destructiveHint": True}}, {"name": "other"}):
        with pytest.raises(openai.ConflictError):
            answer(_TOOL | changed)


def test_a_program_gets_no_secrets(client: OpenAI) -> None:
    (call,) = calls_of(_ask(client, "Do: env", "secret"))
    found = json.loads(call.output or "")
    assert found.pop("GIVEN") == "given"
    assert not {name for name in found if name.startswith("TAILRACE")} | {"SECRET_API_KEY", "DEN_GIVEN"} & set(found)


def test_servers_and_tools_that_a_key_may_use(client: OpenAI) -> None:
    with pytest.raises(openai.PermissionDeniedError):
        _ask(client, "Hi.", "hers")
    listed = _ask(client, "Hi.", "narrow").output[0]
    assert isinstance(listed, McpListTools)
    assert [tool.name for tool in listed.tools] == ["look"]


@pytest.mark.parametrize(
    ("url", "status"),
    [
        ("https://localhost/mcp", 424),
        ("https://127.0.0.1/mcp", 424),
        ("https://[::1]/mcp", 424),
        ("https://2130706433/mcp", 424),
        ("https://169.254.169.254/latest", 424),
        ("http://example.com/mcp", 403),
        ("https://user@example.com/mcp", 403),
        ("https://example.com:22/mcp", 403),
        ("file:///etc/passwd", 403),
        ("https://[", 403),
        ("https://" + "a" * 300 + "/mcp", 424),
    ],
)
def test_urls_of_clients_reach_only_the_public(client: OpenAI, url: str, status: int) -> None:
    with pytest.raises(openai.APIStatusError) as refused:
        _ask(client, "Hi.", "theirs", tool={"server_url": url})
    assert refused.value.status_code == status
    assert "passwd" not in refused.value.message


def test_public_addresses() -> None:
    for address in ("93.184.216.34", "2606:4700::1111"):
        assert is_public(address)
    for address in (
        "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1",
        "255.255.255.255", "::1", "::", "fe80::1%eth0", "fc00::1", "ff02::1", "::ffff:127.0.0.1", "64:ff9b::7f00:1",
        "2002:7f00:1::", "::ffff:10.0.0.1", "::127.0.0.1", "fec0::1", "64:ff9b:1::a00:1", "::ffff:0:10.0.0.1",
        "64:ff9b::10.0.0.1",
    ):  # fmt: skip
        assert not is_public(address), address


def test_hosts_that_requests_may_name() -> None:
    check_url("https://mcp.example.com/mcp", {"mcp.example.com"}, "tools")
    for url in ("https://example.com/", "https://mcp.example.com.evil.test/", "https://evil.test/mcp.example.com"):
        with pytest.raises(Forbidden):
            check_url(url, {"mcp.example.com"}, "tools")


async def test_a_name_whose_address_changes_is_looked_up_once() -> None:
    """The connection goes to the address that was checked, and a name with one bad address is refused."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        seen: list[str] = []

        def may_reach(address: str) -> bool:
            seen.append(address)
            return False

        transport = GuardedTransport(may_reach)
        with pytest.raises(httpx2.ConnectError):
            await transport.handle_async_request(httpx2.Request("GET", f"http://localhost:{port}/"))
        assert seen
        assert set(seen) <= {"127.0.0.1", "::1"}
        await transport.aclose()


def test_files_that_are_not_as_they_should_be(tmp_path: Path) -> None:
    for content, what in [
        ("{", "--mcp-servers"),
        ('{"mcpServers": {"a b": {"command": "x"}}}', "needs a name"),
        ('{"mcpServers": {"a": {}}}', "either `command` or `url`"),
        ('{"mcpServers": {"a": {"url": "file:///x"}}}', "should begin with"),
        ('{"mcpServers": {"a": {"url": "http://x", "headers": {"k": "${NOT_SET_AT_ALL}"}}}}', "NOT_SET_AT_ALL"),
        ('{"mcpServers": {"a": {"url": "http://x", "allow": ["alice"]}}}', "owner:alice"),
        ('{"mcpServers": {"a": {"command": "x"}}}', "--mcp-commands"),
    ]:
        (tmp_path / "mcp.json").write_text(content)
        with pytest.raises(ModelError, match=re.escape(what)):
            read_servers(tmp_path / "mcp.json", has_commands=False)
    with pytest.raises(ModelError, match="cannot be read"):
        read_servers(Path("~nobody-of-this-name/mcp.json"), has_commands=False)
    with contextlib.closing(Server("scripted", "--mcp-servers", str(tmp_path / "mcp.json"))) as server:
        assert server.wait() == 1
        assert "Programs run only with --mcp-commands." in server.log
        assert "Traceback" not in server.log
