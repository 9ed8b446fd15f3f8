"""The server dies during an answer in a conversation: the next server finishes the answer, and the conversation
continues."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from sqlalchemy import create_engine, make_url, text
from tests.api.oracle import Answer, chat_ids
from tests.api.process import Server
from tests.processes import wait_ended
from tests.records.databases import own_database
from tests.waiting import until

_COUNT = 120
_ASKED = {"seed": 3, "max_tokens": _COUNT, "stream": True}


class _House:
    """Servers one after the other, over one directory."""

    def __init__(self, directory: Path, *flags: str, database: str = "") -> None:
        database = database or f"sqlite:///{directory / 'records.sqlite'}"
        self._flags = ("--data-dir", str(directory), "--database", database, *flags)
        self.server = self._start()

    def _start(self) -> Server:
        return Server("scripted:tokens_per_s=200", *self._flags).wait_ready()

    def kill(self) -> None:
        children = psutil.Process(self.server.process.pid).children()
        self.server.process.kill()
        self.server.wait()
        self.server.close()
        wait_ended(children)

    def next(self) -> None:
        self.server = self._start()


@contextlib.contextmanager
def _house(directory: Path, *flags: str, database: str = "") -> Iterator[_House]:
    house = _House(directory, *flags, database=database)
    try:
        yield house
    finally:
        house.server.close()


@contextlib.contextmanager
def _away(url: str) -> Iterator[None]:
    """A PostgreSQL database that refuses and closes all connections."""
    name = make_url(url).database
    server = create_engine(make_url(url).set(database="postgres"), isolation_level="AUTOCOMMIT")
    with contextlib.closing(server.connect()) as connection:
        connection.execute(text(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false"))
        connection.execute(
            text("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = :name"), {"name": name}
        )
        try:
            yield
        finally:
            connection.execute(text(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true"))
    server.dispose()


def _items(house: _House, its_id: str) -> list[dict[str, Any]]:  # Any: of JSON
    answer = house.server.http.get(f"/v1/conversations/{its_id}/items", params={"order": "asc"})
    assert answer.status_code == 200, answer.text
    return list(answer.json()["data"])


def _begin(house: _House, text: str) -> tuple[str, str]:
    """A conversation in which an answer is being written; its id and the stream's."""
    its_id = house.server.post("/v1/conversations", {}).json()["id"]
    body = {"messages": [{"role": "user", "content": text}], "conversation": its_id, **_ASKED}
    with house.server.http.stream("POST", "/v1/chat/completions", json=body) as answer:
        lines = answer.iter_lines()
        while '"content":"' not in next(lines):
            pass
        return str(its_id), str(answer.headers["x-stream-id"])


@pytest.mark.parametrize("kind", ["killed", pytest.param("told", marks=pytest.mark.deep)])
def test_the_next_server_finishes_an_answer(tmp_path: Path, kind: str) -> None:
    with _house(tmp_path) as house:
        its_id, stream_id = _begin(house, "Hi")
        if kind == "killed":
            house.kill()
        else:
            house.server.close()
        house.next()
        assert _items(house, its_id)[-1]["stream_id"] == stream_id
        until(lambda: _items(house, its_id)[-1]["status"] != "in_progress")
        asked, answer = _items(house, its_id)
        assert asked["content"][0]["text"] == "Hi"
        assert answer["content"][0]["text"] == Answer(chat_ids("Hi"), _COUNT, 3).text
        body = {"messages": [{"role": "user", "content": "And then?"}], "conversation": its_id, "max_tokens": 3}
        assert house.server.post("/v1/chat/completions", body).status_code == 200
        assert [item["role"] for item in _items(house, its_id)] == ["user", "assistant"] * 2


@pytest.mark.deep
def test_an_answer_that_ended_before_it_was_written(tmp_path: Path) -> None:
    """The server could not write to the database when the answer began and ended, and was killed."""
    with _house(tmp_path) as house:
        its_id = house.server.post("/v1/conversations", {}).json()["id"]
        body = {"messages": [{"role": "user", "content": "Hi"}], "conversation": its_id, **_ASKED, "stream": False}
        with contextlib.closing(sqlite3.connect(tmp_path / "records.sqlite", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")  # others can read, but not write
            answer = house.server.post("/v1/chat/completions", body)
            assert answer.status_code == 200, answer.text
            house.kill()
        house.next()
        asked, said = _items(house, its_id)
        assert (asked["content"][0]["text"], said["status"]) == ("Hi", "incomplete")  # max_tokens ended it
        assert said["content"][0]["text"] == answer.json()["choices"][0]["message"]["content"]
        for item in (said, asked):
            assert house.server.http.delete(f"/v1/conversations/{its_id}/items/{item['id']}").status_code == 200
        house.kill()
        house.next()
        assert _items(house, its_id) == []  # what a client deleted does not come back


def test_an_abandoned_answer_does_not_block_its_conversation(tmp_path: Path) -> None:
    with _house(tmp_path, "--journal", "memory") as house:
        its_id, _ = _begin(house, "Hi")
        until(lambda: len(_items(house, its_id)) == 2)  # what was not written yet is not in memory any more
        house.kill()
        house.next()
        assert _items(house, its_id)[-1]["status"] == "in_progress"
        body = {"messages": [], "conversation": its_id, "max_tokens": 3}
        again = house.server.post("/v1/chat/completions", body)
        assert again.status_code == 200, again.text
        asked, answer = _items(house, its_id)
        assert answer["content"][0]["text"] == again.json()["choices"][0]["message"]["content"]
        assert answer["parent_id"] == asked["id"]
        statuses = [item["status"] for item in house.server.http.get(f"/v1/conversations/{its_id}/tree").json()["data"]]
        assert statuses == ["completed", "incomplete", "incomplete"]


def test_the_engine_dies(tmp_path: Path) -> None:
    with _house(tmp_path) as house:
        its_id, _ = _begin(house, "Hi")
        house.server.worker().kill()
        until(lambda: _items(house, its_id)[-1]["status"] != "in_progress")
        assert _items(house, its_id)[-1]["content"][0]["text"] == Answer(chat_ids("Hi"), _COUNT, 3).text


@pytest.mark.deep
def test_an_answer_waits_for_an_unreachable_database(tmp_path: Path) -> None:
    with own_database("postgresql", tmp_path) as url, _house(tmp_path, database=url) as house:
        its_id, stream_id = _begin(house, "Hi")
        until(lambda: len(_items(house, its_id)) == 2)
        with _away(url):
            house.server.wait_state(stream_id, "done", timeout_s=45.0)  # which the database does not hold up
            assert house.server.http.get(f"/v1/conversations/{its_id}").status_code == 503
        until(lambda: house.server.http.get(f"/v1/conversations/{its_id}").status_code == 200)
        until(lambda: _items(house, its_id)[-1]["status"] != "in_progress")
        assert _items(house, its_id)[-1]["content"][0]["text"] == Answer(chat_ids("Hi"), _COUNT, 3).text
