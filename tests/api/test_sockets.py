"""Both WebSocket wires with an engine that is stepped by hand, and virtual time."""

from __future__ import annotations

import asyncio

import pytest
from tests.api.socket_client import SocketClient, app_of
from tests.generation.harness import Harness, oracle
from tests.streams.virtual_time import run as run_scenario
from tests.streams.virtual_time import scenario

from tailrace.errors import EngineLost
from tailrace.generation import Limits
from tailrace_outer.scripted.scripted_engine import CONTROL_TOKENS
from tailrace_plugins.articles.chatbot import FINISHED

USER, ASSISTANT = (256 + CONTROL_TOKENS.index(token) for token in ("<|user|>", "<|assistant|>"))


async def answered(harness: Harness, client: SocketClient, prompt: str) -> str:
    """Return the answer to a prompt. Steps the engine until the answer is complete."""
    await client.ask(prompt)
    while FINISHED not in client.frames and client.is_open():
        harness.engine.step()
        await client.settle()
    *texts, last = client.read() or [""]
    assert last == FINISHED
    assert all(texts)
    return "".join(texts)


def turns(*texts: str) -> tuple[int, ...]:
    """Return the ids of a chat as in the engine's template: each text begins with its role, and ends with a line
    break."""
    ids: list[int] = []
    for number, text in enumerate(texts):
        ids += [ASSISTANT if number % 2 else USER, *f"{text}\n".encode()]
    return (*ids, ASSISTANT)


def seed_of(harness: Harness, index: int) -> int:
    seed = harness.engine.submitted[index].sampling.seed
    assert seed is not None
    return seed


# The chatbot


@scenario
async def test_a_conversation_uses_the_template() -> None:
    harness = Harness(limits=Limits(default_max_tokens=24))
    async with SocketClient(app_of(harness), "/") as client:
        first = await answered(harness, client, "Space the final")
        second = await answered(harness, client, " These are")
    asked_first, asked_second = (sequence.prompt_ids for sequence in harness.engine.submitted)
    assert asked_first == turns("Space the final")
    assert first == oracle(asked_first, seed_of(harness, 0), 24)
    assert asked_second == turns("Space the final", first, " These are")
    assert second == oracle(asked_second, seed_of(harness, 1), 24)
    sampling = harness.engine.submitted[1].sampling
    assert (sampling.temperature, sampling.repetition_penalty) == (0.0, 1.0)  # this engine has no penalty
    harness.check_idle()


@scenario
async def test_a_frame_is_a_token_and_none_is_empty() -> None:
    harness = Harness(limits=Limits(default_max_tokens=16))
    async with SocketClient(app_of(harness), "/") as client:
        await client.ask("Hello")
        seen = []
        for _ in range(16):
            harness.engine.step()
            await client.settle()
            seen.append(client.read())
    # Four words, then a character in four tokens, which shows with the last of them.
    assert seen[-1].pop() == FINISHED
    assert [len(frames) for frames in seen] == [1, 1, 1, 1, 0, 0, 0, 1] * 2
    assert all(frame for frames in seen for frame in frames)


@scenario
async def test_without_a_template_the_texts_are_joined() -> None:
    harness = Harness(has_chat=False, limits=Limits(default_max_tokens=9))
    async with SocketClient(app_of(harness), "/") as client:
        first = await answered(harness, client, "Space the final")
        await answered(harness, client, " These are")
    assert harness.engine.submitted[1].prompt_ids == tuple(f"Space the final{first} These are".encode())


@scenario
async def test_an_answer_that_another_server_continues_closes_the_socket() -> None:
    harness = Harness()
    async with SocketClient(app_of(harness), "/") as client:
        await client.ask("Hello")
        harness.engine.step()
        (run,) = harness.generator.live
        run.lease_lost()
        await client.settle()
        assert client.closing == (1012, "Another server continues this stream.")
        assert FINISHED not in client.frames


@scenario
async def test_each_socket_has_its_own_conversation() -> None:
    harness = Harness(limits=Limits(default_max_tokens=9))
    app = app_of(harness)
    async with SocketClient(app, "/") as one, SocketClient(app, "/") as other:
        await answered(harness, one, "One")
        await answered(harness, other, "Other")
    assert harness.engine.submitted[1].prompt_ids == turns("Other")


