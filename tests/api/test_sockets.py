"""Both WebSocket wires with an engine that is stepped by hand, and virtual time."""

from __future__ import annotations

import asyncio

import pytest
from tests.api.caller import Caller, app_of, scenario
from tests.generation.world import World, oracle
from tests.streams.virtual_time import run as run_scenario

from tailrace.dialects.chatbot import FINISHED
from tailrace.engines.scripted.engine import CONTROL_TOKENS
from tailrace.errors import EngineLost
from tailrace.generation import Limits

USER, ASSISTANT = (256 + CONTROL_TOKENS.index(token) for token in ("<|user|>", "<|assistant|>"))


async def answered(world: World, caller: Caller, prompt: str) -> str:
    """The answer to a prompt, with the engine stepped until it is complete."""
    await caller.ask(prompt)
    while FINISHED not in caller.frames and caller.is_open():
        world.engine.step()
        await caller.moment()
    *texts, last = caller.read() or [""]
    assert last == FINISHED
    assert all(texts)
    return "".join(texts)


def turns(*texts: str) -> tuple[int, ...]:
    """The ids of a chat as the engine's template writes it: who begins each text, and a line's end behind it."""
    ids: list[int] = []
    for number, text in enumerate(texts):
        ids += [ASSISTANT if number % 2 else USER, *f"{text}\n".encode()]
    return (*ids, ASSISTANT)


def seed_of(world: World, index: int) -> int:
    seed = world.engine.submitted[index].sampling.seed
    assert seed is not None
    return seed


# The chatbot


@scenario
async def test_a_conversation_uses_the_template() -> None:
    world = World(limits=Limits(default_max_tokens=24))
    async with Caller(app_of(world), "/") as caller:
        first = await answered(world, caller, "Space the final")
        second = await answered(world, caller, " These are")
    asked_first, asked_second = (sequence.prompt_ids for sequence in world.engine.submitted)
    assert asked_first == turns("Space the final")
    assert first == oracle(asked_first, seed_of(world, 0), 24)
    assert asked_second == turns("Space the final", first, " These are")
    assert second == oracle(asked_second, seed_of(world, 1), 24)
    sampling = world.engine.submitted[1].sampling
    assert (sampling.temperature, sampling.repetition_penalty) == (0.0, 1.0)  # this engine has no penalty
    world.check_idle()


@scenario
async def test_a_frame_is_a_token_and_none_is_empty() -> None:
    world = World(limits=Limits(default_max_tokens=16))
    async with Caller(app_of(world), "/") as caller:
        await caller.ask("Hello")
        seen = []
        for _ in range(16):
            world.engine.step()
            await caller.moment()
            seen.append(caller.read())
    # Four words, then a character in four tokens, which shows with the last of them.
    assert seen[-1].pop() == FINISHED
    assert [len(frames) for frames in seen] == [1, 1, 1, 1, 0, 0, 0, 1] * 2
    assert all(frame for frames in seen for frame in frames)


@scenario
async def test_without_a_template_the_texts_are_joined() -> None:
    world = World(has_chat=False, limits=Limits(default_max_tokens=9))
    async with Caller(app_of(world), "/") as caller:
        first = await answered(world, caller, "Space the final")
        await answered(world, caller, " These are")
    assert world.engine.submitted[1].prompt_ids == tuple(f"Space the final{first} These are".encode())


@scenario
async def test_each_socket_has_its_own_conversation() -> None:
    world = World(limits=Limits(default_max_tokens=9))
    app = app_of(world)
    async with Caller(app, "/") as one, Caller(app, "/") as other:
        await answered(world, one, "One")
        await answered(world, other, "Other")
    assert world.engine.submitted[1].prompt_ids == turns("Other")


@scenario
async def test_the_oldest_turns_are_dropped_when_they_no_longer_fit() -> None:
    world = World(context_tokens=300, limits=Limits(default_max_tokens=20))
    said: list[str] = []
    async with Caller(app_of(world), "/") as caller:
        for number in range(12):
            prompt = f"This is prompt number {number}."
            said += [prompt, await answered(world, caller, prompt)]
    lengths = []
    for number, sequence in enumerate(world.engine.submitted):
        lengths.append(len(sequence.prompt_ids))
        assert len(sequence.prompt_ids) + 20 <= 300
        # What is left is the end of what was said, pair by pair, and the prompt.
        ends = [turns(*said[2 * first : 2 * number + 1]) for first in range(number + 1)]
        assert sequence.prompt_ids in ends
    assert max(lengths) > 150  # and no more was forgotten than had to be
    assert lengths[-1] > 150


