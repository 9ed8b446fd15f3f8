"""Keys and owners: who may use which MCP server, and whose responses and approvals are whose."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.api.keyed import House, serving_with_keys
from tests.plugins.tool_loop.tool_servers import COUNTING, Json, Tools

pytest.importorskip("mcp")

from tailrace.settings import Settings

ASK: Json = {"type": "mcp", "server_label": "count"}
HERS: Json = {"type": "mcp", "server_label": "hers"}


@contextlib.asynccontextmanager
async def _house(path: Path) -> AsyncIterator[tuple[House, Tools]]:
    tools = Tools(path, [[("count__append", {"text": "a"})]])
    args = [str(COUNTING), str(tools.counts)]
    tools.servers["hers"] = {"command": sys.executable, "args": args, "allow": ["owner:alice"]}
    tools.write()
    given = {"mcp_servers": str(path / "mcp.json"), "mcp_commands": True}
    async with serving_with_keys(path, tools.source) as house, house.opened(Settings(of_extensions=given)):
        yield house, tools


def _body(tool: Json = ASK, **more: object) -> Json:
    return {"model": "scripted", "input": "Go.", "tools": [tool], **more}


async def test_responses_and_approvals_belong_to_their_owner(tmp_path: Path) -> None:
    async with _house(tmp_path) as (house, tools):
        alice, bob = house.client(house.key("alice")), house.client(house.key("bob"))
        asked = (await alice.post("/v1/responses", json=_body())).json()
        response_id, ask = asked["id"], asked["output"][-1]
        assert ask["type"] == "mcp_approval_request"
        answer = {"type": "mcp_approval_response", "approval_request_id": ask["id"], "approve": True}
        path = f"/v1/responses/{response_id}"
        for found in (
            await bob.get(path),
            await bob.get(path, params={"stream": "true"}),
            await bob.post(f"{path}/cancel"),
            await bob.delete(path),
            await bob.post("/v1/responses", json=_body(input=[answer], previous_response_id=response_id)),
            await bob.post("/v1/responses", json=_body(input=[answer])),
        ):
            assert found.status_code == 404
            never = found.json()["error"]["message"]
            assert response_id not in never
        assert tools.counted() == []
        done = await alice.post("/v1/responses", json=_body(input=[answer], previous_response_id=response_id))
        assert done.json()["output"][-1]["content"][0]["text"] == "The tool has answered."
        assert tools.counted() == ["append"]


async def test_two_owners_may_use_one_idempotency_key(tmp_path: Path) -> None:
    async with _house(tmp_path) as (house, _):
        ids = set()
        for owner in ("alice", "bob"):
            client = house.client(house.key(owner), **{"idempotency-key": "same"})
            ids.add((await client.post("/v1/responses", json=_body())).json()["id"])
        assert len(ids) == 2


async def test_servers_that_only_some_may_use(tmp_path: Path) -> None:
    async with _house(tmp_path) as (house, _):
        alice, bob = house.client(house.key("alice")), house.client(house.key("bob"))
        reader = house.client(house.key("carol", scopes=["read"]))
        listed = [one["label"] for one in (await alice.get("/v1/mcp/servers")).json()["data"]]
        assert listed == ["count", "hers"]
        assert [one["label"] for one in (await bob.get("/v1/mcp/servers")).json()["data"]] == ["count"]
        assert (await reader.get("/v1/mcp/servers")).status_code == 403
        assert (await reader.post("/v1/responses", json=_body())).status_code == 403
        assert (await bob.post("/v1/responses", json=_body(HERS))).status_code == 403
        assert (await alice.post("/v1/responses", json=_body(HERS))).status_code == 200


async def test_an_owner_has_a_limited_number_of_responses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tailrace_plugins.tool_loop.beginnings.KEPT_OF_OWNER", 3)
    async with _house(tmp_path) as (house, _):
        alice, bob = house.client(house.key("alice")), house.client(house.key("bob"))
        other = (await bob.post("/v1/responses", json=_body())).json()["id"]
        ids = [(await alice.post("/v1/responses", json=_body())).json()["id"] for _ in range(5)]
        found = [(await alice.get(f"/v1/responses/{one}")).status_code for one in ids]
        assert found.count(200) == 3
        assert found[-1] == 200
        assert (await bob.get(f"/v1/responses/{other}")).status_code == 200


async def test_what_an_owner_had_is_forgotten(tmp_path: Path) -> None:
    async with _house(tmp_path) as (house, _):
        alice, bob = house.client(house.key("alice")), house.client(house.key("bob"))
        ids = [(await one.post("/v1/responses", json=_body())).json()["id"] for one in (alice, bob)]
        forget = house.extensions
        counts = [await one.forget("alice") for one in forget]
        assert {"tool_loops": 1} in counts
        assert (await alice.get(f"/v1/responses/{ids[0]}")).status_code == 404
        assert (await bob.get(f"/v1/responses/{ids[1]}")).status_code == 200
        assert json.loads((await bob.get(f"/v1/responses/{ids[1]}")).content)["status"] == "completed"
