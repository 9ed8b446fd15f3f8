"""Keys on a server: authentication, scopes, and revocation."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from starlette.routing import Route, WebSocketRoute
from tests.api.keyed import House, serving_with_keys
from tests.waiting import wait_until

from tailrace.access.keys import NewKey
from tailrace.api.lifecycle import PUBLIC, build_routes
from tailrace.records.key_store import KeyStore
from tailrace.settings import Settings

_PROMPT = {"prompt": "Mine.", "seed": 1}
_CHAT = {"messages": [{"role": "user", "content": "Hi."}], "max_tokens": 3}


async def test_without_keys_no_key_is_needed(tmp_path: Path) -> None:
    async with serving_with_keys(tmp_path) as house:
        async with house.client() as client:
            assert (await client.post("/v1/chat/completions", json=_CHAT)).status_code == 200
            assert (await client.get("/v1/admin/keys")).status_code == 400
        async with house.client("tr_whatever") as client:  # clients must send one, and send anything
            assert (await client.get("/v1/models")).status_code == 200


def _paths(house: House) -> list[tuple[str, str]]:
    """Yield each method and path of each route, and those of WebSockets."""
    found = []
    routes, _ = build_routes(house.service.models, house.server(), house.extensions, house.records)
    for one in routes:
        path = re.sub(r"\{[^}]*\}", "x", one.path)  # type: ignore[attr-defined]
        if isinstance(one, WebSocketRoute):
            found.append(("WEBSOCKET", path))
        else:
            assert isinstance(one, Route)
            found += [(method, path) for method in sorted(one.methods or ())]
    return found


async def test_every_route_needs_a_key(tmp_path: Path) -> None:
    async with serving_with_keys(tmp_path) as house:
        house.revoke(house.key())  # a server whose keys are all revoked lets nobody in
        paths = _paths(house)
        assert len(paths) > 80
        is_public = {(method, path) for path in PUBLIC for method in ("GET", "HEAD")} | {
            (method, "/page/x") for method in ("GET", "HEAD")
        }
        async with house.client() as nobody, house.client("tr_aaaaaaaaaaaa_" + "a" * 43) as stranger:
            for method, path in [*paths, ("GET", "/nowhere"), ("POST", "/v1/nowhere"), ("PATCH", "/")]:
                if method == "WEBSOCKET":
                    socket = await house.open_socket(path)
                    assert (await socket.wait("websocket.http.response.start"))["status"] == 401, path
                    continue
                for client in (nobody, stranger):
                    answer = await client.request(method, path)
                    if (method, path) in is_public:
                        assert answer.status_code != 401, path
                    else:
                        assert answer.status_code == 401, (method, path)
                        assert answer.headers["www-authenticate"] == "Bearer"
                        assert "aaaa" not in answer.text


@pytest.mark.parametrize("header", ["authorization", "x-api-key"])
async def test_a_key_is_shown_in_either_header(tmp_path: Path, header: str) -> None:
    async with serving_with_keys(tmp_path) as house:
        token = house.key()
        shown = f"bearer {token}" if header == "authorization" else token
        async with house.client(**{header: shown}) as client:
            assert (await client.post("/v1/messages", json={**_CHAT, "model": "default"})).status_code == 200


async def test_a_path_in_a_header_changes_nothing(tmp_path: Path) -> None:
    async with serving_with_keys(tmp_path) as house:
        house.key()
        for headers in ({"host": "localhost/livez"}, {"x-forwarded-prefix": "/livez"}, {"x-original-url": "/livez"}):
            async with house.client(None, **headers) as client:
                assert (await client.get("/v1/models")).status_code in (401, 403)
        async with house.client() as client:
            for path in ("/livez/../v1/models", "/page/../v1/models", "//v1/models", "/page/%2e%2e/v1/models"):
                assert (await client.get(path)).status_code in (401, 404), path


@pytest.mark.parametrize(
    ("scopes", "allowed", "refused"),
    [
        (("read",), ["GET /v1/models", "GET /openapi.json"], ["POST /v1/chat/completions", "GET /metrics"]),
        (("generate",), ["POST /v1/chat/completions"], ["GET /v1/models", "GET /v1/admin/keys"]),
        (("metrics",), ["GET /metrics"], ["GET /v1/models", "POST /v1/chat/completions"]),
        (("admin",), ["GET /v1/admin/keys"], ["POST /v1/chat/completions", "GET /metrics"]),
        (("generate", "wire:openai"), ["POST /v1/chat/completions"], ["POST /api/chat", "POST /v1/streams"]),
        (("generate", "model:other"), [], ["POST /v1/chat/completions", "POST /api/chat"]),
        (("generate", "model:scripted"), ["POST /v1/chat/completions", "POST /api/chat"], []),
    ],
)
async def test_what_a_key_may_do(
    tmp_path: Path, scopes: tuple[str, ...], allowed: list[str], refused: list[str]
) -> None:
    async with serving_with_keys(tmp_path) as house, house.client(house.key(scopes=scopes)) as client:
        for entry in allowed + refused:
            method, path = entry.split()
            body = {**_CHAT, "model": "scripted", "stream": False} if method == "POST" else None
            if path == "/v1/streams":
                body = {"prompt": "Hi.", "max_tokens": 3}
            answer = await client.request(method, path, json=body)
            assert answer.status_code == (200 if entry in allowed else 403), (entry, answer.text)


async def test_owners_see_only_their_streams(tmp_path: Path) -> None:
    async with (
        serving_with_keys(tmp_path) as house,
        house.client(house.key("a")) as one,
        house.client(house.key("a")) as same,
        house.client(house.key("b")) as other,
    ):
        begun = (await one.post("/v1/streams", json={**_PROMPT, "max_tokens": 3})).json()["id"]
        assert (await same.get(f"/v1/streams/{begun}")).status_code == 200
        assert (await other.get(f"/v1/streams/{begun}")).status_code == 404


async def test_what_a_request_begins_after_its_key_was_revoked_ends_too(tmp_path: Path) -> None:
    async with serving_with_keys(tmp_path) as house:
        token = house.key()

        async def body() -> AsyncIterator[bytes]:
            yield b'{"prompt": "Mine.", '
            house.revoke(token)
            yield b'"max_tokens": 60000, "ignore_eos": true}'

        async with house.client(token, **{"content-type": "application/json"}) as client:
            begun = await client.post("/v1/streams", content=body())
        assert begun.status_code == 201
        await wait_until(lambda: not house.service.generator.live, timeout_s=30)


async def test_a_revoked_keys_streams_end(tmp_path: Path) -> None:
    """They end in the way of their wires, or their connection is closed."""
    async with serving_with_keys(tmp_path) as house:
        token, other = house.key(), house.key()
        async with house.client(token) as client, house.client(other) as same_owner:
            kept = (await same_owner.post("/v1/streams", json={**_PROMPT, "max_tokens": 60_000})).json()["id"]
            long = {**_CHAT, "max_tokens": 60_000}
            waiting = [
                asyncio.create_task(client.post(path, json=body))
                for path, body in (
                    ("/v1/chat/completions", {**long, "stream": True}),
                    ("/v1/chat/completions", long),
                    ("/v1/messages", {**long, "stream": True, "model": "default"}),
                    ("/api/chat", {**long, "model": "default"}),
                    ("/generate_stream", {"inputs": "Hi.", "parameters": {"max_new_tokens": 60_000}}),
                )
            ]
            socket = await house.open_socket("/v1/ws", token=token)
            await socket.wait("websocket.accept")
            following = asyncio.create_task(client.get(f"/v1/streams/{kept}/events"))
            async with asyncio.timeout(120):
                while len(house.service.generator.live) < 6:
                    await asyncio.sleep(0.01)
            house.revoke(token)
            async with asyncio.timeout(120):
                answers = await asyncio.gather(*waiting)
                closed = await socket.wait("websocket.close")
                cut = await asyncio.gather(following, return_exceptions=True)
            assert closed["code"] == 1008
            assert all("revoked" in answer.text for answer in answers)
            assert answers[1].status_code == 401
            assert isinstance(cut[0], BaseException) or b"event: done" not in cut[0].content
            assert (await client.get("/v1/models")).status_code == 401
            assert (await same_owner.get(f"/v1/streams/{kept}")).json()["status"] == "running"


async def test_tickets(tmp_path: Path) -> None:
    async with serving_with_keys(tmp_path) as house:
        token = house.key()
        async with house.client(token) as mine, house.client() as browser:
            begun = [(await mine.post("/v1/streams", json={**_PROMPT, "max_tokens": 3})).json()["id"] for _ in "ab"]
            issued = await mine.post("/v1/tickets", json={"stream_id": begun[0]})
            assert issued.status_code == 201
            ticket = issued.json()["ticket"]
            assert (await browser.get(f"/v1/streams/{begun[0]}/events?ticket={ticket}")).status_code == 200
            for word in ("v1", "", "events", begun[0] + "/"):  # else it would open other paths
                assert (await mine.post("/v1/tickets", json={"stream_id": word})).status_code == 400
            for method, path in (
                ("GET", f"/v1/streams/{begun[1]}/events"), ("GET", "/v1/models"), ("GET", "/v1/admin/keys"),
                ("DELETE", f"/v1/streams/{begun[0]}"), ("POST", "/v1/streams"), ("POST", "/v1/tickets"),
            ):  # fmt: skip
                answer = await browser.request(method, f"{path}?ticket={ticket}")
                assert answer.status_code in (401, 403), (method, path)
            socket = await house.open_socket("/v1/ws", f"ticket={ticket}")
            await socket.wait("websocket.accept")
            socket.say(f'{{"type":"follow","stream_id":"{begun[0]}"}}')
            assert "following" in str((await socket.wait("websocket.send"))["text"])
            socket.say(f'{{"type":"follow","stream_id":"{begun[1]}","id":"b"}}')
            socket.say('{"type":"create","id":"c","prompt":"Hi."}')
            refused = ""
            while refused.count("forbidden") < 2:
                refused += str((await socket.wait("websocket.send"))["text"])
            await socket.close()
            assert (await browser.get(f"/v1/streams/{begun[0]}/events?ticket={ticket[:-2]}xx")).status_code == 401
            house.revoke(token)
            assert (await browser.get(f"/v1/streams/{begun[0]}/events?ticket={ticket}")).status_code == 401


async def test_another_server_over_the_same_database_accepts_a_ticket(tmp_path: Path) -> None:
    """So does the same server after a restart: both have nothing but the database."""
    async with serving_with_keys(tmp_path) as house:
        async with house.client(house.key()) as mine:
            begun = (await mine.post("/v1/streams", json={**_PROMPT, "max_tokens": 3})).json()["id"]
            ticket = (await mine.post("/v1/tickets", json={"stream_id": begun})).json()["ticket"]
        other = house.twin()
        await other.read_keys()
        house.app = house.build_app(records=other)
        async with house.client() as browser:
            followed = await browser.get(f"/v1/streams/{begun}/events?ticket={ticket}")
        other.close()
    assert followed.status_code == 200


async def test_keys_are_administered_over_http(tmp_path: Path) -> None:
    async with serving_with_keys(tmp_path) as house, house.client(house.key("root", scopes=("admin",))) as admin:
        made = await admin.post("/v1/admin/keys", json={"owner": "alice", "scopes": ["read"], "expires_in_s": 60})
        assert made.status_code == 201
        assert made.headers["cache-control"] == "no-store"
        key_id, token = made.json()["id"], made.json()["token"]
        async with house.client(token) as client:
            assert (await client.get("/v1/models")).status_code == 200
            turned = (await admin.post(f"/v1/admin/keys/{key_id}/rotate", json={"grace_s": 0})).json()["token"]
            assert (await client.get("/v1/models")).status_code == 401
        async with house.client(turned) as client:
            assert (await client.get("/v1/models")).status_code == 200
            assert (await admin.delete(f"/v1/admin/keys/{key_id}")).json()["revoked_s"]
            assert (await client.get("/v1/models")).status_code == 401
        listed = await admin.get("/v1/admin/keys?owner=alice")
        assert [key["id"] for key in listed.json()["data"]] == [key_id]
        assert token not in listed.text
        for method, path, body, status in (
            ("GET", "/v1/admin/keys/abcdefghjkmn", None, 404),
            ("DELETE", "/v1/admin/keys/abcdefghjkmn", None, 404),
            ("POST", f"/v1/admin/keys/{key_id}/rotate", {}, 400),
            ("POST", "/v1/admin/keys", {}, 400),
            ("POST", "/v1/admin/keys", {"owner": "anonymous"}, 400),
            ("POST", "/v1/admin/keys", {"owner": "a", "scopes": ["everything"]}, 400),
            ("POST", "/v1/admin/keys", {"owner": "a", "expires_in_s": -1}, 400),
            ("POST", "/v1/admin/keys", {"owner": "a", "name": "a\0"}, 400),
            ("GET", "/v1/admin/keys?owner=%00", None, 400),
            ("GET", "/v1/admin/keys/%00", None, 404),
        ):
            answer = await admin.request(method, path, json=body)
            assert answer.status_code == status, (path, body, answer.text)


async def test_an_older_change_does_not_replace_a_newer_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another server revokes a key that this one rotates, and this server learns that before its own change is
    answered."""
    async with serving_with_keys(tmp_path) as house:
        token, loop = house.key(), asyncio.get_running_loop()
        key_id, other = token.split("_")[1], house.twin()
        others_keys, rotate = other.keys(), KeyStore.rotate

        def rotate_and_revoke(keys: KeyStore, key_id: str, *, grace_s: float) -> NewKey:
            made = rotate(keys, key_id, grace_s=grace_s)
            others_keys.revoke(key_id)
            asyncio.run_coroutine_threadsafe(house.records.read_keys(), loop).result(120)
            return made

        monkeypatch.setattr(KeyStore, "rotate", rotate_and_revoke)
        async with house.client(house.key("root", scopes=("admin",))) as admin:
            await house.records.read_keys()
            turned = await admin.post(f"/v1/admin/keys/{key_id}/rotate", json={})
        other.close()
        async with house.client(turned.json()["token"]) as mine:
            assert (await mine.get("/v1/models")).status_code == 401


