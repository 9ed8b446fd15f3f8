"""What a link shows while a conversation or a stream changes: no tool calls, and nothing that is gone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import httpx
import pytest
from tests.agents.scripts import Rules, scripted
from tests.api.process import Server
from tests.api.shared_reader import SharedReader, token_in
from tests.waiting import until

RULES: Rules = [
    {"when": "<tool_response>", "say": "It is sunny."},
    {"when": "weather", "say": "I look it up.", "calls": [{"name": "look_up", "arguments": {"city": "secret-city"}}]},
    {"when": "forecast", "say": "word " * 80, "calls": [{"name": "look_up", "arguments": {"city": "secret-city"}}]},
    {"when": "", "say": "word " * 4000},
]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
MESSAGES = [{"role": "user", "content": "The weather?"}]
CHAT_TOOL = {"type": "function", "function": {"name": "look_up", "parameters": PARAMETERS}}
TOOL = {"type": "function", "name": "look_up", "parameters": PARAMETERS}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with scripted(tmp_path_factory.mktemp("shared"), RULES, options="tokens_per_s=60") as server:
        yield server


def read(server: Server, **what: str) -> SharedReader:
    return SharedReader(server, token_in(server.post("/v1/shares", what)))


def test_a_stream_is_shown_without_its_tool_calls(server: Server) -> None:
    body = {"model": "coder", "messages": MESSAGES, "tools": [CHAT_TOOL], "stream": True}
    with server.http.stream("POST", "/v1/chat/completions", json=body) as answer:
        stream_id = answer.headers["x-stream-id"]
        with read(server, stream_id=stream_id) as live:
            assert '"name":"look_up"' in "".join(answer.iter_text())
    with read(server, stream_id=stream_id) as afterwards:
        pass
    for reader in (live, afterwards):
        assert [(role, text.strip()) for role, text in reader.shown] == [("assistant", "I look it up.")]
        assert "secret-city" not in reader.body
        assert "look_up" not in reader.body
    assert live.headers["cache-control"] == "no-store, no-transform"
    assert live.headers["vary"] == "x-tailrace-share"


def conversation(server: Server, text: str) -> tuple[str, str]:
    """Return the ids of a conversation and of the response that runs in it."""
    its_id = str(server.post("/v1/conversations", {}).json()["id"])
    body = {"model": "coder", "input": text, "conversation": its_id, "tools": [TOOL], "background": True}
    begun = server.post("/v1/responses", body)
    assert begun.status_code == 200
    return its_id, str(begun.json()["id"])


def test_a_conversation_is_shown_without_its_tool_calls(server: Server) -> None:
    its_id, _ = conversation(server, "The forecast?")
    with read(server, conversation_id=its_id) as reader:
        until(lambda: reader.is_running and "word" in reader.texts.get(1, ""))  # the call is written later
        until(lambda: not reader.is_running)
        assert server.http.delete(f"/v1/conversations/{its_id}").status_code == 200
    assert "secret-city" not in reader.body
    assert "look_up" not in reader.body


def test_readers_of_an_answer_that_runs_see_that_the_conversation_changes(server: Server) -> None:
    its_id, response_id = conversation(server, "Tell me much.")
    with read(server, conversation_id=its_id) as reader:
        until(lambda: len(reader.texts.get(1, "")) > 20)
        answer = server.http.post(f"/v1/conversations/{its_id}", json={"head": None})
        assert answer.status_code == 200, answer.text
        until(lambda: reader.branch == [])
        assert not reader.is_running
        assert server.http.get(f"/v1/responses/{response_id}").json()["status"] == "in_progress"
        assert server.http.delete(f"/v1/conversations/{its_id}").status_code == 200
    assert reader.reason == "deleted"


def test_a_deleted_conversation_cuts_the_readers_of_its_running_answer(server: Server) -> None:
    its_id, _ = conversation(server, "Tell me much.")
    with read(server, conversation_id=its_id) as reader:
        until(lambda: len(reader.texts.get(1, "")) > 20)
        assert server.http.delete(f"/v1/conversations/{its_id}").status_code == 200
    assert reader.reason == "deleted"
    assert len(reader.texts[1]) < 10_000  # long before the answer's end


def test_failed_openings_lock_nobody_out_who_has_a_link(server: Server) -> None:
    headers = {"x-tailrace-share": "trs_no"}
    with httpx.Client(base_url=server.url, trust_env=False) as client:
        codes = [client.get("/v1/shared", headers=headers).status_code for _ in range(260)]
    assert set(codes) == {404, 429}
    body = {"model": "coder", "messages": MESSAGES}
    stream_id = server.http.post("/v1/chat/completions", json=body).headers["x-stream-id"]
    with contextlib.ExitStack() as stack:
        reader = stack.enter_context(read(server, stream_id=stream_id))
    assert reader.status == 200
