"""The WebSocket of `/v1/responses` with an engine that is stepped by hand, and virtual time: lanes, limits, losses.
OpenAI's client on it: `tests/clients/test_response_sockets.py`."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.api.keyed import serving_with_keys
from tests.api.lanes import PATH, Owned, client_of, create, id_of, state, types
from tests.api.socket_client import SocketClient, app_of
from tests.generation.harness import Harness, oracle
from tests.streams.virtual_time import run as run_scenario
from tests.streams.virtual_time import scenario
from tests.waiting import turn, wait_until

from tailrace.access.principal import Principal
from tailrace.errors import EngineLost
from tailrace.generation import Limits
from tailrace.streams import MemoryLogStore, StreamLog

# Lanes


@scenario
async def test_the_first_frame_comes_before_the_first_token() -> None:
    harness = Harness()
    async with client_of(app_of(harness)) as client:
        await client.ask(create())
        frames = client.read_json()
        assert types(frames) == ["response.created", "response.in_progress"]
        harness.finish()
        await client.settle()
        frames += client.read_json()
        assert [frame["sequence_number"] for frame in frames] == list(range(len(frames)))
        assert frames[-1]["type"] == "response.incomplete"
    harness.check_idle()


@scenario
async def test_a_frame_at_a_time_where_the_server_sends_one() -> None:
    harness = Harness()
    async with client_of(app_of(harness), takes_many=False) as client:
        await client.ask(create())
        harness.finish()
        await client.settle()
        assert client.read_json()[-1]["type"] == "response.incomplete"
        await client.ask(create(input="x" * 5000))  # more than the model's window
        assert types(client.read_json()) == ["response.created", "response.in_progress", "response.failed"]


@scenario
async def test_a_defect_in_one_lane_leaves_the_others_alone() -> None:
    harness = Harness(store=_Broken())
    async with client_of(app_of(harness)) as client:
        await client.ask(create(stream_id="a"))
        response_id = id_of(client.read_json())
        await client.ask({"type": "response.retrieve", "response_id": response_id, "stream_id": "b"})
        (error,) = client.read_json()
        assert (error["status"], error["error"]["code"], error["stream_id"]) == (500, "internal_error", "b")
        harness.finish()
        await client.settle()
        assert client.read_json()[-1]["type"] == "response.incomplete"


class _Broken(MemoryLogStore):
    async def read(self, owner: str, stream_id: str, after: int = 0) -> StreamLog:
        raise ZeroDivisionError


@scenario
async def test_a_long_replay_lets_others_go_on() -> None:
    harness = Harness()
    app = app_of(harness)
    async with client_of(app) as client:
        await client.ask(create(900))
        for _ in range(900):
            harness.engine.step()
            await turn()
        await client.settle()
        response_id = id_of(client.read_json())
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await turn()

        counting = asyncio.create_task(count())
        client.send({"type": "response.retrieve", "response_id": response_id, "starting_after": 10**14})
        while not client.frames:
            await turn()
        counting.cancel()
        assert types(client.read_json()) == ["error"]
        assert turns > 10  # one for each 64 events


@scenario
async def test_sixteen_run_at_once_and_more_wait() -> None:
    harness = Harness(max_requests=64)
    async with client_of(app_of(harness)) as client:
        for number in range(20):
            await client.ask(create(40, stream_id=f"lane-{number}"))
        assert len(harness.generator.live) == 16
        harness.finish()
        await client.settle()
        assert len(harness.generator.live) == 4
        harness.finish()
        await client.settle()
        ends = [frame["stream_id"] for frame in client.read_json() if frame["type"] == "response.incomplete"]
        assert sorted(ends) == sorted(f"lane-{number}" for number in range(20))
    harness.check_idle()


@scenario
async def test_a_socket_has_at_most_32_named_lanes() -> None:
    harness = Harness(max_requests=64)
    async with client_of(app_of(harness)) as client:
        for number in range(32):
            await client.ask(create(1, stream_id=f"lane-{number}"))
            harness.finish()
            await client.settle()
        client.read()
        await client.ask(create(1, stream_id="one-more"))
        (error,) = client.read_json()
        assert (error["error"]["code"], error["stream_id"]) == ("websocket_stream_limit_reached", "one-more")
        await client.ask(create(1))  # the lane without a name does not count
        await client.ask(create(1, stream_id="lane-5"))  # and an old one can be used again
        harness.finish()
        await client.settle()
        assert types(client.read_json()).count("response.incomplete") == 2


@scenario
async def test_waiting_commands_are_limited_in_number_and_size() -> None:
    harness = Harness()
    async with client_of(app_of(harness, ws_message_bytes=3000, body_bytes=3000, image_body_bytes=3000)) as client:
        await client.ask(create(900))
        client.read()
        for _ in range(3):
            await client.ask(create(1, instructions="x" * 1000))
        (error,) = client.read_json()
        assert (error["status"], error["error"]["code"], error["error"]["headers"]) == (
            429,
            "overloaded",
            {"retry-after": "1"},
        )
    async with client_of(app_of(harness)) as client:
        await client.ask(create(900))
        client.read()
        for _ in range(64):
            await client.ask(create(1))
        assert client.read() == []
        await client.ask(create(1))
        (error,) = client.read_json()
        assert error["error"]["code"] == "overloaded"


@scenario
async def test_an_engine_that_fails_fails_the_response_and_frees_its_lane() -> None:
    harness = Harness()
    async with client_of(app_of(harness)) as client:
        await client.ask(create(stream_id="a"))
        harness.engine.step(2)
        for run in list(harness.generator.live):
            run.fail(EngineLost("It died."))
        await client.settle()
        frames = client.read_json()
        assert frames[-1]["type"] == "response.failed"
        assert frames[-1]["response"]["error"]["message"] == "It died."
        await client.ask(create(stream_id="a"))
        harness.finish()
        await client.settle()
        assert types(client.read_json())[-1] == "response.incomplete"


@scenario
async def test_a_response_that_goes_on_elsewhere_says_where_to_ask() -> None:
    harness = Harness()
    async with client_of(app_of(harness)) as client:
        await client.ask(create(50, stream_id="a"))
        harness.engine.step(3)
        await client.settle()
        frames = client.read_json()
        (run,) = harness.generator.live
        run.lease_lost()
        await client.settle()
        (error,) = client.read_json()
        assert (error["type"], error["status"], error["stream_id"]) == ("error", 503, "a")
        assert error["sequence_number"] == frames[-1]["sequence_number"]
        assert error["error"]["retryable"]
        assert error["error"]["stream_id"] == id_of(frames).removeprefix("resp_")


@scenario
async def test_a_silence_is_filled() -> None:
    harness = Harness()
    async with client_of(app_of(harness, heartbeat_s=5.0)) as client:
        await client.ask(create())
        client.read()
        await asyncio.sleep(12)
        beats = client.read_json()
        assert types(beats) == ["keepalive", "keepalive"]
        assert {beat["sequence_number"] for beat in beats} == {1}
        harness.finish()


@scenario
async def test_an_idle_socket_is_closed_but_not_one_that_waits() -> None:
    harness = Harness()
    async with client_of(app_of(harness, ws_idle_s=20.0)) as client:
        await client.ask(create())
        await asyncio.sleep(60)
        assert client.is_open()
        harness.finish()
        await asyncio.sleep(21)
        assert client.closing == (1001, "The connection was idle for too long.")


@scenario
async def test_what_is_no_json_closes_the_socket_in_the_end() -> None:
    async with client_of(app_of(Harness())) as client:
        for text in ["nonsense", "[]", "1", '"a"', "{", '{"type": 7}', "{}"]:
            await client.ask(text)
            (error,) = client.read_json()
            assert error["type"] == "error"
            assert error["status"] == 400
        for _ in range(11):
            await client.ask("nonsense")
        assert client.closing[0] == 1008


# The end of a connection


@scenario
async def test_a_response_outlives_a_lost_connection_for_its_linger_time() -> None:
    harness = Harness(limits=Limits(linger_s=30.0))
    app = app_of(harness)
    async with client_of(app) as client:
        await client.ask(create(50))
        harness.engine.step(3)
        await client.settle()
        frames = client.read_json()
    response_id, last = id_of(frames), frames[-1]["sequence_number"]
    await asyncio.sleep(29)
    async with client_of(app, f"response_id={response_id}&starting_after={last}&stream_id=again") as client:
        harness.finish()
        await client.settle()
        rest = client.read_json()
    assert [frame["sequence_number"] for frame in rest] == list(range(last + 1, last + 1 + len(rest)))
    assert {frame["stream_id"] for frame in rest} == {"again"}
    prompt = harness.engine.submitted[0].prompt_ids
    assert rest[-1]["response"]["output"][0]["content"][0]["text"] == oracle(prompt, 1, 50)


@scenario
async def test_nobody_comes_back_within_the_linger_time() -> None:
    harness = Harness(limits=Limits(linger_s=30.0))
    async with client_of(app_of(harness)) as client:
        await client.ask(create(50))
        response_id = id_of(client.read_json())
    await asyncio.sleep(31)
    assert await state(harness, response_id) == "cancelled"
    harness.finish()
    harness.check_idle()


@pytest.mark.parametrize(
    ("code", "fields", "headers", "status"),
    [
        (1000, {}, {}, "cancelled"),
        (1005, {}, {}, "cancelled"),
        (1001, {}, {}, "running"),  # a page that is reloaded
        (1006, {}, {}, "running"),
        (1000, {"background": True}, {}, "running"),
        (1000, {}, {"x-tailrace-linger": "60"}, "running"),
    ],
)
def test_a_client_that_says_goodbye_ends_its_responses(
    code: int, fields: dict[str, Any], headers: dict[str, str], status: str
) -> None:
    async def main() -> None:
        harness = Harness(limits=Limits(linger_s=30.0))
        async with client_of(app_of(harness), headers=headers) as client:
            await client.ask(create(50, **fields))
            harness.engine.step(1)
            await client.settle()
            response_id = id_of(client.read_json())
            client.disconnect(code)
            await client.settle()
            assert await state(harness, response_id) == status
        for run in list(harness.generator.live):
            run.cancel()
        harness.finish()

    run_scenario(main())


@pytest.mark.parametrize("code", [1000, 1001])
def test_a_goodbye_is_heard_even_if_an_answer_is_on_its_way(code: int) -> None:
    """A lane that writes notices it first."""

    async def main() -> None:
        harness = Harness(limits=Limits(linger_s=30.0), store=_SlowToStop())
        async with client_of(app_of(harness)) as client:
            for lane in "abcd":
                await client.ask(create(50, stream_id=lane))
            ids = [frame["response"]["id"] for frame in client.read_json() if frame["type"] == "response.created"]
            for _ in range(3):  # the lanes write before and while the others are cancelled
                harness.engine.step(1)
                client.disconnect(code)
                await turn()
            await asyncio.wait([client.task])
        assert {await state(harness, one) for one in ids} == {"cancelled" if code == 1000 else "running"}
        for run in list(harness.generator.live):
            run.cancel()
        harness.finish()

    run_scenario(main())


async def test_a_goodbye_does_not_cut_the_answer_of_a_conversation(tmp_path: Path) -> None:
    async with serving_with_keys(tmp_path) as house:
        token = house.key()
        async with house.client(token) as client:
            made = (await client.post("/v1/conversations", json={})).json()["id"]
            socket = await house.open_socket(PATH, token=token)
            socket.say(json.dumps(create(100, conversation=made)))
            await socket.wait("websocket.send")
            (run,) = house.service.generator.live
            await socket.close()
            await wait_until(lambda: run.log.end is not None)
            assert run.log.status == "done"


class _SlowToStop(MemoryLogStore):
    async def stop(self, owner: str, stream_id: str) -> StreamLog:
        await asyncio.sleep(0.005)
        return await super().stop(owner, stream_id)


@scenario
async def test_a_response_that_somebody_else_reads_is_not_cancelled() -> None:
    harness = Harness()
    app = app_of(harness)
    async with client_of(app) as other:
        async with client_of(app) as client:
            await client.ask(create(50))
            harness.engine.step(1)
            await client.settle()
            response_id = id_of(client.read_json())
            await other.ask({"type": "response.retrieve", "response_id": response_id})
            client.disconnect(1000)
            await client.settle()
        assert await state(harness, response_id) == "running"
        harness.finish()
        await other.settle()
        assert types(other.read_json())[-1] == "response.incomplete"


# Owners


@scenario
async def test_another_owner_finds_nothing() -> None:
    harness = Harness(limits=Limits(linger_s=30.0))
    app = Owned(app_of(harness))
    async with client_of(app, headers={"x-owner": "me"}) as mine, client_of(app, headers={"x-owner": "you"}) as yours:
        await mine.ask(create(50))
        harness.engine.step(1)
        await mine.settle()
        response_id = id_of(mine.read_json())
        for command in (
            {"type": "response.retrieve", "response_id": response_id},
            {"type": "response.cancel", "response_id": response_id},
            create(previous_response_id=response_id),
        ):
            await yours.ask(command)
            (error,) = yours.read_json()
            assert error["type"] == "error"
            assert error["error"]["code"] in ("unknown_stream", "previous_response_not_found")
        assert await state(harness, response_id, "me") == "running"
        harness.finish()
        await mine.settle()
        # With one's own idempotency key nothing of another owner is found either.
        await mine.ask(create(2, idempotency_key="k"))
        harness.finish()
        await mine.settle()
        await yours.ask(create(2, idempotency_key="k"))
        harness.finish()
        await yours.settle()
        assert id_of(mine.read_json()) != id_of(yours.read_json())


@scenario
async def test_an_owner_has_so_many_sockets_at_once() -> None:
    app = Owned(app_of(Harness(), ws_owner_sockets=2))
    async with client_of(app, headers={"x-owner": "me"}), client_of(app, headers={"x-owner": "me"}):
        async with client_of(app, headers={"x-owner": "me"}) as third:
            assert third.status == 429
            assert json.loads(third.body)["error"]["code"] == "overloaded"
            assert third.answer[b"retry-after"] == b"5"
        async with client_of(app, headers={"x-owner": "you"}) as other:
            assert other.status == 101
        async with client_of(app) as first, client_of(app) as second, client_of(app) as third:
            assert {first.status, second.status, third.status} == {101}  # nobody in particular
    async with client_of(app, headers={"x-owner": "me"}) as again:
        assert again.status == 101


@scenario
async def test_tickets_of_a_stream_have_few_sockets_and_take_none_of_its_owner() -> None:
    app = Owned(app_of(Harness(), ws_owner_sockets=2))
    for name in "ab":
        app.principals[name] = Principal("me", "k", ("read",), name * 22)
    async with AsyncExitStack() as stack:

        async def opened(name: str) -> SocketClient:
            return await stack.enter_async_context(client_of(app, headers={"x-owner": name}))

        clients = [await opened("a") for _ in range(9)]
        assert [client.status for client in clients] == [101] * 8 + [429]
        assert (await opened("b")).status == 101
        assert [(await opened("me")).status for _ in range(3)] == [101, 101, 429]
        await asyncio.sleep(301)
        assert clients[0].closing == (1001, "The connection was idle for too long.")
        assert (await opened("a")).status == 101


@pytest.mark.parametrize(
    ("scopes", "may_create", "may_follow"),
    [
        (("read",), False, True),
        (("generate",), True, False),
        (("generate", "read"), True, True),
        (("generate", "read", "wire:openai"), False, False),
        (("generate", "read", "wire:responses", "model:other"), False, True),
    ],
)
def test_a_key_does_what_its_scopes_allow(scopes: tuple[str, ...], may_create: bool, may_follow: bool) -> None:
    async def main() -> None:
        harness = Harness(limits=Limits(linger_s=30.0))
        app = Owned(app_of(harness))
        async with client_of(app, headers={"x-owner": "me"}) as whole:
            await whole.ask(create(2))
            harness.finish()
            await whole.settle()
            response_id = id_of(whole.read_json())
        app.principals["me"] = Principal("me", "k", scopes)
        async with client_of(app, headers={"x-owner": "me"}) as client:
            await client.ask(create(2))
            harness.finish()
            await client.settle()
            frames = client.read_json()
            assert (frames[-1]["type"] == "response.incomplete") is may_create
            assert may_create or (frames[-1]["status"], len(frames)) == (403, 1)
            await client.ask({"type": "response.retrieve", "response_id": response_id})
            frames = client.read_json()
            assert (frames[-1]["type"] == "response.incomplete") is may_follow
            assert may_follow or (frames[-1]["status"], len(frames)) == (403, 1)

    run_scenario(main())


@scenario
async def test_a_ticket_follows_its_own_stream_only() -> None:
    harness = Harness(limits=Limits(linger_s=30.0))
    app = Owned(app_of(harness))
    ids = []
    async with client_of(app, headers={"x-owner": "me"}) as whole:
        for _ in range(2):
            await whole.ask(create(2))
            harness.finish()
            await whole.settle()
            ids.append(id_of(whole.read_json()))
    app.principals["me"] = Principal("me", "k", ("read",), ids[0].removeprefix("resp_"))
    async with client_of(app, headers={"x-owner": "me"}) as client:
        for response_id, last in zip(ids, ("response.incomplete", "error"), strict=True):
            await client.ask({"type": "response.retrieve", "response_id": response_id})
            assert types(client.read_json())[-1] == last


@scenario
async def test_a_server_that_stops_takes_no_new_ones() -> None:
    harness = Harness()
    async with client_of(app_of(harness)) as client:
        harness.gate.drain(5.0)
        await client.ask(create())
        (error,) = client.read_json()
        assert (error["status"], error["error"]["code"]) == (503, "draining")
