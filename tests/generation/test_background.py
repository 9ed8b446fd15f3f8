"""Streams in the background leave the engine to others, and go on from where they were."""

from __future__ import annotations

import asyncio

import pytest
from tests.generation.engine_failures import KILL
from tests.generation.harness import Harness, end_of, greedy, oracle, prompt_ids_of, text_of
from tests.waiting import idle

from tailrace.api.server_metrics import Metrics
from tailrace.errors import EngineLost
from tailrace.generation import Run


async def _in_background(harness: Harness, prompt: str = "Hi", *, n: int = 1) -> Run:
    return await harness.create(prompt, greedy(20, n=n), is_background=True)


async def test_it_runs_again_and_continues() -> None:
    harness = Harness(max_sequences=2)
    first, second = await _in_background(harness, "one"), await _in_background(harness, "two")
    harness.engine.step(7)
    live = await harness.create("live")
    assert (first.status, second.status, live.status) == ("running", "queued", "running")
    assert harness.engine.aborted == [harness.engine.submitted[1].sequence_id]
    assert (first.num_ahead, second.num_ahead) == (0, 0)
    harness.finish(first, second, live)
    for run in (first, second, live):
        assert text_of(run.log) == oracle(prompt_ids_of(run), 1, 20)
    assert end_of(second.log).continuity == "replayed"
    assert end_of(first.log).continuity is None
    ids = [sequence.sequence_id for sequence in harness.engine.submitted]
    assert len(set(ids)) == len(ids)
    harness.check_idle()


async def test_it_may_leave_before_its_first_token_and_more_than_once() -> None:
    harness = Harness(max_sequences=1)
    run = await _in_background(harness)
    for _ in range(3):
        live = await harness.create("live")
        assert (run.status, live.status) == ("queued", "running")
        while live.log.end is None:
            harness.engine.step()
        assert run.status == "running"
        harness.engine.step(2)
    harness.finish(run)
    assert text_of(run.log) == oracle(prompt_ids_of(run), 1, 20)
    assert end_of(run.log).status == "done"
    harness.check_idle()


async def test_all_its_choices_leave() -> None:
    harness = Harness(max_sequences=3)
    run = await _in_background(harness, n=3)
    harness.engine.step(4)
    live = await harness.create("live")
    assert len(harness.engine.aborted) == 3
    harness.finish(run, live)
    assert [text_of(run.log, index) for index in range(3)] == [
        oracle(prompt_ids_of(run), 1 + index, 20) for index in range(3)
    ]
    harness.check_idle()


async def test_it_is_cancelled_or_loses_the_engine_while_it_waits_again() -> None:
    harness = Harness(max_sequences=1)
    run = await _in_background(harness)
    harness.engine.step(3)
    live = await harness.create("live")
    harness.engine.fail(EngineLost("It died.", is_crash=True))
    harness.engine.restart()
    await idle()
    harness.finish(live)
    harness.finish(run)
    assert text_of(run.log) == oracle(prompt_ids_of(run), 1, 20)
    other = await _in_background(harness)
    harness.engine.step(3)
    live = await harness.create("live")
    other.cancel()
    assert end_of(other.log).status == "cancelled"
    harness.finish(live)
    harness.check_idle()


async def test_others_do_not_wait_for_one_that_leaves_before_it_has_caught_up() -> None:
    """After the loss of an engine, time in the queue counts again without it."""
    harness = Harness(max_sequences=2)
    run, live = await _in_background(harness), await harness.create("live")
    harness.engine.step(9)
    harness.engine.fail(KILL)
    waiting = await harness.create("waiting")
    harness.engine.restart()
    assert (run.status, live.status, waiting.status) == ("queued", "running", "running")
    harness.engine.step(10)
    lost_s = harness.gate.total_lost_s
    await asyncio.sleep(0.01)
    assert harness.gate.total_lost_s == lost_s
    harness.finish(run, live, waiting)
    assert text_of(run.log) == oracle(prompt_ids_of(run), 1, 20)
    harness.check_idle()


@pytest.mark.parametrize(("drift", "exact", "leaves"), [(1, True, False), (0, True, True), (1, False, True)])
async def test_one_whose_answer_must_not_change_leaves_only_an_exact_engine(
    drift: int, exact: bool, leaves: bool
) -> None:
    harness = Harness(max_sequences=1, options={"drift": drift})
    run = await harness.create(is_background=True, exact=exact)
    harness.engine.step(3)
    live = await harness.create("live")
    assert (run.status, live.status) == (("queued", "running") if leaves else ("running", "queued"))
    harness.finish(run, live)
    harness.check_idle()


async def test_what_metrics_count() -> None:
    """It is no loss, and its wait is none of the others."""
    harness = Harness(max_sequences=1)
    metrics = Metrics([harness.generator], harness.generator.observers)
    run = await _in_background(harness)
    harness.engine.step(3)
    harness.finish(run, await harness.create("live"))

    def of(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(f"tailrace_{name}", {**labels, "model": harness.generator.model})

    assert of("preemptions_total") == 1
    assert of("replays_total") == 0
    assert of("streams_outlived", continuity="replayed") is None
    assert of("queue_seconds_count") == 1
    other = await _in_background(harness)
    harness.engine.step(3)
    harness.engine.fail(KILL)
    harness.engine.restart()
    harness.finish(other)
    assert of("replays_total") == of("streams_outlived", continuity="replayed") == 1


async def test_the_server_does_not_wait_for_it() -> None:
    harness = Harness()
    await _in_background(harness)
    await harness.generator.wait_idle()
    live = await harness.create("live")
    harness.finish(live)
    await harness.generator.wait_idle()
