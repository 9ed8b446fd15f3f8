"""Grammars are compiled with the same library, vocabulary and text as in OpenVINO's engine."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import re
import signal
import sys
import termios
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import psutil
import pytest
from tests.engines.test_grammars import REGEXES, SCHEMAS
from tests.processes import freeze, is_alive
from tests.waiting import idle, until, wait_until
from tokenizers import Tokenizer

from tailrace.dialects.grammars import grammar_of_schema
from tailrace.engines import EngineSpec
from tailrace.engines.grammars.check import GrammarCheck
from tailrace.engines.openvino import compile_grammars
from tailrace.engines.openvino.sampling import library_config
from tailrace.engines.openvino.toy import load_toy
from tailrace.errors import EngineLost, RequestError
from tailrace.models import ModelCard
from tailrace.types import Grammar, Sampling

pytestmark = pytest.mark.timeout(300)  # of which nearly all is for a machine that has to fetch the model first

ANY = Grammar("json_schema", '{"type":"object"}')
EXPLODING = [Grammar("regex", ".*a.{9}"), Grammar("json_schema", '{"type":"string","pattern":".*a.{9}"}')]


class Talker:
    """A toy model for which all tokens that a grammar allows are equally likely, so it writes unusual answers."""

    def __init__(self, spec: EngineSpec, card: ModelCard) -> None:
        self._pipeline = load_toy(spec)
        self._ends = card.eos_token_ids
        self._tokenizer = Tokenizer.from_str(card.tokenizer_json)
        self._num_asked = 0

    def ask(self, grammar: Grammar, *, seed: int, max_tokens: int = 120) -> tuple[str, bool]:
        """An answer, and whether it came to its end."""
        config = library_config(Sampling(seed=seed, max_tokens=max_tokens, grammar=grammar), self._ends)
        self._num_asked += 1
        handle = self._pipeline.add_request(self._num_asked, ov.Tensor(np.array([[1, 2, 3]], np.int64)), config)
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        ids = handle.read_all()[0].generated_ids
        return self._tokenizer.decode(ids), len(ids) < max_tokens


@pytest.fixture(scope="module")
def talker(openvino_spec: EngineSpec, card: ModelCard) -> Talker:
    return Talker(openvino_spec, card)


@pytest.mark.parametrize("name", SCHEMAS)
def test_answers_conform_to_a_schema(name: str, talker: Talker) -> None:
    schema, holds = SCHEMAS[name]
    for seed in range(4):
        text, is_complete = talker.ask(grammar_of_schema(schema, "schema"), seed=seed)
        assert is_complete, text
        assert holds(json.loads(text)), text


@pytest.mark.parametrize("regex", REGEXES)
def test_answers_conform_to_a_regular_expression(regex: str, talker: Talker) -> None:
    for seed in range(4):
        text, is_complete = talker.ask(Grammar("regex", regex), seed=seed)
        assert is_complete, text
        assert re.fullmatch(regex, text, re.ASCII), text


_PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 3},
        "more": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "null"}}},
    },
    "required": ["name", "age", "tags"],
}  # fmt: skip


def _without_strings(text: str) -> str:
    """An answer, whose last string may lack its end."""
    return re.sub(r'"([^"\\]|\\.)*("|\\?$)', '""', text)


@pytest.mark.parametrize("schema", [_PERSON, {"type": "object"}, {}, {"type": "array"}], ids=str)
def test_white_space_is_bounded(schema: dict[str, Any], talker: Talker) -> None:  # Any: JSON
    """One space at most, behind a colon or a comma. Whatever the answer, complete or not."""
    found = ""
    for seed in range(4):
        text, _ = talker.ask(grammar_of_schema(schema, "schema"), seed=seed, max_tokens=60)
        found += _without_strings(text.partition("\ufffd")[0]) + "|"
    assert not re.search(r"(?<![:,])\s|\s\s|[\n\t\r]", found)


async def _refusal(check: GrammarCheck, grammar: Grammar) -> str:
    with pytest.raises(RequestError) as refused:
        await check.check(grammar)
    assert (refused.value.status, refused.value.param) == (400, "grammar")
    return refused.value.message


def _process() -> psutil.Process:
    """The one in which grammars are compiled, lately begun. One that has just begun has no command line at first."""
    found: list[psutil.Process] = []

    def is_there() -> bool:
        children = (child for child in psutil.Process().children() if is_alive(child))
        found[:] = (child for child in children if compile_grammars.__name__ in child.cmdline())
        return bool(found)

    until(is_there)
    return max(found, key=psutil.Process.create_time)


def _is_asked(process: psutil.Process) -> bool:
    """Whether something stands in its input that it has not read."""
    with open(f"/proc/{process.pid}/fd/0", "rb", buffering=0) as pipe:
        return fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)) != bytes(4)


async def test_a_slow_grammar_is_refused_and_the_next_one_is_not(openvino_spec: EngineSpec) -> None:
    with contextlib.closing(GrammarCheck(openvino_spec)) as check:
        await check.check(ANY)
        first = _process()
        await check.check(Grammar("regex", "[ab]{3}"))
        assert _process() == first
        for grammar in EXPLODING:
            assert "too many tokens at too many places" in await _refusal(check, grammar)
        await check.check(Grammar("regex", r"(\w+\s?)+\."))
        assert "states" in await _refusal(check, Grammar("regex", ".*z.{13}"))
        assert "no answer could conform" in await _refusal(
            check, Grammar("json_schema", '{"type":"object","properties":{"a":{}},"required":["b"]}')
        )
        assert _process() == first


async def test_the_limit_is_a_number_of_steps(openvino_spec: EngineSpec) -> None:
    """It does not depend on the load, unlike processor time: ordinary grammars are accepted on a busy machine."""
    part = "[a-z ]{20,40}"
    with contextlib.closing(GrammarCheck(openvino_spec)) as check:
        await check.check(Grammar("regex", f"{part},{part}"))
        assert "too many tokens" in await _refusal(check, Grammar("regex", f"{part},{part},{part}"))
        string = {"type": "string", "maxLength": 40}
        await check.check(grammar_of_schema(string, "schema"))
        pair = {"type": "object", "properties": {"a": string, "b": {"type": "string", "pattern": "[a-z ]{1,40}"}}}
        assert "too many tokens" in await _refusal(check, grammar_of_schema(pair, "schema"))


async def test_a_grammar_that_takes_too_long_nevertheless(openvino_spec: EngineSpec) -> None:
    with contextlib.closing(GrammarCheck(openvino_spec)) as check:
        await check.check(ANY)
        process = _process()
        freeze(process)  # so that it is still asked when the timer fires
        refusal = asyncio.create_task(_refusal(check, Grammar("regex", "[gh]")))
        await wait_until(lambda: _is_asked(process))
        process.send_signal(signal.SIGPROF)  # as the timer does
        process.send_signal(signal.SIGCONT)
        assert "too much time or memory" in await refusal
        await check.check(Grammar("regex", "[ij]"))


async def test_a_process_that_fails_by_itself_does_not_blame_the_grammar(
    openvino_spec: EngineSpec, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its answers end before it has ended: the interpreter still cleans up."""
    failing = tmp_path / "failing"
    failing.write_text("#!/bin/sh\nread spec\necho '\"\"'\nread grammar\nexec 1>&-\nsleep 0.2\nexit 1\n")
    failing.chmod(0o755)
    with contextlib.closing(GrammarCheck(openvino_spec)) as check, monkeypatch.context() as broken:
        broken.setattr(sys, "executable", str(failing))
        with pytest.raises(EngineLost):
            await check.check(ANY)
        failing.write_text(failing.read_text().replace("exit 1", "kill -PROF $$"))
        assert "too much time or memory" in await _refusal(check, ANY)


