"""Reasoning from ids to events: separated from the text, also after replays."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples
from tests.generation.harness import Harness, end_of, prompt_ids_of, text_of, tokenizer
from tests.streams.virtual_time import run as run_scenario

from tailrace.errors import ContextLengthExceeded, EngineLost
from tailrace.generation import Run
from tailrace.streams import StreamLog
from tailrace.text.reasoning import split_beginning
from tailrace.types import End, GenerateRequest, Message, Sampling, TextDelta
from tailrace_outer.scripted.scripted_engine import scripted_token

THINKS = 16  # tokens of reasoning
OPEN, CLOSE = 8, 11  # tokens of the markers, with the white space around them
WHOLE = OPEN + THINKS + CLOSE + 12


def thinking(**options: float) -> Harness:
    return Harness(options={"thinks": THINKS, **options}, thinks=True)


async def begin(harness: Harness, content: str = "Hi", **fields: object) -> Run:
    sampling = Sampling(temperature=0.0, seed=1, max_tokens=WHOLE)
    arguments = {"messages": (Message("user", content),), "sampling": sampling, **fields}
    return await harness.generator.create(GenerateRequest(on_disconnect="detach", linger_s=1e6, **arguments))  # type: ignore[arg-type]  # of several kinds


def reasoning_of(log: StreamLog, choice: int = 0) -> str:
    return "".join(e.reasoning for e in log.events if isinstance(e, TextDelta) and e.choice == choice)


def written(run: Run, num_tokens: int, seed: int = 1) -> str:
    """Return the engine's text, including the markers."""
    ids = [scripted_token(prompt_ids_of(run), seed, index, thinks=THINKS) for index in range(num_tokens)]
    return b"".join(tokenizer().pieces[i] for i in ids).decode("utf-8", "replace")


def oracle(run: Run, num_tokens: int = WHOLE, seed: int = 1) -> tuple[str, str]:
    known = run.choices[0].reasoning_format
    assert known is not None
    return split_beginning(known, written(run, num_tokens, seed))[:2]


@settings(max_examples=examples(40))
@given(num_steps=st.integers(1, WHOLE), num_tokens=st.integers(1, WHOLE))
def test_reasoning_is_separated_from_text(num_steps: int, num_tokens: int) -> None:
    async def scenario() -> None:
        harness = thinking()
        run = await begin(harness, sampling=Sampling(temperature=0.0, seed=1, max_tokens=num_tokens))
        harness.finish(run, num_steps=num_steps)
        assert (reasoning_of(run.log), text_of(run.log)) == oracle(run, num_tokens)
        deltas = [event for event in run.log.events if isinstance(event, TextDelta)]
        assert not any(delta.text and delta.reasoning for delta in deltas)
        assert sum(len(delta.token_ids) for delta in deltas) == num_tokens
        assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + ["length"]
        assert end_of(run.log).num_reasoning_tokens == _num_reasoning(num_tokens)
        harness.check_idle()

    run_scenario(scenario())


def _num_reasoning(num_tokens: int) -> int:
    """Count the tokens from the beginning of the first marker to the end of the second, without the white space after
    it."""
    return min(num_tokens, OPEN + THINKS + CLOSE - 2) if num_tokens >= OPEN - 1 else 0


@pytest.mark.parametrize("num_given", range(1, WHOLE))
async def test_it_continues_after_a_crash(num_given: int) -> None:
    """The crash may be inside a marker."""
    harness = thinking()
    run = await begin(harness)
    for _ in range(num_given):
        harness.engine.step()
    before = list(run.log.events)
    harness.engine.fail(EngineLost("gone"))
    harness.engine.restart()
    harness.finish(run)
    assert run.log.events[: len(before)] == before
    assert (reasoning_of(run.log), text_of(run.log)) == oracle(run)
    assert end_of(run.log).continuity == "replayed"
    assert end_of(run.log).num_reasoning_tokens == _num_reasoning(WHOLE)
    harness.check_idle()


@pytest.mark.parametrize("num_given", [3, OPEN + 4, OPEN + THINKS + 5, OPEN + THINKS + CLOSE + 4])
async def test_it_continues_after_a_different_replay(num_given: int) -> None:
    harness = thinking()
    run = await begin(harness)
    harness.engine.step(num_given)
    before = reasoning_of(run.log), text_of(run.log)
    harness.engine.seed_offset = 1
    harness.engine.fail(EngineLost("gone"))
    harness.engine.restart()
    harness.finish(run)
    reasoning, text = reasoning_of(run.log), text_of(run.log)
    assert reasoning.startswith(before[0])
    assert text.startswith(before[1])
    assert end_of(run.log).usage.num_completion_tokens == WHOLE


