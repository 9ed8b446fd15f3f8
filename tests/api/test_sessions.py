"""Sign-in of browsers with a key: cookies, their scope and their lifetime."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import closing
from http.cookies import SimpleCookie
from pathlib import Path

import httpx
import pytest
from sqlalchemy import delete
from starlette.datastructures import Headers
from tests.api.keyed import House, serving_with_keys

from tailrace.access.keys import hash_of
from tailrace.access.sessions import LIFETIME_S, Sessions, cookie_name, new_session, session_token
from tailrace.records import database_tables, records_service
from tailrace.records.record_database import RecordDatabase

_OWN = {"origin": "http://localhost"}
_FOREIGN = "http://evil.example"


@pytest.fixture
async def house(tmp_path: Path) -> AsyncIterator[House]:
    async with serving_with_keys(tmp_path) as made:
        yield made


async def _sign_in(house: House, token: str, **headers: str) -> tuple[httpx.Response, str]:
    """The answer, and the cookie as a browser sends it back."""
    async with house.client(token) as client:
        answer = await client.post("/v1/session", headers={**_OWN, **headers})
    cookie = SimpleCookie(answer.headers.get("set-cookie", ""))
    return answer, "; ".join(f"{name}={morsel.value}" for name, morsel in cookie.items())


async def _get(house: House, path: str, **headers: str) -> httpx.Response:
    async with house.client(None, **{name.replace("_", "-"): value for name, value in headers.items()}) as client:
        return await client.get(path)


async def test_a_cookie_replaces_the_key(house: House) -> None:
    token = house.key("alice", scopes=("read", "generate"))
    answer, cookie = await _sign_in(house, token)
    assert answer.status_code == 201
    assert (answer.json()["owner"], answer.json()["scopes"]) == ("alice", ["generate", "read"])
    cookie = answer.headers["set-cookie"]
    assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= set(cookie.split("; "))
    assert "Secure" not in cookie
    assert token not in cookie
    assert (await _get(house, "/v1/session", cookie=cookie)).json() == answer.json()
    async with house.client(None, cookie=cookie, **_OWN) as client:
        made = await client.post("/v1/streams", json={"prompt": "Hi", "max_tokens": 3})
        assert made.status_code == 201
        assert (await client.get(made.json()["events_url"])).status_code == 200  # as an EventSource, without a ticket
    assert (await _get(house, "/v1/admin/keys", cookie=cookie)).status_code == 403  # no more than the key may


async def test_without_the_cookie_there_is_no_session(house: House) -> None:
    house.key("alice")
    assert (await _get(house, "/v1/session")).status_code == 401
    for cookie in ("tailrace=", "tailrace=none", "tailrace=" + "A" * 43, "other=" + "A" * 43, "=;;=\x7f"):
        assert (await _get(house, "/v1/session", cookie=cookie)).status_code == 401


async def test_without_keys_all_are_anonymous(house: House) -> None:
    assert (await _get(house, "/v1/session")).json()["owner"] == "anonymous"
    async with house.client() as client:
        assert (await client.post("/v1/session", headers=_OWN)).status_code == 400


@pytest.mark.parametrize(
    ("headers", "may_read", "may_change"),
    [
        ({"sec-fetch-site": "same-origin", **_OWN}, True, True),
        ({"sec-fetch-site": "same-origin"}, True, True),
        (_OWN, True, True),
        ({}, True, False),  # plain HTTP: browsers say nothing of a GET, and SameSite=Strict has to do
        ({"sec-fetch-site": "none"}, True, False),  # an address that somebody typed
        ({"sec-fetch-site": "same-site"}, False, False),  # another port of this host
        ({"sec-fetch-site": "cross-site"}, False, False),
        ({"sec-fetch-site": "cross-site", **_OWN}, False, False),
        ({"sec-fetch-site": "same-origin", "origin": _FOREIGN}, False, False),
        ({"origin": _FOREIGN}, False, False),
        ({"origin": "null"}, False, False),
    ],
)
async def test_other_pages_cannot_use_it(
    house: House, headers: dict[str, str], may_read: bool, may_change: bool
) -> None:
    _, cookie = await _sign_in(house, house.key("alice"))
    async with house.client(None, cookie=cookie, **headers) as client:
        assert (await client.get("/v1/conversations")).is_success == may_read
        assert (await client.post("/v1/conversations", json={})).is_success == may_change
        assert (await client.delete("/v1/session")).json().get("ended", False) == may_change


async def test_allowed_origins_cannot_use_it() -> None:
    """What --allowed-origins lets in is let in with a key of its own."""
    for kind, method in (("http", "POST"), ("websocket", "GET")):
        scope = {"type": kind, "method": method}
        headers = Headers({"host": "localhost", "cookie": "tailrace=t", "origin": "https://app.example"})
        assert session_token(scope, headers) is None


async def test_only_a_page_of_the_server_signs_in_and_only_with_a_key(house: House) -> None:
    token = house.key("alice")
    assert (await _sign_in(house, token, **{"sec-fetch-site": "cross-site"}))[0].status_code == 403
    async with house.client(token) as client:
        assert (await client.post("/v1/session")).status_code == 403
    _, cookie = await _sign_in(house, token)
    async with house.client(None, cookie=cookie, **_OWN) as client:
        renewed = await client.post("/v1/session")
        assert (renewed.status_code, "set-cookie" in renewed.headers) == (401, False)
    assert (await _sign_in(house, token[:-1] + "!"))[0].status_code == 401


async def test_it_is_secure_if_the_browser_uses_tls(house: House) -> None:
    answer, _ = await _sign_in(house, house.key("alice"), origin="https://localhost")
    assert answer.headers["set-cookie"].endswith("; Secure")


async def test_it_ends_with_the_key(house: House) -> None:
    token = house.key("alice")
    _, cookie = await _sign_in(house, token)
    house.revoke(token)
    refused = await _get(house, "/v1/session", cookie=cookie)
    assert (refused.status_code, refused.json()["error"]["param"]) == (401, "cookie")


async def test_it_ends_with_the_secret_that_began_it(house: House) -> None:
    token = house.key("alice")
    _, cookie = await _sign_in(house, token)
    rotated = house.records.keys().rotate(token.split("_")[1], grace_s=0.0)
    house.records.keyring.update([rotated.key])
    assert (await _get(house, "/v1/session", cookie=cookie)).status_code == 401
    _, fresh = await _sign_in(house, rotated.token)
    assert (await _get(house, "/v1/session", cookie=fresh)).status_code == 200


async def test_signing_out_ends_it_everywhere(house: House) -> None:
    token = house.key("alice")
    _, cookie = await _sign_in(house, token)
    _, other = await _sign_in(house, token)
    successor = house.twin()
    await successor.read_keys()
    assert successor.active_sessions.find(cookie.partition("=")[2], 0.0) is not None  # outlives its server
    async with house.client(None, cookie=cookie, **_OWN) as client:
        ended = await client.delete("/v1/session")
    assert ended.json() == {"object": "session.ended", "ended": True}
    assert "Max-Age=0" in ended.headers["set-cookie"]
    assert (await _get(house, "/v1/session", cookie=cookie)).status_code == 401
    assert (await _get(house, "/v1/session", cookie=other)).status_code == 200
    await successor.read_keys()
    assert successor.active_sessions.find(cookie.partition("=")[2], 0.0) is None
    assert successor.active_sessions.find(other.partition("=")[2], 0.0) is not None
    successor.close()


async def test_a_server_that_read_nothing_for_long_misses_no_ended_session(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows of ended sessions are deleted meanwhile."""
    _, cookie = await _sign_in(house, house.key("alice"))
    slow = house.twin()
    await slow.read_keys()
    house.records.sessions().end(hash_of(cookie.partition("=")[2]))
    with closing(RecordDatabase(house.database)) as database, database.begin() as connection:
        connection.execute(delete(database_tables.sessions))
    monkeypatch.setattr(records_service, "MISSED_S", -1.0)  # any time is long
    await slow.read_keys()
    assert slow.active_sessions.find(cookie.partition("=")[2], 0.0) is None
    slow.close()


