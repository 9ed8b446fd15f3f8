"""The life of a request: queued, admitted, running, finished, and all other ends."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest
from tests.generation.harness import Harness, end_of, greedy, oracle, prompt_ids_of, text_of
from tests.streams.virtual_time import run as run_scenario
from tests.waiting import idle

from tailrace.errors import EngineError, EngineLost, LeaseLost
from tailrace.generation import Limits
from tailrace.streams import Reader
from tailrace.types import End, Failure, GenerateRequest, Record, Released, Usage, new_stream_id

# Cancel


async def test_cancel_while_queued_frees_the_slot_at_once() -> None:
    harness = Harness(max_sequences=1)
    running, queued, third = [await harness.create() for _ in range(3)]
    assert (running.status, queued.status, third.status) == ("running", "queued", "queued")
    queued.cancel()
    assert queued.log.events == [End("cancelled", Usage(2, 0))]
    assert (queued.status, harness.gate.num_waiting) == ("cancelled", 1)
    assert harness.engine.aborted == []  # the engine never heard of it
    harness.finish(running, third)
    assert text_of(third.log) == oracle(prompt_ids_of(third), 1, 20)
    assert len(harness.engine.submitted) == 2
    harness.check_idle()


async def test_cancel_while_running_frees_the_slot_when_the_engine_is_done() -> None:
    harness = Harness(max_sequences=1)
    run, queued = await harness.create(), await harness.create()
    harness.engine.step(3)
    run.cancel()
    assert end_of(run.log) == End("cancelled", Usage(2, 3))
    assert harness.engine.aborted == [run.choices[0].sequence.sequence_id]
    assert (harness.gate.num_running, queued.status) == (1, "queued")
    harness.engine.step()
    assert (harness.gate.num_running, queued.status) == (1, "running")
    harness.finish(queued)
    harness.check_idle()


async def test_cancel_aborts_every_choice() -> None:
    harness = Harness()
    run = await harness.create("Hi", greedy(50, n=3))
    harness.engine.step(2)
    run.cancel()
    assert sorted(harness.engine.aborted) == sorted(choice.sequence.sequence_id for choice in run.choices)
    assert harness.gate.num_running == 1
    harness.engine.step()
    assert end_of(run.log) == End("cancelled", Usage(2, 6))
    harness.check_idle()


async def test_cancel_before_the_first_token() -> None:
    harness = Harness()
    run = await harness.create()
    run.cancel()
    harness.engine.step()
    assert run.log.events == [End("cancelled", Usage(2, 0))]
    harness.check_idle()


async def test_cancel_twice_and_cancel_after_the_end() -> None:
    harness = Harness()
    run, other = await harness.create("Hi", greedy(3)), await harness.create("Hi", greedy(30))
    harness.engine.step(3)
    before = list(run.log.events)
    run.cancel()
    run.interrupt()
    run.fail(EngineError("message"))
    assert run.log.events == before
    assert end_of(run.log).status == "done"
    other.cancel()
    other.cancel()
    assert harness.engine.aborted == [other.choices[0].sequence.sequence_id]
    harness.engine.step()
    other.cancel()
    assert end_of(other.log).status == "cancelled"
    harness.check_idle()


@pytest.mark.parametrize("cancelled_first", [True, False])
async def test_cancel_and_the_last_token_at_once(cancelled_first: bool) -> None:
    """The last delta arrives just before or just after the cancellation."""
    harness = Harness()
    run = await harness.create("Hi", greedy(3))
    last = harness.engine.compute(3)
    if cancelled_first:
        run.cancel()
        harness.engine.deliver(last)
    else:
        harness.engine.deliver(last)
        run.cancel()
    end = end_of(run.log)
    assert (end.status, end.usage) == (("cancelled", Usage(2, 0)) if cancelled_first else ("done", Usage(2, 3)))
    assert (end.spent is None) == cancelled_first
    harness.engine.step()  # the abort of a sequence that is no longer there
    harness.check_idle()


async def test_cancel_when_one_of_two_choices_is_complete() -> None:
    harness = Harness()
    run = await harness.create("Hi", greedy(40, stop=(oracle(tuple(b"Hi"), 1, 4)[-3:],), n=2))
    while not run.choices[0].is_complete:
        harness.engine.step()
    assert run.log.end is None
    expected = sorted(choice.sequence.sequence_id for choice in run.choices)
    run.cancel()
    assert end_of(run.log).status == "cancelled"
    harness.finish(run)
    assert sorted(harness.engine.aborted) == expected
    harness.check_idle()


async def test_interrupt() -> None:
    harness = Harness(max_sequences=1)
    running, queued = await harness.create(), await harness.create()
    harness.engine.step(2)
    for run in (running, queued):
        run.interrupt()
        end = end_of(run.log)
        assert (end.status, end.failure and end.failure.code) == ("interrupted", "interrupted")
    harness.engine.step()
    harness.check_idle()


# The engine goes


async def test_an_engine_is_lost_and_replaced() -> None:
    harness = Harness(max_sequences=2)
    two, queued = await harness.create("Hi", greedy(20, n=2)), await harness.create("Ho", greedy(5))
    harness.engine.step(3)
    before = list(two.log.events)
    harness.engine.fail(EngineLost("The engine stopped: killed by SIGKILL."))
    assert two.log.events == before
    assert (two.status, queued.status, harness.gate.num_running) == ("running", "queued", 1)
    harness.engine.restart()
    harness.finish(two, queued)
    assert two.log.events[: len(before)] == before
    assert [text_of(two.log, choice) for choice in (0, 1)] == [oracle(prompt_ids_of(two), 1 + n, 20) for n in (0, 1)]
    assert text_of(queued.log) == oracle(prompt_ids_of(queued), 1, 5)
    assert (end_of(two.log).continuity, end_of(queued.log).continuity) == ("replayed", None)
    assert end_of(two.log).usage == Usage(2, 40)
    harness.check_idle()


async def test_a_loss_after_the_cancellation_frees_the_slot() -> None:
    harness = Harness()
    run = await harness.create()
    run.cancel()
    harness.engine.fail(EngineLost("gone"))
    assert run.log.events == [End("cancelled", Usage(2, 0))]
    harness.engine.restart()
    harness.check_idle()


async def test_a_cancellation_without_an_engine_frees_the_slot() -> None:
    harness = Harness(max_sequences=1)
    run, queued = await harness.create(), await harness.create()
    harness.engine.step(2)
    harness.engine.fail(EngineLost("gone"))
    run.cancel()
    assert end_of(run.log) == End("cancelled", Usage(2, 2))
    assert harness.gate.num_running == 0
    harness.engine.restart()
    harness.finish(queued)
    harness.check_idle()


async def test_an_engine_that_is_gone_when_the_request_is_admitted() -> None:
    """The gate is still open."""
    harness = Harness(max_sequences=1)
    harness.engine.is_ready = False
    run, next_run = await harness.create(), await harness.create("Hi", greedy(5, n=1))
    assert (run.status, next_run.status) == ("running", "queued")
    harness.engine.restart()
    harness.finish(run, next_run)
    assert text_of(run.log) == oracle(prompt_ids_of(run), 1, 20)
    harness.check_idle()


async def test_a_stream_taken_over_by_another_server_is_handed_over() -> None:
    harness = Harness(max_sequences=2)
    running, queued = await harness.create("Hi", greedy(20, n=2)), await harness.create("Ho")
    harness.engine.step()
    seen = list(running.log.events)
    harness.store.close()  # from now on it refuses whatever comes, as it does when another one writes the stream
    with Reader(running.log, running.log.last_seq) as reader:
        harness.engine.step()
        ending = await reader.next()
    assert ending == Released(
        running.log.stream_id, len(seen), Failure("lease_lost", "Another server continues this stream.")
    )
    assert (running.log.end, running.log.events) == (None, seen)
    assert len(harness.engine.aborted) == 2
    queued.cancel()
    assert queued.log.end is None
    assert isinstance(queued.log.released, LeaseLost)
    harness.engine.step()
    await harness.generator.wait_idle()
    harness.check_idle()


async def test_a_sequence_that_the_engine_refuses() -> None:
    harness = Harness()
    harness.engine.engine.capabilities = Harness(context_tokens=3).engine.engine.capabilities
    run = await harness.create("Hi", greedy(5))
    harness.finish(run)
    failure = end_of(run.log).failure
    assert failure is not None
    assert failure.code == "sequence_failed"
    harness.check_idle()


# What was cached


async def test_the_end_says_how_much_of_the_prompts_was_cached() -> None:
    harness = Harness(options={"caches": 8})
    cold = await harness.create("Hello there")
    harness.finish(cold)
    warm = await harness.create("Hello you", greedy(20, n=2))
    harness.finish(warm)
    assert [end_of(run.log).num_cached_tokens for run in (cold, warm)] == [0, len("Hello ")]
    request = GenerateRequest(prompts=("Hello you", "Hello there"), sampling=greedy(20, n=2))
    both = await harness.generator.create(request)
    harness.finish(both)
    assert end_of(both.log).num_cached_tokens == len("Hello yo") + len("Hello ther")
    harness.check_idle()


async def test_an_engine_that_does_not_say_what_was_cached() -> None:
    harness = Harness()
    run = await harness.create()
    harness.finish(run)
    assert end_of(run.log).num_cached_tokens is None


async def test_an_answer_that_goes_on_counts_only_its_prompt_as_cached() -> None:
    """The engine that replaces a lost one reads the answer so far as a part of its prompt."""
    harness = Harness(options={"caches": 8})
    run = await harness.create()
    harness.engine.step(6)
    harness.engine.fail(EngineLost("gone"))
    harness.engine.restart()
    harness.finish(run)
    end = end_of(run.log)
    assert end.continuity is not None
    assert end.num_cached_tokens == 0


# Time


def test_the_wait_in_the_queue_is_bounded() -> None:
    async def scenario() -> None:
        harness = Harness(max_sequences=1, limits=Limits(queue_s=60.0))
        running = await harness.create("Hi", greedy(500))
        await asyncio.sleep(30)
        queued = await harness.create()
        await asyncio.sleep(59)
        assert queued.status == "queued"
        await asyncio.sleep(2)
        assert queued.log.events == [
            End(
                "error",
                Usage(2, 0),
                Failure("queue_timeout", "The model was too busy to begin this request in time."),
            )
        ]
        assert harness.gate.num_waiting == 0
        assert running.status == "running"
        running.cancel()
        harness.engine.step()
        harness.check_idle()

    run_scenario(scenario())


def test_the_time_in_the_queue_does_not_count_once_it_runs() -> None:
    async def scenario() -> None:
        harness = Harness(max_sequences=1, limits=Limits(queue_s=60.0))
        first, second = await harness.create("Hi", greedy(5)), await harness.create("Hi", greedy(5))
        await asyncio.sleep(50)
        harness.engine.step(5)
        assert first.status == "done"
        assert second.status == "running"
        await asyncio.sleep(10_000)
        assert second.status == "running"
        harness.finish(second)
        assert end_of(second.log).status == "done"

    run_scenario(scenario())


def test_a_stream_without_readers_is_cancelled_after_its_linger_time() -> None:
    async def scenario() -> None:
        harness = Harness(limits=Limits(linger_s=60.0))
        ours = await harness.generator.create(GenerateRequest(prompts=("Hi",), on_disconnect="detach"))
        theirs = await harness.create(linger_s=5.0)
        await asyncio.sleep(4.9)
        assert (ours.status, theirs.status) == ("running", "running")
        await asyncio.sleep(0.2)
        assert (ours.status, theirs.status) == ("running", "cancelled")
        await asyncio.sleep(54)
        assert ours.status == "running"
        await asyncio.sleep(1)
        assert ours.status == "cancelled"
        harness.engine.step()
        harness.check_idle()

    run_scenario(scenario())


def test_a_queued_stream_without_readers_is_cancelled() -> None:
    async def scenario() -> None:
        harness = Harness(max_sequences=1)
        running, queued = await harness.create(), await harness.create(linger_s=5.0)
        await asyncio.sleep(5.1)
        assert (running.status, queued.status, harness.gate.num_waiting) == ("running", "cancelled", 0)

    run_scenario(scenario())


def test_a_reader_stops_the_linger_timer_and_leaving_starts_it() -> None:
    async def scenario() -> None:
        harness = Harness()
        run = await harness.create(linger_s=5.0)
        await asyncio.sleep(4)
        with Reader(run.log):
            await asyncio.sleep(1_000)
            with Reader(run.log):
                pass
            await asyncio.sleep(1_000)
        await asyncio.sleep(4)
        with Reader(run.log):
            await asyncio.sleep(1_000)
        assert run.status == "running"
        await asyncio.sleep(4.9)
        assert run.status == "running"
        await asyncio.sleep(0.2)
        assert run.status == "cancelled"

    run_scenario(scenario())


def test_the_linger_timer_of_a_finished_stream_does_nothing() -> None:
    async def scenario() -> None:
        harness = Harness()
        run = await harness.create("Hi", greedy(3), linger_s=5.0)
        harness.finish(run)
        before = list(run.log.events)
        with Reader(run.log):
            pass
        await asyncio.sleep(10)
        assert run.log.events == before

    run_scenario(scenario())


async def test_expired_streams_are_freed_without_the_garbage_collector() -> None:
    gc.collect()
    gc.disable()
    harness = Harness(max_sequences=1)
    first, queued = await harness.create("Hi", greedy(3)), await harness.create("Hi", greedy(3))
    queued.cancel()
    harness.finish(first)
    for run in (first, queued):
        harness.store.index.delete(run.log)
    watched = [weakref.ref(run) for run in (first, queued)]
    del first, queued, run
    try:
        assert [watch() for watch in watched] == [None, None]
    finally:
        gc.enable()


async def test_without_linger_time_the_last_reader_cancels() -> None:
    harness = Harness()
    run = await harness.generator.create(
        GenerateRequest(prompts=("Hi",), sampling=greedy(50), on_disconnect="cancel", linger_s=60)
    )
    first, second = Reader(run.log), Reader(run.log)
    first.__enter__()
    second.__enter__()
    harness.engine.step()
    first.__exit__(None, None, None)
    assert run.status == "running"
    second.__exit__(None, None, None)
    assert end_of(run.log) == End("cancelled", Usage(2, 1))
    harness.engine.step()
    harness.check_idle()


async def test_without_linger_time_leaving_cancels_a_queued_stream() -> None:
    harness = Harness(max_sequences=1)
    running = await harness.create()
    queued = await harness.generator.create(GenerateRequest(prompts=("Hi",), on_disconnect="cancel"))
    with Reader(queued.log):
        assert queued.status == "queued"
    assert (queued.status, harness.gate.num_waiting) == ("cancelled", 0)
    harness.finish(running)
    harness.check_idle()


async def test_without_linger_time_a_stream_of_another_server_needs_a_reader() -> None:
    """The server that had it is gone. With a reader here it goes on, and without one it ends."""
    harness = Harness()
    prompts = await harness.generator.prompts.encode(GenerateRequest(prompts=("Hi",)))
    leases = [
        await harness.store.open(Record(new_stream_id(), 1.0, "scripted", prompts=prompts, sampling=greedy(20)))
        for _ in range(2)
    ]
    read, unread = (lease.log for lease in leases)
    with Reader(read):
        assert harness.generator.recover(leases) == 1
        assert end_of(unread).status == "interrupted"
        (run,) = harness.generator.live
        harness.finish(run)
    assert end_of(read).status == "done"
    assert text_of(read) == oracle(prompts[0].ids, 1, 20)
    harness.check_idle()


async def test_a_reader_sees_everything_and_then_the_end() -> None:
    harness = Harness()
    run = await harness.create("Hi", greedy(30))

    async def read() -> list[object]:
        seen: list[object] = []
        with Reader(run.log) as reader:
            while isinstance(taken := await reader.next(), list):
                seen.extend(taken)
        return [*seen, taken]

    reading = asyncio.create_task(read())
    while run.log.end is None:
        await idle()
        harness.engine.step(2)
    assert await reading == run.log.events
