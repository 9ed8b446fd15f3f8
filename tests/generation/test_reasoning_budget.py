"""A budget for reasoning: its end is forced when it is spent, and a replay ends it at the same place."""

from __future__ import annotations

import pytest
from tests.generation.harness import Harness, end_of, prompt_ids_of, text_of, tokenizer
from tests.generation.test_reasoning import OPEN, THINKS, begin, reasoning_of, thinking, written

from tailrace.errors import EngineLost
from tailrace.generation import Run
from tailrace.types import Event, Sampling, TextDelta
from tailrace_outer.scripted.scripted_engine import scripted_token

MOST = 60
END = "\n</think>\n\n"


def sampling(budget: int, **fields: object) -> Sampling:
    return Sampling(temperature=0.0, seed=1, max_tokens=MOST, max_reasoning_tokens=budget, **fields)  # type: ignore[arg-type]  # of several kinds


async def answered(budget: int, num_steps: int = 1, **fields: object) -> tuple[Harness, Run]:
    harness = thinking()
    run = await begin(harness, sampling=sampling(budget, **fields))
    harness.finish(run, num_steps=num_steps)
    return harness, run


def ids_of(events: list[Event]) -> list[int]:
    return [one for event in events if isinstance(event, TextDelta) for one in event.token_ids]


@pytest.mark.parametrize("num_steps", [1, 4, MOST])
@pytest.mark.parametrize("budget", [OPEN + 1, OPEN + 9, OPEN + THINKS - 1])
async def test_the_reasoning_ends_when_the_budget_is_spent(budget: int, num_steps: int) -> None:
    harness, run = await answered(budget, num_steps)
    prompt = harness.engine.submitted[0].prompt_ids
    ids = ids_of(list(run.log.events))
    closing = list(tokenizer().encode(END, special=True))
    spent = ids.index(closing[1], OPEN) - 1  # the end's marker follows a line end
    begun = [scripted_token(prompt, 1, index, thinks=THINKS) for index in range(spent)]
    assert ids[: spent + len(closing)] == begun + closing
    assert ids[spent + len(closing) :] == [
        scripted_token((*prompt, *begun, *closing), 1 + spent + len(closing), index, thinks=THINKS)
        for index in range(MOST - spent - len(closing))
    ]
    assert reasoning_of(run.log) == written_by(begun).removeprefix("<think>").strip()
    assert end_of(run.log).usage.num_completion_tokens == MOST
    assert end_of(run.log).continuity is None
    assert spent >= budget - 1
    harness.check_idle()


def written_by(ids: list[int]) -> str:
    return b"".join(tokenizer().pieces[one] for one in ids).decode("utf-8", "replace")


@pytest.mark.parametrize("num_steps", [1, 7])
async def test_a_budget_that_is_not_spent_changes_nothing(num_steps: int) -> None:
    _, run = await answered(OPEN + THINKS + len(END) + 5, num_steps)
    _, without = await answered(10_000, num_steps)
    assert list(run.log.events)[:-1] == list(without.log.events)[:-1]
    assert written_by(ids_of(list(run.log.events))) == written(run, MOST)


async def test_a_budget_of_nothing_closes_the_reasoning_in_the_prompt() -> None:
    _, run = await answered(0)
    prompt = b"".join(tokenizer().pieces[one] for one in prompt_ids_of(run)).decode()
    assert prompt.endswith("</think>\n\n") == prompt.rstrip().endswith("</think>")
    assert len(ids_of(list(run.log.events))) == MOST


async def test_every_choice_has_its_own_budget() -> None:
    harness, run = await answered(OPEN + 3, 3, n=2)
    assert [len(reasoning_of(run.log, choice)) > 0 for choice in (0, 1)] == [True, True]
    assert len(harness.engine.submitted) == 4
    harness.check_idle()


@pytest.mark.parametrize("num_given", range(1, MOST - len(END), 3))
async def test_it_ends_at_the_same_place_after_a_crash(num_given: int) -> None:
    _, expected = await answered(OPEN + 4)
    harness = thinking()
    run = await begin(harness, sampling=sampling(OPEN + 4))
    for _ in range(num_given):
        harness.engine.step()
    harness.engine.fail(EngineLost("gone"))
    harness.engine.restart()
    harness.finish(run)
    assert ids_of(list(run.log.events)) == ids_of(list(expected.log.events))
    assert (reasoning_of(run.log), text_of(run.log)) == (reasoning_of(expected.log), text_of(expected.log))
    assert end_of(run.log).continuity == "replayed"
    harness.check_idle()


@pytest.mark.parametrize("num_given", [3, OPEN + 4, OPEN + 6, 40])
async def test_it_ends_at_the_same_place_in_another_process(num_given: int) -> None:
    _, expected = await answered(OPEN + 4)
    harness = thinking()
    run = await begin(harness, sampling=sampling(OPEN + 4))
    for _ in range(num_given):
        harness.engine.step()
    before = [event for event in run.log.events if isinstance(event, TextDelta)]
    harness.engine.fail(EngineLost("gone"))
    other = thinking()
    again = await begin(other, sampling=sampling(OPEN + 4))
    other.engine.fail(EngineLost("gone"))
    other.store.append(again.lease, tuple(before))
    other.engine.restart()
    other.finish(again)
    assert ids_of(list(again.log.events)) == ids_of(list(expected.log.events))
    assert (reasoning_of(again.log), text_of(again.log)) == (reasoning_of(expected.log), text_of(expected.log))
    assert end_of(again.log).continuity == "replayed"


async def test_a_limit_inside_of_the_reasoning_comes_first() -> None:
    harness = thinking()
    run = await begin(
        harness, sampling=Sampling(temperature=0.0, seed=1, max_tokens=OPEN + 2, max_reasoning_tokens=OPEN + 9)
    )
    harness.finish(run)
    assert len(harness.engine.submitted) == 1
    last = run.log.events[-2]
    assert isinstance(last, TextDelta)
    assert last.finish_reason == "length"


async def test_a_different_replay_after_the_end_continues() -> None:
    harness = thinking()
    run = await begin(harness, sampling=sampling(OPEN + 4))
    harness.engine.step(30)
    harness.engine.step(10)
    before = ids_of(list(run.log.events))
    harness.engine.seed_offset = 1
    harness.engine.fail(EngineLost("gone"))
    harness.engine.restart()
    harness.finish(run)
    assert ids_of(list(run.log.events))[: len(before)] == before
    assert end_of(run.log).continuity == "continued"
    assert end_of(run.log).usage.num_completion_tokens == MOST
