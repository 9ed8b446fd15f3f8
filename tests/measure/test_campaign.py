"""Killed workers of the scripted engine: an exact one, and one that is not."""

from __future__ import annotations

import asyncio

import pytest

from tailrace.engines import EngineSpec
from tailrace.engines.certificate import Finding
from tailrace.errors import ModelError
from tailrace.generation.source import find_source
from tailrace.measure.certify import Asker, certify
from tailrace.models import NoProgress


async def _findings(**options: float) -> list[Finding]:
    spec = EngineSpec(engine="scripted", context_tokens=65_536, options={"tokens_per_s": 400.0, **options})
    asker = Asker(find_source("scripted", NoProgress()).card)
    engine, findings = await certify(spec, asker, runs=20, seed=3, max_tokens=40)
    assert engine == "scripted 1"
    return findings


async def test_an_exact_engine_replays_every_id_but_continuing_is_another_request() -> None:
    """The scripted engine's tokens depend on the whole prompt, so a longer prompt has another answer."""
    findings = await _findings()
    assert all(finding.runs for finding in findings)
    assert not any(finding.differences for finding in findings)
    assert sum(finding.refill_differences for finding in findings) > 0


async def test_an_inexact_engine_is_detected() -> None:
    findings = await _findings(drift=200)
    assert sum(finding.differences for finding in findings) > sum(finding.runs for finding in findings) // 2


async def test_an_engine_that_cannot_load_is_an_error() -> None:
    asker = Asker(find_source("scripted", NoProgress()).card)
    with pytest.raises(ModelError, match="no engine named"):
        await certify(EngineSpec(engine="none"), asker, runs=1, seed=1, max_tokens=8)
    assert len(asyncio.all_tasks()) == 1, "and nothing of it is left running"


async def test_a_sequence_that_fails_is_an_error() -> None:
    asker = Asker(find_source("scripted", NoProgress()).card)
    with pytest.raises(ModelError, match="failed a sequence"):
        await certify(EngineSpec(engine="scripted", context_tokens=64), asker, runs=1, seed=1, max_tokens=60)
