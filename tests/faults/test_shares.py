"""Links that show a conversation, while servers are killed, and with several servers over one Redis and database."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from tests.api.process import Server
from tests.api.shared_reader import SharedReader, token_in
from tests.faults.house import House
from tests.faults.team import team
from tests.waiting import until

_ASKED = {"input": "Tell me of rivers.", "max_output_tokens": 300, "seed": 3, "background": True}


def _shown_at(server: Server, its_id: str) -> list[tuple[str, str]]:
    items = server.http.get(f"/v1/conversations/{its_id}/items", params={"order": "asc"}).json()["data"]
    return [(item["role"], item["content"][0]["text"]) for item in items if item["status"] != "in_progress"]


def _conversation(server: Server) -> str:
    its_id = str(server.post("/v1/conversations", {"title": "Rivers"}).json()["id"])
    assert server.post("/v1/responses", {**_ASKED, "conversation": its_id}).status_code == 200
    return its_id


@pytest.mark.parametrize("num_kills", [1, pytest.param(12, marks=[pytest.mark.deep, pytest.mark.timeout(900)])])
def test_a_link_shows_the_same_after_the_server_was_killed(tmp_path: Path, num_kills: int) -> None:
    house = House(tmp_path, "scripted:tokens_per_s=200")
    with contextlib.ExitStack() as stack:  # no check of resources: the database opens its connections late
        stack.callback(lambda: house.server.close())
        its_id = _conversation(house.server)
        token = token_in(house.server.post("/v1/shares", {"conversation_id": its_id}))
        revoked = token_in(house.server.post("/v1/shares", {"conversation_id": its_id}))
        assert house.server.http.delete(f"/v1/shares/{revoked.split('_')[1]}").status_code == 200
        for kill in range(num_kills):
            reader = SharedReader(house.server, token)
            with reader:
                until(lambda reader=reader: len(reader.texts.get(1, "")) > 5)  # type: ignore[misc]
                if kill % 3 == 2:
                    house.kill_engine()
                house.restart()
            again, nothing = (SharedReader(house.server, one) for one in (token, revoked))
            with again:
                until(lambda again=again: not again.is_running and len(again.shown) == 2)  # type: ignore[misc]
                assert again.shown == _shown_at(house.server, its_id)
                assert again.shown[1][1].startswith(reader.texts[1])
                assert house.server.http.delete(f"/v1/conversations/{its_id}").status_code == 200
            assert again.reason == "deleted"
            with nothing:
                pass
            assert nothing.status == 404
            its_id = _conversation(house.server)
            token = token_in(house.server.post("/v1/shares", {"conversation_id": its_id}))
        house.server.http.delete(f"/v1/conversations/{its_id}")


def test_servers_that_share_a_database_share_their_links(tmp_path: Path) -> None:
    database = f"sqlite:///{tmp_path / 'records.sqlite'}"
    with team(tmp_path, flags=("--database", database)) as (servers, _):
        one, other = servers.servers
        its_id = _conversation(one)
        token = token_in(one.post("/v1/shares", {"conversation_id": its_id}))
        until(lambda: token.split("_")[1] in [link["id"] for link in other.http.get("/v1/shares").json()["data"]])
        reader = SharedReader(other, token)
        until(lambda: _is_open(other, token))
        with reader:
            until(lambda: len(reader.texts.get(1, "")) > 5)  # another server writes it
            assert reader.is_running
            servers.kill(one)
            until(lambda: not reader.is_running and len(reader.shown) == 2)
            assert reader.shown == _shown_at(other, its_id)
            third = servers.add()
            assert third.http.delete(f"/v1/shares/{token.split('_')[1]}").status_code == 200
        assert reader.reason == "revoked"
        for server in (other, third):
            with SharedReader(server, token) as nothing:
                pass
            assert nothing.status == 404


def _is_open(server: Server, token: str) -> bool:
    with server.http.stream("GET", "/v1/shared", headers={"x-tailrace-share": token}) as answer:
        return answer.status_code == 200
