"""`/v1/admin`: the streams of all owners, the models, and recent errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.api.keyed import House, serving_with_keys
from tests.waiting import wait_until

_ADMIN = ("admin", "generate", "read")


async def _rows(client: httpx.AsyncClient, what: str) -> list[dict[str, Any]]:  # Any: of JSON
    answer = await client.get(f"/v1/admin/{what}")
    assert answer.status_code == 200, answer.text
    rows: list[dict[str, Any]] = answer.json()["data"]
    return rows


async def _begin(house: House, owner: str) -> str:
    async with house.client(house.key(owner)) as client:
        answer = await client.post("/v1/streams", json={"prompt": "A secret.", "max_tokens": 60_000})
        return str(answer.json()["id"])


async def test_an_admin_sees_and_stops_the_streams_of_all_owners(tmp_path: Path) -> None:
    async with serving_with_keys(tmp_path) as house, house.client(house.key("boss", scopes=_ADMIN)) as admin:
        streams = [await _begin(house, owner) for owner in ("alice", "bob")]
        rows = await _rows(admin, "streams")
        assert [(row["id"], row["owner"]) for row in rows] == list(zip(streams, ("alice", "bob"), strict=True))
        assert rows[0]["wire"] == "native"
        assert rows[0]["num_readers"] == 0
        assert "secret" not in str(rows)
        stopped = await admin.post(f"/v1/admin/streams/{streams[0]}/cancel")
        assert (stopped.status_code, stopped.json()["status"]) == (200, "cancelled")
        assert [row["id"] for row in await _rows(admin, "streams")] == streams[1:]
        for gone in (streams[0], "unknown"):
            assert (await admin.post(f"/v1/admin/streams/{gone}/cancel")).status_code == 404


async def test_models_are_unloaded_when_idle_and_loaded(tmp_path: Path) -> None:
    async with serving_with_keys(tmp_path) as house, house.client(house.key("boss", scopes=_ADMIN)) as admin:
        stream = await _begin(house, "alice")
        (model,) = await _rows(admin, "models")
        assert (model["id"], model["state"], model["num_running"]) == ("scripted", "ready", 1)
        name = {"model": model["id"]}
        assert (await admin.post("/v1/admin/models/unload", json=name)).status_code == 503
        await admin.post(f"/v1/admin/streams/{stream}/cancel")
        await wait_until(lambda: not house.service.generator.is_busy)
        unloaded = await admin.post("/v1/admin/models/unload", json=name)
        assert (unloaded.status_code, unloaded.json()["state"]) == (200, "unloaded")
        loaded = await admin.post("/v1/admin/models/load", json=name)
        assert (loaded.status_code, loaded.json()["state"]) == (200, "ready")
        assert loaded.json()["memory_bytes"] > 0


@pytest.mark.parametrize("body", [{}, {"model": ""}, {"model": 1}, {"model": "x", "more": 1}, [], {"model": "other"}])
async def test_bad_bodies_are_refused(tmp_path: Path, body: object) -> None:
    async with serving_with_keys(tmp_path) as house, house.client(house.key("boss", scopes=_ADMIN)) as admin:
        for verb in ("load", "unload"):
            answer = await admin.post(f"/v1/admin/models/{verb}", json=body)
            assert answer.status_code in (400, 404)
            assert "other" not in answer.text


async def test_errors_are_remembered_without_bad_requests(tmp_path: Path) -> None:
    async with serving_with_keys(tmp_path, "scripted:fault_after=2") as house:
        token = house.key("boss", scopes=_ADMIN)
        async with house.client(token) as admin:
            failed = await admin.post("/v1/streams", json={"prompt": "Hi <|fail|>", "max_tokens": 9})
            await admin.get(f"/v1/streams/{failed.json()['id']}/events")
            assert (await admin.post("/v1/streams", json={"prompt": 1})).status_code == 400
            (error,) = await _rows(admin, "errors")
        assert (error["stream_id"], error["owner"]) == (failed.json()["id"], "boss")
        assert error["code"] == "sequence_failed"


async def test_errors_of_an_owner_are_deleted_with_the_owner(tmp_path: Path) -> None:
    async with (
        serving_with_keys(tmp_path, "scripted:fault_after=2") as house,
        house.client(house.key("boss", scopes=_ADMIN)) as admin,
        house.client(house.key("alice")) as alice,
    ):
        for client in (alice, admin):
            failed = await client.post("/v1/streams", json={"prompt": "Hi <|fail|>", "max_tokens": 9})
            await client.get(f"/v1/streams/{failed.json()['id']}/events")
        assert {row["owner"] for row in await _rows(admin, "errors")} == {"alice", "boss"}
        deleted = await admin.delete("/v1/admin/owners/alice")
        assert deleted.status_code == 200, deleted.text
        assert [row["owner"] for row in await _rows(admin, "errors")] == ["boss"]


async def test_the_scope_is_needed(tmp_path: Path) -> None:
    async with serving_with_keys(tmp_path) as house, house.client(house.key("me")) as client:
        for method, path in (
            ("GET", "streams"), ("POST", "streams/x/cancel"), ("GET", "models"), ("POST", "models/load"),
            ("POST", "models/unload"), ("GET", "errors"),
        ):  # fmt: skip
            answer = await client.request(method, f"/v1/admin/{path}", json={"model": "scripted"})
            assert answer.status_code == 403, path
