"""`/v1/ws` with an engine that is stepped by hand: many streams on one socket, and slow readers."""

from __future__ import annotations

import asyncio

from tests.api.socket_client import SocketClient, app_of
from tests.generation.harness import Harness, greedy, oracle, text_of
from tests.streams.virtual_time import scenario
from tests.waiting import idle

from tailrace.access.principal import PRINCIPAL, Principal
from tailrace.generation import Limits
from tailrace.transport.websocket_parts import WriteTurns
from tailrace.types import ANONYMOUS


def _create(name: str, *, count: int = 8, seed: int = 1, **fields: object) -> dict[str, object]:
    return {"type": "create", "id": name, "prompt": f"Of {name}.", "max_tokens": count, "seed": seed, **fields}


@scenario
async def test_concurrent_streams_are_in_order() -> None:
    harness = Harness()
    async with SocketClient(app_of(harness)) as client:
        for name in "abc":
            await client.ask(_create(name))
        created = {frame["id"]: frame["stream_id"] for frame in client.read_json() if frame["type"] == "created"}
        assert set(created) == {"a", "b", "c"}
        for _ in range(8):
            harness.engine.step()
            await client.settle()
            frames = client.read_json()
            assert [frame["id"] for frame in frames if frame["type"] == "delta"] == ["a", "b", "c"]
        assert sorted(frame["id"] for frame in frames if frame["type"] == "done") == ["a", "b", "c"]
    for name, stream_id in created.items():
        assert text_of(harness.store.index.get(stream_id)) == oracle(tuple(f"Of {name}.".encode()), 1, 8)


@scenario
async def test_a_stream_resumes_on_another_socket() -> None:
    harness = Harness()
    app = app_of(harness)
    async with SocketClient(app) as client:
        await client.ask(_create("a"))
        harness.engine.step(1)
        await client.settle()
        created, one = client.read_json()
    harness.finish()
    stream_id = created["stream_id"]
    async with SocketClient(app) as client:
        await client.ask({"type": "follow", "id": "again", "last_event_id": f"{stream_id}-{one['seq']}"})
        following, *rest = client.read_json()
        assert following == {"type": "following", "id": "again", "stream_id": stream_id, "after": 1}
        assert [frame["seq"] for frame in rest] == list(range(2, 10))
        assert "".join(frame.get("text", "") for frame in [one, *rest]) == oracle(tuple(b"Of a."), 1, 8)
        assert rest[-1]["type"] == "done"
        await client.ask({"type": "follow", "stream_id": stream_id, "after": 9})
        assert client.read_json() == [{"type": "ended", "id": stream_id, "stream_id": stream_id, "after": 9}]


@scenario
async def test_streams_of_other_sockets_can_be_followed_cancelled_and_left() -> None:
    harness = Harness()
    run = await harness.create("Hi", greedy(50))
    stream_id = run.log.stream_id
    async with SocketClient(app_of(harness)) as client:
        await client.ask({"type": "follow", "stream_id": stream_id})
        harness.engine.step()
        await client.settle()
        assert [frame["type"] for frame in client.read_json()] == ["following", "delta"]
        await client.ask({"type": "unfollow", "id": stream_id})
        assert client.read_json() == [{"type": "unfollowed", "id": stream_id, "stream_id": stream_id, "seq": 1}]
        assert run.log.num_readers == 0
        harness.engine.step()
        await client.settle()
        assert client.read() == []
        await client.ask({"type": "follow", "id": "x", "stream_id": stream_id, "after": 1})
        assert [frame.get("seq") for frame in client.read_json()] == [None, 2]
        await client.ask({"type": "cancel", "stream_id": stream_id})
        answer, end = client.read_json()
        assert answer == {"type": "status", "id": stream_id, "stream_id": stream_id, "status": "cancelled"}
        assert (end["type"], end["id"], end["seq"]) == ("cancelled", "x", 3)
        await client.ask({"type": "cancel", "stream_id": stream_id})
        assert client.read_json()[0]["status"] == "cancelled"
    harness.finish()
    harness.check_idle()


@scenario
async def test_a_follower_that_is_sent_away_learns_where_to_follow_again() -> None:
    """Another server writes the stream now. The other streams of the socket go on."""
    harness = Harness()
    async with SocketClient(app_of(harness)) as client:
        await client.ask(_create("a"))
        (taken,) = harness.generator.live
        await client.ask(_create("b"))
        harness.engine.step()
        await client.settle()
        client.read()
        taken.lease_lost()
        await client.settle()
        stream_id = taken.log.stream_id
        message = "Another server continues this stream."
        error = {"code": "lease_lost", "message": message, "retryable": True, "stream_id": stream_id, "last_seq": 1}
        assert client.read_json() == [
            {"type": "released", "id": "a", "stream_id": stream_id, "seq": 1, "status": "released", "error": error}
        ]
        harness.engine.step()
        await client.settle()
        assert [(frame["id"], frame["seq"]) for frame in client.read_json()] == [("b", 2)]
        await client.ask({"type": "follow", "id": "a", "stream_id": stream_id, "after": 1})  # the name is free
        assert [frame["type"] for frame in client.read_json()] == ["following", "released"]  # nothing has changed here
        await client.ask(_create("a"))
        assert client.read_json()[0]["type"] == "created"


