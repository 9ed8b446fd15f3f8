"""Requests as chat pages and coding assistants send them, with their default values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.api.process import Server
from tests.http.wire import as_json, sse_data

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Does {name} and says how it went.",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
        },
    }
    for name in ("read_file", "write_to_file", "list_files", "execute_command", "ask_followup_question")
]
QUESTION = {"role": "user", "content": "Tell me of rivers."}
PARTS = {
    "role": "user",
    "content": [{"type": "text", "text": "Mend it."}, {"type": "text", "text": "# Files\nmain.py"}],
}
RULES = {"role": "system", "content": "You are an engineer. " + "Work in small steps and name each. " * 300}
CALL = {"id": "call_1", "type": "function", "function": {"name": "read_file", "arguments": '{"path": "main.py"}'}}
USAGE = {"stream_options": {"include_usage": True}}
NEUTRAL = {"frequency_penalty": 0, "presence_penalty": 0, "temperature": 1, "top_p": 1}

CHATS: dict[str, tuple[dict[str, Any], list[str]]] = {  # with the names of what is ignored
    "open webui": ({"messages": [QUESTION], "tools": TOOLS}, ["tools"]),
    "cline": (
        {
            "messages": [RULES, PARTS],
            "temperature": 0,
            "tools": TOOLS,
            "tool_choice": "auto",
            "parallel_tool_calls": False,
            **USAGE,
        },
        ["tools"],
    ),
    "cline, behind a call": (
        {
            "messages": [
                RULES,
                PARTS,
                {"role": "assistant", "content": "", "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "call_1", "content": "print()"},
                {"role": "user", "content": [{"type": "text", "text": "Go on."}]},
            ],
            "temperature": 0,
            "tools": TOOLS,
            "parallel_tool_calls": False,
            **USAGE,
        },
        ["tools"],
    ),
    "librechat": ({"messages": [RULES, QUESTION], "user": "65f0", **NEUTRAL, **USAGE}, ["user"]),
    "lobechat": ({"messages": [QUESTION], **NEUTRAL, **USAGE}, []),
    "sillytavern": ({"messages": [RULES, QUESTION], **NEUTRAL, "logit_bias": {}, "n": 1, "stop": []}, []),
}


@pytest.mark.parametrize("name", CHATS)
def test_a_chat(server: Server, name: str) -> None:
    body, ignored = CHATS[name]
    answer = server.post("/v1/chat/completions", {"model": "scripted", "stream": True, "max_tokens": 12, **body})
    assert answer.status_code == 200, answer.text
    *chunks, end = sse_data(answer.content)
    assert end == "[DONE]"
    choices = [choice for chunk in map(as_json, chunks) for choice in chunk["choices"]]
    assert "".join(choice["delta"].get("content", "") for choice in choices)
    assert choices[-1]["finish_reason"] == "length"
    assert answer.headers.get("x-tailrace-ignored", "").split(", ") == (ignored or [""])


def test_a_title_for_open_webui(server: Server) -> None:
    body = {"model": "scripted", "messages": [QUESTION], "stream": False, "max_tokens": 1000}
    assert server.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]


def test_where_nothing_may_be_without_effect(serve: Callable[..., Server]) -> None:
    answer = serve("scripted", "--strict").post("/v1/chat/completions", CHATS["open webui"][0])
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools")
    assert "has no effect" in answer.json()["error"]["message"]