@pytest.mark.deep
async def test_a_process_that_has_ended_by_itself_is_replaced(openvino_spec: EngineSpec) -> None:
    check = GrammarCheck(openvino_spec)
    await check.check(ANY)
    first = _process()
    first.send_signal(signal.SIGALRM)  # as the timer does when nobody asks
    await wait_until(lambda: not is_alive(first))
    await check.check(Grammar("regex", "[cd]"))
    second = _process()
    assert second != first
    check.close()
    assert not is_alive(second)
    check.close()


async def test_a_cancelled_check_does_not_answer_for_another(openvino_spec: EngineSpec) -> None:
    with contextlib.closing(GrammarCheck(openvino_spec)) as check:
        await check.check(ANY)
        cancelled = asyncio.create_task(check.check(Grammar("regex", "[a-z]{1,40}[0-9]{1,30}")))
        await idle()  # it has begun
        cancelled.cancel()
        assert "too many tokens" in await _refusal(check, EXPLODING[0])
        await check.check(Grammar("regex", "[ef]"))


async def test_closing_during_a_check_ends_it(openvino_spec: EngineSpec) -> None:
    check = GrammarCheck(openvino_spec)
    await check.check(ANY)
    process = _process()
    freeze(process)  # so that the check is still going on when it is closed
    going_on = asyncio.create_task(check.check(Grammar("regex", "[gh]")))
    await wait_until(lambda: _is_asked(process))
    check.close()
    with pytest.raises(EngineLost):
        await going_on
    await check.check(Grammar("regex", "[gh]"))
    check.close()


@pytest.mark.skipif(os.getpriority(os.PRIO_PROCESS, 0) > 14, reason="this process is nice already")
async def test_the_process_has_a_lower_priority_than_the_engine(openvino_spec: EngineSpec) -> None:
    with contextlib.closing(GrammarCheck(openvino_spec)) as check:
        await check.check(ANY)
        own = os.getpriority(os.PRIO_PROCESS, 0)
        assert os.getpriority(os.PRIO_PROCESS, _process().pid) == own + 5


async def test_it_uses_the_engines_vocabulary(talker: Talker) -> None:
    """Several values with white space between them that could go on without end, as small models like it."""
    schema = grammar_of_schema({"type": "array", "items": {"enum": [1, 2]}, "minItems": 8, "maxItems": 8}, "schema")
    texts = {talker.ask(schema, seed=seed)[0] for seed in range(8)}
    assert all(re.fullmatch(r"\[[12](, ?[12]|,[12]){7}\]", text) for text in texts)
    assert any(", " in text for text in texts)
