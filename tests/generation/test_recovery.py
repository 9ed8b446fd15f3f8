"""Streams whose engine dies: replayed, continued or ended."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples
from tests.generation.engine_failures import CRASH, KILL, code_of, ids_of, restart_engine
from tests.generation.harness import Harness, end_of, greedy, text_of
from tests.streams.virtual_time import run as run_scenario

from tailrace.generation import Limits


@settings(max_examples=examples(60), deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_tokens=st.integers(1, 40),
    deaths=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 5)), max_size=2),
    stop=st.sampled_from([(), (" near",), ("🐕",), (" the dog", " old br", "🌊 ")]),
)
def test_at_any_death_the_stream_is_that_without_a_death(
    seed: int, num_tokens: int, deaths: list[tuple[int, int]], stop: tuple[str, ...]
) -> None:
    async def scenario() -> None:
        alone = Harness()
        undisturbed = await alone.create("Hi", greedy(num_tokens, seed=seed, stop=stop))
        alone.finish(undisturbed)

        harness = Harness()
        run = await harness.create("Hi", greedy(num_tokens, seed=seed, stop=stop))
        for num_steps, at_once in deaths:
            for _ in range(num_steps):
                harness.engine.step(at_once)
            before = list(run.log.events)
            restart_engine(harness, KILL)
            assert run.log.events == before
        harness.finish(run)
        assert text_of(run.log) == text_of(undisturbed.log)
        assert ids_of(run) == ids_of(undisturbed)
        assert (end_of(run.log).status, end_of(run.log).usage) == ("done", end_of(undisturbed.log).usage)
        assert end_of(run.log).continuity in (None, "replayed")
        harness.check_idle()

    run_scenario(scenario())


async def test_another_answer_is_never_shown_over_the_first() -> None:
    harness = Harness()
    run = await harness.create("Hi", greedy(20))
    harness.engine.step(6)
    harness.engine.step(3)
    before = ids_of(run)
    harness.engine.seed_offset = 5
    restart_engine(harness, KILL)
    harness.finish(run)
    assert ids_of(run)[:9] == before
    assert len(ids_of(run)) == 20
    assert (end_of(run.log).status, end_of(run.log).continuity) == ("done", "continued")
    # It goes on behind what was delivered, with what is left of its tokens.
    assert harness.engine.submitted[-1].prompt_ids == (*b"Hi", *before)
    assert harness.engine.submitted[-1].sampling.max_tokens == 11
    assert len(harness.engine.submitted) == 3
    harness.check_idle()


async def test_a_continued_stream_can_be_replayed() -> None:
    harness = Harness()
    run = await harness.create("Hi", greedy(20))
    harness.engine.step(9)
    harness.engine.seed_offset = 5
    restart_engine(harness, KILL)
    harness.engine.step()  # the replay, which says something else
    harness.engine.step(4)  # the continuation
    before = ids_of(run)
    assert len(before) == 13
    restart_engine(harness, KILL)
    harness.finish(run)
    assert ids_of(run)[:13] == before
    assert (len(ids_of(run)), end_of(run.log).continuity) == (20, "continued")
    assert len(harness.engine.submitted) == 4
    harness.check_idle()


async def test_an_exact_request_gets_an_error_instead_of_another_answer() -> None:
    harness = Harness()
    run = await harness.create("Hi", greedy(20), exact=True)
    harness.engine.step(9)
    harness.engine.seed_offset = 5
    restart_engine(harness, KILL)
    harness.finish(run)
    failure = end_of(run.log).failure
    assert failure is not None
    assert failure.code == "diverged"
    assert len(ids_of(run)) == 9
    harness.check_idle()


async def test_a_replay_that_ends_earlier_is_another_answer() -> None:
    harness = Harness()
    run = await harness.create("Hi", greedy(20))
    harness.engine.step(9)
    before = ids_of(run)
    harness.engine.fail(KILL)
    harness.engine.restart(eos_after=5)
    harness.finish(run)
    assert ids_of(run)[:9] == before
    assert end_of(run.log).continuity == "continued"
    harness.check_idle()


def test_the_time_in_which_streams_replay_does_not_count_as_waiting() -> None:
    async def scenario() -> None:
        harness = Harness(max_sequences=1, limits=Limits(queue_s=10.0))
        running, waiting = await harness.create("Hi", greedy(9)), await harness.create("Ho", greedy(9))
        for number in range(30):
            harness.engine.step()
            await asyncio.sleep(1)
            if number == 7:
                restart_engine(harness, KILL)
        assert (code_of(running), code_of(waiting)) == (None, None)
        harness.check_idle()

    run_scenario(scenario())


def test_a_request_waits_for_a_limited_time_without_an_engine() -> None:
    async def scenario() -> None:
        harness = Harness(max_sequences=1, limits=Limits(queue_s=10.0))
        running, waiting = await harness.create("Hi", greedy(20)), await harness.create("Ho", greedy(20))
        for _ in range(3):
            assert waiting.log.end is None
            harness.engine.fail(KILL)
            await asyncio.sleep(110)
            harness.engine.restart()
        assert code_of(waiting) == "queue_timeout"
        harness.finish(running)

    run_scenario(scenario())


def test_a_model_that_is_unloaded_during_a_trial_can_be_used_again() -> None:
    async def scenario() -> None:
        harness = Harness()
        killer = await harness.create("K", greedy(20))
        harness.engine.step(2)
        killer.cancel()
        restart_engine(harness, CRASH)
        assert harness.engine.progress_of("K") == [0]  # the trial of a request whose client left
        was_busy = harness.generator.is_busy
        harness.generator.on_unload()
        harness.engine.is_ready = False
        harness.engine.engine.close()
        harness.engine.receivers, harness.engine.num_delivered = {}, {}
        await asyncio.sleep(100)
        assert (was_busy, harness.generator.is_busy) == (True, False)
        harness.engine.is_ready = True
        harness.generator.on_load()
        run = await harness.create("H", greedy(5))
        harness.finish(run)
        assert end_of(run.log).status == "done"
        harness.check_idle()

    run_scenario(scenario())


def test_the_time_without_an_engine_does_not_count_as_waiting() -> None:
    async def scenario() -> None:
        harness = Harness(max_sequences=1, limits=Limits(queue_s=10.0))
        running, waiting = await harness.create("Hi", greedy(20)), await harness.create("Ho", greedy(20))
        await asyncio.sleep(8)
        for number in (1, 2):
            harness.engine.fail(KILL)
            await asyncio.sleep(60)
            assert waiting.log.end is None
            harness.engine.restart()
            harness.engine.step(number)
        await asyncio.sleep(1.5)
        assert waiting.log.end is None
        await asyncio.sleep(1.0)
        failure = end_of(waiting.log).failure
        assert failure is not None
        assert failure.code == "queue_timeout"
        harness.finish(running)

    run_scenario(scenario())


# The engine stays away


@pytest.mark.parametrize("first_s", [120.0, 70.0, 1000.0])
def test_streams_wait_for_an_engine_for_a_limited_time(first_s: float) -> None:
    """Also if the limit is changed while they wait."""

    async def scenario() -> None:
        harness = Harness(max_sequences=1, limits=Limits(queue_s=500.0, recover_s=first_s))
        running, queued = await harness.create(), await harness.create()
        harness.engine.step(3)
        harness.engine.fail(KILL)
        await asyncio.sleep(60)
        harness.generator.use(Limits(queue_s=500.0, recover_s=120.0))
        await asyncio.sleep(59)
        assert (running.status, queued.status) == ("running", "queued")
        assert harness.generator.is_live
        await asyncio.sleep(2)
        for run in (running, queued):
            failure = end_of(run.log).failure
            assert failure is not None
            assert failure.code == "engine_unavailable"
        before = harness.generator.is_live
        harness.engine.restart()
        assert (before, harness.generator.is_live) == (False, True)
        after = await harness.create("Hi", greedy(5))
        harness.finish(after)
        harness.check_idle()

    run_scenario(scenario())