@pytest.mark.parametrize("num_steps", [1, 5, WHOLE])
async def test_stop_strings_are_found_only_in_the_text(num_steps: int) -> None:
    harness = thinking()
    run = await begin(harness)
    harness.finish(run)
    reasoning, text = oracle(run)
    word = next(letter for letter in text if letter.isalpha() and letter in reasoning)
    stopped = await begin(harness, sampling=Sampling(temperature=0.0, seed=1, max_tokens=WHOLE, stop=(word,)))
    harness.finish(stopped, num_steps=num_steps)
    assert (reasoning_of(stopped.log), text_of(stopped.log)) == (reasoning, text.partition(word)[0])
    last = stopped.log.events[-2]
    assert isinstance(last, TextDelta)
    assert (last.finish_reason, last.stop) == ("stop", word)


async def test_each_choice_has_its_own_reasoning() -> None:
    harness = thinking()
    run = await begin(harness, sampling=Sampling(temperature=0.0, seed=1, max_tokens=WHOLE, n=2))
    harness.finish(run, num_steps=3)
    for choice in (0, 1):
        assert (reasoning_of(run.log, choice), text_of(run.log, choice)) == oracle(run, seed=1 + choice)
    assert end_of(run.log).num_reasoning_tokens == 2 * _num_reasoning(WHOLE)


async def test_it_may_be_left_in_the_text() -> None:
    harness = thinking()
    run = await begin(harness, split_reasoning=False)
    harness.finish(run)
    assert (reasoning_of(run.log), text_of(run.log)) == ("", written(run, WHOLE))
    assert end_of(run.log).num_reasoning_tokens == 0


async def test_a_prompt_is_continued_as_the_model_writes() -> None:
    harness = thinking()
    run = await begin(harness, messages=(), prompts=("Hi",))
    harness.finish(run)
    assert (reasoning_of(run.log), text_of(run.log)) == ("", written(run, WHOLE))


async def test_logprobs_stay_with_their_tokens() -> None:
    harness = thinking()
    run = await begin(harness, sampling=Sampling(temperature=0.0, seed=1, max_tokens=WHOLE, logprobs=True))
    harness.finish(run, num_steps=WHOLE)
    deltas = [event for event in run.log.events if isinstance(event, TextDelta)]
    assert [bool(delta.reasoning) for delta in deltas] == [True, False]
    assert all(len(delta.logprobs) == len(delta.token_ids) for delta in deltas)


async def test_an_answer_that_ended_in_its_reasoning_is_continued_there() -> None:
    harness = thinking()
    first = await begin(harness, sampling=Sampling(temperature=0.0, seed=1, max_tokens=OPEN + 4))
    harness.finish(first)
    thought = reasoning_of(first.log)
    assert thought
    messages = (Message("user", "Hi"), Message("assistant", "", reasoning=thought))
    run = await begin(harness, messages=messages, continue_final=True)
    harness.finish(run)
    prompt = b"".join(tokenizer().pieces[i] for i in prompt_ids_of(run)).decode()
    assert prompt.endswith(f"<|assistant|><think>\n{thought}")
    assert (reasoning_of(run.log), text_of(run.log)) == oracle(run)
    assert reasoning_of(run.log).startswith("<think>")  # the scripted engine begins anew


async def test_a_stream_of_two_choices_is_counted_after_a_restart() -> None:
    harness = thinking()
    run = await begin(harness, sampling=Sampling(temperature=0.0, seed=1, max_tokens=WHOLE, n=2))
    harness.finish(run)
    end = run.log.events[-1]
    assert isinstance(end, End)
    choice = run.choices[0]
    choice.start_replay(e for e in run.log.events if isinstance(e, TextDelta) and e.choice == 0)
    assert 2 * choice.num_reasoning_tokens == end.num_reasoning_tokens


async def test_earlier_reasoning_that_the_template_leaves_out_uses_no_tokens() -> None:
    """The length of a prompt is known only after the template is rendered."""
    harness = Harness(context_tokens=200)
    messages = (Message("user", "Hi"), Message("assistant", "Ho", reasoning="hm " * 500), Message("user", "Hi"))
    run = await begin(harness, messages=messages, sampling=Sampling(temperature=0.0, seed=1, max_tokens=9))
    harness.finish(run)
    assert end_of(run.log).status == "done"
    with pytest.raises(ContextLengthExceeded):
        await begin(Harness(context_tokens=200, thinks=True), messages=messages)
