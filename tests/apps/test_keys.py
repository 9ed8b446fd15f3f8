"""Keys, their scopes and their limits at apps, with a real server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import httpx
import pytest
from tests.apps.process import AppServer, write
from tests.waiting import LONG_S, until
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from tailrace.access.quota import Quota
from tailrace.records.key_store import KeyStore
from tailrace.records.record_database import RecordDatabase
from tailrace.records.request_store import RequestStore

_SOURCE = """
    from fastapi import FastAPI, WebSocket
    from tailrace import serve

    web = FastAPI()

    @serve.deployment
    @serve.ingress(web)
    class Bot:
        @web.get("/words")
        async def words(self):
            async def words():
                while True:
                    yield "word "
            return serve.stream(words())

        @web.get("/")
        async def hello(self):
            return "Hello"

        @web.websocket("/socket")
        async def socket(self, socket: WebSocket):
            await socket.accept()
            await socket.send_text("Hello")

    app = Bot.bind()
"""


class _House:
    """A server of one app, and its database."""

    def __init__(self, server: AppServer, database: RecordDatabase) -> None:
        self.server = server
        self._database = database

    def key(self, owner: str, *scopes: str, quota: Quota | None = None) -> dict[str, str]:
        """Create a key, and wait until the server knows it. Returns its header."""
        made = KeyStore(self._database).create(owner, scopes=scopes, quota=quota or Quota())
        headers = {"x-api-key": made.token}
        until(lambda: self.get("/-/nothing", {}).status_code == 401)  # before the first key, nobody needs one
        until(lambda: self.get("/-/nothing", headers).status_code == 404)
        return headers

    def get(self, path: str, headers: dict[str, str]) -> httpx.Response:
        return httpx.get(self.server.url + path, headers=headers, timeout=LONG_S)

    def rows(self, owner: str) -> list[tuple[str, str, str, str]]:
        found = RequestStore(self._database).rows(owner=owner)
        return [(row.model, row.wire, row.status, row.finish) for row in found]


@contextmanager
def _running(directory: Path) -> Iterator[_House]:
    write(directory, "bot.py", _SOURCE)
    url = f"sqlite:///{directory / 'records.sqlite'}"
    server = AppServer("bot:app", "--database", url, "--data-dir", str(directory / "data"), directory=directory)
    with closing(server), closing(RecordDatabase(url)) as database:
        server.wait_ready()
        yield _House(server, database)


def test_scopes(tmp_path: Path) -> None:
    with _running(tmp_path) as house:
        writer, reader = house.key("alice", "generate"), house.key("alice", "read")
        scraper, chatter = house.key("ops", "metrics"), house.key("bob", "generate", "wire:openai")
        assert house.get("/", writer).status_code == 200
        assert house.get("/", {}).status_code == 401
        for other in (reader, scraper, chatter):
            refused = house.get("/", other)
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "forbidden")
            with pytest.raises(InvalidStatus, match="403"):
                connect(house.server.url.replace("http", "ws") + "/socket", additional_headers=other)
        assert house.get("/-/metrics", scraper).status_code == 200
        assert house.get("/-/metrics", writer).status_code == 403
        with httpx.stream("GET", house.server.url + "/words", headers=writer, timeout=LONG_S) as answer:
            stream = f"{house.server.url}/v1/streams/{answer.headers['x-stream-id']}"
            assert httpx.get(stream, headers=reader).status_code == 200
            assert httpx.get(stream, headers=writer).status_code == 403
            assert httpx.delete(stream, headers=reader).status_code == 403
            assert httpx.delete(stream, headers=writer).status_code == 204


def test_requests_are_counted_and_recorded(tmp_path: Path) -> None:
    with _running(tmp_path) as house:
        alice = house.key("alice", "generate", quota=Quota(requests_per_month=2))
        assert house.get("/", alice).headers["x-ratelimit-remaining-requests"] == "1"
        with connect(house.server.url.replace("http", "ws") + "/socket", additional_headers=alice) as socket:
            assert socket.recv() == "Hello"
        refused = house.get("/", alice)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert int(refused.headers["retry-after"]) > 0
        done, limited = ("default", "app", "done", "done"), ("default", "app", "refused", "rate_limit_exceeded")
        until(lambda: house.rows("alice") == [done, done, limited])


@pytest.mark.deep
def test_streams_at_once(tmp_path: Path) -> None:
    with _running(tmp_path) as house:
        alice = house.key("alice", "generate", quota=Quota(streams_at_once=1))
        with httpx.stream("GET", house.server.url + "/words", headers=alice, timeout=LONG_S):
            assert house.get("/", alice).status_code == 429
        until(lambda: house.get("/", alice).status_code == 200)
