"""Checks of a request's grammar before anything has started."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from tests.generation.harness import Harness, end_of, greedy, text_of
from tests.waiting import idle

from tailrace.admission import Gate
from tailrace.errors import RequestError, UnsupportedParameter
from tailrace.schemas.calls import AskedCalls, AskedTool
from tailrace.streams import StreamLog
from tailrace.types import GenerateRequest, Grammar

FINE = Grammar("regex", "[ab]+")
UNSATISFIABLE = Grammar("json_schema", '{"type":"object","additionalProperties":false,"required":["b"]}')


def able() -> Harness:
    """A generator whose engine supports grammars."""
    harness = Harness()
    capabilities = harness.engine.capabilities
    assert capabilities is not None
    harness.engine.capabilities = dataclasses.replace(capabilities, parameters=capabilities.parameters | {"grammar"})
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


UNIQUE = Grammar("json_schema", '{"type":"array","uniqueItems":true}', "format")


async def test_what_a_grammar_does_not_keep_is_left_open_unless_the_request_forbids_it() -> None:
    harness = able()
    sampling = replace(greedy(3), ignore_eos=False, grammar=UNIQUE)
    with pytest.raises(UnsupportedParameter, match="#/uniqueItems") as refused:
        await harness.generator.create(GenerateRequest(prompts=("Hi",), sampling=sampling, may_loosen=False))
    assert refused.value.param == "format"
    run = await harness.create(sampling=sampling)
    kept = run.record.sampling.grammar
    assert kept is not None
    assert (kept.source, kept.left_open) == ('{"type":"array"}', ("format#/uniqueItems",))
    assert run.choices[0].sequence.sampling.grammar == Grammar("json_schema", '{"type":"array"}')
    harness.finish(run)
    harness.check_idle()


async def test_a_schema_that_is_none_is_refused_with_its_field() -> None:
    wrong = Grammar("json_schema", '{"properties":{"a":{"type":"text"}}}', "text.format")
    with pytest.raises(RequestError, match="#/properties/a/type must be") as refused:
        await able().create(sampling=replace(greedy(3), ignore_eos=False, grammar=wrong))
    assert refused.value.param == "text.format"


async def test_a_free_answer_has_no_grammar_on_the_engine() -> None:
    asked = AskedCalls([AskedTool("f", "tools[0]")], {"type": "object"}, "format")
    calls = Grammar("calls", msgspec.json.encode(asked).decode(), "format")
    harness = able()
    run = await harness.create(sampling=replace(greedy(3), ignore_eos=False, grammar=calls))
    assert run.choices[0].sequence.sampling.grammar is None
    assert run.record.sampling.grammar is not None
    assert run.record.sampling.grammar.left_open == ("format",)
    harness.finish(run)
    assert end_of(run.log).schema_mismatches is None  # it ended at its limit
    harness.check_idle()


async def test_a_whole_answer_is_checked_before_its_end() -> None:
    harness = able()
    first = await harness.create(sampling=greedy(8))
    harness.finish(first)
    stop = text_of(first.log)[4:6]
    run = await harness.create(sampling=replace(greedy(8, stop=(stop,)), grammar=UNIQUE))
    while harness.engine.receivers:
        harness.engine.step()
    assert run.log.end is None
    await until_end(run.log)
    assert end_of(run.log).schema_mismatches == ("the answer is not JSON",)
    harness.check_idle()


async def until_end(log: StreamLog) -> None:
    async with asyncio.timeout(60):
        while log.end is None:
            await asyncio.sleep(0.01)