@scenario
async def test_a_long_prompt_gets_a_short_answer_and_one_too_long_is_refused() -> None:
    world = World(context_tokens=200, limits=Limits(default_max_tokens=100))
    async with Caller(app_of(world), "/") as caller:
        await answered(world, caller, "Hi")
        assert world.engine.submitted[0].sampling.max_tokens == 100
        await answered(world, caller, "x" * 150)
        assert world.engine.submitted[1].prompt_ids == turns("x" * 150)  # the first turn had to go
        assert world.engine.submitted[1].sampling.max_tokens == 200 - 153
        await caller.ask("x" * 400)
        code, reason = caller.closing
        assert code == 1009
        assert "200 is the limit" in reason
    world.check_idle()


@scenario
async def test_an_overloaded_server_lets_the_prompt_wait_and_keeps_the_conversation() -> None:
    world = World(max_requests=1, limits=Limits(default_max_tokens=9))
    async with Caller(app_of(world), "/") as caller:
        first = await answered(world, caller, "One")
        other = await world.create()
        await caller.ask("Two")
        assert len(world.engine.submitted) == 2
        world.finish(other)
        await asyncio.sleep(1.0)  # what Retry-After said
        await answered(world, caller, "Three")
        assert world.engine.submitted[2].prompt_ids == turns("One", first, "Two")
        world.finish()
        assert caller.is_open()


@scenario
async def test_a_server_that_stays_overloaded_closes_with_1013() -> None:
    world = World(max_requests=1)
    await world.create()
    async with Caller(app_of(world, queue_s=10.0), "/") as caller:
        caller.say("One")
        await asyncio.sleep(9.0)
        assert caller.is_open()
        await asyncio.sleep(1.1)
        assert caller.closing == (1013, "The model is overloaded.")
    assert len(world.engine.submitted) == 1


@pytest.mark.parametrize(("how", "code"), [("lost", 1011), ("drain", 1012), ("interrupt", 1012), ("cancel", 1011)])
def test_an_answer_that_is_cut_off_closes_the_socket_without_its_end(how: str, code: int) -> None:
    async def main() -> None:
        world = World()
        async with Caller(app_of(world), "/") as caller:
            if how == "drain":
                world.gate.drain(5.0)
            await caller.ask("Hi")
            world.engine.step(3)
            await caller.moment()
            if how == "lost":
                world.engine.lose(EngineLost("It died."))
            for run in list(world.generator.live):
                run.interrupt() if how == "interrupt" else run.cancel()
            await caller.moment()
            assert caller.closing[0] == code
            assert caller.closing[1]
            assert FINISHED not in caller.frames
            assert bool(caller.frames) == (how != "drain")

    run_scenario(main())


@pytest.mark.parametrize("path", ["/", "/v1/ws"])
def test_a_disconnect_cancels_at_once(path: str) -> None:
    async def main() -> None:
        world = World()
        async with Caller(app_of(world), path) as caller:
            await caller.ask("Hi" if path == "/" else {"type": "create", "prompt": "Hi", "on_disconnect": "cancel"})
            world.engine.step(3)
            await caller.moment()
            (run,) = world.generator.live
            assert run.log.num_readers == 1
            caller.leave()
            await caller.moment()
            assert caller.task.done()
            assert world.engine.aborted
            assert run.status == "cancelled"
            assert run.log.num_readers == 0
        world.finish()
        world.check_idle()

    run_scenario(main())


