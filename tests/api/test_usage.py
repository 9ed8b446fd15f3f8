"""Limits and usage of keys and owners, over HTTP."""

from __future__ import annotations

import asyncio
import csv
import io
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.api.keyed import serving_with_keys
from tests.waiting import wait_until

from tailrace.access.quota import Quota

_BODY = {"prompt": "Mine.", "seed": 1, "max_tokens": 5}
_PROMPT_TOKENS = 5
# One request of each wire that generates, with five tokens: path and body.
_WIRES: dict[str, tuple[str, dict[str, Any]]] = {  # Any: of JSON
    "native": ("/v1/streams", _BODY),
    "openai": ("/v1/completions", {"model": "scripted", **_BODY}),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi."}], "max_tokens": 5}),
    "responses": ("/v1/responses", {"model": "scripted", "input": "Hi.", "max_output_tokens": 16}),
    "anthropic": (
        "/v1/messages", {"model": "scripted", "messages": [{"role": "user", "content": "Hi."}], "max_tokens": 5},
    ),
    "ollama": ("/api/generate", {"model": "scripted", "prompt": "Hi.", "options": {"num_predict": 5}}),
    "tgi": ("/generate", {"inputs": "Hi.", "parameters": {"max_new_tokens": 5}}),
    "plain": ("/?prompt=Hi.", {}),
    "triton": ("/v2/models/scripted/generate", {"text_input": "Hi.", "max_tokens": 5}),
}  # fmt: skip


async def _usage(client: httpx.AsyncClient, query: str = "") -> list[dict[str, Any]]:  # Any: of JSON
    answer = await client.get(f"/v1/usage{query}")
    assert answer.status_code == 200, answer.text
    return list(answer.json()["data"])


async def _until_used(client: httpx.AsyncClient, num_requests: int) -> dict[str, Any]:  # Any: of JSON
    async with asyncio.timeout(30):
        while not (rows := await _usage(client)) or rows[0]["num_requests"] < num_requests:
            await asyncio.sleep(0.05)
    (row,) = rows
    return row


@pytest.mark.parametrize("wire", _WIRES)
async def test_each_wire_is_refused_before_its_first_byte(tmp_path: Path, wire: str) -> None:
    path, body = _WIRES[wire]
    async with serving_with_keys(tmp_path) as house:
        async with house.client(house.key(quota=Quota(requests_per_month=1))) as client:
            first = await client.post(path, json=body)
            assert first.status_code in (200, 201), first.text
            assert first.headers["x-ratelimit-remaining-requests"] == "0"
            second = await client.post(path, json=body)
        assert second.status_code == 429
        assert int(second.headers["retry-after"]) > 0
        assert "1 requests per month" in second.text
        assert '"key-requests-month";r=0;t=' in second.headers["ratelimit"]
        await wait_until(lambda: not house.service.generator.live)


async def test_limits_are_set_shown_and_hold_at_once(tmp_path: Path) -> None:
    async with serving_with_keys(tmp_path) as house:
        token = house.key("alice")
        key_id = token.split("_")[1]
        async with house.client(token) as alice, house.client(house.key("root", scopes=("admin",))) as admin:
            assert (await alice.post("/v1/streams", json=_BODY)).status_code == 201
            shown = await admin.put(f"/v1/admin/keys/{key_id}/quota", json={"requests_per_month": 2})
            assert shown.json()["quota"] == {"requests_per_month": 2}
            assert (await alice.post("/v1/streams", json=_BODY)).status_code == 201  # the one before counted
            assert (await alice.post("/v1/streams", json=_BODY)).status_code == 429
            assert (await admin.put(f"/v1/admin/keys/{key_id}/quota", json={})).status_code == 200
            assert (await alice.post("/v1/streams", json=_BODY)).status_code == 201
            await admin.put("/v1/admin/owners/alice/quota", json={"answer_tokens": 4})
            assert (await admin.get("/v1/admin/owners/alice/quota")).json()["quota"] == {"answer_tokens": 4}
            for given in ({}, {"max_tokens": 3}, {"max_tokens": 9}):
                short = await alice.post("/v1/completions", json={"model": "scripted", "prompt": "Hi.", **given})
                assert short.json()["usage"]["completion_tokens"] == min(given.get("max_tokens", 4), 4)
                assert short.json()["choices"][0]["finish_reason"] == "length"
            made = await admin.post("/v1/admin/keys", json={"owner": "bob", "quota": {"streams_at_once": 1}})
            assert made.json()["quota"] == {"streams_at_once": 1}


