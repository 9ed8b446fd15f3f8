"""The request that kills engines is found, without harm to others."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples
from tests.generation.engine_failures import CRASH, KILL, code_of, restart_engine
from tests.generation.harness import Harness, end_of, greedy, oracle, prompt_ids_of, text_of
from tests.streams.virtual_time import run as run_scenario

from tailrace.errors import PoisonRequest
from tailrace.generation import Run
from tailrace.types import GenerateRequest

# Which request was it?


async def test_a_request_that_crashes_its_engine_twice_is_ended() -> None:
    harness = Harness(options={"fault_after": 3.0})
    poison = await harness.create("Hi", greedy(20))
    for _ in range(2):
        harness.engine.step(3)
        restart_engine(harness, CRASH)
    failure = end_of(poison.log).failure
    assert failure is not None
    assert failure.code == "poison_request"
    harness.check_idle()
    with pytest.raises(PoisonRequest):
        await harness.create("Hi", greedy(20, seed=77))
    other = await harness.create("Ho", greedy(5))
    harness.finish(other)


@pytest.mark.parametrize("position", range(4))
async def test_the_poison_is_found_and_its_neighbours_finish(position: int) -> None:
    """One of four requests kills the engine with its ninth token."""
    harness = Harness(max_sequences=8)
    runs = []
    for number in range(4):
        runs.append(await harness.create(f"Hi {number}", greedy(20)))
        harness.engine.step(2)
    poison = runs[position]
    num_deaths = 0
    for _ in range(300):
        if all(run.log.end is not None for run in runs):
            break
        harness.engine.step()
        if harness.engine.progress_of(f"Hi {position}") == [9]:
            num_deaths += 1
            restart_engine(harness, CRASH)
    assert num_deaths == 2
    failure = end_of(poison.log).failure
    assert failure is not None
    assert failure.code == "poison_request"
    for run in runs:
        if run is not poison:
            assert text_of(run.log) == oracle(prompt_ids_of(run), 1, 20)
    harness.finish()
    harness.check_idle()


@settings(max_examples=examples(40), deadline=None)
@given(st.lists(st.integers(0, 12), max_size=25), st.integers(1, 4))
def test_streams_beside_killed_engines_are_not_blamed(steps: list[int], num_runs: int) -> None:
    """Engines are killed from outside at random positions."""

    async def scenario() -> None:
        harness = Harness()
        runs = [await harness.create(f"Hi {number}", greedy(30)) for number in range(num_runs)]
        last: list[int] = []
        for num_steps in steps:
            for _ in range(num_steps):
                harness.engine.step()
            places = [run.num_generated for run in runs]
            if places == last:
                continue
            last = places
            restart_engine(harness, KILL)
        harness.finish(*runs)
        for run in runs:
            assert text_of(run.log) == oracle(prompt_ids_of(run), 1, 30)
            assert end_of(run.log).status == "done"
        harness.check_idle()

    run_scenario(scenario())


async def test_equal_requests_are_tried_separately() -> None:
    """They are always at the same position, so only separate trials can distinguish them."""
    harness = Harness(max_sequences=8)
    runs = [await harness.create(f"Hi {number}", greedy(20)) for number in range(3)]
    num_deaths = 0
    for _ in range(300):
        if all(run.log.end is not None for run in runs):
            break
        harness.engine.step()
        if harness.engine.progress_of("Hi 1") == [5]:
            num_deaths += 1
            restart_engine(harness, CRASH)
    assert num_deaths <= 3
    assert [end_of(run.log).status for run in runs] == ["done", "error", "done"]
    for run in (runs[0], runs[2]):
        assert text_of(run.log) == oracle(prompt_ids_of(run), 1, 20)
    harness.check_idle()


async def test_after_a_crash_suspects_run_alone_and_then_all_run() -> None:
    harness = Harness(max_sequences=8)
    old, young = await harness.create("Hi", greedy(40)), await harness.create("Ho", greedy(40))
    harness.engine.step(20)
    new, newer = await harness.create("Ha", greedy(5)), await harness.create("He", greedy(5))
    harness.engine.step(2)
    events = [list(run.log.events) for run in (old, young, new, newer)]
    restart_engine(harness, CRASH)
    assert harness.engine.progress_of("He") == [0]
    assert len(harness.engine.receivers) == 1
    harness.engine.step(3)  # past its place
    harness.engine.step()  # taken off
    assert harness.engine.progress_of("Ha") == [0]
    assert len(harness.engine.receivers) == 1
    assert [list(run.log.events) for run in (old, young, new, newer)] == events
    late = await harness.create("Hu", greedy(5))
    harness.engine.step(3)
    harness.engine.step()
    assert len(harness.engine.receivers) == 4
    harness.engine.step(22)
    assert harness.engine.progress_of("Hu") == []  # while anybody is not past the place where the engine died
    harness.engine.step()
    assert harness.engine.progress_of("Hu") == [0]
    harness.finish(old, young, new, newer, late)
    for run, seed in ((old, 1), (young, 1), (new, 1), (newer, 1), (late, 1)):
        assert text_of(run.log) == oracle(prompt_ids_of(run), seed, end_of(run.log).usage.num_completion_tokens)
        assert end_of(run.log).status == "done"
    harness.check_idle()


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("harmless"), st.integers(1, 40)),
            st.tuples(st.just("killer"), st.integers(0, 30)),  # when it has given so many tokens
            st.tuples(st.just("cancel"), st.integers(0, 9)),  # a killer, whose client leaves
            st.tuples(st.just("step"), st.integers(1, 20)),
            st.tuples(st.just("kill"), st.just(0)),  # from outside
        ),
        max_size=25,
    )
)
def test_only_the_killer_is_blamed(actions: list[tuple[str, int]]) -> None:
    async def scenario() -> None:
        harness = Harness(max_sequences=8, max_requests=99)
        harmless: list[Run] = []
        killers: list[tuple[str, int, Run]] = []
        num_crashes = num_crashes_allowed = num_kills = 0

        def crash() -> None:
            nonlocal num_crashes
            while any(place in harness.engine.progress_of(prompt) for prompt, place, _ in killers):
                num_crashes += 1
                restart_engine(harness, CRASH)

        async def step() -> None:
            harness.engine.step()
            await asyncio.sleep(0.1)
            crash()

        for action, number in actions:
            if action == "harmless":
                harmless.append(await harness.create(f"H{len(harmless)}.", greedy(number)))
            elif action == "killer":
                prompt = f"K{len(killers)}."
                killers.append((prompt, number, await harness.create(prompt, greedy(50))))
                # Once with others, then two rounds, then halves of eight, and alone.
                num_crashes_allowed += 3 + 3 + 1
            elif action == "cancel" and killers:
                killers[number % len(killers)][2].cancel()
            elif action == "kill" and num_kills < 4:  # the fifth at one place would be proof
                num_kills += 1
                restart_engine(harness, KILL)
            elif action == "step":
                for _ in range(number):
                    await step()
            crash()
        for _ in range(5_000):
            if not harness.generator.live and not harness.engine.receivers:
                break
            await step()
        for run in harmless:
            assert end_of(run.log).failure is None
            assert text_of(run.log) == oracle(prompt_ids_of(run), 1, end_of(run.log).usage.num_completion_tokens)
        for _, _, run in killers:
            failure = end_of(run.log).failure
            assert end_of(run.log).status == "cancelled" or (failure is not None and failure.code == "poison_request")
        assert num_crashes <= num_crashes_allowed
        await asyncio.sleep(60)
        harness.check_idle()

    run_scenario(scenario())


@pytest.mark.parametrize(("place", "step_s"), [(0, 0.1), (3, 0.1), (20, 0.1), (20, 0.5), (20, 3.0)])
def test_streams_finish_during_a_lasting_attack(place: int, step_s: float) -> None:
    """When a killer is blamed, the next one arrives. All have the same address."""

    async def scenario() -> None:
        harness = Harness(max_sequences=8, max_requests=99)
        running = [await harness.create(f"H{number}.", greedy(200)) for number in range(3)]
        late: list[Run] = []
        killers: list[Run] = []
        num_crashes = 0
        for number in range(5_000):
            killers = [run for run in killers if run.log.end is None]
            while len(killers) < 2:
                killers.append(await harness.create(f"K{num_crashes}.{number}.{len(killers)}", greedy(50)))
            if number % 50 == 0 and len(late) < 10:
                late.append(await harness.create(f"L{len(late)}.", greedy(20)))
            if len(late) == 10 and all(run.log.end is not None for run in (*running, *late)):
                break
            harness.engine.step()
            await asyncio.sleep(step_s)
            while place in harness.engine.progress_of("K"):
                num_crashes += 1
                restart_engine(harness, CRASH)
        for run in (*running, *late):
            assert end_of(run.log).status == "done"
        # Half of the time belongs to those who run: 200 steps are over after so many deaths and recoveries.
        assert num_crashes < 60

    run_scenario(scenario())


# Slow engines: a recovery takes longer than new requests may wait for it


def test_a_replaying_stream_is_not_blamed_when_others_start() -> None:
    async def scenario() -> None:
        harness = Harness(max_sequences=8)
        harmless = await harness.create("H", greedy(400))
        harness.engine.step(200)
        killers = [await harness.create("K0", greedy(50))]
        harness.engine.step(2)
        restart_engine(harness, CRASH)
        harness.engine.step()
        restart_engine(harness, CRASH)
        assert code_of(killers[0]) == "poison_request"
        killers.append(await harness.create("K1", greedy(50)))
        while not harness.engine.progress_of("K1"):
            harness.engine.step()
            await asyncio.sleep(1)
        assert harness.engine.progress_of("H") < [200]  # it has not come to where it was
        restart_engine(harness, CRASH)
        assert code_of(harmless) is None
        assert harness.engine.progress_of("K1") == [0]
        restart_engine(harness, CRASH)
        assert code_of(killers[1]) == "poison_request"
        harness.finish(harmless)
        assert text_of(harmless.log) == oracle(prompt_ids_of(harmless), 1, 400)
        harness.check_idle()

    run_scenario(scenario())


@pytest.mark.parametrize(("place", "num_crashes"), [(100, 3), (200, 5)])
def test_a_late_killer_on_a_slow_engine_is_found(place: int, num_crashes: int) -> None:
    """At two tokens per second it reaches its position after the time limit, which doubles each time."""

    async def scenario() -> None:
        harness = Harness(max_sequences=8)
        harmless = [await harness.create(f"H{number}.", greedy(300)) for number in range(2)]
        killer = await harness.create("K", greedy(300))
        num_deaths = 0
        for _ in range(3_000):
            if not harness.generator.live:
                break
            harness.engine.step()
            await asyncio.sleep(0.5)
            if place in harness.engine.progress_of("K"):
                num_deaths += 1
                restart_engine(harness, CRASH)
        assert code_of(killer) == "poison_request"
        assert num_deaths <= num_crashes
        for run in harmless:
            assert text_of(run.log) == oracle(prompt_ids_of(run), 1, 300)
        await asyncio.sleep(1_000)
        harness.check_idle()

    run_scenario(scenario())


def test_new_requests_do_not_wait_for_many_slow_trials() -> None:
    async def scenario() -> None:
        harness = Harness(max_sequences=64, max_requests=99)
        suspects = [await harness.create(f"H{number}.", greedy(20)) for number in range(31)]
        restart_engine(harness, CRASH)
        late = await harness.create("L", greedy(5))
        for _ in range(40):  # no trial gives a token: the engine only lets go of what is taken off
            if late.times.admitted_s is not None:
                break
            if harness.engine.aborted:
                harness.engine.step()
                harness.engine.aborted.clear()
            await asyncio.sleep(1)
        assert late.times.admitted_s is not None
        harness.finish(late, *suspects)
        harness.check_idle()

    run_scenario(scenario())


def test_new_requests_do_not_wait_until_a_half_has_ended() -> None:
    """Two requests kill only together. They run separately, and new requests start beside each of them."""

    async def scenario() -> None:
        harness = Harness(max_sequences=16)
        runs = [await harness.create(prompt, greedy(300)) for prompt in ("H0", "K0", "H1", "K1")]
        late: Run | None = None
        num_crashes = waited_s = 0
        for _ in range(3_000):
            if not harness.generator.live:
                break
            harness.engine.step()
            await asyncio.sleep(0.5)
            if late is not None and late.times.admitted_s is None:
                waited_s += 1
            if all(place >= 20 for places in map(harness.engine.progress_of, ("K0", "K1")) for place in places or [0]):
                num_crashes += 1
                restart_engine(harness, CRASH)
                late = late or await harness.create("L", greedy(5))
        assert late is not None
        assert num_crashes == 4
        assert waited_s / 2 <= 40
        for run in (late, *runs):
            assert text_of(run.log) == oracle(prompt_ids_of(run), 1, end_of(run.log).usage.num_completion_tokens)
            assert end_of(run.log).status == "done"
        await asyncio.sleep(1_000)
        harness.check_idle()

    run_scenario(scenario())


@settings(max_examples=20, deadline=None)
@given(
    step_s=st.sampled_from([0.5, 1.0]),
    killers=st.lists(st.integers(1, 150), min_size=1, max_size=3),
    harmless=st.lists(st.integers(1, 200), min_size=1, max_size=4),
    gap=st.integers(0, 60),
)
def test_on_a_slow_engine_no_other_request_is_blamed(
    step_s: float, killers: list[int], harmless: list[int], gap: int
) -> None:
    """Killers arrive one after the other, so some start while the other streams still replay."""

    async def scenario() -> None:
        harness = Harness(max_sequences=16, max_requests=99)
        runs: list[Run] = []
        found: list[Run] = []

        async def step() -> None:
            harness.engine.step()
            await asyncio.sleep(step_s)
            while any(place in harness.engine.progress_of(f"K{number}.") for number, place in enumerate(killers)):
                restart_engine(harness, CRASH)

        for number in range(max(len(killers), len(harmless))):
            if number < len(harmless):
                runs.append(await harness.create(f"H{number}.", greedy(harmless[number])))
            if number < len(killers):
                found.append(await harness.create(f"K{number}.", greedy(200)))
            for _ in range(gap):
                await step()
        for _ in range(10_000):
            if not harness.generator.live:
                break
            await step()
        for run in runs:
            assert text_of(run.log) == oracle(prompt_ids_of(run), 1, end_of(run.log).usage.num_completion_tokens)
            assert end_of(run.log).status == "done"
        assert [code_of(run) for run in found] == ["poison_request"] * len(found)

    run_scenario(scenario())


@pytest.mark.parametrize("order", ["last", "first", "middle"])
@pytest.mark.parametrize("max_sequences", [8, 32])
@pytest.mark.parametrize(("step_s", "count"), [(1.0, 50), (2.0, 29), (3.0, 19)])
def test_two_killers_among_many_affect_no_other(order: str, max_sequences: int, step_s: float, count: int) -> None:
    """All are sent together. Without the killers each would start within its time in the queue."""

    async def scenario() -> None:
        harness = Harness(max_sequences=max_sequences, max_requests=99)
        harmless = {f"H{number}.": greedy(count) for number in range(13)}
        place = {"last": 13, "first": 0, "middle": 6}[order]
        prompts = [*harmless]
        prompts[place:place] = ["K0.", "K1."]
        runs = {prompt: await harness.create(prompt, harmless.get(prompt, greedy(50))) for prompt in prompts}
        num_crashes = 0
        for _ in range(2_000):
            if not harness.generator.live and not harness.engine.receivers:
                break
            harness.engine.step()
            await asyncio.sleep(step_s)
            while 3 in [*harness.engine.progress_of("K0."), *harness.engine.progress_of("K1.")]:
                num_crashes += 1
                restart_engine(harness, CRASH)
        for prompt in harmless:
            assert code_of(runs[prompt]) is None
            assert text_of(runs[prompt].log) == oracle(prompt_ids_of(runs[prompt]), 1, count)
        assert [code_of(runs[prompt]) for prompt in ("K0.", "K1.")] == ["poison_request"] * 2
        assert num_crashes <= 6
        await asyncio.sleep(1_000)
        harness.check_idle()

    run_scenario(scenario())


async def test_another_caller_may_send_the_same_request() -> None:
    harness = Harness()

    def ask(caller: str) -> GenerateRequest:
        return GenerateRequest(prompts=("Hi",), sampling=greedy(20), caller=caller)

    killer = await harness.generator.create(ask("192.0.2.1"))
    for _ in range(2):
        harness.engine.step()
        restart_engine(harness, CRASH)
    assert end_of(killer.log).status == "error"
    with pytest.raises(PoisonRequest):
        await harness.generator.create(ask("192.0.2.1"))
    harness.finish(await harness.generator.create(ask("192.0.2.2")))


async def test_a_cancelled_request_is_tried_too() -> None:
    harness = Harness()
    killer, neighbour = await harness.create("Hi", greedy(20)), await harness.create("Ho", greedy(20))
    killer.cancel()
    restart_engine(harness, CRASH)
    assert harness.engine.progress_of("Hi") == []  # the youngest first
    harness.engine.step()
    harness.engine.step()
    assert harness.engine.progress_of("Hi") == [0]
    restart_engine(harness, CRASH)
    with pytest.raises(PoisonRequest):
        await harness.create("Hi", greedy(20))
    harness.finish(neighbour)
    assert end_of(neighbour.log).status == "done"
    harness.check_idle()


@pytest.mark.parametrize(("num_kills", "status"), [(4, "done"), (5, "error")])
async def test_kills_from_outside_need_more_evidence(num_kills: int, status: str) -> None:
    """Kills can come from outside, for example if memory runs out whenever this request is on the engine."""
    harness = Harness()
    run, neighbour = await harness.create("Hi", greedy(20)), await harness.create("Ho", greedy(20))
    harness.engine.step(7)
    for _ in range(num_kills):
        while harness.engine.progress_of("Hi") != [7]:
            harness.engine.step()
        restart_engine(harness, KILL)
    harness.finish(run, neighbour)
    assert (end_of(run.log).status, end_of(neighbour.log).status) == (status, "done")
    harness.check_idle()
