"""An answer of a front end outlives its page and its server: the page asks for the answer of its chat, and gets all of
it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.api.oracle import Answer, chat_ids
from tests.faults.house import House
from tests.http.wire import sse_data

_COUNT = 120
_QUESTION = "Why do rivers bend?"
_SEED = 7

_BODIES = {
    "/v1/ai-sdk/chat": {
        "id": "chat/1",
        "messages": [{"id": "1", "role": "user", "parts": [{"type": "text", "text": _QUESTION}]}],
        "maxOutputTokens": _COUNT,
        "seed": _SEED,
    },
    "/v1/ag-ui": {
        "threadId": "chat/1",
        "runId": "run-1",
        "messages": [{"id": "1", "role": "user", "content": _QUESTION}],
        "tools": [],
        "context": [],
        "forwardedProps": {"max_tokens": _COUNT, "seed": _SEED},
    },
}
_FOLLOW = {"/v1/ai-sdk/chat": "/v1/ai-sdk/chat/chat%2F1/stream", "/v1/ag-ui": "/v1/ag-ui/chat%2F1/events"}


def _text(body: bytes) -> str:
    events = [json.loads(one) for one in sse_data(body) if one != "[DONE]"]
    assert events[-1]["type"] in ("finish", "RUN_FINISHED"), events[-1]
    return "".join(one["delta"] for one in events if one["type"] in ("text-delta", "TEXT_MESSAGE_CONTENT"))


@pytest.mark.parametrize("path", sorted(_BODIES))
def test_a_page_that_comes_back_after_the_server_was_killed(path: str, tmp_path: Path) -> None:
    answer = Answer(chat_ids(_QUESTION), _COUNT, _SEED)
    with House(tmp_path, "scripted:tokens_per_s=60") as house:
        with house.server.http.stream("POST", path, json=_BODIES[path]) as begun:
            assert begun.status_code == 200
            next(begun.iter_bytes())
        house.restart()
        again = house.server.http.get(_FOLLOW[path])
        assert _text(again.content) == answer.text
        assert house.server.http.get(_FOLLOW[path]).status_code == 204


def test_an_answer_is_stopped_by_the_id_of_its_chat(tmp_path: Path) -> None:
    path = "/v1/ai-sdk/chat"
    with House(tmp_path, "scripted:tokens_per_s=20") as house:
        with house.server.http.stream("POST", path, json=_BODIES[path]) as begun:
            chunks = begun.iter_bytes()
            next(chunks)
            assert house.server.http.delete(_FOLLOW[path]).status_code == 200
            rest = b"".join(chunks)
        assert b'"type":"abort"' in rest
        assert house.server.http.delete(_FOLLOW[path]).status_code == 404