@pytest.mark.parametrize("max_tokens", [None, 32_000])
async def test_an_answer_is_as_long_as_a_small_limit_allows(max_tokens: int | None, tmp_path: Path) -> None:
    async with serving_with_keys(tmp_path) as house:

        async def ask(client: httpx.AsyncClient, text: str) -> httpx.Response:
            messages = [{"role": "user", "content": text}]
            body = {"model": "scripted", "messages": messages, "n": 2, "max_tokens": max_tokens}
            return await client.post("/v1/chat/completions", json=body)

        async with house.client(house.key("alice", quota=Quota(tokens_per_minute=100))) as alice:
            answer = await ask(alice, "Hi.")
            assert answer.status_code == 200, answer.text
            usage = answer.json()["usage"]
            assert usage["completion_tokens"] == (100 - usage["prompt_tokens"]) // 2 * 2
            assert {choice["finish_reason"] for choice in answer.json()["choices"]} == {"length"}
            used = f"max_tokens ({usage['completion_tokens'] // 2} used)"
            assert answer.headers.get("x-tailrace-ignored") == (used if max_tokens else None)
            too_long = await ask(alice, "Hi. " * 40)
            assert too_long.status_code == 400
            assert "100 per minute" in too_long.json()["error"]["message"]
            assert "shorten the prompt" in too_long.json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("PUT", "/v1/admin/keys/abcdefghjkmn/quota", {}, 404),
        ("PUT", "/v1/admin/owners/a b/quota", {}, 400),
        ("PUT", "/v1/admin/owners/alice/quota", {"tokens_per_minute": 0}, 400),
        ("PUT", "/v1/admin/owners/alice/quota", {"tokens_per_minute": 1.5}, 400),
        ("GET", "/v1/admin/owners/%00/quota", None, 400),
        ("PUT", "/v1/admin/owners/alice/quota", [], 400),
        ("GET", "/v1/usage?by=owner,owner", None, 400),
        ("GET", "/v1/usage?by=hour", None, 400),
        ("GET", "/v1/usage?by=secret_hash", None, 400),
        ("GET", "/v1/usage?since=yesterday", None, 400),
        ("GET", "/v1/usage?since=99999999999999999999", None, 400),
        ("GET", "/v1/usage?until=0001-01-01T00:00:00%2B23:59", None, 200),
        ("GET", "/v1/usage?format=xml", None, 400),
        ("GET", "/v1/usage?form=csv", None, 400),
        ("GET", "/v1/usage?owner=%00", None, 400),
        ("GET", "/v1/usage?key=%00", None, 400),
    ],
)
async def test_mistakes(tmp_path: Path, method: str, path: str, body: object, status: int) -> None:
    async with serving_with_keys(tmp_path) as house, house.client(house.key("root", scopes=("admin",))) as admin:
        answer = await admin.request(method, path, json=body)
        assert answer.status_code == status, answer.text
        if status >= 400:
            assert answer.json()["error"]["message"]


async def test_limits_need_the_scope_admin(tmp_path: Path) -> None:
    async with serving_with_keys(tmp_path) as house, house.client(house.key("alice")) as alice:
        assert (await alice.put("/v1/admin/owners/alice/quota", json={})).status_code == 403
        assert (await alice.get("/v1/admin/owners/alice/quota")).status_code == 403


async def test_an_owner_sees_only_their_own_usage(tmp_path: Path) -> None:
    async with serving_with_keys(tmp_path) as house:
        clients = [house.client(house.key(owner)) for owner in ("alice", "bob")]
        root = house.client(house.key("root", scopes=("admin",)))
        for client in clients:
            for _ in range(2):
                await client.post("/v1/completions", json={"model": "scripted", **_BODY})
        alice, bob = [await _until_used(client, 2) for client in clients]
        assert alice == {
            "owner": "alice", "num_requests": 2, "num_refused": 0, "num_prompt_tokens": 2 * _PROMPT_TOKENS,
            "num_completion_tokens": 10, "total_s": alice["total_s"],
        }  # fmt: skip
        assert bob["owner"] == "bob"
        assert (await clients[0].get("/v1/usage?owner=bob")).status_code == 400
        assert await _usage(clients[0], "?owner=alice&by=wire,model&since=2026-01-01") == [
            {**{name: alice[name] for name in alice if name != "owner"}, "wire": "openai", "model": "scripted"}
        ]
        assert {row["owner"] for row in await _usage(root)} == {"alice", "bob"}
        assert await _usage(root, "?since=2999-01-01") == []
        table = list(csv.DictReader(io.StringIO((await root.get("/v1/usage?format=csv")).text)))
        assert [row["num_requests"] for row in table] == ["2", "2"]
        assert (await house.client().get("/v1/usage")).status_code == 401
        assert (await house.client(house.key(scopes=("generate",))).get("/v1/usage")).status_code == 403


async def test_all_limits_hold_for_concurrent_requests(tmp_path: Path) -> None:
    quota = Quota(tokens_per_month=100, streams_at_once=4)
    async with serving_with_keys(tmp_path) as house, house.client(house.key("alice", quota=quota)) as alice:
        asking = [alice.post("/v1/completions", json={"model": "scripted", **_BODY}) for _ in range(40)]
        answers = await asyncio.gather(*asking)
        let_in = [answer for answer in answers if answer.status_code == 200]
        assert {answer.status_code for answer in answers} == {200, 429}
        assert len(let_in) == 4  # nobody else comes in while they run
        while (await alice.post("/v1/completions", json={"model": "scripted", **_BODY})).status_code == 200:
            pass
        used = await _until_used(alice, 10)
        assert used["num_prompt_tokens"] + used["num_completion_tokens"] == 100


async def test_socket_of_an_owner_is_refused_like_a_request(tmp_path: Path) -> None:
    async with serving_with_keys(tmp_path) as house:
        token = house.key(quota=Quota(requests_per_month=1))
        socket = await house.open_socket("/v1/ws", token=token)
        await socket.wait("websocket.accept")
        for _ in range(2):
            socket.say('{"type": "create", "prompt": "Hi", "max_tokens": 2}')
        received = ""
        while "rate_limit_exceeded" not in received:
            received = (await socket.wait("websocket.send"))["text"]
        await socket.close()
