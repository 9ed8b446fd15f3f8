"""The WebSocket of `/v1/responses`: what the server keeps of its commands and responses, where and for how long."""

from __future__ import annotations

from tests.api.lanes import Owned, client_of, create, id_of, types
from tests.api.socket_client import app_of
from tests.generation.harness import Harness
from tests.streams.virtual_time import scenario

from tailrace.access.principal import Principal
from tailrace.generation import Limits
from tailrace.types import ANONYMOUS


@scenario
async def test_a_response_that_is_not_stored_outlives_its_connection_too() -> None:
    harness = Harness(limits=Limits(linger_s=30.0))
    app = app_of(harness)
    async with client_of(app) as client:
        await client.ask(create(2, store=False))
        harness.finish()
        await client.settle()
        first = id_of(client.read_json())
        command = create(50, store=False, previous_response_id=first, idempotency_key="k")
        await client.ask(command)
        response_id = id_of(client.read_json())
    assert response_id != first
    async with client_of(app) as client:
        await client.ask({**command, "stream_id": "again"})
        assert id_of(client.read_json()) == response_id
        await client.ask({"type": "response.retrieve", "response_id": response_id, "stream_id": "found"})
        assert id_of(client.read_json()) == response_id
        await client.ask({**command, "input": "Something else."})
        assert client.read_json()[-1]["error"]["code"] == "idempotency_conflict"
        harness.finish()
        await client.settle()
        assert types(client.read_json()).count("response.incomplete") == 2
        # A new request needs what only the lost socket knew.
        await client.ask(create(2, previous_response_id=response_id))
        assert client.read_json()[-1]["error"]["code"] == "previous_response_not_found"
    assert len(harness.engine.submitted) == 2


@scenario
async def test_what_is_not_stored_is_only_in_memory() -> None:
    harness = Harness()
    async with client_of(app_of(harness)) as client:
        ids = []
        for number in range(3):
            await client.ask(create(2, input=f"secret {number}", store=False))
            harness.finish()
            await client.settle()
            ids.append(id_of(client.read_json()))
        for response_id in ids:
            log = await harness.generator.store.read(ANONYMOUS, response_id.removeprefix("resp_"), 0)
            assert b"secret" not in log.record.memo
            await client.ask(create(2, input="Go on.", previous_response_id=response_id))
            harness.finish()
            await client.settle()
            assert types(client.read_json())[-1] == "response.incomplete"


@scenario
async def test_waiting_commands_share_the_memory_of_bodies() -> None:
    harness = Harness()
    app = app_of(harness, body_bytes=20_000, pending_body_bytes=20_000)
    long = create(1, metadata={"x": "x" * 8000})
    async with client_of(app) as other:
        async with client_of(app) as client:
            await client.ask(create(50))
            for _ in range(2):
                await client.ask(long)
            client.read()
            await other.ask(long)
            (error,) = other.read_json()
            assert (error["status"], error["error"]["message"]) == (
                429,
                "Too many request bodies are being read. Try later.",
            )
        await other.ask(long)
        assert types(other.read_json()) == ["response.created", "response.in_progress"]


@scenario
async def test_a_command_without_the_right_scope_does_not_wait() -> None:
    harness = Harness(limits=Limits(linger_s=30.0))
    app = Owned(app_of(harness))
    async with client_of(app, headers={"x-owner": "me"}) as whole:
        await whole.ask(create(50))
        response_id = id_of(whole.read_json())
        app.principals["me"] = Principal("me", "k", ("read",))
        async with client_of(app, headers={"x-owner": "me"}) as client:
            await client.ask({"type": "response.retrieve", "response_id": response_id})
            client.read()
            await client.ask(create(2))  # in the lane that follows the other response
            assert [frame["status"] for frame in client.read_json()] == [403]
