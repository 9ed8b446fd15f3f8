"""Chooses the next token from a row of logits. The same logits give the same token, whatever else runs.

Each row has its own random generator, seeded by the request. It draws one number per token and takes the token at which
the cumulative probability passes that number. An answer is repeatable if its logits are.
"""

from __future__ import annotations

import random
from collections import Counter

import torch

from tailrace.engines.interface import GRAMMAR_TOO_COMPLEX, Delta, Sequence
from tailrace.engines.transformers.grammars import Constraint
from tailrace.types import FinishReason, Sampling, TopLogprobs

__all__ = ["PARAMETERS", "Row", "choose_all"]

PARAMETERS = frozenset((
    "frequency_penalty", "grammar", "ignore_eos", "logit_bias", "logprobs", "max_tokens", "min_p", "presence_penalty",
    "repetition_penalty", "seed", "temperature", "top_k", "top_logprobs", "top_p", "typical_p",
))  # fmt: skip
LIKELIEST = 1024  # tokens that are sorted first; all are sorted only if these are not enough


class Row:
    """One sequence in the batch: its sampling state, its tokens, and its delta that was not taken yet."""

    __slots__ = (
        "_answer",
        "_constraint",
        "_delta",
        "_eos",
        "_random",
        "_seen",
        "count",
        "is_over",
        "is_plain",
        "sampling",
        "sequence_id",
        "token_ids",
    )

    def __init__(self, sequence: Sequence, eos: frozenset[int], constraint: Constraint | None = None) -> None:
        sampling = sequence.sampling
        self.sequence_id = sequence.sequence_id
        self.sampling = sampling
        self.token_ids = list(sequence.prompt_ids)
        self.count = 0  # of the answer
        self.is_over = False
        penalties = sampling.repetition_penalty != 1.0 or sampling.presence_penalty or sampling.frequency_penalty
        # Greedy, without penalties, logprobs or a grammar.
        self.is_plain = not (
            sampling.temperature or penalties or sampling.logprobs or sampling.logit_bias or constraint
        )
        self._constraint = constraint
        self._eos = frozenset() if sampling.ignore_eos else eos
        self._random = random.Random(sampling.seed)
        self._answer: Counter[int] = Counter()
        self._seen = set(sequence.prompt_ids) if sampling.repetition_penalty != 1.0 else set()
        self._delta: Delta | None = None

    @classmethod
    def for_probe(cls) -> Row:
        return cls(Sequence(-1, (0, 1), Sampling(temperature=0.0, seed=0, max_tokens=2)), frozenset())

    def put(self, token_id: int, logprob: float | None = None, top: TopLogprobs = ()) -> None:
        """Append the chosen token."""
        start = self.count
        self.token_ids.append(token_id)
        self.count += 1
        if not self.is_plain:
            self._answer[token_id] += 1
            if self.sampling.repetition_penalty != 1.0:
                self._seen.add(token_id)
        finish: FinishReason | None = "length" if self.count == self.sampling.max_tokens else None
        if token_id in self._eos or self._is_complete(token_id):
            finish = "stop"
        self.is_over = finish is not None
        logprobs = () if logprob is None else (logprob,)
        self._delta = Delta(
            self.sequence_id, start, (token_id,), logprobs, finish, "", (top,) if self.sampling.top_logprobs else ()
        )

    def _is_complete(self, token_id: int) -> bool:
        """Return whether the grammar is complete after this token."""
        if self._constraint is None:
            return False
        self._constraint.take(token_id)
        return self._constraint.is_complete

    def _fail(self, why: str) -> None:
        self.is_over = True
        is_refused = why == GRAMMAR_TOO_COMPLEX
        self._delta = Delta(self.sequence_id, self.count, (), (), "error", why, is_refused=is_refused)

    def take(self) -> Delta | None:
        delta, self._delta = self._delta, None
        return delta

    def choose(self, logits: torch.Tensor) -> int:
        """Choose from logits, float32 of shape (vocab,), and append the token."""
        sampling = self.sampling
        logprob: float | None = None
        top: TopLogprobs = ()
        raw = torch.log_softmax(logits, -1) if sampling.logprobs else None
        scores = self._penalised(logits)
        if self._constraint is not None:
            scores = self._constraint.allow(scores)
            if failure := self._constraint.failure:
                self._fail(failure)
                return 0  # not used: the row has ended
        chosen = int(scores.argmax()) if not sampling.temperature else self._draw(scores)
        if raw is not None:
            logprob = float(raw[chosen])
            if sampling.top_logprobs:
                values, ids = raw.topk(min(sampling.top_logprobs, raw.numel()))
                top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
        self.put(chosen, logprob, top)
        return chosen

    def _penalised(self, logits: torch.Tensor) -> torch.Tensor:
        sampling = self.sampling
        scores = logits.clone()
        if self._seen:
            ids = torch.tensor(list(self._seen), device=scores.device)
            values = scores[ids]
            penalty = sampling.repetition_penalty
            scores[ids] = torch.where(values > 0, values / penalty, values * penalty)
        if self._answer and (sampling.presence_penalty or sampling.frequency_penalty):
            ids = torch.tensor(list(self._answer), device=scores.device)
            counts = torch.tensor(list(self._answer.values()), device=scores.device)
            scores[ids] -= sampling.presence_penalty + sampling.frequency_penalty * counts
        for token_id, bias in sampling.logit_bias:
            scores[token_id] += bias
        return scores

    def _draw(self, scores: torch.Tensor) -> int:
        """Apply top_k, temperature, min_p, typical_p and top_p in this order, then draw."""
        sampling = self.sampling
        draw = self._random.random()
        logits = scores.double() / sampling.temperature
        if not (sampling.top_k or sampling.top_p < 1 or sampling.min_p > 0 or sampling.typical_p < 1):
            return _at(torch.softmax(logits, -1), draw)
        num_all = logits.numel()
        kept, ids = logits.topk(min(sampling.top_k or LIKELIEST, num_all))
        whole = torch.logsumexp(kept if sampling.top_k else logits, -1)
        probs = torch.exp(kept - whole)
        if not sampling.top_k and probs.numel() < num_all and not self._suffices(probs):
            kept, ids = logits.sort(descending=True)
            probs = torch.exp(kept - whole)
        return int(ids[_at(self._filter(probs), draw)])

    def _suffices(self, probs: torch.Tensor) -> bool:
        """Return whether these, the likeliest tokens, contain all that may be chosen."""
        sampling = self.sampling
        if sampling.typical_p < 1:
            return False
        if sampling.min_p > 0:
            return float(probs[-1]) < sampling.min_p * float(probs[0])
        return float(probs.sum()) >= sampling.top_p

    def _filter(self, probs: torch.Tensor) -> torch.Tensor:
        """Set tokens that may not be chosen to zero. `probs` are in descending order."""
        sampling = self.sampling
        total = 1.0
        if sampling.min_p > 0:
            probs = torch.where(probs >= sampling.min_p * probs[0], probs, 0.0)
            total = float(probs.sum())
        if sampling.typical_p < 1:
            probs = _typical(probs / total, sampling.typical_p)
            total = float(probs.sum())
        if sampling.top_p < 1:
            before = torch.cumsum(probs, -1) - probs
            probs = torch.where(before < sampling.top_p * total, probs, 0.0)
        return probs


