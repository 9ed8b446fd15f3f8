"""Killed workers of the scripted engine: an exact one, and one that is not."""

from __future__ import annotations

import asyncio

import pytest

from tailrace.assembly.source import find_source
from tailrace.engines import EngineSpec
from tailrace.engines.certificate import Finding
from tailrace.errors import ModelError
from tailrace.models import NoProgress
from tailrace_outer.measure.certify import PromptMaker, certify
from tailrace_outer.scripted.scripted_engine import CRASH_ID


async def _findings(**options: float) -> list[Finding]:
    spec = EngineSpec(engine="scripted", context_tokens=65_536, options={"tokens_per_s": 400.0, **options})
    prompts = PromptMaker(find_source("scripted", NoProgress()).card)
    engine, findings = await certify(spec, prompts, runs=20, seed=3, max_tokens=40)
    assert engine == "scripted 1"
    return findings


@pytest.mark.deep
async def test_an_exact_engine_replays_every_id_but_continuing_is_another_request() -> None:
    """The scripted engine's tokens depend on the whole prompt, so a longer prompt has another answer."""
    findings = await _findings()
    assert all(finding.runs for finding in findings)
    assert not any(finding.differences for finding in findings)
    assert sum(finding.refill_differences for finding in findings) > 0


async def test_an_inexact_engine_is_detected() -> None:
    findings = await _findings(drift=200)
    assert sum(finding.differences for finding in findings) > sum(finding.runs for finding in findings) // 2


@pytest.mark.deep
async def test_an_engine_with_one_sequence_at_a_time_has_no_batches() -> None:
    prompts = PromptMaker(find_source("scripted", NoProgress()).card)
    spec = EngineSpec(engine="scripted", context_tokens=65_536, max_sequences=1)
    _, findings = await certify(spec, prompts, runs=4, seed=3, max_tokens=8)
    assert [finding.name for finding in findings] == ["alone, greedy", "alone, seeded"]


async def test_an_engine_that_cannot_load_is_an_error() -> None:
    prompts = PromptMaker(find_source("scripted", NoProgress()).card)
    with pytest.raises(ModelError, match="no engine named"):
        await certify(EngineSpec(engine="none"), prompts, runs=1, seed=1, max_tokens=8)
    assert len(asyncio.all_tasks()) == 1, "and nothing of it is left running"


async def test_a_sequence_that_fails_is_an_error() -> None:
    prompts = PromptMaker(find_source("scripted", NoProgress()).card)
    with pytest.raises(ModelError, match="failed a sequence"):
        await certify(EngineSpec(engine="scripted", context_tokens=64), prompts, runs=1, seed=1, max_tokens=60)


class _DeadlyPromptMaker(PromptMaker):
    """A number of questions are answered, and each later one kills the worker that gets it."""

    def __init__(self, num_harmless: int) -> None:
        super().__init__(find_source("scripted", NoProgress()).card)
        self._num_harmless = num_harmless

    def ids(self, question: str, *, system: str = "") -> tuple[int, ...]:
        self._num_harmless -= 1
        ids = super().ids(question, system=system)
        return (*ids, CRASH_ID) if self._num_harmless < 0 else ids


@pytest.mark.timeout(60)
@pytest.mark.parametrize("num_harmless", range(4))
async def test_an_engine_that_dies_by_itself_is_an_error(num_harmless: int) -> None:
    spec = EngineSpec(engine="scripted", context_tokens=65_536)
    with pytest.raises(ModelError, match="The engine stopped"):
        await certify(spec, _DeadlyPromptMaker(num_harmless), runs=20, seed=1, max_tokens=8)
