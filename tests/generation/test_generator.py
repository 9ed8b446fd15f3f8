"""Requests that are refused, before anything has started."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from tests.generation.harness import Harness, end_of, greedy, oracle, prompt_ids_of, text_of, tokenizer
from tests.waiting import idle

from tailrace.errors import (
    ContextLengthExceeded,
    Draining,
    EngineLost,
    QueueFull,
    TailraceError,
    UnsupportedParameter,
)
from tailrace.generation import Limits
from tailrace.types import GenerateRequest, Message, Sampling, TextDelta


async def refused(harness: Harness, request: GenerateRequest) -> TailraceError:
    before = harness.store.num_streams
    with pytest.raises(TailraceError) as caught:
        await harness.generator.create(request)
    assert harness.store.num_streams == before
    harness.check_idle()
    assert not harness.engine.submitted
    return caught.value


async def test_a_prompt_becomes_its_answer() -> None:
    harness = Harness()
    run = await harness.create("Where?", greedy(40))
    assert (run.status, run.log.record.model, run.log.record.prompts[0].text) == ("running", "scripted", "Where?")
    assert run.log.record.prompts[0].ids == tuple(b"Where?")
    harness.finish(run)
    assert text_of(run.log) == oracle(prompt_ids_of(run), 1, 40)
    assert end_of(run.log).usage == (6, 40)
    assert run.status == "done"
    assert harness.store.index.get(run.log.stream_id) is run.log
    assert run.log.expires_in_s is not None
    harness.check_idle()


async def test_a_chat_is_encoded_with_its_template() -> None:
    harness = Harness()
    messages = (Message("system", "Be <|user|>."), Message("user", "Hi"))
    run = await harness.generator.create(GenerateRequest(messages=messages, sampling=greedy(5)))
    shown = "".join(tokenizer().token_text(i) for i in run.log.record.prompts[0].ids)
    assert shown == "<|system|>Be <|user|>.\n<|user|>Hi\n<|assistant|>"
    assert (
        sum(i in tokenizer().special_ids for i in run.log.record.prompts[0].ids) == 3
    )  # all of them from the template
    assert run.log.record.prompts[0].text == "Be <|user|>.Hi"
    harness.finish(run)
    assert text_of(run.log) == oracle(prompt_ids_of(run), 1, 5)


async def test_an_empty_message_is_a_prompt() -> None:
    harness = Harness()
    run = await harness.generator.create(GenerateRequest(messages=(Message("user", ""),), sampling=greedy(2)))
    assert len(run.log.record.prompts[0].ids) == 3
    harness.finish(run)


@pytest.mark.parametrize("model", [None, "", "scripted"])
async def test_names_of_the_model(model: str | None) -> None:
    harness = Harness()
    run = await harness.generator.create(GenerateRequest(model=model, prompts=("Hi",), sampling=greedy(1)))
    harness.finish(run)
    assert run.log.record.model == "scripted"


@pytest.mark.parametrize(
    ("name", "sampling"),
    [
        ("top_p", Sampling(top_p=0.5)),
        ("top_k", Sampling(top_k=5)),
        ("min_p", Sampling(min_p=0.1)),
        ("repetition_penalty", Sampling(repetition_penalty=1.1)),
        ("presence_penalty", Sampling(presence_penalty=1.0)),
        ("frequency_penalty", Sampling(frequency_penalty=1.0)),
    ],
)
async def test_an_unsupported_parameter_is_named(name: str, sampling: Sampling) -> None:
    error = await refused(Harness(), GenerateRequest(prompts=("Hi",), sampling=sampling))
    assert isinstance(error, UnsupportedParameter)
    assert (error.param, error.message) == (name, f"This engine does not support {name}.")


async def test_parameters_implemented_outside_the_engine_need_no_support() -> None:
    harness = Harness()
    assert {"stop", "include_stop", "n", "seed", "max_tokens"} <= harness.generator.parameters
    run = await harness.create("Hi", Sampling(seed=3, max_tokens=4, stop=("zzz",), include_stop=True, n=2))
    harness.finish(run)
    assert end_of(run.log).status == "done"


async def test_more_choices_than_allowed() -> None:
    error = await refused(Harness(max_sequences=16), GenerateRequest(prompts=("Hi",), sampling=greedy(1, n=9)))
    assert (error.status, error.param) == (400, "n")
    harness = Harness(max_sequences=16)
    harness.finish(await harness.create("Hi", greedy(1, n=8)))


async def test_more_choices_than_the_engine_runs_at_once() -> None:
    error = await refused(Harness(max_sequences=2), GenerateRequest(prompts=("Hi",), sampling=greedy(1, n=3)))
    assert (error.status, error.param, error.retry_after_s) == (400, "n", None)


async def test_a_chat_without_a_template() -> None:
    error = await refused(Harness(has_chat=False), GenerateRequest(messages=(Message("user", "Hi"),)))
    assert isinstance(error, UnsupportedParameter)
    assert error.param == "messages"


async def test_a_value_that_the_template_does_not_use() -> None:
    values = {"enable_thinking": False}
    error = await refused(Harness(), GenerateRequest(messages=(Message("user", "Hi"),), template_values=values))
    assert isinstance(error, UnsupportedParameter)
    assert error.param == "chat_template_kwargs"


async def test_an_empty_prompt() -> None:
    error = await refused(Harness(), GenerateRequest(prompts=("",)))
    assert (error.status, error.param, error.message) == (400, "prompt", "The prompt is empty.")


@pytest.mark.parametrize(
    "request_",
    [
        GenerateRequest(prompts=("a\0b",)),
        GenerateRequest(messages=(Message("user", "\0"),)),
        GenerateRequest(prompts=("a",), sampling=Sampling(stop=("\0",))),
    ],
)
async def test_nul(request_: GenerateRequest) -> None:
    error = await refused(Harness(), request_)
    assert (error.status, error.message) == (400, "Text must not contain NUL characters.")


async def test_lone_surrogates() -> None:
    error = await refused(Harness(), GenerateRequest(prompts=("a\ud800",)))
    assert error.status == 400


# Lengths


async def test_a_prompt_that_is_too_long_is_refused_with_both_counts() -> None:
    error = await refused(Harness(context_tokens=100), GenerateRequest(prompts=("x" * 150,)))
    assert isinstance(error, ContextLengthExceeded)
    assert (error.num_prompt_tokens, error.limit_tokens, error.param) == (150, 100, "prompt")
    assert error.message == "The maximum context length is 100 tokens, and the prompt has 150. Shorten the prompt."


async def test_a_much_too_long_prompt_is_refused_without_being_encoded() -> None:
    """One token of the engine has 64 KiB, so only very long texts are certainly too long."""
    error = await refused(Harness(context_tokens=5), GenerateRequest(prompts=("x" * 500_000,)))
    assert isinstance(error, ContextLengthExceeded)
    assert 5 < error.num_prompt_tokens <= 500_000
    assert "the prompt has at least " in error.message


async def test_too_many_ids_are_refused_unread() -> None:
    error = await refused(Harness(context_tokens=5), GenerateRequest(prompts=(((10**9,) * 6,),)))
    assert isinstance(error, ContextLengthExceeded)
    assert error.num_prompt_tokens == 6


async def test_truncation_keeps_the_last_ids() -> None:
    harness = Harness(context_tokens=20)
    run = await harness.generator.create(GenerateRequest(prompts=(((10**9, 65, 66),),), truncate=2, sampling=greedy(1)))
    assert (run.log.record.prompts[0].text, run.log.record.prompts[0].ids) == ("AB", (65, 66))


async def test_a_longer_answer_than_there_is_room_for_is_shortened() -> None:
    """Clients send the largest answer that their own models can give with every request."""
    harness = Harness(context_tokens=100)
    run = await harness.create("x" * 60, greedy(32_000))
    assert run.log.record.sampling.max_tokens == 40
    harness.finish(run)
    assert end_of(run.log).usage == (60, 40)
    assert [event.finish_reason for event in run.log.events if isinstance(event, TextDelta)][-1] == "length"
    request = GenerateRequest(prompts=("x" * 100,), sampling=greedy(32_000))
    error = await refused(Harness(context_tokens=100), request)
    assert isinstance(error, ContextLengthExceeded)
    assert (error.num_prompt_tokens, error.max_tokens, error.param) == (100, 0, "prompt")


async def test_prompt_and_answer_that_are_too_long_together() -> None:
    harness = Harness(context_tokens=100)
    request = GenerateRequest(prompts=("x" * 60,), sampling=greedy(41), may_shorten=False)
    error = await refused(harness, request)
    assert isinstance(error, ContextLengthExceeded)
    assert (error.num_prompt_tokens, error.max_tokens, error.limit_tokens) == (60, 41, 100)
    assert (error.param, error.message) == (
        "max_tokens",
        "The maximum context length is 100 tokens. The prompt has 60, and the answer may have 41. "
        "Shorten the prompt, or ask for a shorter answer.",
    )
    run = await harness.create("x" * 60, greedy(40))
    harness.finish(run)
    assert end_of(run.log).usage == (60, 40)


async def test_more_answers_than_the_memory_has_room_for() -> None:
    error = await refused(Harness(kv_tokens=8), GenerateRequest(prompts=("x",), sampling=greedy(1, n=4)))
    assert (error.status, error.param) == (400, "n")
    assert error.message == "The engine's memory has no room for 4 answers at once. Ask for fewer."


async def test_choices_share_the_memory() -> None:
    harness = Harness(context_tokens=1_000, kv_tokens=200)
    request = GenerateRequest(prompts=("x" * 50,), sampling=greedy(50, n=2), may_shorten=False)
    error = await refused(harness, request)
    assert isinstance(error, ContextLengthExceeded)
    assert error.limit_tokens < 100
    run = await harness.create("x" * 50, greedy(error.limit_tokens - 50, n=2))
    harness.finish(run)
    assert end_of(run.log).status == "done"


async def test_memory_smaller_than_the_default_answer_still_serves() -> None:
    harness = Harness(context_tokens=8_000, kv_tokens=100)
    run = await harness.create("x" * 10, greedy())
    harness.finish(run)
    assert end_of(run.log).status == "done"
    num_prompt_tokens, num_completion_tokens = end_of(run.log).usage
    assert num_prompt_tokens + num_completion_tokens == harness.generator.limit_tokens(1) <= 100


async def test_the_default_answer_is_as_long_as_the_window_lets_it() -> None:
    harness = Harness(context_tokens=100, limits=Limits(default_max_tokens=70))
    short, long = await harness.create("x" * 10, greedy()), await harness.create("x" * 90, greedy())
    harness.finish(short, long)
    assert end_of(short.log).usage == (10, 70)
    assert end_of(long.log).usage == (90, 10)
    error = await refused(Harness(context_tokens=100), GenerateRequest(prompts=("x" * 100,), sampling=greedy()))
    assert isinstance(error, ContextLengthExceeded)


async def test_truncation_keeps_the_end() -> None:
    harness = Harness(context_tokens=100)
    request = GenerateRequest(prompts=("a" * 5_000 + "bcd",), truncate=3, sampling=greedy(4), on_disconnect="detach")
    run = await harness.generator.create(request)
    assert run.log.record.prompts[0].ids == tuple(b"bcd")
    harness.finish(run)
    assert end_of(run.log).usage == (3, 4)
    assert text_of(run.log) == oracle(tuple(b"bcd"), 1, 4)
    longer = await harness.generator.create(GenerateRequest(prompts=("abc",), truncate=99, sampling=greedy(1)))
    assert longer.log.record.prompts[0].ids == tuple(b"abc")


@contextmanager
def threads_busy() -> Iterator[None]:
    """Occupy the event loop's threads: other work for a thread waits until the end of the block."""
    free = threading.Event()
    threads = ThreadPoolExecutor(1)
    threads.submit(free.wait)
    asyncio.get_running_loop().set_default_executor(threads)
    try:
        yield
    finally:
        free.set()


