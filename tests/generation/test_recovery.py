"""What becomes of streams whose engine dies: replayed, continued, quarantined or given up."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.generation.world import World, asked, end_of, greedy, oracle, text_of
from tests.streams.virtual_time import run as run_scenario

from tailrace.errors import EngineLost, PoisonRequest
from tailrace.generation import Limits, Run
from tailrace.types import GenerateRequest, Sampling, TextDelta

CRASH = EngineLost("The engine stopped: killed by SIGSEGV.", is_crash=True)
KILL = EngineLost("The engine stopped: killed by SIGKILL.")


def ids_of(run: Run) -> list[int]:
    return [i for event in run.log.events if isinstance(event, TextDelta) for i in event.token_ids]


def die(world: World, error: EngineLost) -> None:
    world.engine.lose(error)
    world.engine.come_back()


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_tokens=st.integers(1, 40),
    deaths=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 5)), max_size=2),
    stop=st.sampled_from([(), (" near",), ("🐕",), (" the dog", " old br", "🌊 ")]),
)
def test_whenever_it_dies_the_stream_is_the_undisturbed_one(
    seed: int, num_tokens: int, deaths: list[tuple[int, int]], stop: tuple[str, ...]
) -> None:
    async def scenario() -> None:
        alone = World()
        undisturbed = await alone.create("Hi", greedy(num_tokens, seed=seed, stop=stop))
        alone.finish(undisturbed)

        world = World()
        run = await world.create("Hi", greedy(num_tokens, seed=seed, stop=stop))
        for num_steps, at_once in deaths:
            for _ in range(num_steps):
                world.engine.step(at_once)
            before = list(run.log.events)
            die(world, KILL)
            assert run.log.events == before
        world.finish(run)
        assert text_of(run.log) == text_of(undisturbed.log)
        assert ids_of(run) == ids_of(undisturbed)
        assert (end_of(run.log).status, end_of(run.log).usage) == ("done", end_of(undisturbed.log).usage)
        assert end_of(run.log).continuity in (None, "replayed")
        world.check_idle()

    run_scenario(scenario())


async def test_another_answer_is_never_shown_over_the_first() -> None:
    world = World()
    run = await world.create("Hi", greedy(20))
    world.engine.step(6)
    world.engine.step(3)
    before = ids_of(run)
    world.engine.twist = 5
    die(world, KILL)
    world.finish(run)
    assert ids_of(run)[:9] == before
    assert len(ids_of(run)) == 20
    assert (end_of(run.log).status, end_of(run.log).continuity) == ("done", "continued")
    # It goes on behind what was delivered, with what is left of its tokens.
    assert world.engine.submitted[-1].prompt_ids == (*b"Hi", *before)
    assert world.engine.submitted[-1].sampling.max_tokens == 11
    assert len(world.engine.submitted) == 3
    world.check_idle()


async def test_what_was_continued_can_be_replayed() -> None:
    world = World()
    run = await world.create("Hi", greedy(20))
    world.engine.step(9)
    world.engine.twist = 5
    die(world, KILL)
    world.engine.step()  # the replay, which says something else
    world.engine.step(4)  # the continuation
    before = ids_of(run)
    assert len(before) == 13
    die(world, KILL)
    world.finish(run)
    assert ids_of(run)[:13] == before
    assert (len(ids_of(run)), end_of(run.log).continuity) == (20, "continued")
    assert len(world.engine.submitted) == 4
    world.check_idle()


async def test_who_asks_for_exactness_gets_an_error_rather_than_another_answer() -> None:
    world = World()
    request = GenerateRequest(prompts=("Hi",), sampling=greedy(20), on_disconnect="detach", linger_s=1e6, exact=True)
    run = await world.generator.create(request)
    world.engine.step(9)
    world.engine.twist = 5
    die(world, KILL)
    world.finish(run)
    failure = end_of(run.log).failure
    assert failure is not None
    assert failure.code == "diverged"
    assert len(ids_of(run)) == 9
    world.check_idle()


async def test_a_replay_that_ends_sooner_is_another_answer_too() -> None:
    world = World()
    run = await world.create("Hi", greedy(20))
    world.engine.step(9)
    before = ids_of(run)
    world.engine.lose(KILL)
    world.engine.engine._eos_after = 5
    world.engine.come_back()
    world.finish(run)
    assert ids_of(run)[:9] == before
    assert end_of(run.log).continuity == "continued"
    world.check_idle()


# Which request was it?


async def test_one_that_crashes_its_engine_twice_is_not_tried_again() -> None:
    world = World(options={"fault_after": 3.0})
    poison = await world.create("Hi", greedy(20))
    for _ in range(2):
        world.engine.step(3)
        die(world, CRASH)
    failure = end_of(poison.log).failure
    assert failure is not None
    assert failure.code == "poison_request"
    world.check_idle()
    with pytest.raises(PoisonRequest):
        await world.create("Hi", greedy(20, seed=77))
    other = await world.create("Ho", greedy(5))
    world.finish(other)


@pytest.mark.parametrize("position", range(4))
async def test_the_poison_is_found_and_its_neighbours_finish(position: int) -> None:
    """One of four takes the engine down with its ninth token, whatever the others do."""
    world = World(max_sequences=8)
    runs = []
    for number in range(4):
        runs.append(await world.create(f"Hi {number}", greedy(20)))
        world.engine.step(2)
    poison = runs[position]
    num_deaths = 0
    for _ in range(300):
        if all(run.log.end is not None for run in runs):
            break
        world.engine.step()
        if poison.log.end is None and not poison.is_stranded and poison.choices[0].place == 9:
            num_deaths += 1
            die(world, CRASH)
    assert num_deaths == 2
    failure = end_of(poison.log).failure
    assert failure is not None
    assert failure.code == "poison_request"
    for run in runs:
        if run is not poison:
            assert text_of(run.log) == oracle(asked(run), 1, 20)
    world.finish()
    world.check_idle()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 12), max_size=25), st.integers(1, 4))
def test_whoever_is_only_near_when_engines_are_killed_is_no_poison(steps: list[int], num_runs: int) -> None:
    """Killed at random: no two places need be the same, and three are not, but in the very beginning."""

    async def scenario() -> None:
        world = World()
        runs = [await world.create(f"Hi {number}", greedy(30)) for number in range(num_runs)]
        last: list[int] = []
        for num_steps in steps:
            for _ in range(num_steps):
                world.engine.step()
            places = [run._place() for run in runs]
            if places == last:
                continue
            last = places
            die(world, KILL)
        world.finish(*runs)
        for run in runs:
            assert text_of(run.log) == oracle(asked(run), 1, 30)
            assert end_of(run.log).status == "done"
        world.check_idle()

    run_scenario(scenario())


async def test_of_twins_each_is_tried_alone() -> None:
    """They are at the same place always, so that only one after the other can tell."""
    world = World(max_sequences=8)
    runs = [await world.create(f"Hi {number}", greedy(20)) for number in range(3)]
    num_deaths = 0
    for _ in range(300):
        if all(run.log.end is not None for run in runs):
            break
        world.engine.step()
        if runs[1].log.end is None and not runs[1].is_stranded and runs[1].choices[0].place == 5:
            num_deaths += 1
            die(world, CRASH)
    assert num_deaths <= 3
    assert [end_of(run.log).status for run in runs] == ["done", "error", "done"]
    for run in (runs[0], runs[2]):
        assert text_of(run.log) == oracle(asked(run), 1, 20)
    world.check_idle()


async def test_after_a_crash_the_youngest_waits_for_the_others() -> None:
    world = World(max_sequences=8)
    old, young = await world.create("Hi", greedy(20)), await world.create("Ho", greedy(20))
    world.engine.step(5)
    waiting = await world.create("Ha", Sampling(max_tokens=5, seed=1, temperature=0.0))
    die(world, CRASH)
    assert [run.is_stranded for run in (old, young, waiting)] == [False, False, True]
    world.engine.step(5)
    world.engine.step()
    assert not waiting.is_stranded
    world.finish(old, young, waiting)
    world.check_idle()


# The engine stays away


def test_streams_do_not_wait_for_an_engine_for_ever() -> None:
    async def scenario() -> None:
        world = World(max_sequences=1, limits=Limits(queue_s=500.0, recover_s=120.0))
        running, queued = await world.create(), await world.create()
        world.engine.step(3)
        world.engine.lose(KILL)
        await asyncio.sleep(119)
        assert (running.status, queued.status) == ("running", "queued")
        assert world.generator.is_live
        await asyncio.sleep(2)
        for run in (running, queued):
            failure = end_of(run.log).failure
            assert failure is not None
            assert failure.code == "engine_unavailable"
        before = world.generator.is_live
        world.engine.come_back()
        assert (before, world.generator.is_live) == (False, True)
        after = await world.create("Hi", greedy(5))
        world.finish(after)
        world.check_idle()

    run_scenario(scenario())
