"""`/v1/streams` in conversations, as the page uses it: ask, continue, regenerate, wait in the queue."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.api.process import Server
from tests.waiting import until

Json = dict[str, Any]  # Any: of JSON


def _tree(server: Server, its_id: str) -> Json:
    answer = server.http.get(f"/v1/conversations/{its_id}/tree")
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def _text(item: Json) -> str:
    return str(item["content"][0]["text"])


def _new(server: Server) -> str:
    return str(server.post("/v1/conversations", {}).json()["id"])


def _ask(server: Server, place: object, *texts: str, **more: object) -> str:
    messages = [{"role": "user", "content": text} for text in texts]
    body = {"conversation": place, "messages": messages, "max_tokens": 6, "seed": 1, **more}
    return server.create(body)


def test_ask_regenerate_and_continue(server: Server) -> None:
    its_id = _new(server)
    first = _ask(server, its_id, "Hi")
    server.wait_state(first, "done")
    question, answer = _tree(server, its_id)["data"]
    assert (_text(question), question["role"]) == ("Hi", "user")
    assert (answer["parent_id"], answer["stream_id"], answer["status"]) == (question["id"], first, "incomplete")
    second = _ask(server, {"id": its_id, "parent_id": question["id"]}, seed=2)
    server.wait_state(second, "done")
    longer = _ask(server, {"id": its_id, "parent_id": answer["id"]})
    addition = server.wait_state(longer, "done")["text"]
    tree = _tree(server, its_id)
    other, continued = tree["data"][2:]
    assert [other["parent_id"], continued["parent_id"]] == [question["id"]] * 2
    assert _text(continued) == _text(answer) + addition
    assert tree["head"] == continued["id"]


def test_a_continued_answer_shows_its_beginning_while_it_runs(serve: Callable[..., Server]) -> None:
    server = serve("scripted:tokens_per_s=20")
    its_id = _new(server)
    server.wait_state(_ask(server, its_id, "Hi"), "done")
    answer = _tree(server, its_id)["data"][-1]
    stream_id = _ask(server, {"id": its_id, "parent_id": answer["id"]}, max_tokens=5000)
    longer = _tree(server, its_id)["data"][-1]
    assert (longer["status"], longer["stream_id"], _text(longer)) == ("in_progress", stream_id, _text(answer))
    server.http.post(f"/v1/streams/{stream_id}/cancel")
    addition = server.state(stream_id)["text"]
    assert _text(_tree(server, its_id)["data"][-1]) == _text(answer) + addition


def test_instructions_are_shown_to_the_model_and_not_kept(server: Server) -> None:
    its_id = _new(server)
    told = server.wait_state(_ask(server, its_id, "Hi", instructions="Be brief."), "done")
    assert [_text(item) for item in _tree(server, its_id)["data"]] == ["Hi", told["text"]]
    body = {"messages": [{"role": role, "content": text} for role, text in (("system", "Be brief."), ("user", "Hi"))]}
    plain = server.wait_state(server.create({**body, "max_tokens": 6, "seed": 1}), "done")
    assert (plain["text"], plain["usage"]) == (told["text"], told["usage"])


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "Hi", "conversation": "ID"}, "messages"),
        ({"prompt": "Hi", "instructions": "Be brief."}, "messages"),
        ({"messages": [], "conversation": "ID"}, "messages"),
        ({"messages": [{"role": "user", "content": "a\0"}], "conversation": "ID"}, "items"),
        ({"messages": [{"role": "user", "content": "a"}], "conversation": "ID", "n": 2}, "n"),
        ({"messages": [{"role": "user", "content": "a"}], "conversation": 5}, "conversation"),
        ({"messages": [{"role": "user", "content": "a"}], "instructions": 5}, "instructions"),
    ],
)
def test_refused(server: Server, body: Json, param: str) -> None:
    its_id = _new(server)
    filled = body | ({"conversation": its_id} if body.get("conversation") == "ID" else {})
    refused = server.post("/v1/streams", filled)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    assert _tree(server, its_id)["data"] == []


def test_the_tree_has_facts_about_its_answers(server: Server) -> None:
    its_id, usages = _new(server), {}

    def is_recorded() -> bool:
        """Records begin a moment after the database was made, and are written behind their streams."""
        stream_id = _ask(server, {"id": its_id, "parent_id": None}, "Hi")
        usages[stream_id] = server.wait_state(stream_id, "done")["usage"]
        return bool(_tree(server, its_id)["answers"])

    until(is_recorded)
    stream_id, facts = next(iter(_tree(server, its_id)["answers"].items()))
    assert (facts["model"], facts["status"], facts["finish"]) == ("scripted", "done", "length")
    assert (facts["num_prompt_tokens"], facts["num_completion_tokens"]) == (usages[stream_id]["prompt_tokens"], 6)
    assert 0 <= facts["queue_s"] <= facts["first_token_s"] <= facts["total_s"]


def test_a_queued_stream_shows_the_number_ahead(serve: Callable[..., Server]) -> None:
    server = serve("scripted:tokens_per_s=20", "--max-sequences", "1")
    ids = [_ask(server, _new(server), "Hi", max_tokens=5000) for _ in range(4)]
    assert [server.state(each).get("num_ahead") for each in ids] == [None, 0, 1, 2]
    server.http.post(f"/v1/streams/{ids[1]}/cancel")
    assert [server.state(each).get("num_ahead") for each in (ids[0], ids[2], ids[3])] == [None, 0, 1]
    for each in ids:
        server.http.post(f"/v1/streams/{each}/cancel")


def test_a_model_says_whether_it_is_loaded(serve: Callable[..., Server]) -> None:
    server = serve("scripted", "--model", "other=scripted")

    def states() -> dict[str, str]:
        return {model["id"]: model["state"] for model in server.http.get("/v1/models").json()["data"]}

    assert states() == {"scripted": "ready", "other": "unloaded"}
    server.wait_state(_ask(server, _new(server), "Hi", model="other"), "done")
    assert states() == {"scripted": "ready", "other": "ready"}
