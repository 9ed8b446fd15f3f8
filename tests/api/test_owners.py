"""Two owners on one server: for each, a stream of the other looks like an unknown stream."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import httpx
import pytest
from tests.api.lanes import Owned
from tests.api.socket_client import SocketClient, app_of
from tests.generation.harness import Harness, greedy
from tests.http.wire import as_json
from tests.streams.virtual_time import scenario

from tailrace.access.principal import PRINCIPAL, Principal, owner_of
from tailrace.api.lifecycle import build_app
from tailrace.assembly.service import Service, start_service
from tailrace.assembly.source import find_source
from tailrace.dialects.wire import Follow, OnStream, Operation, Wire
from tailrace.http.wires import ServedWires
from tailrace.models import NoProgress
from tailrace.server import Opened, Server, open_extensions
from tailrace.settings import Settings
from tailrace.types import ANONYMOUS, GenerateRequest, new_stream_id

_PROMPT = {"prompt": "Mine.", "seed": 1}


class _House:
    """A server in this process, and its clients."""

    def __init__(self, service: Service, server: Server, extensions: Sequence[Opened]) -> None:
        self.app = Owned(build_app(service.models, server, extensions))
        self.service = service
        transport = httpx.ASGITransport(self.app)
        self.mine, self.yours, self.nobodys = (
            httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers)
            for headers in ({"x-owner": "me"}, {"x-owner": "you"}, {})
        )

    @property
    def others(self) -> tuple[httpx.AsyncClient, ...]:
        return self.yours, self.nobodys

    async def begin(self, count: int = 60_000, **headers: str) -> str:
        """Begin a stream of mine, by default an endless one."""
        answer = await self.mine.post("/v1/streams", json={**_PROMPT, "max_tokens": count}, headers=headers)
        assert answer.status_code == 201, answer.text
        return str(answer.json()["id"])

    async def finished(self) -> str:
        stream_id = await self.begin(3)
        assert (await self.mine.get(f"/v1/streams/{stream_id}/events")).status_code == 200
        return stream_id

    async def state(self, stream_id: str) -> str:
        return str((await self.mine.get(f"/v1/streams/{stream_id}")).json()["status"])


@contextlib.asynccontextmanager
async def _serving(directory: Path) -> AsyncIterator[_House]:
    source = await asyncio.to_thread(find_source, "scripted:tokens_per_s=200", NoProgress())
    settings = Settings(kv_tokens=4_000_000, load_s=60.0)
    async with start_service(source, settings, data_path=directory) as service:
        server = Server(Settings(), service.store)
        async with open_extensions(server) as extensions:
            yield _House(service, server, extensions)
        for run in list(service.generator.live):
            run.cancel()


def _on_streams() -> list[tuple[Wire, Operation]]:
    """All operations that follow, show, stop or delete a stream by its id, of every wire."""
    return [
        (wire, operation)
        for wire in ServedWires().all
        for operation in wire.operations
        if isinstance(operation.act, Follow | OnStream) and operation.act.topic is None
    ]


async def _ask(client: httpx.AsyncClient, operation: Operation, stream_id: str) -> tuple[int, bytes]:
    path = operation.path.format(stream_id=stream_id, response_id=f"resp_{stream_id}")
    query = dict([operation.only_with.split("=")]) if operation.only_with else {}
    query |= {"stream_id": stream_id} if "stream_id!" in operation.query else {}
    query |= {"stream": "true"} if "stream!" in operation.query else {}
    answer = await client.request(operation.method, path, params=query)
    return answer.status_code, answer.content


def _named(entry: tuple[Wire, Operation]) -> str:
    return f"{entry[0].name} {entry[1].method} {entry[1].path}"


async def test_streams_of_another_owner_are_unknown_on_every_wire(tmp_path: Path) -> None:
    async with _serving(tmp_path) as house:
        deleted = await house.finished()
        assert (await house.mine.delete(f"/v1/streams/{deleted}")).status_code == 204
        streams = (await house.begin(), await house.finished(), deleted)
        for (entry, client), stream_id in itertools.product(itertools.product(_on_streams(), house.others), streams):
            never = await _ask(client, entry[1], new_stream_id())
            assert never[0] == 404, _named(entry)
            assert await _ask(client, entry[1], stream_id) == never, _named(entry)
        assert [await house.state(stream_id) for stream_id in streams[:2]] == ["running", "done"]
        assert (await house.mine.get(f"/v1/streams/{deleted}")).status_code == 410


async def test_own_streams_are_found_on_every_wire(tmp_path: Path) -> None:
    """So the test before this one does not pass because of wrong paths."""
    async with _serving(tmp_path) as house:
        for entry in _on_streams():
            stream_id = await house.finished()
            status, _ = await _ask(house.mine, entry[1], stream_id)
            assert status in (200, 204), _named(entry)
    assert len(_on_streams()) >= 9


async def test_an_answer_is_not_found_by_the_chat_of_another_owner(tmp_path: Path) -> None:
    path, part = "/v1/ai-sdk/chat", {"type": "text", "text": "Tell me of rivers."}
    chat = {"id": "c", "messages": [{"role": "user", "parts": [part]}], "maxOutputTokens": 5_000}
    async with _serving(tmp_path) as house, asyncio.timeout(60):
        asking = asyncio.create_task(house.mine.post(path, json=chat))
        while not list(house.service.generator.live):
            await asyncio.sleep(0.01)
        for other in house.others:
            assert (await other.get(f"{path}/c/stream")).status_code == 204
            assert (await other.delete(f"{path}/c/stream")).status_code == 404
        assert (await house.mine.delete(f"{path}/c/stream")).status_code == 200
        assert b'"type":"abort"' in (await asking).content


async def test_a_run_is_not_found_by_another_owner(tmp_path: Path) -> None:
    """Not by its id, nor by that of one of its events, nor by its thread; also not when it has ended."""
    path = "/v1/ag-ui"
    run = {
        "threadId": "t", "runId": "r", "messages": [{"id": "1", "role": "user", "content": "Hi"}],
        "forwardedProps": {"max_tokens": 3},
    }  # fmt: skip
    async with _serving(tmp_path) as house, asyncio.timeout(60):
        begun = await house.mine.post(path, json=run)
        last = {"last-event-id": f"{begun.headers['x-stream-id']}.1.0"}
        for other in house.others:
            never = await other.get(f"{path}?runId=never")
            for answer in (await other.get(f"{path}?runId=r"), await other.post(path, json=run, headers=last)):
                assert (answer.status_code, answer.content) == (404, never.content)
            assert (await other.get(f"{path}/t/events")).status_code == 204
        for answer in (await house.mine.get(f"{path}?runId=r"), await house.mine.post(path, json=run, headers=last)):
            assert (answer.status_code, answer.content) == (200, begun.content)


async def test_an_event_id_does_not_find_streams_of_other_owners(tmp_path: Path) -> None:
    async with _serving(tmp_path) as house:
        stream_id = await house.finished()

        async def resume(client: httpx.AsyncClient, found: str) -> httpx.Response:
            headers = {"last-event-id": f"{found}-1", "accept": "text/event-stream"}
            return await client.post("/v1/streams", json=_PROMPT, headers=headers)

        for client in house.others:
            answer, never = await resume(client, stream_id), await resume(client, new_stream_id())
            assert (answer.status_code, answer.content) == (404, never.content)
        assert (await resume(house.mine, stream_id)).status_code == 200


async def test_streams_of_tokens_have_owners_as_durable_streams(tmp_path: Path) -> None:
    async with _serving(tmp_path) as house:
        stream_id = await house.begin()
        for client, live in itertools.product(house.others, ("", "?live=sse&offset=-1", "?live=long-poll&offset=now")):
            never = await client.get(f"/v1/durable/streams/{new_stream_id()}{live}")
            answer = await client.get(f"/v1/durable/streams/{stream_id}{live}")
            assert (answer.status_code, answer.content) == (never.status_code, never.content)
            assert never.status_code == 404
            assert (await client.head(f"/v1/durable/streams/{stream_id}")).status_code == 404
        assert (await house.mine.get(f"/v1/durable/streams/{stream_id}")).status_code == 200


async def test_durable_streams_have_owners(tmp_path: Path) -> None:
    text = {"content-type": "text/plain"}
    async with _serving(tmp_path) as house:
        assert (await house.mine.put("/v1/durable/a", content=b"mine", headers=text)).status_code == 201
        for client in house.others:
            assert (await client.get("/v1/durable/a")).status_code == 404
            assert (await client.head("/v1/durable/a")).status_code == 404
            assert (await client.post("/v1/durable/a", content=b"!", headers=text)).status_code == 404
            assert (await client.delete("/v1/durable/a")).status_code == 404
            forking = {"stream-forked-from": "/v1/durable/a"}
            assert (await client.put("/v1/durable/fork", headers=forking)).status_code == 404
        assert (await house.yours.put("/v1/durable/a", content=b"yours", headers=text)).status_code == 201
        assert (await house.mine.put("/v1/durable/fork", headers={"stream-forked-from": "a"})).status_code == 201
    async with _serving(tmp_path) as house:
        assert (await house.mine.get("/v1/durable/a")).content == b"mine"
        assert (await house.mine.get("/v1/durable/fork")).content == b"mine"
        assert (await house.yours.get("/v1/durable/a")).content == b"yours"
        assert (await house.nobodys.get("/v1/durable/a")).status_code == 404


async def test_two_owners_use_the_same_idempotency_key(tmp_path: Path) -> None:
    async with _serving(tmp_path) as house:
        body, key = {**_PROMPT, "max_tokens": 3}, {"idempotency-key": "one"}
        clients = (house.mine, house.yours, house.nobodys)
        ids = [(await one.post("/v1/streams", json=body, headers=key)).json()["id"] for one in clients]
        assert len(set(ids)) == 3
        assert [(await one.post("/v1/streams", json=body, headers=key)).json()["id"] for one in clients] == ids
        other = await house.yours.post("/v1/streams", json={**body, "seed": 2}, headers=key)
        assert other.status_code == 409
    async with _serving(tmp_path) as house:
        clients = (house.mine, house.yours, house.nobodys)
        assert [(await one.post("/v1/streams", json=body, headers=key)).json()["id"] for one in clients] == ids


async def test_responses_of_another_owner_cannot_be_continued(tmp_path: Path) -> None:
    async with _serving(tmp_path) as house:
        first = (await house.mine.post("/v1/responses", json={"input": "Hi", "max_output_tokens": 3})).json()["id"]
        further = {"input": "And?", "max_output_tokens": 3, "previous_response_id": first}
        assert (await house.mine.post("/v1/responses", json=further)).status_code == 200
        never = {**further, "previous_response_id": f"resp_{new_stream_id()}"}
        for client in house.others:
            refused = await client.post("/v1/responses", json=further)
            assert refused.status_code == 400
            assert refused.content == (await client.post("/v1/responses", json=never)).content


@scenario
async def test_a_socket_sees_only_streams_of_its_owner() -> None:
    harness = Harness()
    app = Owned(app_of(harness))
    request = GenerateRequest(prompts=("Mine.",), on_disconnect="detach", linger_s=1e6, sampling=greedy(9), owner="me")
    running, finished = await harness.generator.create(request), await harness.generator.create(request)
    finished.cancel()
    for headers in ({"x-owner": "you"}, {}):
        async with SocketClient(app, headers=headers) as socket:
            for command, run in itertools.product(("follow", "cancel"), (running, finished)):
                await socket.ask({"type": command, "stream_id": run.log.stream_id})
                await socket.ask({"type": command, "stream_id": new_stream_id()})
                refused, never = socket.read_json()
                assert refused["error"]["code"] == "unknown_stream"
                assert refused["error"] == never["error"]
    assert running.log.end is None
    async with SocketClient(app, headers={"x-owner": "me"}) as socket:
        await socket.ask({"type": "create", "id": "a", "prompt": "Hi", "max_tokens": 3})
        (created,) = socket.read_json()
        assert (await harness.store.read("me", created["stream_id"])).record.owner == "me"
        await socket.ask({"type": "cancel", "stream_id": running.log.stream_id})
    assert running.log.end is not None


@scenario
async def test_streams_of_a_chatbot_belong_to_the_owner_of_the_socket() -> None:
    harness = Harness()
    async with SocketClient(Owned(app_of(harness)), "/", headers={"x-owner": "me"}) as socket:
        await socket.ask("Hello!")
        assert [run.log.record.owner for run in harness.generator.live] == ["me"]


async def test_owners_keep_their_streams_over_a_restart(tmp_path: Path) -> None:
    async with _serving(tmp_path) as house:
        finished, deleted = await house.finished(), await house.finished()
        await house.mine.delete(f"/v1/streams/{deleted}")
    async with _serving(tmp_path) as house:
        for stream_id, status in ((finished, 200), (deleted, 410)):
            assert (await house.mine.get(f"/v1/streams/{stream_id}")).status_code == status
            for client in house.others:
                answer = await client.get(f"/v1/streams/{stream_id}")
                assert (answer.status_code, as_json(answer.text)["error"]["code"]) == (404, "unknown_stream")


def test_without_a_principal_the_owner_is_anonymous() -> None:
    assert owner_of({"type": "http"}) == ANONYMOUS
    assert owner_of({"type": "http", PRINCIPAL: Principal("me")}) == "me"


@pytest.mark.parametrize("name", ["", "a\0b"])
def test_invalid_names_of_owners(name: str) -> None:
    with pytest.raises(ValueError, match="owner"):
        Principal(name)
