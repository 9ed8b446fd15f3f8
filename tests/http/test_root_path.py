"""A server that a proxy serves below a path."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from urllib.parse import urljoin

import httpx
import pytest
from tests.api.keyed import serving_with_keys
from tests.api.process import Server
from tests.http.nginx import below_a_path

from tailrace.settings import Settings

_BODY = {"prompt": "Hi", "max_tokens": 3}
_BROWSER = {"accept": "text/html"}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with closing(Server("scripted", "--root-path", "/llm", "--allowed-hosts", "chat.example")) as running:
        yield running.wait_ready()


def test_the_paths_in_answers_begin_with_it(server: Server) -> None:
    begun = server.post("/v1/streams", _BODY)
    path = f"/llm/v1/streams/{begun.json()['id']}"
    assert begun.headers["location"] == path
    assert (begun.json()["events_url"], begun.json()["cancel_url"]) == (f"{path}/events", f"{path}/cancel")
    chat = {"messages": [{"role": "user", "content": "Hi"}], "stream": True, "max_tokens": 2}
    headers = server.post("/v1/chat/completions", chat).headers
    assert headers["content-location"] == f"/llm/v1/streams/{headers['x-stream-id']}"
    assert headers["location"] == f"{headers['content-location']}/events"
    made = server.http.put("/v1/durable/a", headers={"content-type": "text/plain"})
    assert made.headers["location"] == f"{server.url}/llm/v1/durable/a"
    assert server.http.get("/openapi.json").json()["servers"] == [{"url": "/llm"}]


async def test_the_cookie_is_for_it(tmp_path: Path) -> None:
    async with serving_with_keys(tmp_path) as house:
        key = house.key()
        async with house.opened(Settings(root_path="/llm")), house.client(key, origin="http://localhost") as client:
            assert "; Path=/llm/; " in (await client.post("/v1/session")).headers["set-cookie"]


@pytest.mark.parametrize("path", ["llm", "/llm/", "/", "//llm", "https://chat.example/llm", "/a b", "/llm?x", "/é"])
def test_what_is_no_path(path: str) -> None:
    with pytest.raises(ValueError, match="--root-path takes a path"):
        Settings(root_path=path)


def _addresses(text: str) -> list[str]:
    """Return what a page or module loads."""
    return re.findall(r'(?:src|href)="([^"#]+)"', text) + re.findall(r'(?:from|import)[ (]?[`"](\.[^"`$]+)[`"]', text)


def test_behind_nginx_everything_stays_below_the_path(server: Server, tmp_path: Path) -> None:
    with below_a_path(tmp_path, server.port) as port, httpx.Client(trust_env=False, headers=_BROWSER) as client:
        root = f"http://127.0.0.1:{port}/llm/"
        waiting, seen = [root, f"{root}docs"], set[str]()
        while waiting:
            address = waiting.pop()
            if address in seen:
                continue
            seen.add(address)
            assert address.startswith(root), address
            answer = client.get(address)
            assert answer.status_code == 200, address
            if answer.headers["content-type"].startswith(("text/html", "text/javascript")):
                waiting += [urljoin(address, each) for each in _addresses(answer.text)]
        assert {f"{root}page/main.js", f"{root}page/lib/preact.js", f"{root}openapi.json"} <= seen
        begun = client.post(f"{root}v1/streams", json=_BODY)
        followed = client.get(urljoin(root, begun.headers["location"] + "/events"))
        assert "event: done" in followed.text
        assert client.post(f"{root}chat/completions", json={"messages": []}).status_code == 400
