"""The laws of sampling: each announced parameter has its effect.

typical_p is not tested: noise in a flat distribution changes its result. An engine that is not exact may give
different answers if two tokens are almost equally likely. So equal answers are required only for most prompts; an
ignored parameter changes almost all answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import count, repeat
from typing import Any, TypeAlias

from msgspec.structs import replace

from tailrace.types import Grammar, Sampling
from tailrace_outer.testing._harness import EngineHarness, Law, require

__all__ = ["grammar_laws", "sampling_laws"]

_MAX_TOKENS = 2  # few, because after one different token all later tokens differ
_LONG_TOKENS = 32  # enough for small models to repeat themselves
_NUM_PROMPTS = 12
_STRONG = 2.0  # the largest penalty that every engine accepts
_NEAR = 0.1  # largest difference between two computations of the same logprob
_SURE = 100.0  # a bias that outweighs every logit
_NUM_CHARACTERS = 4  # of an answer with a grammar; a token has at least one character
_GRAMMAR_TOKENS = 16

_Ids: TypeAlias = tuple[int, ...]


def _run_all(harness: EngineHarness, prompts: list[_Ids], samplings: Iterable[Sampling]) -> list[int]:
    """Run sequences, `harness.width` at once, and return their ids."""
    sequence_ids: list[int] = []
    for prompt, sampling in zip(prompts, samplings, strict=False):
        sequence_ids.append(harness.submit(prompt, sampling))
        if len(sequence_ids) % harness.width == 0:
            harness.finish()
    harness.finish()
    return sequence_ids


def _answers(harness: EngineHarness, prompts: list[_Ids], sampling: Sampling) -> list[_Ids]:
    return [harness.ids(sequence_id) for sequence_id in _run_all(harness, prompts, repeat(sampling))]


def _seeded_answers(
    harness: EngineHarness, prompts: list[_Ids], first_seed: int, parameter: dict[str, Any]
) -> list[_Ids]:
    samplings = (replace(harness.sampling(_MAX_TOKENS, seed), **parameter) for seed in count(first_seed))
    return [harness.ids(sequence_id) for sequence_id in _run_all(harness, prompts, samplings)]


def _require_mostly_same(seen: list[_Ids], expected: list[_Ids], what: str) -> None:
    same = sum(left == right for left, right in zip(seen, expected, strict=True))
    require(
        2 * same >= len(seen), None, f"{what}: {same} of {len(seen)} answers are the same; {seen} against {expected}"
    )


def _leaves_likeliest(**parameter: float) -> Callable[[EngineHarness], None]:
    """Return a check that with this parameter only the likeliest token is drawn at temperature 1."""

    def check(harness: EngineHarness) -> None:
        prompts = harness.prompts(_NUM_PROMPTS, "narrow")
        greedy = _answers(harness, prompts, harness.sampling(_MAX_TOKENS))
        _require_mostly_same(_seeded_answers(harness, prompts, 31, parameter), greedy, f"{parameter} against greedy")

    return check


def _repeats(prompts: list[_Ids], answers: list[_Ids]) -> int:
    """Count tokens of the answers that were in the prompt or earlier in the answer."""
    repeated = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        seen = set(prompt)
        for token_id in answer:
            repeated += token_id in seen
            seen.add(token_id)
    return repeated


def _penalises(name: str, *, counts_prompt: bool) -> Callable[[EngineHarness], None]:
    def check(harness: EngineHarness) -> None:
        prompts = harness.prompts(5, "repeat")
        counted: list[_Ids] = prompts if counts_prompt else [()] * len(prompts)
        free = harness.sampling(_LONG_TOKENS)
        penalty: dict[str, Any] = {name: _STRONG}
        without, penalised = _answers(harness, prompts, free), _answers(harness, prompts, replace(free, **penalty))
        few, many = _repeats(counted, penalised), _repeats(counted, without)
        require(
            few < many or not many, None, f"{name} {_STRONG} left {few} repeated tokens, without it there were {many}"
        )
        if not counts_prompt:
            # Put the first token of the answer into the prompt, which the penalty must ignore.
            prompts = [answer[:1] * 4 + prompt for prompt, answer in zip(prompts, without, strict=True)]
            usual = _answers(harness, prompts, harness.sampling(1))
            first = _answers(harness, prompts, replace(harness.sampling(1), **penalty))
            _require_mostly_same(first, usual, f"the first token, which {name} must not change")

    return check


def _logit_bias(harness: EngineHarness) -> None:
    prompts = harness.prompts(3, "bias")
    free = harness.sampling(_MAX_TOKENS)
    without = _answers(harness, prompts, free)
    wanted = 7 % harness.vocab_size
    forced = _answers(harness, prompts, replace(free, logit_bias=((wanted, _SURE),)))
    require(forced == [(wanted,) * _MAX_TOKENS] * 3, None, f"token {wanted} with a bias of {_SURE} gave {forced}")
    banned = without[0][0]
    spared = _answers(harness, prompts, replace(free, logit_bias=((banned, -_SURE),)))
    require(not any(banned in answer for answer in spared), None, f"token {banned} with {-_SURE} is in {spared}")


def _stop_tokens(harness: EngineHarness) -> None:
    prompts = harness.prompts(3, "stops")
    free = harness.sampling(_MAX_TOKENS)
    for prompt, usual in zip(prompts, _answers(harness, prompts, free), strict=True):
        sequence_id = harness.submit(prompt, replace(free, stop_token_ids=usual[:1]))
        harness.finish()
        ids, reason = harness.ids(sequence_id), harness.end(sequence_id).finish_reason
        ended = reason == "stop" and ids[-1:] == usual[:1]
        require(ended == (usual[0] in ids), sequence_id, f"token {usual[0]} did not end {ids}, whose end is {reason!r}")


def _min_tokens(harness: EngineHarness) -> None:
    prompts = harness.prompts(3, "least")
    free = harness.sampling(_MAX_TOKENS)
    ends = tuple({answer[0] for answer in _answers(harness, prompts, free)})
    longer = replace(free, stop_token_ids=ends, min_tokens=_MAX_TOKENS)
    for ids in _answers(harness, prompts, longer):
        require(len(ids) == _MAX_TOKENS, None, f"{ids} ended before {_MAX_TOKENS} tokens")


def _allowed_tokens(harness: EngineHarness) -> None:
    allowed = (3 % harness.vocab_size, 11 % harness.vocab_size)
    prompts = harness.prompts(3, "allowed")
    free = replace(harness.sampling(_MAX_TOKENS), allowed_token_ids=allowed)
    answers = _answers(harness, prompts, free)
    require(
        all(set(ids) <= {*allowed} for ids in answers), None, f"only {allowed} are allowed, but there are {answers}"
    )


def _bad_words(harness: EngineHarness) -> None:
    prompts = harness.prompts(3, "bad")
    free = harness.sampling(_MAX_TOKENS)
    without = _answers(harness, prompts, free)
    bad = tuple(without)
    answers = _answers(harness, prompts, replace(free, bad_words=bad))
    require(not {*answers} & {*bad}, None, f"{bad} are bad, but there are {answers}")
    _require_mostly_same([ids[:1] for ids in answers], [ids[:1] for ids in without], "the first token of bad words")
    banned = without[0][0]
    answers = _answers(harness, prompts, replace(free, bad_words=((banned,),)))
    require(not any(banned in ids for ids in answers), None, f"token {banned} is bad, but there are {answers}")


def _top_logprobs(harness: EngineHarness) -> None:
    sequence_id = harness.submit(
        harness.prompts(1, "top")[0], replace(harness.sampling(_MAX_TOKENS), logprobs=True, top_logprobs=3)
    )
    harness.finish()
    for delta in harness.deltas[sequence_id]:
        require(
            len(delta.top_logprobs) == len(delta.token_ids),
            sequence_id,
            f"top_logprobs and tokens differ in number: {delta}",
        )
        for token_id, logprob, top in zip(delta.token_ids, delta.logprobs, delta.top_logprobs, strict=True):
            values = [value for _, value in top]
            require(
                len(top) == 3 and values == sorted(values, reverse=True), sequence_id, f"three, likeliest first: {top}"
            )
            require(
                dict(top).get(token_id) == logprob, sequence_id, f"greedy took {token_id} with {logprob}, out of {top}"
            )


def _prompt_logprobs(harness: EngineHarness) -> None:
    """The logprobs of most answers are those that their tokens have as a part of a prompt."""
    prompts = harness.prompts(_NUM_PROMPTS, "scored")
    asked = replace(harness.sampling(_MAX_TOKENS), logprobs=True)
    answered = _run_all(harness, prompts, repeat(asked))
    longer = [(*prompt, *harness.ids(one)) for prompt, one in zip(prompts, answered, strict=True)]
    scored = _run_all(harness, longer, repeat(replace(asked, prompt_logprobs=2)))
    plain = _run_all(harness, longer[:1], repeat(asked))
    require(not harness.deltas[plain[0]][0].prompt_logprobs, plain[0], "prompt_logprobs without a request")
    pairs: list[tuple[float, float]] = []
    for ids, before, after in zip(longer, answered, scored, strict=True):
        first, *others = harness.deltas[after]
        found = first.prompt_logprobs
        require(not any(one.prompt_logprobs for one in others), after, "prompt_logprobs again after the first delta")
        require(len(found) == len(ids) - 1, after, f"{len(found)} logprobs of the {len(ids)} tokens of a prompt")
        for one in found:
            values = [value for _, value in one.top]
            require(len(values) == 2 and values == sorted(values, reverse=True), after, f"two, likeliest first: {one}")
            require((one.rank == 1) == (one.logprob >= values[0]), after, f"the rank of {one}")
        answer = [logprob for delta in harness.deltas[before] for logprob in delta.logprobs]
        pairs += zip((one.logprob for one in found[-len(answer) :]), answer, strict=True)
    near = sum(abs(one - other) < _NEAR for one, other in pairs)
    require(2 * near >= len(pairs), None, f"{near} of {len(pairs)} are near: in prompts and in answers {pairs}")


def _raw_logprobs(harness: EngineHarness) -> None:
    """Logprobs do not depend on the temperature."""
    prompts = harness.prompts(_NUM_PROMPTS, "raw")
    greedy = replace(harness.sampling(1), logprobs=True)
    cold = replace(greedy, temperature=0.01)
    usual, cooled = (_run_all(harness, prompts, repeat(sampling)) for sampling in (greedy, cold))
    near = 0
    for first, second in zip(usual, cooled, strict=True):
        (one,), (other,) = harness.end(first).logprobs, harness.end(second).logprobs
        near += abs(one - other) < _NEAR or harness.ids(first) != harness.ids(second)
    require(
        2 * near >= _NUM_PROMPTS, None, f"at temperature 0.01 only {near} of {_NUM_PROMPTS} logprobs are the model's"
    )


def _grammars(harness: EngineHarness) -> None:
    """Run answers of four digits and of four letters beside one without a grammar.

    The vocabulary is unknown here, so only facts that hold for any vocabulary are checked.
    """
    prompt = harness.prompts(1, "grammar")[0]
    free = harness.submit(prompt, harness.sampling(_GRAMMAR_TOKENS)) if harness.width > 2 else None
    firsts = []
    for characters in ("0-9", "a-z"):
        grammar = Grammar("regex", f"[{characters}]{{{_NUM_CHARACTERS}}}")
        constrained = harness.submit(
            prompt, replace(harness.sampling(_GRAMMAR_TOKENS), grammar=grammar, ignore_eos=False)
        )
        if harness.width == 1:
            harness.finish()
        firsts.append(constrained)
    harness.finish()
    for constrained in firsts:
        ids, reason = harness.ids(constrained), harness.end(constrained).finish_reason
        seen = f"{ids} for {_NUM_CHARACTERS} characters, and finish_reason {reason!r}"
        require(reason == "stop" and len(ids) <= _NUM_CHARACTERS + 1, constrained, seen)  # one is the end of text
    digits, letters = (harness.ids(constrained)[:1] for constrained in firsts)
    require(digits != letters, firsts[1], f"a digit and a letter are both token {digits}")
    if free is not None and harness.engine.capabilities.exact:
        alone = harness.alone(prompt, harness.sampling(_GRAMMAR_TOKENS), like=free)
        require(
            harness.ids(free) == alone, free, f"beside grammars it gave {harness.ids(free)}, but replayed alone {alone}"
        )


_WARM = frozenset({"seed", "temperature"})
_DRAWN = _WARM | {"top_p"}  # engines that draw tokens from logits; the scripted engine has no logits

sampling_laws: tuple[Law, ...] = (
    Law(
        "cold_is_greedy", "near temperature 0 the likeliest token is taken", _leaves_likeliest(temperature=0.01), _DRAWN
    ),
    Law("top_k_narrows", "top_k 1 leaves the likeliest token", _leaves_likeliest(top_k=1), _WARM | {"top_k"}),
    Law("top_p_narrows", "a tiny top_p leaves the likeliest token", _leaves_likeliest(top_p=1e-4), _WARM | {"top_p"}),
    Law(
        "min_p_narrows", "a min_p near 1 leaves the likeliest token", _leaves_likeliest(min_p=0.9999), _WARM | {"min_p"}
    ),
    Law(
        "repetition_is_penalised",
        "repetition_penalty makes tokens of prompt and answer less likely",
        _penalises("repetition_penalty", counts_prompt=True),
        frozenset({"repetition_penalty"}),
    ),
    Law(
        "presence_is_penalised",
        "presence_penalty makes tokens of the answer less likely, and ignores the prompt",
        _penalises("presence_penalty", counts_prompt=False),
        frozenset({"presence_penalty"}),
    ),
    Law(
        "frequency_is_penalised",
        "frequency_penalty makes tokens of the answer less likely, and ignores the prompt",
        _penalises("frequency_penalty", counts_prompt=False),
        frozenset({"frequency_penalty"}),
    ),
    Law("bias_is_added", "logit_bias forces and bans tokens", _logit_bias, frozenset({"logit_bias"})),
    Law("stop_tokens_end", "a token of stop_token_ids ends the answer", _stop_tokens, frozenset({"stop_token_ids"})),
    Law(
        "min_tokens_come",
        "nothing ends an answer before min_tokens",
        _min_tokens,
        frozenset({"min_tokens", "stop_token_ids"}),
    ),
    Law("only_allowed_tokens", "no token but allowed_token_ids", _allowed_tokens, frozenset({"allowed_token_ids"})),
    Law("bad_words_never_come", "no sequence of tokens that is in bad_words", _bad_words, frozenset({"bad_words"})),
    Law("top_logprobs_are_sorted", "the likeliest tokens, sorted", _top_logprobs, frozenset({"top_logprobs"})),
    Law(
        "prompts_are_scored",
        "the tokens of a prompt have the logprobs that they have in an answer",
        _prompt_logprobs,
        frozenset({"logprobs", "prompt_logprobs"}),
    ),
    Law("logprobs_are_raw", "logprobs do not depend on temperature", _raw_logprobs, _DRAWN | {"logprobs"}),
)

grammar_laws = (Law("grammar_holds", "a grammar constrains only its own answer", _grammars, frozenset({"grammar"})),)