async def test_a_long_prompt_is_encoded_in_a_thread() -> None:
    harness = Harness(context_tokens=65_536, kv_tokens=65_536)
    with threads_busy():
        creating = asyncio.create_task(harness.create("x" * 20_000, greedy(3)))
        await idle()
        assert not creating.done()  # the loop goes on meanwhile
    run = await creating
    harness.finish(run)
    assert end_of(run.log).usage == (20_000, 3)


async def test_a_request_cancelled_while_it_is_encoded_leaves_nothing() -> None:
    harness = Harness(context_tokens=65_536, kv_tokens=65_536)
    with threads_busy():
        creating = asyncio.create_task(harness.create("x" * 20_000, greedy(3)))
        await idle()
        creating.cancel()
        await asyncio.wait([creating])
    assert creating.cancelled()
    assert harness.store.num_streams == 0
    harness.check_idle()


# Room


async def test_a_full_queue() -> None:
    harness = Harness(max_sequences=1, max_requests=2)
    runs = [await harness.create() for _ in range(2)]
    with pytest.raises(QueueFull) as caught:
        await harness.create()
    assert 1 <= (caught.value.retry_after_s or 0) <= 30
    assert harness.store.num_streams == 2
    harness.finish(*runs)
    harness.finish(await harness.create())
    harness.check_idle()