@pytest.mark.parametrize("path", ["/v1/admin/keys", "/v1/tickets"])
async def test_small_bodies_have_a_small_limit(path: str, tmp_path: Path) -> None:
    async with serving_with_keys(tmp_path) as house, house.client(house.key(scopes=("admin", "read"))) as client:
        for pieces in (b'"%b"' % (b"x" * 2**16), _in_pieces()):
            refused = await client.post(path, content=pieces, headers={"content-type": "application/json"})
            assert refused.status_code == 413
            assert "65536 bytes" in refused.text


async def _in_pieces() -> AsyncIterator[bytes]:
    for _ in range(2**6 + 1):
        yield b" " * 2**10


async def test_metrics_can_be_public(tmp_path: Path) -> None:
    async with serving_with_keys(tmp_path) as house:
        house.key()
        async with house.client() as client:
            assert (await client.get("/metrics")).status_code == 401
        house.app = house.build_app(Settings(public_metrics=True))
        async with house.client() as client:
            assert 'tailrace_ready{model="scripted"} 1.0' in (await client.get("/metrics")).text
            assert (await client.get("/v1/models")).status_code == 401


@pytest.mark.parametrize(
    ("method", "path", "body", "name"),
    [
        ("POST", "/v1/admin/keys", {"owner": "a", "scope": ["read"]}, "scope"),
        ("POST", "/v1/admin/keys", {"owner": "a", "quota": {"tokens_a_minute": 5}}, "quota.tokens_a_minute"),
        ("POST", "/v1/admin/keys/abcdefghjkmn/rotate", {"grace": 5}, "grace"),
        ("PUT", "/v1/admin/owners/alice/quota", {"tokens_a_minute": 5}, "tokens_a_minute"),
    ],
)
async def test_an_unknown_field_is_named(tmp_path: Path, method: str, path: str, body: object, name: str) -> None:
    async with serving_with_keys(tmp_path) as house, house.client(house.key("root", scopes=("admin",))) as admin:
        answer = await admin.request(method, path, json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == name
        assert answer.json()["error"]["message"] == f"Unknown field: {name}."