@scenario
async def test_prompts_wait_in_order_up_to_a_limit() -> None:
    world = World(limits=Limits(default_max_tokens=4))
    async with Caller(app_of(world), "/") as caller:
        for number in range(17):  # one is being answered, sixteen wait
            await caller.ask(f"Prompt {number}")
        assert len(world.engine.submitted) == 1
        while caller.frames.count(FINISHED) < 17:
            world.engine.step()
            await caller.moment()
        asked = [bytes(i for i in sequence.prompt_ids if i < 256) for sequence in world.engine.submitted]
        assert all(ids.endswith(f"Prompt {number}\n".encode()) for number, ids in enumerate(asked))
        for number in range(18):
            await caller.ask(f"Prompt {number}")
        assert caller.closing == (1008, "Too many prompts wait for an answer.")


@scenario
async def test_prompts_that_wait_are_bounded_in_length() -> None:
    async with Caller(app_of(World(), ws_message_bytes=100), "/") as caller:
        for _ in range(3):
            await caller.ask("x" * 60)
        assert caller.closing[0] == 1008


# Both wires


@pytest.mark.parametrize("path", ["/", "/v1/ws"])
def test_binary_frames_are_not_understood(path: str) -> None:
    async def main() -> None:
        async with Caller(app_of(World()), path) as caller:
            caller.say_bytes(b"Hi")
            await caller.moment()
            assert caller.closing == (1003, "Only text frames are supported.")

    run_scenario(main())


@pytest.mark.parametrize("path", ["/", "/v1/ws"])
def test_silence_closes_a_socket_unless_something_runs(path: str) -> None:
    async def main() -> None:
        world = World(limits=Limits(default_max_tokens=20, queue_s=1e6))
        async with Caller(app_of(world, ws_idle_s=10.0), path) as caller:
            await asyncio.sleep(8.0)
            await caller.ask("Hi" if path == "/" else {"type": "create", "prompt": "Hi"})
            await asyncio.sleep(50.0)
            assert caller.is_open()
            world.finish()
            await asyncio.sleep(9.0)
            assert caller.is_open()
            await asyncio.sleep(1.1)
            assert caller.closing == (1001, "The connection was idle for too long.")
        async with Caller(app_of(world, ws_idle_s=0.0), path) as caller:
            await asyncio.sleep(1e6)
            assert caller.is_open()

    run_scenario(main())


@pytest.mark.parametrize("path", ["/", "/v1/ws"])
def test_sockets_are_counted(path: str) -> None:
    async def main() -> None:
        app = app_of(World(), ws_sockets=1)
        async with Caller(app, path) as first:
            assert first.status == 101
            assert first.answer[b"x-request-id"]
            async with Caller(app, path) as second:
                assert second.status == 429
                assert second.answer[b"retry-after"] == b"5"
                assert second.answer[b"x-request-id"]
                assert b'"code":"overloaded"' in second.body
        async with Caller(app, path) as third:
            assert third.status == 101

    run_scenario(main())


@pytest.mark.parametrize("path", ["/", "/v1/ws"])
def test_a_draining_server_refuses_sockets(path: str) -> None:
    async def main() -> None:
        world = World()
        world.gate.drain(5.0)
        async with Caller(app_of(world), path) as caller:
            assert caller.status == 503
            assert b'"code":"draining"' in caller.body

    run_scenario(main())


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/nowhere", {}, 404),
        ("/v1/streams", {}, 404),
        ("/", {"origin": "http://evil.test"}, 403),
        ("/v1/ws", {"origin": "http://evil.test"}, 403),
        ("/v1/ws", {"origin": "null"}, 403),
        ("/v1/ws", {"host": "evil.test"}, 403),
        ("/v1/ws", {"host": "localhost:8000", "origin": "http://localhost:9000"}, 403),
        ("/v1/ws", {"host": "localhost:8000", "origin": "http://localhost:8000"}, 101),
        ("/v1/ws", {"origin": "http://friend.test"}, 101),
    ],
)
def test_who_may_open_a_socket(path: str, headers: dict[str, str], status: int) -> None:
    async def main() -> None:
        async with Caller(app_of(World(), allowed_origins="http://friend.test"), path, headers) as caller:
            assert caller.status == status
            assert caller.answer[b"x-request-id"]

    run_scenario(main())


@scenario
async def test_without_http_answers_a_refused_socket_is_closed() -> None:
    caller = Caller(app_of(World()), headers={"origin": "http://evil.test"})
    del caller.scope["extensions"]
    async with caller:
        assert (caller.status, caller.closing) == (None, (1008, ""))
