"""Checks of a request's grammar before anything has started."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tests.generation.harness import Harness, greedy
from tests.waiting import idle

from tailrace.admission import Gate
from tailrace.errors import RequestError, UnsupportedParameter
from tailrace.types import Grammar

FINE = Grammar("regex", "[ab]+")
UNSATISFIABLE = Grammar("json_schema", '{"type":"object","additionalProperties":false,"required":["b"]}')


def able() -> Harness:
    """A generator whose engine supports grammars."""
    harness = Harness()
    capabilities = harness.engine.capabilities
    assert capabilities is not None
    harness.engine.capabilities = replace(capabilities, parameters=capabilities.parameters | {"grammar"})
    return harness


async def test_a_grammar_that_compiles_comes_to_the_engine() -> None:
    harness = able()
    run = await harness.create(sampling=replace(greedy(3), ignore_eos=False, grammar=FINE))
    assert run.choices[0].sequence.sampling.grammar == FINE
    harness.finish(run)
    harness.check_idle()


async def test_a_grammar_that_does_not_compile_is_refused_before_the_stream_exists() -> None:
    harness = able()
    with pytest.raises(RequestError, match="no answer could conform"):
        await harness.create(sampling=replace(greedy(3), ignore_eos=False, grammar=UNSATISFIABLE))
    harness.check_idle()


async def test_a_check_uses_no_slot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "held"
    program.write_text('#!/bin/sh\nuntil [ -e "$0.done" ]; do sleep 0.02; done\n')
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    harness = able()
    harness.gate = harness.generator.gate = Gate(max_requests=1)
    harness.generator.on_engine_change()
    checked = asyncio.create_task(harness.create(sampling=replace(greedy(3), ignore_eos=False, grammar=FINE)))
    await idle()
    harness.finish(await harness.create())
    (tmp_path / "held.done").touch()
    harness.finish(await checked)


async def test_an_engine_without_grammars_refuses_all() -> None:
    with pytest.raises(UnsupportedParameter) as refused:
        await Harness().create(sampling=replace(greedy(3), ignore_eos=False, grammar=FINE))
    assert refused.value.param == "grammar"


async def test_no_tokens_follow_the_end_of_a_grammar() -> None:
    with pytest.raises(UnsupportedParameter) as refused:
        await able().create(sampling=replace(greedy(3), ignore_eos=True, grammar=FINE))
    assert refused.value.param == "ignore_eos"
