"""Links that show a conversation or a stream: what they show, who may make them, and what attackers get."""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.api.keyed import House, serving_with_keys
from tests.api.oracle import Answer, chat_ids
from tests.api.own_keys import key_of
from tests.api.process import Server
from tests.api.shared_reader import SharedReader, token_in
from tests.waiting import LONG_S, until

PROMPT = "Tell me of rivers."
COUNT = 150
ANSWER = Answer(chat_ids(PROMPT), COUNT, 7)
OWNERS = ("ann-canary", "bob-canary")


class Keyed:
    """A server with a key for each of two owners."""

    def __init__(self, server: Server, tokens: list[str]) -> None:
        self.server = server
        self.ann, self.bob, self.reading, self.admin = (
            httpx.Client(
                base_url=server.url, headers={"authorization": f"Bearer {token}"}, timeout=LONG_S, trust_env=False
            )
            for token in tokens
        )

    def conversation(self) -> str:
        """A conversation of Ann, with an answer that runs."""
        made = self.ann.post("/v1/conversations", json={"title": "Of rivers"}).json()
        body = {"input": PROMPT, "conversation": made["id"], "seed": 7, "max_output_tokens": COUNT}
        instructions = {"instructions": "secret-instructions"}
        answer = self.ann.post("/v1/responses", json={**body, **instructions, "background": True})
        assert answer.status_code == 200, answer.text
        return str(made["id"])

    def stream(self, count: int = COUNT) -> str:
        body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": count, "seed": 7}
        return str(self.ann.post("/v1/streams", json=body).json()["id"])

    def share(self, **what: object) -> str:
        return token_in(self.ann.post("/v1/shares", json=what))


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keyed]:
    directory = tmp_path_factory.mktemp("keyed")
    database = f"sqlite:///{directory / 'records.sqlite'}"
    scopes = ("read", "generate")
    tokens = [key_of(database, owner, *scopes) for owner in OWNERS]
    tokens += [key_of(database, OWNERS[0], "read"), key_of(database, "root", "admin")]
    server = Server("scripted:tokens_per_s=100", "--data-dir", str(directory), "--database", database)
    with contextlib.closing(server), contextlib.ExitStack() as stack:
        keyed = Keyed(server.wait_ready(), tokens)
        for client in (keyed.ann, keyed.bob, keyed.reading, keyed.admin):
            stack.enter_context(client)
        yield keyed


def refused(server: Server, token: str) -> tuple[int, str]:
    headers = [(b"x-tailrace-share", token.encode())]
    answer = httpx.get(f"{server.url}/v1/shared", headers=headers, trust_env=False)
    return answer.status_code, "" if answer.status_code == 200 else answer.json()["error"]["code"]


# What it shows


def test_a_conversation_is_shown_live_without_a_key(keyed: Keyed) -> None:
    its_id = keyed.conversation()
    token = keyed.share(conversation_id=its_id)
    reader = SharedReader(keyed.server, token)
    with contextlib.ExitStack() as stack:
        stack.enter_context(reader)
        assert reader.headers["x-robots-tag"].startswith("noindex")
        until(lambda: reader.is_running and len(reader.texts.get(1, "")) > 0)  # it is being written
        until(lambda: not reader.is_running)
        kept = keyed.ann.get(f"/v1/conversations/{its_id}/items", params={"order": "asc"}).json()["data"]
        assert reader.shown == [(item["role"], item["content"][0]["text"]) for item in kept]
        assert reader.shown[0] == ("user", PROMPT)
        assert reader.title == "Of rivers"
        # A further turn appears by itself.
        again = {"input": "Go on.", "conversation": its_id, "max_output_tokens": 5, "seed": 1}
        assert keyed.ann.post("/v1/responses", json=again).status_code == 200
        until(lambda: len(reader.shown) == 4 and not reader.is_running)
        assert reader.shown[2] == ("user", "Go on.")
        assert keyed.ann.delete(f"/v1/conversations/{its_id}").status_code == 200
    assert reader.reason == "deleted"
    for secret in (*OWNERS, "secret-instructions", its_id, "resp_", "msg_", "tr_", token):
        assert secret not in reader.body
    assert refused_or_ended(keyed, token) == "deleted"


