"""Headers for browsers: which origins may send requests, and how answers may be used."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tests.api.process import Server
from tests.apps.process import AppServer, write

_LISTED, _OTHER = "https://app.example", "https://evil.example"
_HEADERS = {
    "content-security-policy": "frame-ancestors 'none'",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    running = Server("scripted", "--allowed-origins", f"{_LISTED}, https://second.example").wait_ready()
    yield running
    running.close()


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/models"),
        ("GET", "/v1/streams"),
        ("GET", "/v1/streams/" + "A" * 22),
        ("GET", "/nowhere"),
        ("DELETE", "/v1/models"),
        ("GET", "/metrics"),
        ("GET", "/openapi.json"),
        ("GET", "/livez"),
        ("POST", "/?prompt=Hi"),
        ("GET", "/v1/ws"),
    ],
)
def test_answers_have_headers_against_misuse(server: Server, method: str, path: str) -> None:
    headers = server.http.request(method, path).headers
    assert {name: headers.get_list(name) for name in _HEADERS} == {name: [value] for name, value in _HEADERS.items()}
    assert headers["cache-control"].startswith("no-")
    assert "server" not in headers


def test_the_page_has_its_own_policy(server: Server) -> None:
    for path in ("/", "/docs"):
        headers = server.http.get(path, headers={"accept": "text/html"}).headers
        (policy,) = headers.get_list("content-security-policy")
        assert "script-src 'self'" in policy
        assert "frame-ancestors 'none'" in policy
        assert headers["cache-control"] == "no-cache"


def test_pages_of_listed_origins_may_call(server: Server) -> None:
    for origin in (_LISTED, "https://second.example"):
        asked = {
            "origin": origin,
            "access-control-request-method": "POST",
            "access-control-request-headers": "x-api-key",
        }
        preflight = server.http.options("/v1/streams", headers=asked)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-headers"] == "x-api-key"
        for answer in (preflight, server.http.get("/v1/models", headers={"origin": origin})):
            assert answer.headers["access-control-allow-origin"] == origin
            assert "Origin" in answer.headers["vary"]
            assert "access-control-allow-credentials" not in answer.headers  # there are no cookies to send


def test_a_public_page_of_a_listed_origin_may_call_a_private_address(server: Server) -> None:
    """Browsers ask for it before they send a page's request from a public site to a private address."""
    asked = {"access-control-request-method": "GET", "access-control-request-private-network": "true"}
    preflight = server.http.options("/v1/models", headers={"origin": _LISTED, **asked})
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-private-network"] == "true"
    refused = server.http.options("/v1/models", headers={"origin": _OTHER, **asked})
    assert refused.status_code >= 400
    assert "access-control-allow-origin" not in refused.headers


def test_pages_of_other_origins_may_not(server: Server) -> None:
    for origin in (_OTHER, "null", _LISTED + ".evil.example", "http://app.example"):
        preflight = server.http.options(
            "/v1/streams", headers={"origin": origin, "access-control-request-method": "POST"}
        )
        assert preflight.status_code >= 400
        assert "access-control-allow-origin" not in preflight.headers
        answer = server.http.get("/v1/models", headers={"origin": origin})
        assert answer.status_code == 403
        assert "access-control-allow-origin" not in answer.headers


def test_headers_of_apps_are_not_changed(tmp_path: Path) -> None:
    write(
        tmp_path,
        "bot.py",
        """
        async def app(scope, receive, send):
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"Hello."})
        """,
    )
    running = AppServer("bot:app", directory=tmp_path).wait_ready()
    assert not set(_HEADERS) & set(httpx.get(running.url).headers)
    running.close()
