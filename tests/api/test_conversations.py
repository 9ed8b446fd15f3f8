"""Conversations on a real server: OpenAI's client, branches, two tabs, owners and refusals."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI
from openai.types.conversations import Message
from openai.types.responses import ResponseIncompleteEvent
from tests.api.oracle import Answer, chat_ids
from tests.api.own_keys import key_of
from tests.api.process import Server
from tests.waiting import until

Json = dict[str, Any]  # Any: of JSON
_COUNT = 6


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=30) as made:
        yield made


def _made(server: Server, *texts: str) -> str:
    """Create a conversation with these messages of the user and the assistant in turn."""
    items = [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(texts)]
    return str(server.post("/v1/conversations", {"items": items}).json()["id"])


def _items(server: Server, its_id: str) -> list[Json]:
    answer = server.http.get(f"/v1/conversations/{its_id}/items", params={"order": "asc", "limit": 100})
    assert answer.status_code == 200, answer.text
    return list(answer.json()["data"])


def _text(item: Json) -> str:
    return str(item["content"][0]["text"])


def _texts(server: Server, its_id: str) -> list[str]:
    return [_text(item) for item in _items(server, its_id)]


def _chat(server: Server, place: object, *messages: Json, **more: object) -> httpx.Response:
    body = {"messages": messages, "conversation": place, "max_tokens": _COUNT, "seed": 1, **more}
    return server.post("/v1/chat/completions", body)


def _user(text: str) -> Json:
    return {"role": "user", "content": text}


# OpenAI's client


def test_openais_client(client: OpenAI) -> None:
    made = client.conversations.create(
        metadata={"topic": "rivers"}, items=[{"type": "message", "role": "user", "content": "Hi"}]
    )
    assert made.object == "conversation"
    assert client.conversations.retrieve(made.id).metadata == {"topic": "rivers"}
    assert client.conversations.update(made.id, metadata={"topic": "boats"}).metadata == {"topic": "boats"}
    added = client.conversations.items.create(
        made.id,
        items=[
            {"role": "assistant", "content": "Ho"},
            {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "a river"},
        ],
    )
    assert [item.type for item in added.data] == ["message", "function_call", "function_call_output"]
    assert (added.first_id, added.last_id, added.has_more) == (added.data[0].id, added.data[-1].id, False)
    for order, types in (
        ("asc", ["message", "message", "function_call", "function_call_output"]),
        ("desc", ["function_call_output", "function_call", "message", "message"]),
    ):
        listed = client.conversations.items.list(made.id, order=order, limit=3)  # type: ignore[arg-type]
        assert listed.has_more
        assert [item.type for item in listed] == types  # the client fetches the second page
    found = client.conversations.items.retrieve(added.first_id, conversation_id=made.id)
    assert isinstance(found, Message)
    assert found.role == "assistant"
    assert client.conversations.items.delete(added.first_id, conversation_id=made.id).id == made.id
    with pytest.raises(openai.NotFoundError):
        client.conversations.items.retrieve(added.first_id, conversation_id=made.id)
    assert client.conversations.delete(made.id).deleted
    with pytest.raises(openai.NotFoundError) as gone:
        client.conversations.retrieve(made.id)
    assert gone.value.code == "conversation_not_found"


def test_responses_continue(client: OpenAI, server: Server) -> None:
    made = client.conversations.create()
    first = client.responses.create(
        model="scripted", input="Hi", conversation=made.id, max_output_tokens=_COUNT, extra_body={"seed": 1}
    )
    assert first.output_text == Answer(chat_ids("Hi"), _COUNT, 1).text
    assert first.conversation is not None
    assert first.conversation.id == made.id
    with client.responses.create(
        model="scripted", input="More", conversation={"id": made.id}, max_output_tokens=_COUNT, stream=True
    ) as stream:
        last = list(stream)[-1]
    assert isinstance(last, ResponseIncompleteEvent)
    second = last.response
    listed = _items(server, made.id)
    assert [item["role"] for item in listed] == ["user", "assistant", "user", "assistant"]
    assert [_text(item) for item in listed] == ["Hi", first.output_text, "More", second.output_text]
    assert listed[1]["id"] == first.output[0].id
    assert second.usage is not None
    assert first.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens  # the prompt contains the earlier turns
    assert server.http.get(f"/v1/conversations/{made.id}").json()["title"] == "Hi"


def test_a_streamed_chat_continues(client: OpenAI, server: Server) -> None:
    its_id = _made(server)
    texts = []
    for text in ("One", "Two"):
        with client.chat.completions.create(
            model="scripted", messages=[{"role": "user", "content": text}], max_tokens=_COUNT, stream=True,
            extra_body={"conversation": its_id},
        ) as stream:  # fmt: skip
            texts += [text, "".join(chunk.choices[0].delta.content or "" for chunk in stream)]
        assert _texts(server, its_id) == texts  # at once, when the answer has been read


def test_the_prompt_of_a_chat_has_the_whole_branch(server: Server) -> None:
    its_id = _made(server, "Hi", "Ho")
    in_pieces = _chat(server, its_id, _user("More")).json()
    at_once = server.post(
        "/v1/chat/completions",
        {
            "messages": [_user("Hi"), {"role": "assistant", "content": "Ho"}, _user("More")],
            "max_tokens": _COUNT,
            "seed": 1,
        },
    ).json()
    assert in_pieces["choices"] == at_once["choices"]
    assert in_pieces["usage"] == at_once["usage"]


def test_a_chat_without_a_conversation_is_not_kept(server: Server) -> None:
    before = server.http.get("/v1/conversations").json()
    assert server.post("/v1/chat/completions", {"messages": [_user("Hi")], "max_tokens": 2}).status_code == 200
    assert server.http.get("/v1/conversations").json() == before


# Branches


def test_edit_and_regenerate(server: Server) -> None:
    its_id = _made(server, "Hi", "Ho", "More", "Well")
    first, _, third, fourth = _items(server, its_id)
    again = _chat(server, {"id": its_id, "parent_id": third["id"]}, seed=2).json()["choices"][0]["message"]["content"]
    assert _texts(server, its_id) == ["Hi", "Ho", "More", again]
    edited = _chat(server, {"id": its_id, "parent_id": None}, _user("Hello")).json()
    assert _texts(server, its_id) == ["Hello", edited["choices"][0]["message"]["content"]]
    moved = server.post(f"/v1/conversations/{its_id}", {"head": fourth["id"]})
    assert moved.json()["head"] == fourth["id"]
    assert _texts(server, its_id) == ["Hi", "Ho", "More", "Well"]
    tree = server.http.get(f"/v1/conversations/{its_id}/tree").json()
    assert tree["head"] == fourth["id"]
    parents = {_text(item): item["parent_id"] for item in tree["data"]}
    assert parents["Hi"] is None
    assert parents["Hello"] is None
    assert parents[again] == parents["Well"] == third["id"]
    assert parents["Ho"] == first["id"]


def test_an_incomplete_answer_is_continued(server: Server) -> None:
    its_id = _made(server, "Hi")
    first = _chat(server, its_id).json()["choices"][0]["message"]["content"]
    _, answer = _items(server, its_id)
    assert (answer["status"], _text(answer)) == ("incomplete", first)
    more = _chat(server, its_id).json()["choices"][0]["message"]["content"]
    assert _texts(server, its_id) == ["Hi", first + more]
    assert len(server.http.get(f"/v1/conversations/{its_id}/tree").json()["data"]) == 3


# While an answer is written


def test_a_second_tab_follows(paced: Server) -> None:
    its_id = _made(paced, "Hi")
    with paced.http.stream("POST", "/v1/chat/completions", json={
        "messages": [], "conversation": its_id, "max_tokens": 20_000, "stream": True,
    }) as answer:  # fmt: skip
        stream_id = answer.headers["x-stream-id"]
        written = _items(paced, its_id)[-1]
        assert (written["status"], written["stream_id"], _text(written)) == ("in_progress", stream_id, "")
        locked = _chat(paced, its_id, _user("And?"))
        assert (locked.status_code, locked.json()["error"]["code"]) == (409, "conversation_locked")
        assert locked.headers["retry-after"]
        elsewhere = {"id": its_id, "parent_id": written["parent_id"]}
        assert _chat(paced, elsewhere).status_code == 200
        deleted = paced.http.delete(f"/v1/conversations/{its_id}/items/{written['id']}")
        assert deleted.status_code == 409
    assert paced.state(stream_id)["status"] == "running"  # it does not end with its reader
    with paced.http.stream("GET", f"/v1/streams/{stream_id}/events") as followed:
        assert next(followed.iter_lines())
    stopped = paced.post(f"/v1/streams/{stream_id}/cancel", {}).json()
    kept = paced.http.get(f"/v1/conversations/{its_id}/items/{written['id']}").json()
    assert (kept["status"], _text(kept)) == ("incomplete", stopped["text"])
    assert stopped["text"]


def test_of_requests_at_once_one_continues_the_conversation(paced: Server) -> None:
    made = paced.post("/v1/conversations", {}).json()["id"]

    def ask(number: int) -> httpx.Response:
        body = {"input": f"Question {number}", "conversation": made, "max_output_tokens": 40}
        return paced.post("/v1/responses", body)

    with ThreadPoolExecutor(6) as threads:
        answers = list(threads.map(ask, range(6)))
    assert sorted(answer.status_code for answer in answers) == [200, *[409] * 5]
    assert len(paced.http.get(f"/v1/conversations/{made}/tree").json()["data"]) == 2


def test_the_same_request_again_is_kept_once(paced: Server) -> None:
    its_id = _made(paced, "Hi")
    key = {"idempotency-key": "again"}
    body = {"messages": [_user("More")], "conversation": its_id, "max_tokens": 40, "stream": True}
    with paced.http.stream("POST", "/v1/chat/completions", json=body, headers=key) as first:
        stream_id = first.headers["x-stream-id"]
    again = paced.http.post("/v1/chat/completions", json=body, headers=key)  # while the first is being written
    assert again.headers["x-stream-id"] == stream_id
    assert [item["role"] for item in _items(paced, its_id)] == ["user", "user", "assistant"]


def test_a_deleted_conversation_does_not_come_back(paced: Server) -> None:
    its_id = _made(paced, "Hi")
    with paced.http.stream("POST", "/v1/chat/completions", json={
        "messages": [], "conversation": its_id, "max_tokens": 30, "stream": True,
    }) as answer:  # fmt: skip
        assert paced.http.delete(f"/v1/conversations/{its_id}").json()["deleted"]
        assert answer.read().endswith(b"data: [DONE]\n\n")
    assert paced.http.get(f"/v1/conversations/{its_id}").status_code == 404


# Lists and search


def test_listed_and_searched(server: Server) -> None:
    ids = [_made(server, f"kanarienvogel {number}") for number in range(3)]
    server.post(f"/v1/conversations/{ids[0]}", {"title": "A title"})
    seen: list[str] = []
    query: Json = {"search": "KANARIEN", "limit": 2}
    while True:
        page = server.http.get("/v1/conversations", params=query).json()
        seen += [one["id"] for one in page["data"]]
        if not page["has_more"]:
            break
        query["after"] = page["last_id"]
    assert seen == [ids[0], ids[2], ids[1]]
    (found,) = server.http.get("/v1/conversations", params={"search": "a TITLE"}).json()["data"]
    assert (found["id"], found["title"], found["num_items"]) == (ids[0], "A title", 1)
    none = server.http.get("/v1/conversations", params={"search": "nowhere"}).json()
    assert none == {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}


# What is refused


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "param"),
    [
        ("GET", "", {"limit": "0"}, 400, "limit"),
        ("GET", "", {"limit": "101"}, 400, "limit"),
        ("GET", "", {"search": "x" * 201}, 400, "search"),
        ("GET", "", {"search": "a\0"}, 400, "search"),
        ("GET", "", {"page": "1"}, 400, None),
        ("GET", "", {"after": "conv_none"}, 404, "conversation"),
        ("GET", "/conv_none", {}, 404, "conversation"),
        ("GET", "/conv_none/tree", {}, 404, "conversation"),
        ("GET", "/a%00b", {}, 404, "conversation"),
        ("GET", "/{}/items", {"order": "up"}, 400, "order"),
        ("GET", "/{}/items", {"after": "msg_none"}, 404, "after"),
        ("GET", "/{}/items/msg_none", {}, 404, "item_id"),
        ("DELETE", "/{}/items/msg_none", {}, 404, "item_id"),
        ("POST", "", {"items": 5}, 400, "items"),
        ("POST", "", {"items": [{"role": "tool", "content": "kanarienvogel"}]}, 400, "items"),
        ("POST", "", {"items": [_user("a\0")]}, 400, "items"),
        ("POST", "", {"title": "x" * 201}, 400, "title"),
        ("POST", "", {"title": "\0"}, 400, "title"),
        ("POST", "", {"metadata": {str(number): "" for number in range(17)}}, 400, "metadata"),
        ("POST", "", {"metadata": {"a": "x" * 513}}, 400, "metadata"),
        ("POST", "", {"metadata": {"a": 5}}, 400, "metadata"),
        ("POST", "/{}", {"head": "msg_none"}, 404, "head"),
        ("POST", "/{}", {"head": 5}, 400, "head"),
        ("POST", "/{}/items", {}, 400, None),
        ("POST", "/{}/items", {"items": []}, 400, "items"),
        ("POST", "/{}/items", {"items": [_user("Hi")], "parent_id": "msg_none"}, 404, "parent_id"),
        ("PATCH", "/{}", {}, 405, None),
    ],
)  # fmt: skip
def test_refused(server: Server, method: str, path: str, body: Json, status: int, param: str | None) -> None:
    its_id = _made(server, "Hi")
    sent = {"params": body} if method == "GET" else {"json": body}
    answer = server.http.request(method, "/v1/conversations" + path.format(its_id), **sent)  # type: ignore[arg-type]
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert (error["param"] or "").startswith(param or "")
    assert "kanarienvogel" not in answer.text
    assert _texts(server, its_id) == ["Hi"]


@pytest.mark.parametrize(
    ("place", "status"), [("conv_none", 404), ({"id": "conv_none"}, 404), (5, 400), ({}, 400), ("a\0b", 404), ("", 400)]
)
def test_unknown_conversations_and_items(server: Server, place: object, status: int) -> None:
    for path, body in (("/v1/chat/completions", {"messages": [_user("Hi")]}), ("/v1/responses", {"input": "Hi"})):
        answer = server.post(path, {**body, "conversation": place})
        assert answer.status_code == status, answer.text
        assert (answer.json()["error"]["param"] or "").startswith("conversation")


def test_an_unknown_parent(server: Server) -> None:
    its_id, other = _made(server, "Hi"), _made(server, "Ho")
    elsewhere = _items(server, other)[0]["id"]
    answer = _chat(server, {"id": its_id, "parent_id": elsewhere}, _user("More"))
    assert answer.status_code == 404
    assert _texts(server, its_id) == ["Hi"]


def test_a_request_that_is_refused_leaves_nothing(server: Server) -> None:
    its_id = _made(server, "Hi")
    assert _chat(server, its_id, _user("x" * 200_000)).status_code == 400
    assert _chat(server, its_id, _user("More"), model="elsewhere").status_code == 404
    assert _texts(server, its_id) == ["Hi"]


def test_unknown_fields_are_named(server: Server) -> None:
    items = [{**_user("Hi"), "smell": "good"}, {"type": "image_generation_call", "result": ""}]
    answer = server.post("/v1/conversations", {"colour": "red", "items": items})
    assert answer.status_code == 200
    assert answer.headers["x-tailrace-ignored"] == "colour, items[].smell, items[1] (image_generation_call)"
    assert answer.json()["num_items"] == 1


# Owners, and keys


def test_owners_see_only_their_conversations(tmp_path: Path) -> None:
    database = f"sqlite:///{tmp_path / 'records.sqlite'}"
    me, you, reader = key_of(database, "me"), key_of(database, "you"), key_of(database, "me", "read")
    flags = ("--database", database, "--data-dir", str(tmp_path / "data"))
    with contextlib.closing(Server("scripted", *flags)) as server, contextlib.ExitStack() as clients:
        server.wait_ready()

        def client(token: str) -> httpx.Client:
            headers = {"authorization": f"Bearer {token}"}
            return clients.enter_context(httpx.Client(base_url=server.url, headers=headers, timeout=60))

        mine, yours, reading = client(me), client(you), client(reader)
        made = mine.post("/v1/conversations", json={"items": [_user("Mine")]}).json()
        path = f"/v1/conversations/{made['id']}"
        body = {"messages": [_user("Yours?")], "conversation": made["id"], "max_tokens": 3}
        asked: list[tuple[str, str, Json | None]] = [
            ("GET", path, None), ("POST", path, {"title": "Yours"}), ("DELETE", path, None),
            ("GET", path + "/tree", None), ("GET", path + "/items", None),
            ("POST", path + "/items", {"items": [_user("Hi")]}),
            ("GET", f"{path}/items/{made['head']}", None), ("DELETE", f"{path}/items/{made['head']}", None),
            ("POST", "/v1/chat/completions", body),
            ("POST", "/v1/responses", {"input": "Yours?", "conversation": made["id"]}),
            ("GET", f"/v1/conversations?after={made['id']}", None),
        ]  # fmt: skip
        for method, where, sent in asked:
            there = yours.request(method, where, json=sent)
            assert there.status_code == 404, (method, where)
            nowhere = yours.request(method, where.replace(made["id"], "conv_none"), json=json.loads(
                json.dumps(sent).replace(made["id"], "conv_none")
            ))  # fmt: skip
            assert nowhere.json() == there.json()  # nor can they tell that it is there
        assert yours.get("/v1/conversations").json()["data"] == []
        assert yours.get("/v1/conversations?search=mine").json()["data"] == []
        assert [one["id"] for one in mine.get("/v1/conversations?search=mine").json()["data"]] == [made["id"]]
        assert reading.get(path).status_code == 200
        for method, where, sent in asked:
            if method != "GET":
                assert reading.request(method, where, json=sent).status_code == 403, (method, where)
        assert mine.get(path).json() == made


def test_the_audit_log(tmp_path: Path, serve: Callable[..., Server]) -> None:
    audit = tmp_path / "audit.jsonl"
    server = serve("scripted", "--audit-log", str(audit), "--database", f"sqlite:///{tmp_path / 'records.sqlite'}")
    its_id = _made(server, "kanarienvogel")
    one = server.http.get(f"/v1/conversations/{its_id}/export").json()
    server.http.get("/v1/conversations/export")
    server.post("/v1/conversations/import", one)
    server.http.delete("/v1/conversations/kanarienvogel")
    server.http.delete(f"/v1/conversations/{its_id}")
    lines = [json.loads(line) for line in audit.read_text().splitlines()]
    assert [(line["event"], line.get("conversation")) for line in lines] == [
        ("conversation.export", its_id),
        ("conversation.export", None),
        ("conversation.import", None),
        ("conversation.delete", its_id),
    ]
    assert "kanarienvogel" not in audit.read_text()


def test_without_a_database(tmp_path: Path) -> None:
    """A server that loses its database answers 503 for conversations, and continues to serve chats."""
    there = tmp_path / "records"
    flags = ("--database", f"sqlite:///{there / 'records.sqlite'}", "--data-dir", str(tmp_path / "data"))
    with contextlib.closing(Server("scripted", *flags)) as server:
        server.wait_ready()
        there.write_text("not a directory")
        refused = server.http.get("/v1/conversations")
        assert refused.status_code == 503
        assert server.post("/v1/chat/completions", {"messages": [_user("Hi")], "max_tokens": 2}).status_code == 200
        there.unlink()
        until(lambda: server.http.get("/v1/conversations").status_code == 200)


# Files


@pytest.mark.parametrize("form", ["tailrace", "chatgpt", "sharegpt"])
def test_export_and_import(server: Server, form: str) -> None:
    its_id = _made(server, "Hi", "Ho", "More")
    _chat(server, {"id": its_id, "parent_id": None}, _user("Another beginning"))
    texts = _texts(server, its_id)
    exported = server.http.get(f"/v1/conversations/{its_id}/export", params={"format": form})
    assert exported.status_code == 200
    assert "attachment" in exported.headers["content-disposition"]
    taken_in = server.post("/v1/conversations/import", exported.json())
    assert taken_in.status_code == 200, taken_in.text
    (again,) = taken_in.json()["data"]
    assert again["id"] != its_id
    assert (again["title"], taken_in.json()["num_left_out"]) == ("Hi", 0)
    assert _texts(server, again["id"]) == texts
    tree = server.http.get(f"/v1/conversations/{again['id']}/tree").json()["data"]
    assert len(tree) == (2 if form == "sharegpt" else 5)  # which has no branches
    assert _chat(server, again["id"], _user("And on")).status_code == 200


def test_our_file_is_unchanged_by_import_and_export(server: Server) -> None:
    its_id = _made(server, "Hi", "Ho")
    server.post(f"/v1/conversations/{its_id}", {"metadata": {"a": "b"}})
    first = server.http.get(f"/v1/conversations/{its_id}/export").json()
    (again,) = server.post("/v1/conversations/import", first).json()["data"]
    assert server.http.get(f"/v1/conversations/{again['id']}/export").json() == first


def test_all_in_one_file(server: Server) -> None:
    ids = {_made(server, "One"), _made(server, "Two")}
    for form, key in (("chatgpt", "id"), ("sharegpt", "id")):
        exported = server.http.get("/v1/conversations/export", params={"format": form}).json()
        assert ids <= {one[key] for one in exported}
    (whole,) = {len(server.http.get("/v1/conversations/export").json()["conversations"])}
    listed = 0
    query: Json = {"limit": 100}
    while True:
        page = server.http.get("/v1/conversations", params=query).json()
        listed += len(page["data"])
        if not page["has_more"]:
            break
        query["after"] = page["last_id"]
    assert whole == listed


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"", 400),
        (b"[", 400),
        (b"{}", 400),
        (b'[{"mapping": {"a": {"parent": "a"}}}]', 400),
        (b"[" * 200_000, 400),
        (b'{"conversations": [{"from": "human", "value": "' + b"x" * 3_000_000 + b'"}]}', 413),
        (b"[]", 200),
    ],
    ids=["nothing", "torn", "neither", "loop", "deep", "large", "empty"],
)
def test_accepted_and_refused_files(server: Server, content: bytes, status: int) -> None:
    before = server.http.get("/v1/conversations").json()
    headers = {"content-type": "application/json"}
    answer = server.http.post("/v1/conversations/import", content=content, headers=headers)
    assert answer.status_code == status, answer.text
    assert server.http.get("/v1/conversations").json() == before


def test_unknown_formats_and_conversations_of_exports(server: Server) -> None:
    for path, status in (
        ("/v1/conversations/export?format=pdf", 400),
        ("/v1/conversations/export?limit=5", 400),
        ("/v1/conversations/conv_none/export", 404),
    ):
        assert server.http.get(path).status_code == status
    assert server.http.post("/v1/conversations/import", content=b"[]").status_code == 415