async def test_draining() -> None:
    harness = Harness()
    run, longer = await harness.create("Hi", greedy(5)), await harness.create("Hi", greedy(50))
    before = harness.generator.state == "ready"
    harness.gate.drain(5.0)
    assert (before, harness.generator.state == "ready") == (True, False)
    with pytest.raises(Draining):
        await harness.create()
    drained = asyncio.create_task(harness.generator.wait_idle())
    await idle()
    assert not drained.done()
    harness.engine.step(5)
    await idle()
    assert (run.status, drained.done()) == ("done", False)
    harness.finish(longer)
    await drained
    await harness.generator.wait_idle()  # at once
    harness.check_idle()


async def test_an_engine_that_does_not_start_again() -> None:
    harness = Harness()
    harness.engine.failures = 3
    harness.engine.fail(EngineLost("gone"))
    error = await refused(harness, GenerateRequest(prompts=("Hi",)))
    assert isinstance(error, EngineLost)
    assert (error.status, error.retry_after_s) == (503, 4.0)
    harness.engine.restart()
    harness.finish(await harness.create())


# Seeds


@pytest.mark.parametrize("seed", [0, 7, -1, -(2**63), 2**63 - 1, 2**64 - 1])
async def test_choices_have_different_valid_seeds(seed: int) -> None:
    harness = Harness()
    run = await harness.create("Hi", greedy(12, seed=seed, n=2))
    assert run.log.record.seed == seed
    given = [sequence.sampling.seed for sequence in harness.engine.submitted]
    assert given == [seed % 2**64, (seed + 1) % 2**64]
    harness.finish(run)
    for choice in (0, 1):
        assert text_of(run.log, choice) == oracle(prompt_ids_of(run), seed + choice, 12)
    assert text_of(run.log, 0) != text_of(run.log, 1)
    assert end_of(run.log).usage == (2, 24)


async def test_a_missing_seed_is_drawn() -> None:
    harness = Harness()
    one, other = [await harness.create("Hi", greedy(12, seed=None)) for _ in range(2)]
    harness.finish(one, other)
    assert one.log.record.seed != other.log.record.seed
    assert text_of(one.log) == oracle(prompt_ids_of(one), one.log.record.seed, 12)
