"""Chooses the next token from a row of logits. The same logits give the same token, whatever else runs.

Each row has its own random generator, seeded by the request. It draws one number per token and takes the token at which
the cumulative probability passes that number. An answer is repeatable if its logits are.

Nothing here sorts a vocabulary unless it must: the likeliest tokens are found by the maxima of blocks.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from tailrace.engines import ALL_EXCLUDED, Delta, Sequence
from tailrace.errors import SequenceFailed
from tailrace.types import FinishReason, PromptLogprob, Sampling, TopLogprobs
from tailrace_kit.constraints import Constraint

__all__ = ["PARAMETERS", "Logits", "Row", "check_ids"]

PARAMETERS = frozenset((
    "allowed_token_ids", "bad_words", "frequency_penalty", "grammar", "ignore_eos", "logit_bias", "logprobs",
    "max_tokens", "min_p", "min_tokens", "presence_penalty", "repetition_penalty", "seed", "stop_token_ids",
    "temperature", "top_k", "top_logprobs", "top_p", "typical_p",
))  # fmt: skip

_BLOCK = 128  # tokens whose maximum or sum is computed together
_LEAST_WEIGHTS = (1e-2, 1e-3, 1e-4, 1e-5, 1e-6)  # relative to the likeliest token; less likely ones are looked at last

Logits = npt.NDArray[np.float32]
Probabilities = npt.NDArray[np.float64]
Ids = npt.NDArray[np.intp]


class Row:
    """One sequence in the batch: its sampling state, its tokens, and its delta that was not taken yet."""

    __slots__ = (
        "_allowed", "_answer", "_bad", "_eos", "_ids", "_is_changed", "_logprobs", "_prompt", "_random", "_seen",
        "_start", "_stops", "_top", "_why", "adapter", "constraint", "count", "finish", "is_greedy", "is_plain",
        "sampling", "sequence_id", "token_ids",
    )  # fmt: skip

    def __init__(self, sequence: Sequence, eos: frozenset[int], constraint: Constraint | None = None) -> None:
        sampling = sequence.sampling
        self.sequence_id = sequence.sequence_id
        self.sampling = sampling
        self.token_ids = list(sequence.prompt_ids)
        self.count = 0  # of the answer
        self.finish: FinishReason | None = None
        self._eos = frozenset() if sampling.ignore_eos else eos
        self._stops = self._eos | frozenset(sampling.stop_token_ids)
        self._allowed = np.array(sampling.allowed_token_ids, np.intp) if sampling.allowed_token_ids else None
        self._bad = sampling.bad_words
        self.adapter = sequence.adapter
        self.is_greedy = not sampling.temperature
        penalties = sampling.repetition_penalty != 1.0 or sampling.presence_penalty or sampling.frequency_penalty
        self._is_changed = bool(
            penalties
            or sampling.logit_bias
            or constraint
            or sampling.min_tokens
            or sampling.allowed_token_ids
            or sampling.bad_words
        )
        # Greedy, and nothing changes the logits or asks for them.
        self.is_plain = self.is_greedy and not self._is_changed and not sampling.logprobs
        self.constraint = constraint
        self._random = random.Random(sampling.seed)
        self._answer: Counter[int] = Counter()
        self._seen = set(sequence.prompt_ids) if sampling.repetition_penalty != 1.0 else set()
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._top: list[TopLogprobs] = []
        self._prompt: list[PromptLogprob] = []
        self._start = 0
        self._why = ""

    @classmethod
    def for_probe(cls) -> Row:
        return cls(Sequence(-1, ((0, 1),), Sampling(temperature=0.0, seed=0, max_tokens=2)), frozenset())

    @property
    def is_over(self) -> bool:
        return self.finish is not None

    @property
    def may_be_forced(self) -> bool:
        """Whether a token may be put without its logits: nobody asks how likely it is, and nothing else of the request
        may exclude it."""
        sampling = self.sampling
        may_exclude = sampling.bad_words or sampling.allowed_token_ids or self.count < sampling.min_tokens
        return not (sampling.logprobs or may_exclude)

    @property
    def wants_prompt(self) -> bool:
        """Whether the tokens of the prompt need their logprobs."""
        return self.sampling.prompt_logprobs is not None

    def read_prompt(self, logits: Logits, first: int) -> None:
        """Note how likely the tokens of the prompt from index `first` on are. `logits` are those before each of them,
        (tokens, vocabulary)."""
        count = self.sampling.prompt_logprobs or 0
        for row, token_id in zip(logits, self.token_ids[first:], strict=False):
            shift = _log_sum_exp(row)
            rank = 1 + int((row > row[token_id]).sum())
            self._prompt.append(PromptLogprob(float(row[token_id] - shift), rank, _likeliest(row, count, shift)))

    def put(self, token_id: int, logprob: float | None = None, top: TopLogprobs = ()) -> None:
        """Append the chosen token."""
        self.token_ids.append(token_id)
        self.count += 1
        if not self.is_plain:
            self._answer[token_id] += 1
            if self.sampling.repetition_penalty != 1.0:
                self._seen.add(token_id)
        self._ids.append(token_id)
        if logprob is not None:
            self._logprobs.append(logprob)
            if self.sampling.top_logprobs:
                self._top.append(top)
        if self.count == self.sampling.max_tokens:
            self.finish = "length"
        if token_id in self._stops or self._completes(token_id):
            self.finish = "stop"

    def force(self, token_id: int) -> None:
        """Append a token that the grammar leaves no choice about. Takes a draw, as a chosen one does."""
        if not self.is_greedy:
            self._random.random()
        self.put(token_id)

    def fail(self, why: str) -> None:
        """End the row, because of what its request asks for."""
        self.finish = "error"
        self._why = why

    def cancel(self) -> Delta:
        return Delta(self.sequence_id, self._start, (), (), "cancelled")

    def take(self, *, is_alone: bool = False, num_cached_tokens: int | None = None) -> Delta | None:
        """Return the tokens that were put since the last call."""
        if not self._ids and self.finish is None:
            return None
        delta = Delta(
            self.sequence_id,
            self._start,
            tuple(self._ids),
            tuple(self._logprobs),
            self.finish,
            self._why,
            tuple(self._top),
            is_refused=bool(self._why),
            is_alone=is_alone,
            num_cached_tokens=num_cached_tokens,
            prompt_logprobs=tuple(self._prompt),
        )
        self._start = self.count
        self._ids, self._logprobs, self._top, self._prompt = [], [], [], []
        return delta

    def choose(self, logits: Logits) -> int:
        """Choose from logits, float32 of shape (vocab,), and append the token. Returns -1 if the row has failed."""
        if self.is_plain:
            chosen = int(logits.argmax())
            self.put(chosen)
            return chosen
        sampling = self.sampling
        scores = self._changed(logits)
        if scores is None:
            return -1
        chosen = int(scores.argmax()) if self.is_greedy else self._draw(scores)
        if not sampling.logprobs:
            self.put(chosen)
            return chosen
        shift = _log_sum_exp(logits)
        self.put(chosen, float(logits[chosen] - shift), _likeliest(logits, sampling.top_logprobs, shift))
        return chosen

    def _completes(self, token_id: int) -> bool:
        """Return whether the grammar is complete after this token."""
        if self.constraint is None:
            return False
        self.constraint.take(token_id)
        return self.constraint.is_complete

    def _changed(self, logits: Logits) -> Logits | None:
        """Return the logits with all that the request changes; None if the row has failed."""
        sampling = self.sampling
        if not self._is_changed:
            return logits
        scores = logits.astype(np.float32, copy=True)
        if self._seen:
            ids = np.fromiter(self._seen, np.intp, len(self._seen))
            values, penalty = scores[ids], np.float32(sampling.repetition_penalty)
            scores[ids] = np.where(values > 0, values / penalty, values * penalty)
        if self._answer and (sampling.presence_penalty or sampling.frequency_penalty):
            ids = np.fromiter(self._answer, np.intp, len(self._answer))
            counts = np.fromiter(self._answer.values(), np.float32, len(self._answer))
            scores[ids] -= np.float32(sampling.presence_penalty) + np.float32(sampling.frequency_penalty) * counts
        for token_id, bias in sampling.logit_bias:
            scores[token_id] += np.float32(bias)
        if self._allowed is not None:
            others = np.ones(len(scores), bool)
            others[self._allowed] = False
            scores[others] = -np.inf
        scores[self._forbidden()] = -np.inf
        if self.constraint is not None:
            self.constraint.allow(scores)
            if failure := self.constraint.failure:
                self.fail(failure)
                return None
        if scores.max() == -np.inf:
            self.fail(ALL_EXCLUDED)
            return None
        return scores

    def _forbidden(self) -> list[int]:
        """Return the tokens that may not come next: the ends of a text that is too short, and the last tokens of bad
        words whose others have come."""
        forbidden = [word[-1] for word in self._bad if self._ends_with(word[:-1])]
        if self.count < self.sampling.min_tokens:
            forbidden += self._stops
        return forbidden

    def _ends_with(self, ids: tuple[int, ...]) -> bool:
        return not ids or (len(ids) <= self.count and tuple(self.token_ids[-len(ids) :]) == ids)

    def _draw(self, scores: Logits) -> int:
        """Apply top_k, temperature, min_p, typical_p and top_p in this order, then draw."""
        sampling = self.sampling
        draw = self._random.random()
        temperature = sampling.temperature
        if not (sampling.top_k or sampling.top_p < 1 or sampling.min_p > 0 or sampling.typical_p < 1):
            return _draw_from_all(scores, temperature, draw)
        ids, whole, surprise = _candidates(scores, sampling)
        probabilities = np.exp(scores[ids].astype(np.float64) / temperature - whole)
        return int(ids[_at(_filtered(probabilities, sampling, surprise), draw)])


def check_ids(sequence: Sequence, vocab_size: int) -> None:
    """Raises: SequenceFailed if a token id of a request is not in the vocabulary."""
    sampling = sequence.sampling
    given: tuple[tuple[str, Iterable[int]], ...] = (
        ("the prompt", sequence.prompt_ids),
        ("logit_bias", (token_id for token_id, _ in sampling.logit_bias)),
        ("stop_token_ids", sampling.stop_token_ids),
        ("allowed_token_ids", sampling.allowed_token_ids),
        ("bad_words", (token_id for word in sampling.bad_words for token_id in word)),
    )
    for name, ids in given:
        if not all(0 <= token_id < vocab_size for token_id in ids):
            raise SequenceFailed(f"{name} contains a token id outside the model's vocabulary")


def _log_sum_exp(logits: Logits, temperature: float = 1.0) -> float:
    weights, highest = _weights(logits, temperature)
    return highest / temperature + math.log(float(weights.sum(dtype=np.float64)))


def _weights(scores: Logits, temperature: float) -> tuple[Logits, float]:
    """Return the probabilities of all tokens relative to that of the likeliest one, and its logit."""
    highest = scores.max()
    weights = np.subtract(scores, highest)
    if temperature != 1:
        weights *= np.float32(1 / temperature)
    return np.exp(weights, out=weights), float(highest)


def _likeliest(logits: Logits, count: int, shift: float) -> TopLogprobs:
    """Return the likeliest tokens and their logprobs, which are the logits minus `shift`."""
    ids = _largest(logits, count) if count else ()
    return tuple((int(one), float(logits[one] - shift)) for one in ids)


def _largest(logits: Logits, count: int) -> Ids:
    """Return the ids of the largest logits, in descending order; of equal ones, the smallest id first."""
    count = min(count, len(logits))
    num_blocks = len(logits) // _BLOCK
    if num_blocks <= count:
        ids = np.arange(len(logits))
    else:
        # The largest values of `count` blocks are `count` values, so no value below all of them is among the largest.
        highest = logits[: num_blocks * _BLOCK].reshape(num_blocks, _BLOCK).max(-1)
        ids = np.flatnonzero(logits >= np.partition(highest, num_blocks - count)[num_blocks - count])
    return _in_order(logits, ids)[:count]


def _in_order(logits: Logits, ids: Ids) -> Ids:
    ordered: Ids = ids[np.argsort(-logits[ids], kind="stable")]
    return ordered


def _draw_from_all(scores: Logits, temperature: float, draw: float) -> int:
    """Draw from the softmax of all tokens, block by block."""
    weights, _ = _weights(scores, temperature)
    num_whole = len(weights) // _BLOCK * _BLOCK
    sums = weights[:num_whole].reshape(-1, _BLOCK).sum(-1, dtype=np.float64)
    sums = np.append(sums, weights[num_whole:].sum(dtype=np.float64))
    block = _at(sums, draw)
    left = (draw * sums.sum() - sums[:block].sum()) / sums[block]
    own = weights[block * _BLOCK : (block + 1) * _BLOCK].astype(np.float64)
    return block * _BLOCK + _at(own, min(max(left, 0.0), 1.0))


def _candidates(scores: Logits, sampling: Sampling) -> tuple[Ids, float, float | None]:
    """Return the likeliest tokens in descending order, which contain all that may be chosen; the logarithm of the sum
    by which their probabilities are divided; and the expected surprise, if they are not all that count for it. Tokens
    beyond top_k are not in the sum."""
    temperature = sampling.temperature
    if sampling.top_k:
        ids = _largest(scores, sampling.top_k)
        return ids, _log_sum_exp(scores[ids], temperature), None
    weights, highest = _weights(scores, temperature)
    total = float(weights.sum())  # in pairs: seven digits
    surprise = _expected_surprise(weights, total) if sampling.typical_p < 1 and not sampling.min_p else None
    ids = _likely(weights, total, sampling, surprise)
    return _in_order(scores, ids), highest / temperature + math.log(total), surprise


def _likely(weights: Logits, total: float, sampling: Sampling, surprise: float | None) -> Ids:
    """Return the tokens that are likely enough to be looked at: few, of which the others are less likely."""
    if sampling.min_p > 0:  # a little less than it says, because of rounding: `_filtered` looks again
        return np.flatnonzero(weights >= np.float32(sampling.min_p * (1 - 1e-3)))
    leasts: tuple[float, ...] = _LEAST_WEIGHTS
    mass = sampling.top_p
    if surprise is not None:
        # A token of more than twice the expected surprise is further from it than any of less, since none is below 0.
        leasts, mass = (total * math.exp(-2 * surprise) * (1 - 1e-3),), sampling.typical_p
    for least in leasts:
        ids = np.flatnonzero(weights >= np.float32(least))
        if float(weights[ids].sum(dtype=np.float64)) >= mass * total:
            return ids
    return np.flatnonzero(weights > 0)


def _expected_surprise(weights: Logits, total: float) -> float:
    """Return the expected surprise of the next token: the entropy, in nats."""
    logs = np.log(np.maximum(weights, np.float32(1e-37)))
    return math.log(total) - float(np.multiply(weights, logs, out=logs).sum(dtype=np.float64)) / total


def _filtered(probabilities: Probabilities, sampling: Sampling, surprise: float | None) -> Probabilities:
    """Set tokens that may not be chosen to zero. `probabilities` are in descending order; `surprise` is the expected
    one, if other tokens count for it, too."""
    total = 1.0
    if sampling.min_p > 0:
        probabilities = np.where(probabilities >= sampling.min_p * probabilities[0], probabilities, 0.0)
        total = float(probabilities.sum())
    if sampling.typical_p < 1:
        probabilities = _typical(probabilities / total, sampling.typical_p, surprise)
        total = float(probabilities.sum())
    if sampling.top_p < 1:
        before = np.cumsum(probabilities) - probabilities
        probabilities = np.where(before < sampling.top_p * total, probabilities, 0.0)
    return probabilities


def _typical(probabilities: Probabilities, mass: float, expected: float | None) -> Probabilities:
    """Keep the tokens whose surprise is nearest to the expected one, up to the mass. Source: arXiv 2202.00666."""
    surprise = -np.log(np.maximum(probabilities, 1e-300))
    shift = np.abs(surprise - ((probabilities * surprise).sum() if expected is None else expected))
    order = np.argsort(shift, kind="stable")
    before = np.cumsum(probabilities[order]) - probabilities[order]
    kept = np.zeros_like(probabilities)
    chosen = order[before < mass]
    kept[chosen] = probabilities[chosen]
    return kept


def _at(weights: Probabilities, draw: float) -> int:
    """Return the index at which the cumulative sum passes `draw` times the total. Its weight is never zero."""
    cumulated = np.cumsum(weights)
    index = int(np.searchsorted(cumulated, draw * cumulated[-1], side="right"))
    return index if index < len(weights) else int(np.flatnonzero(weights)[-1])