@scenario
async def test_the_oldest_turns_are_dropped_when_they_no_longer_fit() -> None:
    harness = Harness(context_tokens=300, limits=Limits(default_max_tokens=20))
    texts: list[str] = []
    async with SocketClient(app_of(harness), "/") as client:
        for number in range(12):
            prompt = f"This is prompt number {number}."
            texts += [prompt, await answered(harness, client, prompt)]
    lengths = []
    for number, sequence in enumerate(harness.engine.submitted):
        lengths.append(len(sequence.prompt_ids))
        assert len(sequence.prompt_ids) + 20 <= 300
        # The prompt follows the last pairs of prompts and answers that fit.
        ends = [turns(*texts[2 * first : 2 * number + 1]) for first in range(number + 1)]
        assert sequence.prompt_ids in ends
    assert max(lengths) > 150  # and no more was forgotten than had to be
    assert lengths[-1] > 150


@scenario
async def test_a_long_prompt_gets_a_short_answer_and_one_too_long_is_refused() -> None:
    harness = Harness(context_tokens=200, limits=Limits(default_max_tokens=100))
    async with SocketClient(app_of(harness), "/") as client:
        await answered(harness, client, "Hi")
        assert harness.engine.submitted[0].sampling.max_tokens == 100
        await answered(harness, client, "x" * 150)
        assert harness.engine.submitted[1].prompt_ids == turns("x" * 150)  # the first turn had to go
        assert harness.engine.submitted[1].sampling.max_tokens == 200 - 153
        await client.ask("x" * 400)
        code, reason = client.closing
        assert code == 1009
        assert "The maximum context length is 200 tokens, and the prompt has 403." in reason
    harness.check_idle()


@scenario
async def test_an_overloaded_server_lets_the_prompt_wait_and_keeps_the_conversation() -> None:
    harness = Harness(max_requests=1, limits=Limits(default_max_tokens=9))
    async with SocketClient(app_of(harness), "/") as client:
        first = await answered(harness, client, "One")
        other = await harness.create()
        await client.ask("Two")
        assert len(harness.engine.submitted) == 2
        harness.finish(other)
        await asyncio.sleep(1.0)  # the time in Retry-After
        await answered(harness, client, "Three")
        assert harness.engine.submitted[2].prompt_ids == turns("One", first, "Two")
        harness.finish()
        assert client.is_open()


@scenario
async def test_a_server_that_stays_overloaded_closes_with_1013() -> None:
    harness = Harness(max_requests=1)
    await harness.create()
    async with SocketClient(app_of(harness, queue_s=10.0), "/") as client:
        client.send("One")
        await asyncio.sleep(9.0)
        assert client.is_open()
        await asyncio.sleep(1.1)
        assert client.closing == (1013, "The model is overloaded.")
    assert len(harness.engine.submitted) == 1


@pytest.mark.parametrize(("how", "code"), [("lost", 1011), ("drain", 1012), ("interrupt", 1012), ("cancel", 1011)])
def test_an_answer_that_is_cut_off_closes_the_socket_without_its_end(how: str, code: int) -> None:
    async def main() -> None:
        harness = Harness()
        async with SocketClient(app_of(harness), "/") as client:
            if how == "drain":
                harness.gate.drain(5.0)
            await client.ask("Hi")
            harness.engine.step(3)
            await client.settle()
            if how == "lost":
                harness.engine.fail(EngineLost("It died."))
            for run in list(harness.generator.live):
                run.interrupt() if how == "interrupt" else run.cancel()
            await client.settle()
            assert client.closing[0] == code
            assert client.closing[1]
            assert FINISHED not in client.frames
            assert bool(client.frames) == (how != "drain")

    run_scenario(main())


@pytest.mark.parametrize("path", ["/", "/v1/ws"])
def test_a_disconnect_cancels_at_once(path: str) -> None:
    async def main() -> None:
        harness = Harness()
        async with SocketClient(app_of(harness), path) as client:
            await client.ask("Hi" if path == "/" else {"type": "create", "prompt": "Hi", "on_disconnect": "cancel"})
            harness.engine.step(3)
            await client.settle()
            (run,) = harness.generator.live
            assert run.log.num_readers == 1
            client.disconnect()
            await client.settle()
            assert client.task.done()
            assert harness.engine.aborted
            assert run.status == "cancelled"
            assert run.log.num_readers == 0
        harness.finish()
        harness.check_idle()

    run_scenario(main())


