"""The text that kills engines is found, without harm to the others."""

from __future__ import annotations

import asyncio

import pytest
from tests.generation.engine_failures import CRASH, KILL
from tests.generation.harness import Harness
from tests.streams.virtual_time import run as run_scenario
from tests.waiting import turn

from tailrace.errors import EngineLost, PoisonRequest
from tailrace.generation.embedder import Embedder
from tailrace.types import VectorRequest, Vectors

_KILLER = "It kills"  # and so does every text that begins like this


class _House:
    """A model whose engine dies when a test says so."""

    def __init__(self) -> None:
        self.harness = Harness(task="embed", options={"embeds": 4.0})
        self.engine = self.harness.engine
        self._embedder = Embedder(self.harness.generator, num_dimensions=4, may_shorten=False)

    async def ask(self, *texts: str, caller: str = "one") -> asyncio.Task[Vectors]:
        run = await self._embedder.begin(VectorRequest(inputs=texts, caller=caller))
        return asyncio.create_task(run.result())

    @property
    def has_killer(self) -> bool:
        """Whether the text is on the engine."""
        return bool(self.engine.progress_of(_KILLER))

    @property
    def num_on_engine(self) -> int:
        return len(self.engine.receivers)

    async def run(self, *asked: asyncio.Task[Vectors], death: EngineLost = CRASH) -> int:
        """Run requests to their end. The engine dies whenever it has the text. Returns how often it died."""
        num_deaths = 0
        for _ in range(1000):
            if all(one.done() for one in asked):
                return num_deaths
            await turn(1)
            if self.has_killer:
                self.engine.fail(death)
                self.engine.restart()
                num_deaths += 1
            else:
                self.engine.step()
        raise AssertionError("the requests do not end")


async def test_only_the_request_with_the_text_ends() -> None:
    house = _House()
    asked = [await house.ask(f"Text {number}.", "More.") for number in range(6)]
    poison = await house.ask("Hi", _KILLER)
    assert await house.run(*asked, poison) == 2
    assert all(len(one.result().vectors) == 2 for one in asked)
    with pytest.raises(PoisonRequest, match="Input 1, counted from 0"):
        poison.result()
    with pytest.raises(PoisonRequest, match="Input 0, counted from 0"):
        await house.ask(_KILLER, "Other.")
    same = await house.ask(_KILLER, caller="two")
    assert await house.run(same) == 2
    assert isinstance(same.exception(), PoisonRequest)
    house.harness.check_idle()


async def test_nothing_else_runs_beside_a_trial() -> None:
    house = _House()
    asked = [await house.ask(f"Text {number}.") for number in range(4)]
    house.engine.fail(CRASH)
    house.engine.restart()
    asked.append(await house.ask("A new one."))
    for _ in range(4):
        assert house.num_on_engine == 1
        house.engine.step()
    assert house.num_on_engine > 1
    assert await house.run(*asked) == 0


@pytest.mark.parametrize(("is_one_text", "num_deaths"), [(True, 2), (False, 4)])
async def test_several_texts_of_one_caller_cost_one_death_of_all(is_one_text: bool, num_deaths: int) -> None:
    """The others would lose too many engines if each of them killed one while all run."""
    house = _House()
    other = await house.ask("Hi", caller="two")
    poison = [await house.ask(_KILLER if is_one_text else f"{_KILLER} {number}") for number in range(3)]
    assert await house.run(other, *poison) == num_deaths
    assert all(isinstance(one.exception(), PoisonRequest) for one in poison)
    assert len(other.result().vectors) == 1


async def test_a_text_whose_engines_are_killed_from_outside_is_tried_after_two() -> None:
    house = _House()
    asked, poison = await house.ask("Hi"), await house.ask(_KILLER)
    assert await house.run(asked, poison, death=KILL) == 4
    assert isinstance(poison.exception(), PoisonRequest)
    assert len(asked.result().vectors) == 1


async def test_callers_who_kill_engines_wait_for_each_other() -> None:
    house = _House()
    for number in range(3):
        poison = await house.ask(f"{_KILLER} {number}", caller="bad")
        assert await house.run(poison) == 2
        assert isinstance(poison.exception(), PoisonRequest)
    slowed = [await house.ask(f"Text {number}.", caller="bad") for number in range(3)]
    assert house.num_on_engine == 1
    assert await house.run(*slowed) == 0


async def test_a_text_is_tried_when_its_client_has_left() -> None:
    house = _House()
    poison = await house.ask(_KILLER)
    assert house.has_killer
    await turn(1)
    poison.cancel()
    await turn(1)
    house.engine.fail(CRASH)
    house.engine.restart()
    assert house.has_killer
    house.engine.fail(CRASH)
    house.engine.restart()
    with pytest.raises(PoisonRequest):
        await house.ask(_KILLER)
    house.harness.check_idle()


def test_trials_have_a_time_limit() -> None:
    async def scenario() -> None:
        house = _House()
        asked = [await house.ask(f"Text {number}.") for number in range(4)]
        house.engine.fail(CRASH)
        house.engine.restart()
        await asyncio.sleep(40)
        assert house.num_on_engine == 1
        house.engine.step()
        assert house.num_on_engine > 1
        assert await house.run(*asked) == 0

    run_scenario(scenario())


def test_a_text_with_which_the_engine_hangs_for_longer_is_found() -> None:
    async def scenario() -> None:
        house = _House()
        poison = await house.ask(_KILLER)
        for _ in range(2):
            assert house.has_killer
            await asyncio.sleep(40)
            house.engine.fail(CRASH)
            house.engine.restart()
        assert await house.run(poison) == 0
        assert isinstance(poison.exception(), PoisonRequest)

    run_scenario(scenario())


async def test_a_trial_is_forgotten_when_no_engine_comes() -> None:
    house = _House()
    asked = await house.ask("Hi")
    await turn(1)
    house.engine.fail(CRASH)
    asked.cancel()
    await turn(2)
    assert house.harness.generator.is_busy
    house.harness.generator.on_unload()
    assert not house.harness.generator.is_busy
