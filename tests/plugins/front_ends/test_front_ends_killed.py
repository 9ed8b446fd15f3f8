"""An answer of a front end outlives its page and its server: the page asks for the answer of its chat, and gets all of
it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.api.oracle import Answer, chat_ids
from tests.faults.house import House
from tests.http.wire import sse_data

from tailrace.dialects.bodies import JsonBody

__all__ = ["BODIES", "COUNT", "FOLLOW", "QUESTION", "SEED", "text_of"]

COUNT = 120
QUESTION = "Why do rivers bend?"
SEED = 7

BODIES: dict[str, JsonBody] = {
    "/v1/ai-sdk/chat": {
        "id": "chat/1",
        "messages": [{"id": "1", "role": "user", "parts": [{"type": "text", "text": QUESTION}]}],
        "maxOutputTokens": COUNT,
        "seed": SEED,
    },
    "/v1/ag-ui": {
        "threadId": "chat/1",
        "runId": "run-1",
        "messages": [{"id": "1", "role": "user", "content": QUESTION}],
        "tools": [],
        "context": [],
        "forwardedProps": {"max_tokens": COUNT, "seed": SEED},
    },
}
FOLLOW = {"/v1/ai-sdk/chat": "/v1/ai-sdk/chat/chat%2F1/stream", "/v1/ag-ui": "/v1/ag-ui/chat%2F1/events"}


def text_of(body: bytes) -> str:
    events = [json.loads(one) for one in sse_data(body) if one != "[DONE]"]
    assert events[-1]["type"] in ("finish", "RUN_FINISHED"), events[-1]
    return "".join(one["delta"] for one in events if one["type"] in ("text-delta", "TEXT_MESSAGE_CONTENT"))


@pytest.mark.parametrize("path", sorted(BODIES))
def test_a_page_that_comes_back_after_the_server_was_killed(path: str, tmp_path: Path) -> None:
    answer = Answer(chat_ids(QUESTION), COUNT, SEED)
    with House(tmp_path, "scripted:tokens_per_s=60") as house:
        with house.server.http.stream("POST", path, json=BODIES[path]) as begun:
            assert begun.status_code == 200
            next(begun.iter_bytes())
        house.restart()
        again = house.server.http.get(FOLLOW[path])
        assert text_of(again.content) == answer.text
        assert house.server.http.get(FOLLOW[path]).status_code == 204


def test_an_answer_is_stopped_by_the_id_of_its_chat(tmp_path: Path) -> None:
    path = "/v1/ai-sdk/chat"
    with House(tmp_path, "scripted:tokens_per_s=20") as house:
        with house.server.http.stream("POST", path, json=BODIES[path]) as begun:
            chunks = begun.iter_bytes()
            next(chunks)
            assert house.server.http.delete(FOLLOW[path]).status_code == 200
            rest = b"".join(chunks)
        assert b'"type":"abort"' in rest
        assert house.server.http.delete(FOLLOW[path]).status_code == 404
