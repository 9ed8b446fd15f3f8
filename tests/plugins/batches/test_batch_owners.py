"""Owners see only their own files and batches; rows have the limits of the key that created the batch."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
from tests.api.keyed import House, serving_with_keys
from tests.plugins.batches.chat_rows import CHAT, chat_file
from tests.waiting import LONG_S, turn

from tailrace.access.quota import Quota
from tailrace.server import LocalNotes, LocalTable
from tailrace_plugins.batches.batch_files import Files, FileWriter
from tailrace_plugins.batches.batch_run import RowLimits
from tailrace_plugins.batches.batches import RowBatches
from tailrace_plugins.batches.row_runner import RowRunner
from tailrace_plugins.batches.slots import RowQueue

_ANTHROPIC = "/v1/messages/batches"


async def _upload(client: httpx.AsyncClient, content: bytes) -> str:
    answer = await client.post("/v1/files", files={"file": ("rows.jsonl", content)}, data={"purpose": "batch"})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


async def _begin(client: httpx.AsyncClient, content: bytes) -> str:
    body = {"input_file_id": await _upload(client, content), "endpoint": CHAT, "completion_window": "24h"}
    answer = await client.post("/v1/batches", json=body)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


async def _ended(client: httpx.AsyncClient, batch_id: str) -> dict[str, Any]:  # Any: JSON
    async with asyncio.timeout(LONG_S):
        while True:
            batch = dict((await client.get(f"/v1/batches/{batch_id}")).json())
            if batch["status"] in ("completed", "failed", "expired", "cancelled"):
                return batch
            await asyncio.sleep(0.02)


async def test_others_see_nothing(tmp_path: Path) -> None:
    async with serving_with_keys(tmp_path) as house:
        mine, yours = house.client(house.key("me")), house.client(house.key("you"))
        batch = await _ended(mine, await _begin(mine, chat_file(3)))
        file_id, output_id = batch["input_file_id"], batch["output_file_id"]
        message = {
            "custom_id": "a",
            "params": {"model": "scripted", "max_tokens": 3, "messages": [{"role": "user", "content": "Hi"}]},
        }
        made = (await mine.post(_ANTHROPIC, json={"requests": [message]})).json()
        paths = [
            ("GET", f"/v1/files/{file_id}"),
            ("GET", f"/v1/files/{output_id}/content"),
            ("DELETE", f"/v1/files/{output_id}"),
            ("GET", f"/v1/batches/{batch['id']}"),
            ("POST", f"/v1/batches/{batch['id']}/cancel"),
            ("GET", f"{_ANTHROPIC}/{made['id']}"),
            ("GET", f"{_ANTHROPIC}/{made['id']}/results"),
            ("POST", f"{_ANTHROPIC}/{made['id']}/cancel"),
            ("DELETE", f"{_ANTHROPIC}/{made['id']}"),
        ]
        for method, path in paths:
            assert (await yours.request(method, path)).status_code == 404, path
        for path in ("/v1/files", "/v1/batches", _ANTHROPIC):
            assert (await yours.get(path)).json()["data"] == []
            assert len((await mine.get(path)).json()["data"]) >= 1
            assert (await house.client().get(path)).status_code == 401
        body = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
        assert (await yours.post("/v1/batches", json=body)).status_code == 404
        assert (await mine.get(f"/v1/files/{output_id}/content")).text.count("\n") == 3


async def test_keys_need_their_scopes(tmp_path: Path) -> None:
    async with serving_with_keys(tmp_path) as house:
        reader = house.client(house.key("me", scopes=("read",)))
        writer = house.client(house.key("me", scopes=("generate", "wire:anthropic")))
        files = {"file": ("rows.jsonl", b"{}")}
        assert (await reader.post("/v1/files", files=files, data={"purpose": "batch"})).status_code == 403
        assert (await reader.post(_ANTHROPIC, json={"requests": []})).status_code == 403
        assert (await reader.get("/v1/files")).status_code == 200
        assert (await writer.get("/v1/files")).status_code == 403
        all_of_me = house.client(house.key("me"))
        batch = await _ended(all_of_me, await _begin(writer, chat_file(2)))
        assert batch["request_counts"] == {"total": 2, "completed": 0, "failed": 2}
        lines = (await all_of_me.get(f"/v1/files/{batch['error_file_id']}/content")).text.splitlines()
        assert [json.loads(line)["response"]["status_code"] for line in lines] == [403, 403]


async def test_rows_wait_for_the_limits_of_the_key(tmp_path: Path) -> None:
    async with serving_with_keys(tmp_path) as house:
        client = house.client(house.key("me", quota=Quota(streams_at_once=1)))
        batch = await _ended(client, await _begin(client, chat_file(4)))
        assert batch["request_counts"] == {"total": 4, "completed": 4, "failed": 0}


async def test_an_owner_who_has_used_up_a_limit_does_not_hold_others_up(tmp_path: Path) -> None:
    async with serving_with_keys(tmp_path) as house:
        used_up = house.client(house.key("me", quota=Quota(requests_per_minute=2)))
        batch_id = await _begin(used_up, chat_file(300))
        async with asyncio.timeout(LONG_S):
            while (await used_up.get(f"/v1/batches/{batch_id}")).json()["request_counts"]["completed"] < 2:
                await asyncio.sleep(0.02)
        other = house.client(house.key("other"))
        ended = await _ended(other, await _begin(other, chat_file(4)))
        assert ended["request_counts"] == {"total": 4, "completed": 4, "failed": 0}
        counts = (await used_up.get(f"/v1/batches/{batch_id}")).json()["request_counts"]
        assert counts["completed"] < 10  # more than two when a minute of the clock has ended


async def test_a_revoked_key_runs_no_more_rows(tmp_path: Path) -> None:
    async with serving_with_keys(tmp_path) as house:
        token, client = house.key("me"), house.client(house.key("me"))
        batch_id = await _begin(house.client(token), chat_file(500, max_tokens=40))
        await _until_running(house, client)
        house.revoke(token)
        batch = await _ended(client, batch_id)
        assert batch["status"] == "completed"
        lines = (await client.get(f"/v1/files/{batch['error_file_id']}/content")).text.splitlines()
        statuses = {json.loads(line)["response"]["status_code"] for line in lines}
        assert statuses == {401}
        assert len(lines) > 300


async def test_an_owner_is_deleted_with_files_and_batches(tmp_path: Path) -> None:
    async with serving_with_keys(tmp_path) as house:
        mine, yours = house.client(house.key("me")), house.client(house.key("you"))
        kept = await _ended(yours, await _begin(yours, chat_file(2)))
        await _ended(mine, await _begin(mine, chat_file(2)))
        running = await _begin(mine, chat_file(300, max_tokens=200))
        await _until_running(house, mine)
        counts: dict[str, int] = {}
        for extension in house.extensions:
            counts.update(await extension.forget("me"))
        assert (counts["files"], counts["batches"]) == (3, 2)
        assert (await mine.get("/v1/files")).json()["data"] == []
        assert (await mine.get(f"/v1/batches/{running}")).status_code == 404
        assert not house.service.generator.live
        assert (await yours.get(f"/v1/files/{kept['output_file_id']}/content")).text.count("\n") == 2


async def test_rows_go_on_when_the_files_of_others_are_deleted(tmp_path: Path) -> None:
    """Two owners fill the space, and a third waits: for the end of an upload, and for an owner's deletion."""
    async with serving_with_keys(tmp_path) as house, asyncio.TaskGroup() as group:
        files = Files(LocalTable(LocalNotes.in_memory("batches")), most_bytes=4_000)  # an owner has half of it
        rows = RowRunner(house.server(), at_once=1, has_room=files.has_room)
        batches = RowBatches(files, rows, group, RowLimits(1, row_bytes=1))
        for owner in ("a", "b"):
            writer = FileWriter(files, owner, f"file-{owner}")
            writer.add(b"1" * 1_900)
            await writer.close(filename="rows", purpose="batch", expires_s=None)
        queue = RowQueue(rows.slots, "c", (0, ""))
        waiting = group.create_task(queue.take())
        await turn(2)
        assert not waiting.done()
        await batches.forget("b")
        await asyncio.wait_for(waiting, LONG_S)
        queue.leave()
        upload = FileWriter(files, "b", "file-c")
        upload.add(b"1" * (4_000 - files.table.used()))
        await upload.flush()
        waiting = group.create_task(queue.take())
        await turn(2)
        assert not waiting.done()
        await upload.undo()
        await asyncio.wait_for(waiting, LONG_S)


async def _until_running(house: House, client: httpx.AsyncClient) -> None:
    async with asyncio.timeout(LONG_S):
        while not house.service.generator.live:
            await asyncio.sleep(0.01)
