"""`tailrace chat` with the tools of MCP servers."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from tests.api.process import TAILRACE, Server, environment
from tests.plugins.terminal_chat.pty_process import terminal
from tests.plugins.tool_loop.tool_servers import Tools
from tests.seeing import data_url, picture
from tests.waiting import until

from tailrace.cli.commands import PlainScreen
from tailrace.client import AnswerFailed, Client, connect
from tailrace_plugins.terminal_chat.mcp_answer import Tools as ChatTools
from tailrace_plugins.terminal_chat.session import Chat

pytest.importorskip("mcp")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Tools]]:
    tools = Tools(tmp_path_factory.mktemp("tools"), [])
    rules = [
        {
            "when": "Write",
            "say": "I write.",
            "calls": [{"name": "count__append", "arguments": {"text": "a\u001b[2Jb"}}],
        },
        {
            "when": "Long",
            "say": "I write.",
            "calls": [{"name": "count__append", "arguments": {"text": "a" * 300 + "\u202e\u200bEND"}}],
        },
        {"when": "Look", "calls": [{"name": "count__look", "arguments": {"text": "seen"}}]},
        {"when": r"<tool_response>\n([^\n]*)", "say": "It said: $1"},
        {"when": ".", "say": "Hello."},
    ]
    (tools.path / "script.json").write_text(json.dumps({"rules": rules}))
    with contextlib.closing(tools.start()) as server:
        yield server, tools


def _run(server: Server, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [TAILRACE, "chat", "--url", server.url, "--tools", "count", "scripted", *arguments]
    return subprocess.run(
        command, stdin=subprocess.DEVNULL, env=environment(), capture_output=True, text=True, timeout=50, check=False
    )


def test_in_a_pipe_only_what_reads_is_called(served: tuple[Server, Tools]) -> None:
    server, tools = served
    before = len(tools.counted())
    done = _run(server, "Look.")
    assert (done.returncode, done.stdout) == (0, "It said: seen\n")
    assert 'count: look {"text": "seen"}: seen' in done.stderr
    done = _run(server, "Write.")
    assert (done.returncode, done.stdout) == (0, "I write.\nIt said: The user did not allow this call.\n")
    assert tools.counted()[before:] == ["look"]
    assert _run(server, "--tools", "other", "Look.").returncode == 1


def test_at_a_terminal_calls_are_asked_for(served: tuple[Server, Tools], tmp_path: Path) -> None:
    server, tools = served
    before = len(tools.counted())
    with terminal("chat", "--url", server.url, "scripted", TAILRACE_HOME=str(tmp_path)) as at:
        at.wait_for(">>>")
        at.type("/tools\r")
        at.wait_for("MCP servers: count. In use: none.")
        at.type("/tools nothing\r")
        at.wait_for("there is no MCP server nothing")
        at.type("/tools count\r")
        at.wait_for("The model may use the tools of count")
        at.type("Write.\r")
        at.wait_for("[y/N]")
        at.type("n\r")
        at.wait_for("did not allow this call")
        assert len(tools.counted()) == before
        at.type("Write.\r")
        at.wait_for("The model wants to call", count=2)
        until(lambda: "[y/N]" in at.text.rpartition("The model wants to call")[2])
        at.type("y\r")
        at.wait_for("It said: a")
        assert tools.counted()[before:] == ["append"]
        assert "\x1b[2Jb" not in at.raw.replace("\x1b[2J\x1b", "")
        at.type('/tools ""\r')
        at.wait_for("No tools are used now.")


def test_a_question_shows_all_and_is_answered_after_it(served: tuple[Server, Tools], tmp_path: Path) -> None:
    server, tools = served
    before = len(tools.counted())
    with terminal("chat", "--url", server.url, "--tools", "count", "scripted", TAILRACE_HOME=str(tmp_path)) as at:
        at.wait_for(">>>")
        at.type("Long.\ry\r")  # before the question
        at.wait_for("[y/N]")
        shown = "".join(at.text.split())
        assert "a" * 300 + "\\u202e\\u200bEND" in shown
        at.type("n\r")
        at.wait_for("did not allow this call")
        assert len(tools.counted()) == before


async def test_images_go_with_tools(tmp_path: Path) -> None:
    """Both in the question, and in an earlier one that was asked without tools."""
    (tmp_path / "a.png").write_bytes(picture(1, 32, 32))
    tools, said = Tools(tmp_path, []), list[str]()
    with contextlib.closing(Server("scripted", *tools.flags)) as server:
        async with connect(server.wait_ready().url) as client:
            chat = Chat(client, "scripted", said.append, said.append, sampling={"max_tokens": 12, "seed": 7})
            chat.attach(str(tmp_path / "a.png"))
            assert await chat.ask("First?", PlainScreen(io.StringIO()))
            chat.attach(str(tmp_path / "a.png"))
            used = ChatTools(["count"], said.append)
            assert await chat.ask_with_tools("Second?", used, lambda: PlainScreen(io.StringIO()))
        part = {"type": "input_image", "image_url": data_url(picture(1, 32, 32))}
        first, answer, second = (turn["content"] for turn in chat.turns[:3])
        items = [
            {"role": "user", "content": [part, {"type": "input_text", "text": first[1]["text"]}]},
            {"role": "assistant", "content": answer},
            {"role": "user", "content": [part, {"type": "input_text", "text": second[1]["text"]}]},
        ]
        mcp = {"type": "mcp", "server_label": "count", "require_approval": {"never": {"read_only": True}}}
        body = {"model": "scripted", "input": items, "tools": [mcp], "max_output_tokens": 12, "seed": 7}
        (*_, message) = server.post("/v1/responses", body).json()["output"]
    assert chat.turns[3] == {"role": "assistant", "content": message["content"][0]["text"]}
    assert (first[1]["text"], second[1]["text"], chat.images) == ("First?", "Second?", [])


async def test_a_model_that_asks_without_end_is_stopped() -> None:
    call = {"type": "mcp_approval_request", "id": "m", "server_label": "a", "name": "b", "arguments": "no JSON \u202e"}

    class Asking:
        num_asked = 0

        async def respond(self, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
            self.num_asked += 1
            yield {"type": "response.output_item.done", "item": call}
            yield {"type": "response.completed", "response": {"id": "resp_x"}}

    client, asked = Asking(), list[str]()

    async def refuse(call: str) -> bool:
        asked.append(call)
        return False

    tools = ChatTools(["a"], asked.append, refuse)
    with pytest.raises(AnswerFailed, match="not allowed"):
        await tools.answer(cast(Client, client), {}, [], lambda: PlainScreen(io.StringIO()), asked.append)
    assert client.num_asked == 5
    assert asked[0] == 'a: b "no JSON \\u202e"'