def refused_or_ended(keyed: Keyed, token: str) -> str:
    with SharedReader(keyed.server, token) as reader:
        pass
    assert reader.shown == []
    return reader.reason


def test_a_stream_is_shown_live_and_afterwards(keyed: Keyed) -> None:
    stream_id = keyed.stream()
    token = keyed.share(stream_id=stream_id)
    for _ in range(2):
        with SharedReader(keyed.server, token) as reader:
            pass
        assert (reader.reason, reader.shown) == ("done", [("assistant", ANSWER.text)])
        assert stream_id not in reader.body
        assert PROMPT not in reader.body


def test_a_reader_of_a_link_keeps_nothing_running(keyed: Keyed) -> None:
    body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 5000, "stream": True}
    with keyed.ann.stream("POST", "/v1/chat/completions", json=body) as answer:
        stream_id = answer.headers["x-stream-id"]
        next(answer.iter_bytes())
        reader = SharedReader(keyed.server, keyed.share(stream_id=stream_id))
        reader.__enter__()
        until(lambda: bool(reader.shown and reader.shown[0][1]))
    reader.wait_end()  # the owner has left, so the stream is cancelled
    assert reader.reason == "done"
    assert keyed.ann.get(f"/v1/streams/{stream_id}").json()["status"] == "cancelled"


def test_the_page_is_there_without_a_key_and_is_not_indexed(keyed: Keyed) -> None:
    answer = httpx.get(f"{keyed.server.url}/share", trust_env=False)
    assert answer.status_code == 200
    assert "noindex" in answer.headers["x-robots-tag"]
    assert '<meta name="robots" content="noindex' in answer.text
    assert "script-src 'self'" in answer.headers["content-security-policy"]


def test_a_head_request_gets_the_headers_only(keyed: Keyed) -> None:
    headers = {"x-tailrace-share": keyed.share(stream_id=keyed.stream(4000))}
    answer = httpx.head(f"{keyed.server.url}/v1/shared", headers=headers, trust_env=False)
    assert (answer.status_code, answer.content) == (200, b"")


# Who may make and end them


def test_revocation_cuts_running_readers(keyed: Keyed) -> None:
    token = keyed.share(stream_id=keyed.stream(4000))
    with SharedReader(keyed.server, token) as reader:
        until(lambda: bool(reader.shown and reader.shown[0][1]))
        share_id = token.split("_")[1]
        assert keyed.bob.delete(f"/v1/shares/{share_id}").status_code == 404
        assert keyed.ann.delete(f"/v1/shares/{share_id}").json() == {
            "id": share_id, "object": "share.revoked", "revoked": True,
        }  # fmt: skip
    assert reader.reason == "revoked"
    assert refused(keyed.server, token) == (404, "unknown_share")
    assert keyed.ann.delete(f"/v1/shares/{share_id}").status_code == 200  # again


def test_expiry_cuts_running_readers(keyed: Keyed) -> None:
    token = keyed.share(stream_id=keyed.stream(4000), expires_in_s=1.5)
    with SharedReader(keyed.server, token) as reader:
        pass
    assert reader.reason == "expired"
    assert refused(keyed.server, token) == (404, "unknown_share")


def test_a_link_ends_with_the_key_that_made_it(keyed: Keyed) -> None:
    made = keyed.admin.post("/v1/admin/keys", json={"owner": OWNERS[0], "scopes": ["read", "generate"]}).json()
    headers = {"authorization": f"Bearer {made['token']}"}
    token = token_in(keyed.ann.post("/v1/shares", json={"stream_id": keyed.stream(4000)}, headers=headers))
    with SharedReader(keyed.server, token) as reader:
        until(lambda: bool(reader.shown and reader.shown[0][1]))
        assert keyed.admin.delete(f"/v1/admin/keys/{made['id']}").status_code == 200
    assert reader.reason == "revoked"
    assert refused(keyed.server, token) == (404, "unknown_share")