async def test_ended_sessions_are_deleted(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    token = house.key("alice")
    for _ in range(103):
        await _sign_in(house, token)
    assert len(house.records.keys().changed_since(0).sessions) == 103
    now_s = time.time()
    monkeypatch.setattr("tailrace.records.session_store.time.time", lambda: now_s + 601)
    await _sign_in(house, token)
    assert len(house.records.keys().changed_since(0).sessions) == 101


async def test_a_key_has_a_limited_number_of_sessions(house: House) -> None:
    token = house.key("alice")
    _, first = await _sign_in(house, token)
    for _ in range(100):
        _, last = await _sign_in(house, token)
    await house.records.read_keys()
    assert (await _get(house, "/v1/session", cookie=first)).status_code == 401
    assert (await _get(house, "/v1/session", cookie=last)).status_code == 200


def test_it_expires() -> None:
    token, session = new_session("k", b"hash", 1000.0)
    sessions = Sessions()
    sessions.update([session], 1000.0)
    assert sessions.find(token, 1000.0 + LIFETIME_S - 1) == session
    assert sessions.find(token, 1000.0 + LIFETIME_S) is None
    sessions.update([session], 1000.0 + LIFETIME_S)
    assert sessions.find(token, 1000.0) is None


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("localhost:8000", "tailrace-8000"),
        ("chat.example", "tailrace"),
        ("[::1]:81", "tailrace-81"),
        ("[::1]", "tailrace"),
    ],
)
def test_servers_on_other_ports_have_other_cookies(host: str, name: str) -> None:
    assert cookie_name(Headers({"host": host})) == name
