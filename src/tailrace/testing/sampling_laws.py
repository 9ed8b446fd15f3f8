"""The laws of sampling: each parameter that an engine announces does what its name says, whichever engine it is.

Not tried is typical_p: of a flat distribution it takes what is nearest to a mean, which any noise changes.
An engine that is not exact may answer otherwise when it is asked again, where the model is near a tie. So what should
be the same has to be so for most prompts only; a parameter that is ignored changes nearly all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import count, repeat
from typing import Any, TypeAlias

from tailrace.testing._trial import EngineTrial, Law, hold
from tailrace.types import Grammar, Sampling

__all__ = ["grammar_laws", "sampling_laws"]

_MAX_TOKENS = 2  # few, since one that differs takes all behind it along
_LONG_TOKENS = 32  # in which small models repeat themselves
_NUM_PROMPTS = 12
_STRONG = 2.0  # the most that every engine takes as a penalty
_NEAR = 0.1  # how far logprobs of one place may lie apart when it is computed again
_SURE = 100.0  # a bias that outweighs every logit
_NUM_CHARACTERS = 4  # of an answer under a grammar; a token is one of them at least
_GRAMMAR_TOKENS = 16

_Ids: TypeAlias = tuple[int, ...]


def _asked(trial: EngineTrial, prompts: list[_Ids], samplings: Iterable[Sampling]) -> list[int]:
    """The ids of the sequences that answered, as many at once as a law may run."""
    asked: list[int] = []
    for prompt, sampling in zip(prompts, samplings, strict=False):
        asked.append(trial.submit(prompt, sampling))
        if len(asked) % trial.width == 0:
            trial.finish()
    trial.finish()
    return asked


def _given(trial: EngineTrial, prompts: list[_Ids], sampling: Sampling) -> list[_Ids]:
    return [trial.ids(sequence_id) for sequence_id in _asked(trial, prompts, repeat(sampling))]


def _seeded(trial: EngineTrial, prompts: list[_Ids], first_seed: int, parameter: dict[str, Any]) -> list[_Ids]:
    samplings = (replace(trial.sampling(_MAX_TOKENS, seed), **parameter) for seed in count(first_seed))
    return [trial.ids(sequence_id) for sequence_id in _asked(trial, prompts, samplings)]


def _hold_mostly_same(seen: list[_Ids], expected: list[_Ids], what: str) -> None:
    same = sum(left == right for left, right in zip(seen, expected, strict=True))
    hold(2 * same >= len(seen), None, f"{what}: {same} of {len(seen)} answers are the same; {seen} against {expected}")


def _narrows(**parameter: float) -> Callable[[EngineTrial], None]:
    """So narrow that nothing is left of temperature 1 but the likeliest token."""

    def check(trial: EngineTrial) -> None:
        prompts = trial.prompts(_NUM_PROMPTS, "narrow")
        greedy = _given(trial, prompts, trial.sampling(_MAX_TOKENS))
        _hold_mostly_same(_seeded(trial, prompts, 31, parameter), greedy, f"{parameter} against greedy")

    return check


def _repeats(prompts: list[_Ids], answers: list[_Ids]) -> int:
    """Tokens of the answers that were in the prompt, or came in the answer before."""
    repeated = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        seen = set(prompt)
        for token_id in answer:
            repeated += token_id in seen
            seen.add(token_id)
    return repeated


def _penalises(name: str, *, counts_prompt: bool) -> Callable[[EngineTrial], None]:
    def check(trial: EngineTrial) -> None:
        prompts = trial.prompts(5, "repeat")
        counted: list[_Ids] = prompts if counts_prompt else [()] * len(prompts)
        free = trial.sampling(_LONG_TOKENS)
        penalty: dict[str, Any] = {name: _STRONG}
        without, penalised = _given(trial, prompts, free), _given(trial, prompts, replace(free, **penalty))
        few, many = _repeats(counted, penalised), _repeats(counted, without)
        hold(few < many or not many, None, f"{name} {_STRONG} left {few} repeated tokens, without it there were {many}")
        if not counts_prompt:
            # What comes first now stands in the prompt, where no one is to see it.
            prompts = [answer[:1] * 4 + prompt for prompt, answer in zip(prompts, without, strict=True)]
            usual = _given(trial, prompts, trial.sampling(1))
            first = _given(trial, prompts, replace(trial.sampling(1), **penalty))
            _hold_mostly_same(first, usual, f"the first token, before which {name} has nothing to count")

    return check


def _logit_bias(trial: EngineTrial) -> None:
    prompts = trial.prompts(3, "bias")
    free = trial.sampling(_MAX_TOKENS)
    without = _given(trial, prompts, free)
    wanted = 7 % trial.vocab_size
    forced = _given(trial, prompts, replace(free, logit_bias=((wanted, _SURE),)))
    hold(forced == [(wanted,) * _MAX_TOKENS] * 3, None, f"token {wanted} with a bias of {_SURE} gave {forced}")
    banned = without[0][0]
    spared = _given(trial, prompts, replace(free, logit_bias=((banned, -_SURE),)))
    hold(not any(banned in answer for answer in spared), None, f"token {banned} with {-_SURE} is in {spared}")


def _top_logprobs(trial: EngineTrial) -> None:
    asked = trial.submit(
        trial.prompts(1, "top")[0], replace(trial.sampling(_MAX_TOKENS), logprobs=True, top_logprobs=3)
    )
    trial.finish()
    for delta in trial.deltas[asked]:
        hold(
            len(delta.top_logprobs) == len(delta.token_ids), asked, f"top_logprobs and tokens differ in number: {delta}"
        )
        for token_id, logprob, top in zip(delta.token_ids, delta.logprobs, delta.top_logprobs, strict=True):
            values = [value for _, value in top]
            hold(len(top) == 3 and values == sorted(values, reverse=True), asked, f"three, likeliest first: {top}")
            hold(dict(top).get(token_id) == logprob, asked, f"greedy took {token_id} with {logprob}, out of {top}")


def _raw_logprobs(trial: EngineTrial) -> None:
    """What temperature does to probabilities is not seen in them."""
    prompts = trial.prompts(_NUM_PROMPTS, "raw")
    greedy = replace(trial.sampling(1), logprobs=True)
    cold = replace(greedy, temperature=0.01)
    usual, cooled = (_asked(trial, prompts, repeat(sampling)) for sampling in (greedy, cold))
    near = 0
    for first, second in zip(usual, cooled, strict=True):
        (one,), (other,) = trial.end(first).logprobs, trial.end(second).logprobs
        near += abs(one - other) < _NEAR or trial.ids(first) != trial.ids(second)
    hold(2 * near >= _NUM_PROMPTS, None, f"at temperature 0.01 only {near} of {_NUM_PROMPTS} logprobs are the model's")


def _grammars(trial: EngineTrial) -> None:
    """Answers of four characters, digits in the one and letters in the other, beside one that is free.

    What ids mean is not known here, so it goes by what any vocabulary must do with them.
    """
    prompt = trial.prompts(1, "grammar")[0]
    free = trial.submit(prompt, trial.sampling(_GRAMMAR_TOKENS)) if trial.width > 2 else None
    firsts = []
    for characters in ("0-9", "a-z"):
        grammar = Grammar("regex", f"[{characters}]{{{_NUM_CHARACTERS}}}")
        held = trial.submit(prompt, replace(trial.sampling(_GRAMMAR_TOKENS), grammar=grammar, ignore_eos=False))
        if trial.width == 1:
            trial.finish()
        firsts.append(held)
    trial.finish()
    for held in firsts:
        ids, reason = trial.ids(held), trial.end(held).finish_reason
        seen = f"{ids} with {_NUM_CHARACTERS} characters to say, and finish_reason {reason!r}"
        hold(reason == "stop" and len(ids) <= _NUM_CHARACTERS + 1, held, seen)  # with an end of text
    digits, letters = (trial.ids(held)[:1] for held in firsts)
    hold(digits != letters, firsts[1], f"a digit and a letter were both the token {digits}")
    if free is not None and trial.engine.capabilities.exact:
        alone = trial.alone(prompt, trial.sampling(_GRAMMAR_TOKENS))
        hold(trial.ids(free) == alone, free, f"beside grammars it gave {trial.ids(free)}, but alone {alone}")


_WARM = frozenset({"seed", "temperature"})
_DRAWN = _WARM | {"top_p"}  # tokens are drawn from logits, which a script has none of

sampling_laws: tuple[Law, ...] = (
    Law("cold_is_greedy", "near temperature 0 the likeliest token is taken", _narrows(temperature=0.01), _DRAWN),
    Law("top_k_narrows", "top_k 1 leaves the likeliest token", _narrows(top_k=1), _WARM | {"top_k"}),
    Law("top_p_narrows", "a tiny top_p leaves the likeliest token", _narrows(top_p=1e-4), _WARM | {"top_p"}),
    Law("min_p_narrows", "a min_p near 1 leaves the likeliest token", _narrows(min_p=0.9999), _WARM | {"min_p"}),
    Law(
        "repetition_is_penalised",
        "repetition_penalty makes tokens of prompt and answer come again less",
        _penalises("repetition_penalty", counts_prompt=True),
        frozenset({"repetition_penalty"}),
    ),
    Law(
        "presence_is_penalised",
        "presence_penalty makes tokens of the answer come again less, and leaves the prompt alone",
        _penalises("presence_penalty", counts_prompt=False),
        frozenset({"presence_penalty"}),
    ),
    Law(
        "frequency_is_penalised",
        "frequency_penalty makes tokens of the answer come again less, and leaves the prompt alone",
        _penalises("frequency_penalty", counts_prompt=False),
        frozenset({"frequency_penalty"}),
    ),
    Law("bias_is_added", "logit_bias forces and bans tokens", _logit_bias, frozenset({"logit_bias"})),
    Law("top_logprobs_are_sorted", "so many of the likeliest, in order", _top_logprobs, frozenset({"top_logprobs"})),
    Law("logprobs_are_raw", "logprobs are the model's, before temperature", _raw_logprobs, _DRAWN | {"logprobs"}),
)

grammar_laws = (Law("grammar_holds", "a grammar bounds its answer, and no other", _grammars, frozenset({"grammar"})),)