def test_a_link_is_made_for_what_one_has_only(keyed: Keyed) -> None:
    its_id, stream_id = keyed.conversation(), keyed.stream(3)
    for client in (keyed.bob, keyed.admin):
        for what in ({"conversation_id": its_id}, {"stream_id": stream_id}):
            assert client.post("/v1/shares", json=what).status_code in (403, 404)
    assert keyed.reading.post("/v1/shares", json={"stream_id": stream_id}).status_code == 403
    assert keyed.reading.get("/v1/shares").status_code == 403  # it would get links that others may read, too
    assert httpx.post(f"{keyed.server.url}/v1/shares", json={}, trust_env=False).status_code == 401
    token = keyed.share(stream_id=stream_id)
    assert [one["path"].partition("#")[2] for one in keyed.ann.get("/v1/shares").json()["data"]].count(token) == 1
    assert keyed.bob.get("/v1/shares").json()["data"] == []


@pytest.mark.parametrize(
    "body",
    [
        {}, {"stream_id": "a", "conversation_id": "b"}, {"stream_id": ""}, {"stream_id": 1}, {"stream_id": "x" * 65},
        {"stream_id": "no"}, {"conversation_id": "conv_no"}, {"conversation_id": "\0"}, {"stream_id": "\0"},
        {"stream_id": "no", "expires_in_s": 0}, {"stream_id": "no", "expires_in_s": -1},
        {"stream_id": "no", "expires_in_s": 1e12}, {"stream_id": "no", "expires_in_s": "soon"},
    ],
)  # fmt: skip
def test_bad_input(keyed: Keyed, body: dict[str, Any]) -> None:
    answer = keyed.ann.post("/v1/shares", json=body)
    assert answer.status_code in (400, 404), answer.text
    assert answer.json()["error"]["message"]
    for share_id in ("x", "%00", "a" * 3000, "..%2F"):
        assert keyed.ann.delete(f"/v1/shares/{share_id}").status_code == 404


# Attackers


def _altered(token: str) -> Iterator[str]:
    head, share_id, signature = token.split("_", 2)
    flipped = bytearray(base64.urlsafe_b64decode(signature + "="))
    flipped[5] ^= 1
    other = base64.urlsafe_b64encode(bytes(flipped)).decode().rstrip("=")
    yield from (
        "", "trs_", token[:-1], token + "a", token.upper(), f"{head}_{share_id}_{other}",
        f"{head}_{'0' * 16}_{signature}", f"{head}_{share_id[::-1]}_{signature}", f"{head}_{share_id}_{'A' * 43}",
        f"tr_{share_id}_{signature}", f"Bearer {token}", f"{head}_{share_id}_", token.replace("_", "-", 1),
        f"{token}\u00e9", "trs_" + "0" * 16 + "_" + "A" * 43, "x" * 5000,
    )  # fmt: skip


def test_forged_and_altered_links_show_nothing(keyed: Keyed) -> None:
    token = keyed.share(stream_id=keyed.stream(3))
    other = keyed.share(stream_id=keyed.stream(3))
    mixed = "_".join([*token.split("_")[:2], other.split("_", 2)[2]])  # the id of one, the signature of another
    for forged in (*_altered(token), mixed):
        assert refused(keyed.server, forged) == (404, "unknown_share"), forged


