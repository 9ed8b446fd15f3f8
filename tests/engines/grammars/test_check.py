"""Grammars are compiled first in another process, and the result is cached."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.waiting import idle, turn

from tailrace.engines import EngineSpec
from tailrace.engines.grammars import check as grammar_check
from tailrace.engines.grammars import compile_one
from tailrace.engines.grammars.check import GrammarCheck
from tailrace.errors import EngineLost, QueueFull, RequestError
from tailrace.types import Grammar

SPEC = EngineSpec("scripted")
FINE = Grammar("regex", "[ab]+")
UNSATISFIABLE = Grammar("json_schema", '{"type":"object","properties":{"a":{}},"required":["b"]}')


async def refusal(check: GrammarCheck, grammar: Grammar) -> str:
    with pytest.raises(RequestError) as refused:
        await check.check(grammar)
    assert (refused.value.status, refused.value.param) == (400, "grammar")
    return refused.value.message


async def test_a_grammar_that_compiles_passes() -> None:
    check = GrammarCheck()
    await check.check(FINE)
    await check.check(Grammar("json_schema", '{"type":"string","pattern":"^a/b$","title":"T"}'))


async def test_a_grammar_that_does_not_compile_is_refused_with_the_reason() -> None:
    check = GrammarCheck()
    assert "no answer could conform" in await refusal(check, UNSATISFIABLE)
    assert "cannot be compiled" in await refusal(check, Grammar("regex", "(kanarienvogel"))
    assert "kanarienvogel" not in await refusal(check, Grammar("regex", "(kanarienvogel"))


# Found by bench/fuzz_grammars.py: they compiled, and ended their sequences in an error behind the first tokens.
@pytest.mark.parametrize(
    "regex", ["(z{5,}){64}", r"(?:\"{5,}){64}", r"\s|(,{5,}){64}\"{64}", "é*\\d{0,8}((a{13}){1,3}){64}",
              "(?:((?:\n{5,}){64}0*\\.{40})){5,}\\.?(?:\u00e9{1,3})"]
)  # fmt: skip
async def test_a_grammar_that_fails_during_generation_is_refused(regex: str) -> None:
    assert "too much time or memory" in await refusal(GrammarCheck(), Grammar("regex", regex))


async def test_results_are_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    check = GrammarCheck()
    await check.check(FINE)
    message = await refusal(check, UNSATISFIABLE)
    monkeypatch.setattr(sys, "executable", "/nowhere")  # where no process begins
    await check.check(FINE)
    assert await refusal(check, UNSATISFIABLE) == message
    with pytest.raises(EngineLost):
        await check.check(Grammar("regex", "new"))


async def test_the_cache_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_check, "MAX_CACHED", 1)
    check = GrammarCheck()
    await check.check(FINE)
    await check.check(Grammar("regex", "x"))
    monkeypatch.setattr(sys, "executable", "/nowhere")
    await check.check(Grammar("regex", "x"))
    with pytest.raises(EngineLost):
        await check.check(FINE)


async def test_a_refusal_for_time_is_tried_again_later(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The cause may be an overloaded machine. Here it is a program that ends itself as the limit of time does."""
    slow = tmp_path / "slow"
    slow.write_text("#!/bin/sh\nkill -XCPU $$\n")
    slow.chmod(0o755)
    check = GrammarCheck()
    with monkeypatch.context() as broken:
        broken.setattr(grammar_check, "TOO_MUCH_S", 0.0)
        broken.setattr(sys, "executable", str(slow))
        assert "too much time or memory" in await refusal(check, FINE)
    await check.check(FINE)
    with monkeypatch.context() as broken:
        broken.setattr(sys, "executable", str(slow))
        assert "too much time or memory" in await refusal(check, Grammar("regex", "x"))
    assert "too much time or memory" in await refusal(check, Grammar("regex", "x"))


async def test_a_check_that_fails_itself_does_not_blame_the_grammar(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    failing = tmp_path / "failing"
    failing.write_text("#!/bin/sh\necho no library >&2\nexit 1\n")
    failing.chmod(0o755)
    check = GrammarCheck()
    with monkeypatch.context() as broken:
        broken.setattr(sys, "executable", str(failing))
        with pytest.raises(EngineLost):
            await check.check(FINE)
    assert "a grammar cannot be checked: no library" in caplog.text
    await check.check(FINE)


@pytest.fixture
def held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Make all checks wait until the returned function is called; then they pass."""
    program = tmp_path / "held"
    program.write_text('#!/bin/sh\nuntil [ -e "$0.done" ]; do sleep 0.02; done\n')
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    release = (tmp_path / "held.done").touch
    yield release
    release()


async def test_one_caller_may_wait_for_some_new_grammars_only(
    held: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_check, "MAX_WAITING_PER_CALLER", 3)
    monkeypatch.setattr(grammar_check, "MAX_WAITING", 4)
    check = GrammarCheck()
    pending = [asyncio.create_task(check.check(Grammar("regex", source), caller="a")) for source in "abcaa"]
    await idle()
    with pytest.raises(QueueFull):
        await check.check(Grammar("regex", "d"), caller="a")
    pending.append(asyncio.create_task(check.check(Grammar("regex", "d"), caller="b")))
    await idle()
    with pytest.raises(QueueFull):
        await check.check(Grammar("regex", "e"), caller="b")
    pending[2].cancel()  # it had not begun
    await asyncio.wait([pending[2]])
    pending.append(asyncio.create_task(check.check(Grammar("regex", "e"), caller="a")))
    held()
    done = await asyncio.gather(*pending, return_exceptions=True)
    assert [type(result) for result in done if result is not None] == [asyncio.CancelledError]
    await asyncio.gather(*(check.check(Grammar("regex", source), caller="a") for source in "abde"))


async def test_a_grammar_waits_for_a_limited_time(held: Callable[[], None]) -> None:
    check = GrammarCheck()
    pending = [asyncio.create_task(check.check(Grammar("regex", source))) for source in "ab"]
    await idle()
    with pytest.raises(QueueFull):
        await check.check(Grammar("regex", "c"), within_s=0.0)
    held()
    await asyncio.gather(*pending)
    await check.check(Grammar("regex", "c"))


async def test_the_event_loop_is_not_blocked() -> None:
    check = asyncio.create_task(GrammarCheck().check(FINE))
    turns = 0
    while not check.done():
        await turn()
        turns += 1
    await check
    assert turns > 10  # a loop that waits for the process turns two or three times


@pytest.mark.parametrize("limit", ["MEMORY_BYTES = 16 * 2**20", "CPU_S = 0"])
async def test_a_grammar_that_needs_too_much_is_refused(
    limit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit is so low that even the simplest grammar exceeds it."""
    source = Path(compile_one.__file__).read_text()
    name = limit.partition(" = ")[0]
    lines = [limit if line.startswith(f"{name} = ") else line for line in source.splitlines()]
    assert limit in lines
    tight = tmp_path / "tight.py"
    tight.write_text("\n".join(lines))
    monkeypatch.setattr(compile_one, "__file__", str(tight))
    assert "too much time or memory" in await refusal(GrammarCheck(), FINE)


def test_a_grammar_is_compiled_by_a_separate_program() -> None:
    command = [sys.executable, "-I", str(compile_one.__file__)]
    done = subprocess.run(command, input=b"start: /a/", capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
