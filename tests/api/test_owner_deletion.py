"""Deleting an owner removes all data from the database and from files, and nothing of other owners."""

from __future__ import annotations

from pathlib import Path

import pytest
from sqlalchemy import select
from tests.api.keyed import House, serving_with_keys
from tests.waiting import wait_until

from tailrace.access.quota import Quota
from tailrace.records.database_tables import METADATA
from tailrace.records.record_database import RecordDatabase

_CHAT = {"messages": [{"role": "user", "content": "Hi."}], "max_tokens": 3}


async def _live(house: House, token: str) -> str:
    """Create data of every kind; returns the id of a running stream."""
    async with house.client(token) as client:
        conversation = (await client.post("/v1/conversations", json={})).json()["id"]
        answer = await client.post("/v1/chat/completions", json={**_CHAT, "conversation": conversation})
        assert answer.status_code == 200, answer.text
        assert (await client.post("/v1/chat/completions", json={"model": "nobody", **_CHAT})).status_code < 500
        answer = await client.post("/v1/responses", json={"input": "Hi.", "max_output_tokens": 3})
        assert answer.status_code == 200, answer.text
        made = await client.put("/v1/durable/notes", headers={"content-type": "text/plain"}, content=b"kept")
        assert made.status_code == 201, made.text
        body = {"prompt": "Long.", "max_tokens": 60_000, "on_disconnect": "detach"}
        return str((await client.post("/v1/streams", json=body)).json()["id"])


def _rows_with(directory: Path, word: str) -> dict[str, int]:
    """Return the number of rows of each table that contain a word."""
    database = RecordDatabase(f"sqlite:///{directory / 'records.sqlite'}")
    with database.begin() as connection:
        found = {
            table.name: sum(word in str(row) for row in connection.execute(select(table)))
            for table in METADATA.sorted_tables
        }
    database.close()
    return {name: count for name, count in found.items() if count}


async def test_all_data_of_the_owner_is_deleted_and_no_other(tmp_path: Path) -> None:
    async with serving_with_keys(tmp_path) as house:
        tokens = {owner: house.key(owner) for owner in ("alice", "bob")}
        house.records.keys().limit_owner("alice", Quota(requests_per_month=1000))
        streams = {owner: await _live(house, token) for owner, token in tokens.items()}
        await wait_until(lambda: {"requests", "kept_streams"} <= _rows_with(tmp_path, "bob").keys())
        before = _rows_with(tmp_path, "bob")
        async with house.client(house.key("root", scopes=("admin",))) as admin:
            answer = await admin.delete("/v1/admin/owners/alice")
            assert answer.status_code == 200, answer.text
            deleted = answer.json()["deleted"]
            assert deleted["keys"] == deleted["conversations"] == deleted["durable_streams"] == 1
            assert deleted["responses"] == 1
            assert deleted["streams"] >= 2
            assert deleted["requests"] >= 2
            again = await admin.delete("/v1/admin/owners/alice")
            assert set(again.json()["deleted"].values()) == {0}
        assert _rows_with(tmp_path, "alice") == {}
        assert b"alice" not in b"".join(path.read_bytes() for path in (tmp_path / "records").iterdir())
        async with house.client(tokens["alice"]) as alice, house.client(tokens["bob"]) as bob:
            assert (await alice.get("/v1/models")).status_code == 401
            assert (await bob.get(f"/v1/streams/{streams['bob']}")).json()["status"] == "running"
            assert (await bob.get(f"/v1/streams/{streams['alice']}")).status_code == 404
            assert (await bob.get("/v1/durable/notes")).content == b"kept"
        kept = _rows_with(tmp_path, "bob")  # rows of requests may still have come
        assert all(kept[table] >= count for table, count in before.items())
        assert await house.service.store.streams_of("alice") == []
        async with house.client(house.key("alice")) as successor:  # the limits were those of the former alice
            answer = await successor.post("/v1/completions", json={"prompt": "Hi.", "max_tokens": 1})
            assert answer.status_code == 200
            assert "ratelimit" not in answer.headers


async def test_another_server_that_still_accepts_the_key_cannot_add_conversations(tmp_path: Path) -> None:
    async with serving_with_keys(tmp_path) as house:
        token = house.key("alice")
        async with house.client(house.key("root", scopes=("admin",))) as admin, house.client(token) as alice:
            assert (await alice.post("/v1/conversations", json={})).status_code == 200
            exported = (await alice.get("/v1/conversations/export")).content
            other = house.twin()
            await other.read_keys()
            assert (await admin.delete("/v1/admin/owners/alice")).json()["deleted"]["conversations"] == 1
        async with house.opened(records=other), house.client(token) as alice:
            assert (await alice.get("/v1/conversations")).json()["data"] == []
            made = await alice.post("/v1/conversations", json={})
            imported = await alice.post(
                "/v1/conversations/import", content=exported, headers={"content-type": "application/json"}
            )
        other.close()
    for answer in (made, imported):
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "key_revoked")
    assert _rows_with(tmp_path, "alice") == {}


@pytest.mark.parametrize("owner", ["anonymous", "a b", "root"])
async def test_mistakes(tmp_path: Path, owner: str) -> None:
    async with serving_with_keys(tmp_path) as house:
        async with house.client(house.key("root", scopes=("admin",))) as admin:
            assert (await admin.delete(f"/v1/admin/owners/{owner}")).status_code == 400
            assert (await admin.get("/v1/admin/keys")).status_code == 200
        async with house.client(house.key("alice")) as alice:
            assert (await alice.delete("/v1/admin/owners/bob")).status_code == 403