def choose_all(rows: list[Row], logits: torch.Tensor) -> list[int]:
    """Choose a token for each row of logits, float32 of shape (rows, vocab), and append it to the row."""
    likeliest: list[int] = logits.argmax(-1).tolist()
    for index, row in enumerate(rows):
        if row.is_plain:
            row.put(likeliest[index])
        else:
            likeliest[index] = row.choose(logits[index])
    return likeliest


def _typical(probs: torch.Tensor, mass: float) -> torch.Tensor:
    """Keep the tokens whose surprise is nearest to the expected one, up to the mass. Source: arXiv 2202.00666."""
    surprise = -torch.log(probs.clamp_min(1e-300))
    shift = (surprise - (probs * surprise).sum()).abs()
    order = torch.argsort(shift)
    before = torch.cumsum(probs[order], -1) - probs[order]
    kept = torch.zeros_like(probs)
    chosen = order[before < mass]
    kept[chosen] = probs[chosen]
    return kept


def _at(probs: torch.Tensor, draw: float) -> int:
    """Return the index at which the cumulative sum passes `draw` times the total. Its probability is never zero."""
    cumulated = torch.cumsum(probs, -1)
    index = int(torch.searchsorted(cumulated, draw * float(cumulated[-1]), right=True))
    return index if index < probs.numel() else int(probs.nonzero()[-1])
