"""What a request asks for and does not get is named in a header, or refused with --strict; and what does not fit at all
is refused in the words by which clients know it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from tests.api.process import Server
from tests.http.wire import sse_data

_CONTEXT_TOKENS = 512
_SOURCE = "scripted:utf8=0,caches=8"  # one token of an answer is a word
_FLAGS = ("--context-tokens", str(_CONTEXT_TOKENS), "--default-max-tokens", "4")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with contextlib.closing(Server(_SOURCE, *_FLAGS)) as started:
        yield started.wait_ready()


@pytest.fixture(scope="module")
def strict() -> Iterator[Server]:
    with contextlib.closing(Server(_SOURCE, *_FLAGS, "--strict")) as started:
        yield started.wait_ready()


def _user(content: object) -> dict[str, object]:
    return {"role": "user", "content": content}


HI = [_user("Hi")]
SOUND = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
MESSAGES = {"model": "scripted", "max_tokens": 4, "messages": HI}

# A path, a body, and what the answer says was left out.
LEFT_OUT: dict[str, tuple[str, dict[str, Any], str]] = {
    "a field": ("/v1/chat/completions", {"messages": HI, "frobnicate": 1}, "frobnicate"),
    "an option": ("/v1/chat/completions", {"messages": HI, "service_tier": "flex"}, "service_tier"),
    "a tool": (
        "/v1/responses",
        {"input": "Hi", "tools": [{"type": "web_search"}]},
        "tools[0] (web_search)",
    ),
    "a tool of a server": (
        "/v1/messages",
        {**MESSAGES, "tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        "tools[0] (web_search_20250305)",
    ),
    "a field of the beta": (
        "/v1/messages",
        {**MESSAGES, "context_management": {"edits": [{"type": "clear_thinking_20251015"}]}},
        "context_management",
    ),
    "a block": (
        "/v1/messages",
        {**MESSAGES, "messages": [*HI, {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"},
                                                                        {"type": "text", "text": "Ho"}]}, *HI]},
        "messages[1].content[0] (redacted_thinking)",
    ),
    "a sound of an earlier turn": (
        "/v1/chat/completions",
        {"messages": [_user([SOUND]), {"role": "assistant", "content": "A cat."}, _user("Sure?")]},
        "messages[0].content[0] (audio: placeholder)",
    ),
    "an item": (
        "/v1/responses",
        {"input": [{"type": "web_search_call", "id": "ws_1", "status": "completed"}, {"type": "message", **HI[0]}]},
        "input[0] (web_search_call)",
    ),
    "a sampling parameter": ("/v1/completions", {"prompt": "Hi", "repetition_penalty": 1.1}, "repetition_penalty"),
    "an option of a sampler": ("/api/chat", {"model": "scripted", "messages": HI, "options": {"mirostat": 2}},
                               "options.mirostat"),
    "tokens of OpenAI": ("/v1/completions", {"prompt": "Hi", "max_tokens": 32_000}, "max_tokens (510 used)"),
    "tokens of a chat": (
        "/v1/chat/completions", {"messages": HI, "max_completion_tokens": 32_000}, "max_completion_tokens (507 used)"
    ),
    "tokens of Responses": (
        "/v1/responses", {"input": "Hi", "max_output_tokens": 32_000}, "max_output_tokens (507 used)"
    ),
    "tokens of Anthropic": ("/v1/messages", {**MESSAGES, "max_tokens": 32_000}, "max_tokens (507 used)"),
    "tokens of Ollama": (
        "/api/generate", {"model": "scripted", "prompt": "Hi", "raw": True, "options": {"num_predict": 32_000}},
        "options.num_predict (510 used)",
    ),
    "tokens of Triton": (
        "/v2/models/scripted/generate", {"text_input": "Hi", "max_tokens": 32_000}, "max_tokens (507 used)"
    ),
    "tokens of our own wire": ("/v1/streams", {"prompt": "Hi", "max_tokens": 32_000}, "max_tokens (510 used)"),
}  # fmt: skip
left_out = pytest.mark.parametrize("case", LEFT_OUT)


@left_out
def test_what_is_left_out_is_named(server: Server, case: str) -> None:
    path, body, expected = LEFT_OUT[case]
    answer = server.post(path, {"stream": False, **body} if path != "/v1/streams" else body)
    assert answer.status_code in (200, 201), answer.text
    assert answer.headers["x-tailrace-ignored"] == expected


@left_out
def test_strict_refuses_what_would_be_left_out(strict: Server, case: str) -> None:
    path, body, expected = LEFT_OUT[case]
    answer = strict.post(path, body)
    assert answer.status_code == 400
    if "used" not in expected:
        assert expected.split(" (")[0] in answer.text or "repetition_penalty" in answer.text
    assert "x-stream-id" not in answer.headers


def test_ten_are_named_and_the_others_counted(server: Server) -> None:
    body = {"prompt": "Hi", **{f"field_{number:02}": number for number in range(13)}}
    named = server.post("/v1/completions", body).headers["x-tailrace-ignored"].split(", ")
    assert named == [*(f"field_{number:02}" for number in range(10)), "and 3 more"]


def test_an_answer_that_was_shortened_ends_by_its_length(server: Server) -> None:
    asked = {"max_tokens": 32_000, "seed": 1}
    chat = server.post("/v1/chat/completions", {"messages": HI, **asked}).json()
    assert chat["choices"][0]["finish_reason"] == "length"
    assert chat["usage"]["total_tokens"] == _CONTEXT_TOKENS
    message = server.post("/v1/messages", {**MESSAGES, **asked}).json()
    assert message["stop_reason"] == "max_tokens"


@pytest.mark.parametrize("source", ["server", "strict"])
def test_no_limit_is_all_the_room(source: str, request: pytest.FixtureRequest) -> None:
    server = request.getfixturevalue(source)
    for path, body in (
        ("/v1/completions", {"prompt": "Hi", "max_tokens": -1}),
        ("/api/generate", {"model": "scripted", "prompt": "Hi", "raw": True, "options": {"num_predict": -1}}),
    ):
        answer = server.post(path, {"stream": False, **body})
        assert answer.status_code == 200, answer.text
        assert "x-tailrace-ignored" not in answer.headers
        assert server.state(answer.headers["x-stream-id"])["usage"]["total_tokens"] == _CONTEXT_TOKENS


def test_only_tgi_refuses_what_would_be_shortened(server: Server) -> None:
    """Its clients know the message of its validation, and send no more than fits."""
    answer = server.post("/generate", {"inputs": "Hi", "parameters": {"max_new_tokens": 511}})
    assert (answer.status_code, answer.json()["error_type"]) == (422, "validation")
    assert "`inputs` tokens + `max_new_tokens` must be <= 512. Given: 2 `inputs` tokens and 511" in answer.text


# Prompts that are too long

LONG = "x" * 600
TOO_LONG: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {
    "chat": (
        "/v1/chat/completions", {"messages": [_user(LONG)]},
        {"code": "context_length_exceeded", "param": "messages", "message": "maximum context length is 512 tokens"},
    ),
    "completions": (
        "/v1/completions", {"prompt": LONG},
        {"code": "context_length_exceeded", "param": "prompt", "message": "maximum context length is 512 tokens"},
    ),
    "responses": (
        "/v1/responses", {"input": LONG},
        {"code": "context_length_exceeded", "param": "input", "message": "maximum context length is 512 tokens"},
    ),
    "anthropic": (
        "/v1/messages", {**MESSAGES, "messages": [_user(LONG)]},
        {"type": "invalid_request_error", "message": "prompt is too long: 603 tokens > 512 maximum"},
    ),
    "ollama": (
        "/api/chat", {"model": "scripted", "messages": [_user(LONG)]}, {"": "exceeds the context length"}
    ),
}  # fmt: skip


@pytest.mark.parametrize("wire", TOO_LONG)
def test_a_prompt_that_is_too_long(server: Server, wire: str) -> None:
    path, body, expected = TOO_LONG[wire]
    for stream in (False, True):
        if (wire, stream) == ("responses", True):
            continue  # see below
        answer = server.post(path, {**body, "stream": stream})
        assert answer.status_code == 400
        error = answer.json()["error"]
        for name, text in expected.items():
            assert text in (error[name] if name else error), error


def test_a_stream_of_responses_says_in_an_event_that_a_prompt_is_too_long(server: Server) -> None:
    """Codex CLI makes a conversation shorter after this event, and not after a status."""
    answer = server.post("/v1/responses", {"input": LONG, "stream": True})
    assert answer.status_code == 200
    events = [json.loads(data) for data in sse_data(answer.content)]
    (failed,) = (event["response"] for event in events if event["type"] == "response.failed")
    assert failed["error"]["code"] == "context_length_exceeded"
    assert server.http.get(f"/v1/responses/{failed['id']}").status_code == 404


# Whether a response is kept


def test_a_response_that_is_not_stored(server: Server) -> None:
    answer = server.post("/v1/responses", {"input": "Hi", "store": False})
    path = f"/v1/responses/{answer.json()['id']}"
    for method, more in (("GET", ""), ("POST", "/cancel"), ("DELETE", "")):
        gone = server.http.request(method, path + more)
        assert (gone.status_code, gone.json()["error"]["type"]) == (404, "invalid_request_error"), method
    later = server.post("/v1/responses", {"input": "More", "previous_response_id": answer.json()["id"]})
    assert (later.status_code, later.json()["error"]["code"]) == (400, "previous_response_not_found")
    # As a stream, it can be resumed for a while, like that of any other answer.
    assert server.state(answer.headers["x-stream-id"])["status"] == "done"


# The prefix cache


def _claude(server: Server, version: str) -> dict[str, int]:
    """Ask as Claude Code does: the first text of its system prompt is another one in every request."""
    billing = f"x-anthropic-billing-header: cc_version=2.1.197.{version}; cc_entrypoint=cli; cch={version};"
    system = [{"type": "text", "text": billing}, {"type": "text", "text": "You write code. " * 8}]
    answer = server.post("/v1/messages", {**MESSAGES, "system": system})
    assert answer.headers["x-tailrace-ignored"] == "system[0] (x-anthropic-billing-header)"
    usage: dict[str, int] = answer.json()["usage"]
    return usage


def test_the_prompts_of_claude_code_have_the_same_beginning(server: Server) -> None:
    first, second = _claude(server, "a1b"), _claude(server, "9z8")
    assert (second["input_tokens"], second["cache_creation_input_tokens"]) == (1, 0)
    assert second["cache_read_input_tokens"] == first["input_tokens"] + first["cache_read_input_tokens"] - 1


def test_every_wire_says_how_much_of_a_prompt_was_cached(server: Server) -> None:
    chat: httpx.Response
    for _ in range(2):
        chat = server.post("/v1/chat/completions", {"messages": [_user("The river.")]})
        response = server.post("/v1/responses", {"input": "The river."})
    usage = chat.json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": usage["prompt_tokens"] - 1}
    usage = response.json()["usage"]
    assert usage["input_tokens_details"]["cached_tokens"] == usage["input_tokens"] - 1