def test_a_link_opens_nothing_else(keyed: Keyed) -> None:
    stream_id = keyed.stream(3)
    token = keyed.share(stream_id=stream_id)
    others = (
        ("GET", f"/v1/streams/{stream_id}"), ("GET", f"/v1/streams/{stream_id}/events"), ("GET", "/v1/shares"),
        ("POST", "/v1/streams"), ("DELETE", f"/v1/streams/{stream_id}"), ("POST", f"/v1/streams/{stream_id}/cancel"),
        ("GET", "/v1/conversations"), ("GET", "/v1/models"), ("POST", "/v1/shared"), ("DELETE", "/v1/shared"),
        ("DELETE", f"/v1/shares/{token.split('_')[1]}"),
    )  # fmt: skip
    for headers in ({"x-tailrace-share": token}, {"authorization": f"Bearer {token}"}, {"x-api-key": token}):
        for method, path in others:
            answer = httpx.request(method, f"{keyed.server.url}{path}", headers=headers, trust_env=False)
            assert answer.status_code in (401, 405), (method, path)
            assert token not in answer.text
    for path in (f"/v1/shared?ticket={token}", f"/v1/shared?share={token}"):
        assert httpx.get(f"{keyed.server.url}{path}", trust_env=False).status_code == 404


def test_neither_log_nor_metrics_have_a_link(keyed: Keyed) -> None:
    token = keyed.share(stream_id=keyed.stream(3))
    with SharedReader(keyed.server, token):
        pass
    assert token.split("_", 2)[2] not in keyed.server.log


def test_a_link_made_without_a_key_ends_when_there_are_keys(tmp_path: Path, serve: Callable[..., Server]) -> None:
    database = f"sqlite:///{tmp_path / 'records.sqlite'}"
    server = serve("scripted", "--data-dir", str(tmp_path), "--database", database)
    stream_id = server.create({"prompt": "Hi", "max_tokens": 3})
    token = token_in(server.post("/v1/shares", {"stream_id": stream_id}))
    with SharedReader(server, token) as reader:
        pass
    assert reader.reason == "done"
    key_of(database, "ann")
    until(lambda: refused(server, token) == (404, "unknown_share"))


@pytest.mark.deep
def test_so_many_readers_and_openings_at_once(serve: Callable[..., Server]) -> None:
    server = serve("scripted:tokens_per_s=50")
    stream_id = server.create({"prompt": "Hi", "max_tokens": 60_000})
    token = token_in(server.post("/v1/shares", {"stream_id": stream_id}))
    readers = [SharedReader(server, token) for _ in range(51)]
    for reader in readers:
        reader.__enter__()
    assert sorted(reader.status for reader in readers) == [200] * 50 + [429]
    assert server.http.post(f"/v1/streams/{stream_id}/cancel").status_code == 200
    for reader in readers:
        reader.wait_end()
    statuses = [refused(server, "trs_")[0] for _ in range(250)]  # in at most two minutes
    assert set(statuses) == {404, 429}


async def _opened_from(house: House, token: str, address: str, most: int) -> list[int]:
    """Open a link from an address, up to the first refusal. Returns the statuses."""
    transport = httpx.ASGITransport(house.app, client=(address, 1))
    statuses: list[int] = []
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        while len(statuses) < most and 429 not in statuses:
            answer = await client.head("/v1/shared", headers={"x-tailrace-share": token})
            statuses.append(answer.status_code)
    return statuses


async def test_readers_in_many_places_do_not_lock_each_other_out(tmp_path: Path) -> None:
    async with serving_with_keys(tmp_path) as house, house.client(house.key()) as client:
        stream_id = (await client.post("/v1/streams", json={"prompt": "Hi", "max_tokens": 3})).json()["id"]
        token = token_in(await client.post("/v1/shares", json={"stream_id": stream_id}))
        greedy = await _opened_from(house, token, "203.0.113.1", 250)  # in at most two minutes
        assert set(greedy) == {200, 429}
        assert await _opened_from(house, token, "203.0.113.2", 1) == [200]
        assert set(await _opened_from(house, token, "127.0.0.1", 150)) == {200}  # it may be a proxy
        statuses: list[int] = []
        for number in range(20):
            statuses += await _opened_from(house, token, f"198.51.100.{number}", 70)
        assert set(statuses) == {200, 429}
