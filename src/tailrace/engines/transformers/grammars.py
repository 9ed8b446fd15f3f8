"""Masks the tokens in a row of logits that a grammar does not allow next."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from llguidance import LLMatcher, LLTokenizer

from tailrace.engines.grammars.guidance import to_guidance
from tailrace.engines.interface import GRAMMAR_TOO_COMPLEX
from tailrace.errors import SequenceFailed
from tailrace.reasons import in_one_line
from tailrace.types import Grammar

__all__ = ["Constraint", "Constraints"]

logger = logging.getLogger("tailrace.engine")


class Constraint:
    """The state of one answer in its grammar."""

    def __init__(self, matcher: LLMatcher, ends: list[int], *, ignore_eos: bool) -> None:
        self._matcher = matcher
        self._ends = ends
        self._ignores_eos = ignore_eos

    @property
    def is_complete(self) -> bool:
        """Whether only the end of text may follow."""
        return self._matcher.is_stopped()

    @property
    def failure(self) -> str:
        """Why the next tokens cannot be computed, or ""."""
        return GRAMMAR_TOO_COMPLEX if self._matcher.is_error() else ""

    def allow(self, scores: torch.Tensor) -> torch.Tensor:
        """Return logits of shape (vocab,) with minus infinity for tokens that are not allowed. With `ignore_eos`, the
        end of text is never allowed."""
        marks = torch.frombuffer(bytearray(self._matcher.compute_logit_bias()), dtype=torch.uint8)
        allowed = torch.zeros(scores.shape[-1], dtype=torch.bool)
        num_known = min(len(marks), len(allowed))
        allowed[:num_known] = marks[:num_known] != 0
        if self._ignores_eos:
            allowed[self._ends] = False
        return scores.masked_fill(~allowed.to(scores.device), -torch.inf)

    def take(self, token_id: int) -> None:
        """Advance by the chosen token, which is not an end of text."""
        self._matcher.consume_token(token_id)


class Constraints:
    """The model's vocabulary for llguidance. Takes a second for a large vocabulary.

    Raises: ValueError if the tokenizer cannot be used.
    """

    def __init__(self, tokenizer: str, ends: frozenset[int], vocab_size: int) -> None:
        self._ends = sorted(ends)
        self._tokenizer = LLTokenizer(tokenizer, n_vocab=vocab_size, eos_token=self._ends)

    def __call__(self, grammar: Grammar, *, ignore_eos: bool) -> Constraint:
        """Compile a grammar. Raises: SequenceFailed if it does not compile."""
        matcher = LLMatcher(self._tokenizer, to_guidance(grammar), log_level=0)
        if matcher.is_error():
            raise SequenceFailed("the grammar does not compile")
        return Constraint(matcher, self._ends, ignore_eos=ignore_eos)

    @classmethod
    def of_model(cls, path: Path, ends: frozenset[int], vocab_size: int) -> Constraints | None:
        """Load the tokenizer of a model directory. Returns None if there is no usable one."""
        file = path / "tokenizer.json"
        if not ends or not file.is_file():
            return None
        try:
            return cls(file.read_text(), ends, vocab_size)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a Rust panic of the library is not an Exception
            logger.warning("Grammars are not supported for this tokenizer: %s.", in_one_line(error))
            return None