@scenario
async def test_prompts_wait_in_order_up_to_a_limit() -> None:
    harness = Harness(limits=Limits(default_max_tokens=4))
    async with SocketClient(app_of(harness), "/") as client:
        for number in range(17):  # one is being answered, sixteen wait
            await client.ask(f"Prompt {number}")
        assert len(harness.engine.submitted) == 1
        while client.frames.count(FINISHED) < 17:
            harness.engine.step()
            await client.settle()
        asked = [bytes(i for i in sequence.prompt_ids if i < 256) for sequence in harness.engine.submitted]
        assert all(ids.endswith(f"Prompt {number}\n".encode()) for number, ids in enumerate(asked))
        for number in range(18):
            await client.ask(f"Prompt {number}")
        assert client.closing == (1008, "Too many prompts wait for an answer.")


@scenario
async def test_prompts_that_wait_are_bounded_in_length() -> None:
    async with SocketClient(app_of(Harness(), ws_message_bytes=100), "/") as client:
        for _ in range(3):
            await client.ask("x" * 60)
        assert client.closing[0] == 1008


# Both wires


@pytest.mark.parametrize("path", ["/", "/v1/ws"])
def test_binary_frames_are_not_understood(path: str) -> None:
    async def main() -> None:
        async with SocketClient(app_of(Harness()), path) as client:
            client.send_bytes(b"Hi")
            await client.settle()
            assert client.closing == (1003, "Only text frames are supported.")

    run_scenario(main())


@pytest.mark.parametrize("path", ["/", "/v1/ws"])
def test_silence_closes_a_socket_unless_something_runs(path: str) -> None:
    async def main() -> None:
        harness = Harness(limits=Limits(default_max_tokens=20, queue_s=1e6))
        async with SocketClient(app_of(harness, ws_idle_s=10.0), path) as client:
            await asyncio.sleep(8.0)
            await client.ask("Hi" if path == "/" else {"type": "create", "prompt": "Hi"})
            await asyncio.sleep(50.0)
            assert client.is_open()
            harness.finish()
            await asyncio.sleep(9.0)
            assert client.is_open()
            await asyncio.sleep(1.1)
            assert client.closing == (1001, "The connection was idle for too long.")
        async with SocketClient(app_of(harness, ws_idle_s=0.0), path) as client:
            await asyncio.sleep(1e6)
            assert client.is_open()

    run_scenario(main())


@pytest.mark.parametrize("path", ["/", "/v1/ws"])
def test_sockets_are_counted(path: str) -> None:
    async def main() -> None:
        app = app_of(Harness(), ws_sockets=1)
        async with SocketClient(app, path) as first:
            assert first.status == 101
            assert first.answer[b"x-request-id"]
            async with SocketClient(app, path) as second:
                assert second.status == 429
                assert second.answer[b"retry-after"] == b"5"
                assert second.answer[b"x-request-id"]
                assert b'"code":"overloaded"' in second.body
        async with SocketClient(app, path) as third:
            assert third.status == 101

    run_scenario(main())


@pytest.mark.parametrize("path", ["/", "/v1/ws"])
def test_a_draining_server_refuses_sockets(path: str) -> None:
    async def main() -> None:
        harness = Harness()
        harness.gate.drain(5.0)
        async with SocketClient(app_of(harness), path) as client:
            assert client.status == 503
            assert b'"code":"draining"' in client.body

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
        async with SocketClient(app_of(Harness(), allowed_origins="http://friend.test"), path, headers) as client:
            assert client.status == status
            assert client.answer[b"x-request-id"]

    run_scenario(main())


@scenario
async def test_without_http_answers_a_refused_socket_is_closed() -> None:
    client = SocketClient(app_of(Harness()), headers={"origin": "http://evil.test"})
    del client.scope["extensions"]
    async with client:
        assert (client.status, client.closing) == (None, (1008, ""))
