"""The laws of sampling pass a correct engine, and each fails for an engine that ignores its parameter."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
from msgspec.structs import replace

from tailrace.engines.interface import Capabilities, Delta, Engine, Sequence
from tailrace.testing import Law
from tailrace.types import FinishReason, PromptLogprob, Sampling
from tailrace_outer.testing.sampling_laws import sampling_laws

_VOCAB_SIZE = 40
_PARAMETERS = frozenset(Sampling.__struct_fields__) - {
    "stop",
    "include_stop",
    "include_special",
    "single_call",
    "grammar",
    "n",
    "typical_p",
}


def _logits(ids: list[int]) -> list[float]:
    """Return the logits of a model with two tokens of context, which likes to repeat itself."""
    draw = random.Random(f"{ids[-2:]}")
    logits = [draw.gauss(0, 2) for _ in range(_VOCAB_SIZE)]
    logits[ids[-1] * 7 % 5] += 4
    return logits


def _log_softmax(logits: list[float]) -> list[float]:
    most = max(logits)
    total = most + math.log(sum(math.exp(logit - most) for logit in logits))
    return [logit - total for logit in logits]


class _Toy:
    """Samples in plain Python, one token per step for each sequence."""

    def __init__(self) -> None:
        self.capabilities = Capabilities("toy", 256, 4096, 1, 8, _PARAMETERS, exact=True)
        self._runs: dict[int, tuple[Sequence, list[int], random.Random]] = {}
        self._aborted: set[int] = set()

    def submit(self, sequence: Sequence) -> None:
        self._runs[sequence.sequence_id] = (sequence, [], random.Random(sequence.sampling.seed))

    def abort(self, sequence_id: int) -> None:
        if sequence_id in self._runs:
            self._aborted.add(sequence_id)

    def step(self) -> list[Delta]:
        deltas = []
        for sequence_id, (sequence, answer, draw) in list(self._runs.items()):
            if sequence_id in self._aborted:
                delta = Delta(sequence_id, len(answer), (), (), "cancelled")
            else:
                delta = self._next(sequence, answer, draw)
            if delta.finish_reason is not None:
                del self._runs[sequence_id]
            deltas.append(delta)
        self._aborted.clear()
        return deltas

    def close(self) -> None:
        self._runs.clear()

    def penalised(self, sequence: Sequence, answer: list[int]) -> Counter[int]:
        """Return the tokens that presence and frequency penalties count."""
        return Counter(answer)

    def told(self, raw: list[float], chosen: list[float]) -> list[float]:
        """Return the logprobs to report, given those of the model and those of the distribution that was sampled."""
        return raw

    def _next(self, sequence: Sequence, answer: list[int], draw: random.Random) -> Delta:
        sampling = sequence.sampling
        logits = _logits([0, *sequence.prompt_ids, *answer])
        raw = _log_softmax(logits)
        for token_id, bias in sampling.logit_bias:
            logits[token_id] += bias
        for token_id in {*sequence.prompt_ids, *answer}:
            penalty = sampling.repetition_penalty
            logits[token_id] *= 1 / penalty if logits[token_id] > 0 else penalty
        for token_id, count in self.penalised(sequence, answer).items():
            logits[token_id] -= sampling.presence_penalty + count * sampling.frequency_penalty
        for token_id in _forbidden(sampling, answer):
            logits[token_id] = -1e9
        if sampling.temperature:
            logits = _log_softmax([logit / sampling.temperature for logit in logits])
            left = _left(logits, sampling)
            (token_id,) = draw.choices(left, [math.exp(logits[one]) for one in left])
        else:
            token_id = max(range(_VOCAB_SIZE), key=logits.__getitem__)
        start, before = len(answer), tuple(_scored(sequence)) if not answer else ()
        answer.append(token_id)
        finish: FinishReason | None = "length" if len(answer) == sampling.max_tokens else None
        finish = "stop" if token_id in sampling.stop_token_ids else finish
        told = self.told(raw, _log_softmax(logits))
        top = sorted(enumerate(told), key=lambda each: -each[1])[: sampling.top_logprobs]
        return Delta(
            sequence.sequence_id,
            start,
            (token_id,),
            (told[token_id],) if sampling.logprobs else (),
            finish,
            top_logprobs=(tuple(top),) if sampling.top_logprobs else (),
            prompt_logprobs=before,
        )


def _scored(sequence: Sequence) -> Iterator[PromptLogprob]:
    ids, count = sequence.prompt_ids, sequence.sampling.prompt_logprobs
    for end in range(1, len(ids) if count is not None else 1):
        logprobs = _log_softmax(_logits([0, *ids[:end]]))
        order = sorted(range(_VOCAB_SIZE), key=lambda token_id: -logprobs[token_id])
        top = tuple((token_id, logprobs[token_id]) for token_id in order[:count])
        yield PromptLogprob(logprobs[ids[end]], 1 + order.index(ids[end]), top)


def _forbidden(sampling: Sampling, answer: list[int]) -> set[int]:
    forbidden = {*range(_VOCAB_SIZE)}.difference(sampling.allowed_token_ids) if sampling.allowed_token_ids else set()
    for *before, last in sampling.bad_words:
        if not before or answer[-len(before) :] == before:
            forbidden.add(last)
    return forbidden.union(sampling.stop_token_ids) if len(answer) < sampling.min_tokens else forbidden


def _left(logprobs: list[float], sampling: Sampling) -> list[int]:
    """Return the tokens that top_k, top_p and min_p keep, the most likely first."""
    order = sorted(range(_VOCAB_SIZE), key=lambda token_id: -logprobs[token_id])
    left = order[: sampling.top_k or None]
    left = _until(left, logprobs, sampling.top_p)
    least = max(logprobs) + math.log(sampling.min_p or 1e-300)
    return [token_id for token_id in left if logprobs[token_id] >= least] or left[:1]


def _until(order: list[int], logprobs: list[float], share: float) -> list[int]:
    total, left = 0.0, []
    for token_id in order:
        left.append(token_id)
        total += math.exp(logprobs[token_id])
        if total >= share:
            break
    return left


class _CountsThePrompt(_Toy):
    def penalised(self, sequence: Sequence, answer: list[int]) -> Counter[int]:
        return Counter([*sequence.prompt_ids, *answer])


class _TellsWhatItDrewFrom(_Toy):
    def told(self, raw: list[float], chosen: list[float]) -> list[float]:
        return chosen


class _Unsorted(_Toy):
    def step(self) -> list[Delta]:
        return [_turned(delta) for delta in super().step()]


def _turned(delta: Delta) -> Delta:
    tops = tuple(top[::-1] for top in delta.top_logprobs)
    return Delta(
        delta.sequence_id, delta.start, delta.token_ids, delta.logprobs, delta.finish_reason, top_logprobs=tops
    )


def _ignoring(name: str) -> Callable[[], Engine]:
    class Ignoring(_Toy):
        def submit(self, sequence: Sequence) -> None:
            default = {name: getattr(Sampling(), name)}
            super().submit(replace(sequence, sampling=replace(sequence.sampling, **default)))

    return Ignoring


@pytest.mark.parametrize("law", sampling_laws, ids=str)
def test_a_correct_engine(law: Law) -> None:
    assert law.applies_to(_Toy().capabilities)
    law(_Toy, vocab_size=_VOCAB_SIZE)


_BROKEN: list[tuple[Callable[[], Engine], str]] = [
    (_ignoring("top_k"), "top_k_narrows"),
    (_ignoring("top_p"), "top_p_narrows"),
    (_ignoring("min_p"), "min_p_narrows"),
    (_ignoring("repetition_penalty"), "repetition_is_penalised"),
    (_ignoring("presence_penalty"), "presence_is_penalised"),
    (_ignoring("frequency_penalty"), "frequency_is_penalised"),
    (_ignoring("logit_bias"), "bias_is_added"),
    (_ignoring("stop_token_ids"), "stop_tokens_end"),
    (_ignoring("min_tokens"), "min_tokens_come"),
    (_ignoring("allowed_token_ids"), "only_allowed_tokens"),
    (_ignoring("bad_words"), "bad_words_never_come"),
    (_ignoring("top_logprobs"), "top_logprobs_are_sorted"),
    (_CountsThePrompt, "presence_is_penalised"),
    (_CountsThePrompt, "frequency_is_penalised"),
    (_ignoring("prompt_logprobs"), "prompts_are_scored"),
    (_TellsWhatItDrewFrom, "logprobs_are_raw"),
    (_Unsorted, "top_logprobs_are_sorted"),
]


@pytest.mark.parametrize(("make", "name"), _BROKEN, ids=[f"{make.__name__}-{name}" for make, name in _BROKEN])
def test_an_engine_that_ignores_a_parameter_is_caught(make: Callable[[], Engine], name: str) -> None:
    with pytest.raises(AssertionError, match=f"^{name} "):
        _law(name)(make, vocab_size=_VOCAB_SIZE)


def test_a_temperature_that_is_ignored() -> None:
    class Warm(_Toy):
        def submit(self, sequence: Sequence) -> None:
            warm = 1.0 if sequence.sampling.temperature else 0.0
            super().submit(replace(sequence, sampling=replace(sequence.sampling, temperature=warm)))

    with pytest.raises(AssertionError, match=r"^cold_is_greedy "):
        _law("cold_is_greedy")(Warm, vocab_size=_VOCAB_SIZE)


def _law(name: str) -> Law:
    return next(law for law in sampling_laws if law.name == name)
