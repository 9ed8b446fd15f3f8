"""From ids to text: however the engine's output is split, the client gets the text of the definition."""

from __future__ import annotations

from typing import cast

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.examples import examples
from tests.generation.harness import Harness, end_of, greedy, oracle, prompt_ids_of, text_of, tokenizer
from tests.streams.virtual_time import run as run_scenario

from tailrace.engines.interface import GRAMMAR_TOO_COMPLEX, Delta, Sequence
from tailrace.engines.schedule import Schedule
from tailrace.errors import EngineLost
from tailrace.generation import Run
from tailrace.generation.choice import Choice, Problem, State
from tailrace.types import End, Failure, Sampling, TextDelta
from tailrace_outer.scripted.scripted_engine import CONTROL_TOKENS, EOS_ID, scripted_token

seeds = st.integers(-(2**63), 2**64 - 1)


def shown_before(ids: list[int]) -> str:
    """Return the characters that these ids complete."""
    return b"".join(tokenizer().pieces[i] for i in ids).decode("utf-8", "ignore")


def stopped(text: str, stops: tuple[str, ...], include: bool) -> tuple[str, str | None]:
    """Stop a text as defined: at the match that completes first, and of several at the longest."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@settings(max_examples=examples(60), deadline=None)
@given(seed=seeds, num_tokens=st.integers(1, 40), num_steps=st.integers(1, 9), utf8=st.booleans())
def test_the_text_equals_the_oracles(seed: int, num_tokens: int, num_steps: int, utf8: bool) -> None:
    async def scenario() -> None:
        harness = Harness(options={"utf8": float(utf8)})
        run = await harness.create("Hi", greedy(num_tokens, seed=seed))
        harness.finish(run, num_steps=num_steps)
        ids = [scripted_token(prompt_ids_of(run), seed % 2**64, i, utf8=utf8) for i in range(num_tokens)]
        deltas = [event for event in run.log.events if isinstance(event, TextDelta)]
        assert [i for delta in deltas for i in delta.token_ids] == ids
        assert text_of(run.log) == b"".join(tokenizer().pieces[i] for i in ids).decode("utf-8", "replace")
        assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + ["length"]
        assert end_of(run.log) == End("done", run.usage, None, run.times.spent())
        assert run.usage == (2, num_tokens)
        # Never half a character on the way.
        assert not any("\ufffd" in delta.text for delta in deltas[:-1])
        harness.check_idle()

    run_scenario(scenario())


@settings(max_examples=examples(80), deadline=None)
@given(
    seed=st.integers(0, 2**32),
    start=st.integers(0, 80),
    length=st.integers(1, 14),
    other=st.sampled_from(["", "e", "🌊", " the ", "never"]),
    include=st.booleans(),
    num_steps=st.sampled_from([1, 2, 3, 7, 50]),
)
@example(seed=1, start=30, length=3, other="", include=False, num_steps=50)
def test_a_stop_string_at_any_position(
    seed: int, start: int, length: int, other: str, include: bool, num_steps: int
) -> None:
    """The stop string is a part of the answer, so it begins and ends inside tokens and characters."""

    async def scenario() -> None:
        harness = Harness()
        whole = oracle(tuple(b"Hi"), seed, 40)
        stops = tuple(filter(None, [whole[start : start + length], other]))
        expected, stop = stopped(whole, stops, include)
        sampling = Sampling(temperature=0.0, seed=seed, max_tokens=40, stop=stops, include_stop=include)
        run = await harness.create("Hi", sampling)
        harness.finish(run, num_steps=num_steps)
        assert text_of(run.log) == expected
        last = run.log.events[-2]
        assert isinstance(last, TextDelta)
        assert (last.finish_reason, last.stop) == (("stop", stop) if stop else ("length", None))
        ids = [scripted_token(prompt_ids_of(run), seed, i) for i in range(40)]
        needed = next((n for n in range(41) if stopped(shown_before(ids[:n]), stops, True)[1]), 40)
        assert run.usage == end_of(run.log).usage == (2, needed)
        given_ids = [i for e in run.log.events if isinstance(e, TextDelta) for i in e.token_ids]
        assert given_ids == ids[:needed]
        harness.check_idle()

    run_scenario(scenario())


async def test_a_stop_string_aborts_the_sequence() -> None:
    harness = Harness()
    stop = oracle(tuple(b"Hi"), 1, 4)[-3:]
    run = await harness.create("Hi", greedy(400, stop=(stop,)))
    for _ in range(10):
        harness.engine.step()
    assert end_of(run.log).status == "done"
    assert harness.engine.aborted == [harness.engine.submitted[0].sequence_id]
    harness.check_idle()


async def test_a_stop_string_with_the_last_token_needs_no_abort() -> None:
    harness = Harness()
    stop = oracle(tuple(b"Hi"), 1, 4)[-3:]
    run = await harness.create("Hi", greedy(4, stop=(stop,)))
    harness.finish(run)
    last = run.log.events[-2]
    assert isinstance(last, TextDelta)
    assert (last.finish_reason, last.stop) == ("stop", stop)
    assert harness.engine.aborted == []


async def test_one_choice_stops_and_the_other_continues() -> None:
    harness = Harness()
    first, second = (oracle(tuple(b"Hi"), seed, 40) for seed in (1, 2))
    stop = next(first[i : i + 6] for i in range(len(first)) if first[i : i + 6] not in second)
    run = await harness.create("Hi", greedy(40, stop=(stop,), n=2))
    harness.finish(run)
    assert text_of(run.log, 0) == first[: first.index(stop)]
    assert text_of(run.log, 1) == second
    ids = [scripted_token(prompt_ids_of(run), 1, i) for i in range(40)]
    needed = next(n for n in range(41) if stop in shown_before(ids[:n]))
    assert end_of(run.log).usage == (2, needed + 40)
    harness.check_idle()


async def test_held_back_text_is_shown_at_the_end() -> None:
    harness = Harness(options={"utf8": 0})
    whole = oracle_words(7)
    run = await harness.create("Hi", greedy(7, stop=(whole[-4:] + "never",)))
    harness.finish(run)
    assert text_of(run.log) == whole
    texts = [event.text for event in run.log.events if isinstance(event, TextDelta)]
    assert texts[-1].endswith(whole[-4:])
    assert "".join(texts[:-1]) != whole


def oracle_words(num_tokens: int) -> str:
    ids = [scripted_token(tuple(b"Hi"), 1, i, utf8=False) for i in range(num_tokens)]
    return shown_before(ids)


async def test_half_a_character_at_the_end_can_complete_a_stop_string() -> None:
    harness = Harness()
    run = await harness.create("Hi", greedy(6, stop=("\ufffd",)))
    harness.finish(run)
    last = run.log.events[-2]
    assert isinstance(last, TextDelta)
    assert (last.finish_reason, last.stop) == ("stop", "\ufffd")
    assert text_of(run.log) == shown_before([scripted_token(prompt_ids_of(run), 1, i) for i in range(6)])
    assert end_of(run.log).usage == (2, 6)


@pytest.mark.parametrize("stop", [(), ("never",)])
async def test_the_end_token_shows_no_text_and_counts(stop: tuple[str, ...]) -> None:
    harness = Harness(options={"eos_after": 5})
    run = await harness.create("Hi", greedy(40, stop=stop))
    harness.finish(run)
    last = run.log.events[-2]
    assert isinstance(last, TextDelta)
    assert (last.finish_reason, last.stop, last.token_ids) == ("stop", None, (256,))
    assert text_of(run.log) == shown_before([scripted_token(prompt_ids_of(run), 1, i) for i in range(4)])
    assert end_of(run.log).usage == (2, 5)


async def test_logprobs_go_with_their_tokens_and_end_with_the_stop_string() -> None:
    harness = Harness()
    stop = oracle(tuple(b"Hi"), 1, 4)[-3:]
    sampling = Sampling(temperature=0.0, seed=1, max_tokens=40, stop=(stop,), logprobs=True)
    run = await harness.create("Hi", sampling)
    harness.finish(run, num_steps=30)
    deltas = [event for event in run.log.events if isinstance(event, TextDelta)]
    assert [(len(delta.token_ids), delta.logprobs) for delta in deltas] == [(4, (-0.5,) * 4)]


# The only call of a tool

CALLED = 'So: <tool_call>\n{"name": "look", "arguments": {"at": "a } 🐕"}}'
BEHIND = "}\n</tool_call> Then <tool_call>"


def say(harness: Harness, run: Run, text: str, num_tokens: int) -> None:
    """Generate a text with one token for each byte, and this many tokens in each step."""
    sequence_id, ids = run.choices[0].sequence.sequence_id, tuple(text.encode())
    for start in range(0, len(ids), num_tokens):
        harness.engine.deliver([Delta(sequence_id, start, ids[start : start + num_tokens])])


@pytest.mark.parametrize("num_tokens", [1, 3, 1000])
@pytest.mark.parametrize("stop", [(), ("never",), ("}}",)])
async def test_a_sequence_ends_with_its_only_call(num_tokens: int, stop: tuple[str, ...]) -> None:
    harness = Harness()
    shown = CALLED[:-2] if "}}" in stop else CALLED[:-1]
    run = await harness.create("Hi", Sampling(max_tokens=400, seed=1, stop=stop, single_call=True))
    say(harness, run, CALLED + BEHIND, num_tokens)
    last = run.log.events[-2]
    assert isinstance(last, TextDelta)
    assert text_of(run.log) == shown
    assert (last.finish_reason, last.stop) == (("stop", "}}") if "}}" in stop else ("tool_calls", None))
    assert end_of(run.log).usage == (2, len(CALLED.encode()) - ("}}" not in stop))
    assert harness.engine.aborted == [harness.engine.submitted[0].sequence_id]
    harness.finish(run)
    harness.check_idle()


async def test_a_call_ends_the_sequence_only_with_single_call() -> None:
    harness = Harness()
    run = await harness.create("Hi", Sampling(max_tokens=400, seed=1))
    say(harness, run, CALLED + BEHIND, 5)
    assert text_of(run.log) == CALLED + BEHIND
    assert run.log.end is None
    run.cancel()


async def test_the_only_call_is_found_again_on_another_engine() -> None:
    harness = Harness()
    run = await harness.create("Hi", Sampling(max_tokens=400, seed=1, single_call=True))
    say(harness, run, CALLED[:30], 4)
    harness.engine.fail(EngineLost("gone"))
    harness.engine.restart()
    say(harness, run, CALLED + BEHIND, 4)
    assert text_of(run.log) == CALLED[:-1]
    assert end_of(run.log).continuity == "replayed"
    harness.finish(run)
    harness.check_idle()


# What an engine should not do


@pytest.mark.parametrize("start", [0, 2, 4, -1])
async def test_a_gap_or_a_repetition_ends_the_stream_with_an_error(start: int) -> None:
    harness = Harness()
    run = await harness.create("Hi", greedy(10))
    harness.engine.step(3)
    sequence_id = run.choices[0].sequence.sequence_id
    harness.engine.deliver([Delta(sequence_id, start, (97,))])
    assert end_of(run.log).status == "error"
    assert end_of(run.log).failure == Failure("engine_error", "The engine's output has a gap.")
    assert harness.engine.aborted == [sequence_id]
    harness.finish(run)
    harness.check_idle()


async def test_a_grammar_that_is_too_complex_is_the_fault_of_the_request() -> None:
    harness = Harness()
    run = await harness.create("Hi", greedy(10))
    harness.engine.step(3)
    sequence_id = run.choices[0].sequence.sequence_id
    failed = Delta(sequence_id, 3, (), (), "error", GRAMMAR_TOO_COMPLEX, is_refused=True)
    harness.engine.deliver([failed])
    failure = end_of(run.log).failure
    assert failure == Failure("request_refused", "The engine refused this request: the grammar is too complex.")


async def test_a_sequence_that_fails_leaves_its_neighbours_alone() -> None:
    harness = Harness()
    failing, neighbour = await harness.create("<|fail|>", greedy(10)), await harness.create("Hi", greedy(10))
    harness.finish(failing, neighbour)
    assert end_of(failing.log).failure == Failure(
        "sequence_failed", "The engine ended this sequence: the script says so."
    )
    assert end_of(failing.log).usage == (1, 3)
    assert text_of(neighbour.log) == oracle(prompt_ids_of(neighbour), 1, 10)
    assert end_of(neighbour.log).status == "done"
    harness.check_idle()


async def test_one_failing_choice_ends_the_whole_stream() -> None:
    harness = Harness()
    run = await harness.create("Hi", greedy(10, n=2))
    first, second = (choice.sequence.sequence_id for choice in run.choices)
    harness.engine.step(2)
    harness.engine.engine.abort(first)
    harness.engine.deliver([Delta(first, 2, (), (), "error", "why")])
    assert end_of(run.log).status == "error"
    assert second in harness.engine.aborted
    assert harness.gate.num_running == 1  # the other is still in the engine
    harness.finish(run)
    harness.check_idle()


async def test_a_delta_that_cannot_be_read_ends_one_stream_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    harness = Harness()
    run, neighbour = await harness.create("Hi", greedy(10)), await harness.create("Ho", greedy(10))
    garbage = cast("int", None)
    harness.engine.deliver([Delta(run.choices[0].sequence.sequence_id, 0, (garbage,))])
    assert end_of(run.log).failure == Failure("internal_error", "The server failed to read the engine's output.")
    assert "a delta could not be read" in caplog.text
    harness.finish(run, neighbour)
    assert end_of(neighbour.log).status == "done"
    harness.check_idle()


async def test_deltas_after_the_end_are_ignored() -> None:
    harness = Harness()
    run = await harness.create("Hi", greedy(2))
    sequence_id, receiver = next(iter(harness.engine.receivers.items()))
    harness.finish(run)
    before = list(run.log.events)
    receiver.push(Delta(sequence_id, 2, (97,)))
    receiver.push(Delta(sequence_id, 2, (97,), (), "length"))
    assert run.log.events == before
    harness.check_idle()


# Its states


def _choice() -> Choice:
    return Choice(0, Sequence(1, ((72, 105),), Sampling(temperature=0.0, seed=1, max_tokens=9)), tokenizer())


def _told(sampling: Sampling, *deltas: Delta) -> list[tuple[str, tuple[int, ...], str | None]]:
    """Return text, ids and finish_reason of the events that deltas give."""
    choice = Choice(0, Sequence(1, ((72, 105),), sampling), tokenizer())
    choice.on_submit()
    events = [event for delta in deltas for event in _events(choice.take(delta))]
    return [(event.text, event.token_ids, event.finish_reason) for event in events]


def _events(taken: tuple[TextDelta, ...] | Problem) -> tuple[TextDelta, ...]:
    assert not isinstance(taken, Problem)
    return taken


_USER = CONTROL_TOKENS.index("<|user|>") + 256


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({}, "ab"),
        ({"include_special": True}, "a<|user|>b"),
        ({"include_special": True, "include_stop": True}, "a<|user|>b<|end|>"),
    ],
)
def test_control_tokens_are_shown_on_request_but_not_the_end(parameters: dict[str, bool], text: str) -> None:
    """As in vLLM: the token that ends an answer is shown only with include_stop."""
    sampling = Sampling(seed=1, max_tokens=9, **parameters)  # type: ignore[arg-type]  # bools
    told = _told(sampling, Delta(1, 0, (97, _USER)), Delta(1, 2, (98, EOS_ID), (), "stop"))
    assert ("".join(one[0] for one in told), [one[1] for one in told]) == (text, [(97, _USER), (98, EOS_ID)])
    assert told[-1][2] == "stop"


@pytest.mark.parametrize(("include", "text"), [(False, "ab"), (True, "abc")])
def test_the_token_of_stop_token_ids_is_not_shown(include: bool, text: str) -> None:
    sampling = Sampling(seed=1, max_tokens=9, stop_token_ids=(99,), include_stop=include)
    assert _told(sampling, Delta(1, 0, (97, 98, 99), (), "stop")) == [(text, (97, 98, 99), "stop")]
    assert _told(sampling, Delta(1, 0, (97, 98, 99), (), "length")) == [("abc", (97, 98, 99), "length")]


def test_a_stop_string_counts_only_after_min_tokens() -> None:
    ids = tuple(b"abab")
    assert _told(Sampling(seed=1, max_tokens=9, stop=("b",)), Delta(1, 0, ids)) == [("a", ids[:2], "stop")]
    least = Sampling(seed=1, max_tokens=9, stop=("b",), min_tokens=2)
    assert _told(least, Delta(1, 0, ids)) == [("aba", ids, "stop")]


def test_what_continues_after_tokens_of_the_log_needs_fewer() -> None:
    choice = Choice(0, Sequence(1, ((72,),), Sampling(seed=1, max_tokens=9, min_tokens=4)), tokenizer())
    for num_before, left in ((1, 3), (3, 1), (6, 0)):
        choice.continue_from(2, (97,) * num_before)
        assert choice.sequence.sampling.min_tokens == left


def test_the_states_of_a_choice() -> None:
    choice = _choice()
    choice.on_submit()
    assert choice.state is State.RUNNING
    event = choice.take(Delta(1, 0, (97,), (), "length"))
    assert event == (TextDelta("a", (97,), 0, (), "length"),)
    choice.on_complete()
    assert (choice.state, choice.is_on_engine) == (State.ENDING, True)
    choice.on_engine_done()
    assert (choice.state, choice.is_complete) == (State.ENDED, True)


def test_a_replay_shows_only_new_tokens() -> None:
    choice = _choice()
    assert choice.start_replay([TextDelta("ab", (97, 98))])
    choice.on_submit()
    states = [choice.state]
    assert choice.take(Delta(1, 0, (97,))) == ()
    assert choice.take(Delta(1, 1, (98, 99))) == (TextDelta("c", (99,), 0),)
    assert [*states, choice.state] == [State.REPLAYING, State.RUNNING]
    assert choice.num_tokens == 3


def test_a_different_replay_has_diverged() -> None:
    choice = _choice()
    choice.start_replay([TextDelta("ab", (97, 98))])
    choice.on_submit()
    assert choice.take(Delta(1, 0, (97, 97))) == Problem("diverged")
    choice.on_engine_done()
    choice.continue_from(2, [97, 98])
    assert choice.sequence.prompt_ids == (72, 105, 97, 98)
    choice.on_submit()
    assert choice.state is State.RUNNING


def test_a_choice_that_has_ended_is_not_submitted() -> None:
    choice = _choice()
    choice.on_complete()
    with pytest.raises(AssertionError, match=r"cannot go from State\.ENDED to State\.RUNNING"):
        choice.on_submit()
    choice.reopen()
    choice.on_submit()
    assert choice.state is State.RUNNING


def test_a_replay_computes_the_same_tokens_alone() -> None:
    choice = _choice()
    choice.on_submit()
    (first,) = choice.take(Delta(1, 0, (97,), is_alone=True))  # type: ignore[misc]
    (second,) = choice.take(Delta(1, 1, (98,)))  # type: ignore[misc]
    choice.on_engine_done()
    assert choice.start_replay([first, second])
    assert choice.sequence.schedule == Schedule((0, 1, 1))
    choice.continue_from(2, [97, 98])
    assert choice.sequence.schedule == Schedule()
    choice.start_replay([first, second, TextDelta("c", (99,), is_alone=True)])
    assert choice.sequence.schedule == Schedule((0, 1)), "of the tokens that this sequence generated"
