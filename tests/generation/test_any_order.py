"""Requests, steps, cancellations, losses and time in any order: every stream ends, and every slot is freed."""

from __future__ import annotations

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples
from tests.generation.harness import Harness, end_of, greedy, oracle, prompt_ids_of, text_of
from tests.streams.virtual_time import run as run_scenario

from tailrace.errors import EngineLost
from tailrace.generation import Limits
from tailrace.types import TextDelta

actions = st.lists(
    st.one_of(
        st.tuples(st.just("create"), st.integers(1, 12)),
        st.tuples(st.just("create_two"), st.integers(1, 12)),
        st.tuples(st.just("create_background"), st.integers(1, 12)),
        st.tuples(st.just("fail"), st.integers(4, 12)),
        st.tuples(st.just("step"), st.integers(1, 5)),
        st.tuples(st.just("cancel"), st.integers(0, 9)),
        st.tuples(st.just("interrupt"), st.integers(0, 9)),
        st.tuples(st.just("lose_engine"), st.just(0)),
        st.tuples(st.just("restart_engine"), st.just(0)),
        st.tuples(st.just("sleep"), st.integers(1, 40)),
    ),
    max_size=30,
)


@settings(max_examples=examples(80), deadline=None)
@given(actions)
def test_every_stream_ends_once_and_every_slot_is_freed(actions: list[tuple[str, int]]) -> None:
    async def scenario() -> None:
        harness = Harness(
            max_sequences=3, kv_tokens=60, context_tokens=60, limits=Limits(queue_s=60.0), max_requests=99
        )
        runs = []
        for action, number in actions:
            if action == "create_background":
                runs.append(await harness.create(sampling=greedy(number), linger_s=100.0, is_background=True))
            elif action in ("create", "create_two", "fail"):
                sampling = greedy(number, n=2 if action == "create_two" else 1)
                runs.append(await harness.create("<|fail|>" if action == "fail" else "Hi", sampling, linger_s=100.0))
            elif action == "step":
                harness.engine.step(number)
            elif action in ("cancel", "interrupt") and runs:
                getattr(runs[number % len(runs)], action)()
            elif action == "lose_engine":
                harness.engine.fail(EngineLost("gone"))
            elif action == "restart_engine" and not harness.engine.is_ready:
                harness.engine.restart()
            elif action == "sleep":
                await asyncio.sleep(number)
            assert harness.gate.used_sequences <= 3
            assert harness.gate.used_tokens <= 60
            assert len(harness.engine.receivers.keys() - set(harness.engine.aborted)) <= 3
            assert harness.generator.live.keys() == {run for run in runs if run.log.end is None}
        if not harness.engine.is_ready:
            harness.engine.restart()
        idle = asyncio.create_task(harness.generator.wait_idle())
        harness.finish(*runs)
        await idle
        for run in runs:
            end = end_of(run.log)
            assert end.usage == run.usage
            if end.status == "done":
                for choice in range(run.log.record.num_choices):
                    deltas = [e for e in run.log.events if isinstance(e, TextDelta) and e.choice == choice]
                    num_tokens = sum(len(delta.token_ids) for delta in deltas)
                    assert text_of(run.log, choice) == oracle(prompt_ids_of(run), 1 + choice, num_tokens)
            else:
                assert (end.failure is None) == (end.status == "cancelled")
        harness.check_idle()
        harness.store.close()

    run_scenario(scenario())
