"""`/v1/ws` with an engine that is stepped by hand: many streams on one socket, and slow readers."""

from __future__ import annotations

import asyncio

from tests.api.caller import Caller, app_of, scenario
from tests.generation.world import World, greedy, oracle, text_of
from tests.waiting import idle

from tailrace.generation import Limits
from tailrace.http.flow import WriteTurns
from tailrace.types import ANONYMOUS


def _create(name: str, *, count: int = 8, seed: int = 1, **fields: object) -> dict[str, object]:
    return {"type": "create", "id": name, "prompt": f"Of {name}.", "max_tokens": count, "seed": seed, **fields}


@scenario
async def test_concurrent_streams_are_in_order() -> None:
    world = World()
    async with Caller(app_of(world)) as caller:
        for name in "abc":
            await caller.ask(_create(name))
        created = {frame["id"]: frame["stream_id"] for frame in caller.read_json() if frame["type"] == "created"}
        assert set(created) == {"a", "b", "c"}
        for _ in range(8):
            world.engine.step()
            await caller.moment()
            frames = caller.read_json()
            assert [frame["id"] for frame in frames if frame["type"] == "delta"] == ["a", "b", "c"]
        assert sorted(frame["id"] for frame in frames if frame["type"] == "done") == ["a", "b", "c"]
    for name, stream_id in created.items():
        assert text_of(world.store.index.get(stream_id)) == oracle(tuple(f"Of {name}.".encode()), 1, 8)


@scenario
async def test_a_stream_resumes_on_another_socket() -> None:
    world = World()
    app = app_of(world)
    async with Caller(app) as caller:
        await caller.ask(_create("a"))
        world.engine.step(1)
        await caller.moment()
        created, one = caller.read_json()
    world.finish()
    stream_id = created["stream_id"]
    async with Caller(app) as caller:
        await caller.ask({"type": "follow", "id": "again", "last_event_id": f"{stream_id}-{one['seq']}"})
        following, *rest = caller.read_json()
        assert following == {"type": "following", "id": "again", "stream_id": stream_id, "after": 1}
        assert [frame["seq"] for frame in rest] == list(range(2, 10))
        assert "".join(frame.get("text", "") for frame in [one, *rest]) == oracle(tuple(b"Of a."), 1, 8)
        assert rest[-1]["type"] == "done"
        await caller.ask({"type": "follow", "stream_id": stream_id, "after": 9})
        assert caller.read_json() == [{"type": "ended", "id": stream_id, "stream_id": stream_id, "after": 9}]


@scenario
async def test_streams_of_other_sockets_can_be_followed_cancelled_and_left() -> None:
    world = World()
    run = await world.create("Hi", greedy(50))
    stream_id = run.log.stream_id
    async with Caller(app_of(world)) as caller:
        await caller.ask({"type": "follow", "stream_id": stream_id})
        world.engine.step()
        await caller.moment()
        assert [frame["type"] for frame in caller.read_json()] == ["following", "delta"]
        await caller.ask({"type": "unfollow", "id": stream_id})
        assert caller.read_json() == [{"type": "unfollowed", "id": stream_id, "stream_id": stream_id, "seq": 1}]
        assert run.log.num_readers == 0
        world.engine.step()
        await caller.moment()
        assert caller.read() == []
        await caller.ask({"type": "follow", "id": "x", "stream_id": stream_id, "after": 1})
        assert [frame.get("seq") for frame in caller.read_json()] == [None, 2]
        await caller.ask({"type": "cancel", "stream_id": stream_id})
        answer, end = caller.read_json()
        assert answer == {"type": "status", "id": stream_id, "stream_id": stream_id, "status": "cancelled"}
        assert (end["type"], end["id"], end["seq"]) == ("cancelled", "x", 3)
        await caller.ask({"type": "cancel", "stream_id": stream_id})
        assert caller.read_json()[0]["status"] == "cancelled"
    world.finish()
    world.check_idle()


@scenario
async def test_a_deleted_stream_can_be_cancelled_by_its_follower() -> None:
    world = World()
    async with Caller(app_of(world)) as caller:
        await caller.ask(_create("a", count=500))
        (created,) = caller.read_json()
        caller.is_reading = False
        for _ in range(3):
            world.engine.step()
        await caller.moment()
        await world.store.stop(ANONYMOUS, created["stream_id"])
        await world.store.delete(ANONYMOUS, created["stream_id"])
        await caller.ask({"type": "cancel", "id": "a"})
        caller.is_reading = True
        await caller.moment()
        frames = caller.read_json()
        assert [frame["status"] for frame in frames if frame["type"] == "status"] == ["cancelled"]
        assert "cancelled" in [frame["type"] for frame in frames]
        await caller.ask(_create("b"))
        assert caller.read_json()[0]["type"] == "created"


@scenario
async def test_cancel_by_name_reaches_the_engine() -> None:
    world = World()
    async with Caller(app_of(world)) as caller:
        await caller.ask(_create("a", count=500))
        world.engine.step()
        await caller.ask({"type": "cancel", "id": "a"})
        assert world.engine.aborted
        assert [frame["type"] for frame in caller.read_json()] == ["created", "delta", "status", "cancelled"]
        await caller.ask(_create("a"))  # the name is free again
        assert caller.read_json()[0]["type"] == "created"