@scenario
async def test_a_deleted_stream_can_be_cancelled_by_its_follower() -> None:
    harness = Harness()
    async with SocketClient(app_of(harness)) as client:
        await client.ask(_create("a", count=500))
        (created,) = client.read_json()
        client.is_reading = False
        for _ in range(3):
            harness.engine.step()
        await client.settle()
        await harness.store.stop(ANONYMOUS, created["stream_id"])
        await harness.store.delete(ANONYMOUS, created["stream_id"])
        await client.ask({"type": "cancel", "id": "a"})
        client.is_reading = True
        await client.settle()
        frames = client.read_json()
        assert [frame["status"] for frame in frames if frame["type"] == "status"] == ["cancelled"]
        assert "cancelled" in [frame["type"] for frame in frames]
        await client.ask(_create("b"))
        assert client.read_json()[0]["type"] == "created"


@scenario
async def test_cancel_by_name_reaches_the_engine() -> None:
    harness = Harness()
    async with SocketClient(app_of(harness)) as client:
        await client.ask(_create("a", count=500))
        harness.engine.step()
        await client.ask({"type": "cancel", "id": "a"})
        assert harness.engine.aborted
        assert [frame["type"] for frame in client.read_json()] == ["created", "delta", "status", "cancelled"]
        await client.ask(_create("a"))  # the name is free again
        assert client.read_json()[0]["type"] == "created"


@scenario
async def test_streams_survive_their_socket_except_with_on_disconnect_cancel() -> None:
    harness = Harness(limits=Limits(linger_s=60.0))
    async with SocketClient(app_of(harness)) as client:
        await client.ask(_create("stays"))
        await client.ask(_create("goes", on_disconnect="cancel"))
        stays, goes = (frame["stream_id"] for frame in client.read_json())
    assert harness.store.index.get(goes).end is not None
    harness.finish()
    end = harness.store.index.get(stays).end
    assert end is not None
    assert end.status == "done"


@scenario
async def test_a_key_generates_only_within_its_rights() -> None:
    harness = Harness()
    for scopes in (("read",), ("generate", "wire:openai"), ("generate", "model:other")):
        client = SocketClient(app_of(harness))
        client.scope[PRINCIPAL] = Principal("me", "k", scopes)
        async with client:
            await client.ask(_create("a"))
            (refusal,) = client.read_json()
        assert (refusal["type"], refusal["error"]["code"]) == ("refused", "forbidden")
        chat = SocketClient(app_of(harness), "/")
        chat.scope[PRINCIPAL] = Principal("me", "k", scopes)
        async with chat:
            await chat.ask("Hi")
            assert chat.closing[0] == 1008
    harness.check_idle()
    assert not harness.engine.submitted


@scenario
async def test_refusals_leave_the_socket_open() -> None:
    harness = Harness(max_requests=2, max_sequences=2)
    async with SocketClient(app_of(harness, ws_streams=3)) as client:
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
            await client.ask(command)
            (refusal,) = client.read_json()
            assert (refusal["type"], refusal["id"], refusal["error"]["code"]) == ("refused", name, code)
        await client.ask(_create("a", count=50))
        created = client.read_json()[0]
        for command, code in [
            (_create("a"), "invalid_request"),
            ({"type": "follow", "id": "a", "stream_id": created["stream_id"]}, "invalid_request"),
            ({"type": "follow", "id": "b", "stream_id": created["stream_id"], "after": 99}, "seq_out_of_range"),
        ]:
            await client.ask(command)
            (refusal,) = client.read_json()
            assert (refusal["type"], refusal["error"]["code"]) == ("refused", code)
        await client.ask(_create("b"))
        await client.ask(_create("c"))
        assert [frame["type"] for frame in client.read_json()] == ["created", "refused"]
        await client.ask(_create("c"))
        (refusal,) = client.read_json()
        assert refusal["error"]["code"] == "overloaded"
        assert refusal["retry_after_s"] >= 1
        await client.ask({"type": "follow", "id": "c", "stream_id": created["stream_id"]})
        await client.ask({"type": "follow", "id": "d", "stream_id": created["stream_id"]})
        assert [frame["type"] for frame in client.read_json()] == ["following", "refused"]  # one too many
        await client.ask({"type": "ping", "id": "p"})
        assert client.read() == ['{"type":"pong","id":"p"}']
    harness.finish()


@scenario
async def test_too_many_invalid_frames_close_the_socket() -> None:
    async with SocketClient(app_of(Harness())) as client:
        for _ in range(3):
            for _ in range(10):
                await client.ask("nonsense")
            await client.ask({"type": "ping"})
        assert client.is_open()
        assert len(client.read()) == 33
        for _ in range(11):
            await client.ask("nonsense")
        assert client.closing == (1008, "Too many frames are not JSON objects.")


@scenario
async def test_a_socket_that_does_not_read_delays_no_other() -> None:
    harness = Harness()
    app = app_of(harness)
    async with SocketClient(app) as slow, SocketClient(app, takes_many=False) as quick:
        await slow.ask(_create("a", count=100))
        stream_id = slow.read_json()[0]["stream_id"]
        slow.is_reading = False
        await quick.ask({"type": "follow", "stream_id": stream_id})
        harness.finish()
        await quick.settle()
        assert len(quick.read()) == 102
        assert slow.read() == []
        slow.is_reading = True
        await slow.settle()
        assert [frame["seq"] for frame in slow.read_json()] == list(range(1, 102))


@scenario
async def test_a_slow_client_can_still_leave_and_cancel() -> None:
    harness = Harness()
    async with SocketClient(app_of(harness)) as client:
        await client.ask(_create("a", count=900))
        client.is_reading = False
        harness.engine.step(10)
        await client.ask({"type": "cancel", "id": "a"})
        assert harness.engine.aborted
        await client.ask(_create("b", count=900, on_disconnect="cancel"))
    harness.finish()
    harness.check_idle()


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