@scenario
async def test_streams_survive_their_socket_except_with_on_disconnect_cancel() -> None:
    world = World(limits=Limits(linger_s=60.0))
    async with Caller(app_of(world)) as caller:
        await caller.ask(_create("stays"))
        await caller.ask(_create("goes", on_disconnect="cancel"))
        stays, goes = (frame["stream_id"] for frame in caller.read_json())
    assert world.store.index.get(goes).end is not None
    world.finish()
    end = world.store.index.get(stays).end
    assert end is not None
    assert end.status == "done"


@scenario
async def test_refusals_leave_the_socket_open() -> None:
    world = World(max_requests=2, max_sequences=2)
    async with Caller(app_of(world, ws_streams=3)) as caller:
        cases: list[tuple[object, str | None, str]] = [
            ("not JSON", None, "invalid_request"),
            ({"type": "jump"}, None, "invalid_request"),
            ({"type": "create", "id": "a", "promt": "Hi"}, "a", "unsupported_parameter"),
            (_create("a", n=99), "a", "invalid_request"),
            (_create("a", model="another"), "a", "model_not_found"),
            ({"type": "follow", "id": "a", "stream_id": "nothing"}, "a", "unknown_stream"),
            ({"type": "follow", "id": "a", "last_event_id": "nothing"}, "a", "seq_out_of_range"),
            ({"type": "cancel", "id": "a"}, "a", "invalid_request"),
            ({"type": "unfollow", "id": "a"}, "a", "invalid_request"),
        ]
        for command, name, code in cases:
            await caller.ask(command)
            (refusal,) = caller.read_json()
            assert (refusal["type"], refusal["id"], refusal["error"]["code"]) == ("refused", name, code)
        await caller.ask(_create("a", count=50))
        created = caller.read_json()[0]
        for command, code in [
            (_create("a"), "invalid_request"),
            ({"type": "follow", "id": "a", "stream_id": created["stream_id"]}, "invalid_request"),
            ({"type": "follow", "id": "b", "stream_id": created["stream_id"], "after": 99}, "seq_out_of_range"),
        ]:
            await caller.ask(command)
            (refusal,) = caller.read_json()
            assert (refusal["type"], refusal["error"]["code"]) == ("refused", code)
        await caller.ask(_create("b"))
        await caller.ask(_create("c"))
        assert [frame["type"] for frame in caller.read_json()] == ["created", "refused"]
        await caller.ask(_create("c"))
        (refusal,) = caller.read_json()
        assert refusal["error"]["code"] == "overloaded"
        assert refusal["retry_after_s"] >= 1
        await caller.ask({"type": "follow", "id": "c", "stream_id": created["stream_id"]})
        await caller.ask({"type": "follow", "id": "d", "stream_id": created["stream_id"]})
        assert [frame["type"] for frame in caller.read_json()] == ["following", "refused"]  # one too many
        await caller.ask({"type": "ping", "id": "p"})
        assert caller.read() == ['{"type":"pong","id":"p"}']
    world.finish()


@scenario
async def test_too_many_invalid_frames_close_the_socket() -> None:
    async with Caller(app_of(World())) as caller:
        for _ in range(3):
            for _ in range(10):
                await caller.ask("nonsense")
            await caller.ask({"type": "ping"})
        assert caller.is_open()
        assert len(caller.read()) == 33
        for _ in range(11):
            await caller.ask("nonsense")
        assert caller.closing == (1008, "Too many frames are not JSON objects.")


@scenario
async def test_a_socket_that_does_not_read_delays_no_other() -> None:
    world = World()
    app = app_of(world)
    async with Caller(app) as slow, Caller(app, takes_many=False) as quick:
        await slow.ask(_create("a", count=100))
        stream_id = slow.read_json()[0]["stream_id"]
        slow.is_reading = False
        await quick.ask({"type": "follow", "stream_id": stream_id})
        world.finish()
        await quick.moment()
        assert len(quick.read()) == 102
        assert slow.read() == []
        slow.is_reading = True
        await slow.moment()
        assert [frame["seq"] for frame in slow.read_json()] == list(range(1, 102))


@scenario
async def test_a_slow_client_can_still_leave_and_cancel() -> None:
    world = World()
    async with Caller(app_of(world)) as caller:
        await caller.ask(_create("a", count=900))
        caller.is_reading = False
        world.engine.step(10)
        await caller.ask({"type": "cancel", "id": "a"})
        assert world.engine.aborted
        await caller.ask(_create("b", count=900, on_disconnect="cancel"))
    world.finish()
    world.check_idle()


async def test_sockets_take_turns() -> None:
    turns_ = WriteTurns()
    written: list[str] = []

    async def write(name: str, count: int) -> None:
        for _ in range(count):
            await turns_.wait()
            written.append(name)
            turns_.next()

    turns_.is_full = True
    async with asyncio.TaskGroup() as group:
        for name in "abc":
            group.create_task(write(name, 3))
        gone = group.create_task(write("gone", 3))
        await idle()
        gone.cancel()
        for _ in range(9):  # room for one frame each time
            turns_.is_full = False
            turns_.next()
            turns_.is_full = True
            await idle()
    assert "".join(written) == "abcabcabc"


async def test_an_unused_turn_goes_to_the_next_socket() -> None:
    turns_ = WriteTurns()
    turns_.is_full = True
    first, second = (asyncio.create_task(turns_.wait()) for _ in range(2))
    await idle()
    turns_.is_full = False
    turns_.next()
    first.cancel()
    await second
