"""Grammars in the engine's process: llguidance says which tokens may come next.

A grammar is compiled in a thread of its own, and its masks are computed in threads while the model computes. So a
grammar never holds the other rows up.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer

from tailrace.engines import GRAMMAR_TOO_COMPLEX, in_one_line
from tailrace.engines.grammars.compile_one import STEP_ITEMS
from tailrace.engines.grammars.guidance import to_guidance
from tailrace.types import Grammar

__all__ = ["Constraint", "Constraints"]

logger = logging.getLogger("tailrace.engine")

_NOT_COMPILED = "the grammar does not compile"
_MAX_CACHED = 64  # compiled grammars; a copy of one is cheap


class Constraint:
    """The state of one answer in its grammar."""

    def __init__(self, compiling: Future[LLMatcher], ends: list[int], *, ignore_eos: bool) -> None:
        self._compiling = compiling
        self._own: LLMatcher | None = None
        self._ends = ends
        self._ignores_eos = ignore_eos
        self.mask: npt.NDArray[np.uint8] | None = None  # one bit for each token that may come next; None: not computed

    @property
    def is_ready(self) -> bool:
        """Whether the grammar is compiled."""
        return self._compiling.done()

    @property
    def matcher(self) -> LLMatcher:
        """Waits until the grammar is compiled."""
        if self._own is None:
            self._own = self._compiling.result().deep_copy()
        return self._own

    @property
    def is_complete(self) -> bool:
        """Whether only the end of text may follow."""
        return self.matcher.is_stopped() and not self.matcher.is_error()

    @property
    def failure(self) -> str:
        """Why the next tokens cannot be computed, or ""."""
        if not self.matcher.is_error():
            return ""
        return _NOT_COMPILED if self._compiling.result().is_error() else GRAMMAR_TOO_COMPLEX

    def allow(self, scores: npt.NDArray[np.float32]) -> None:
        """Set logits of shape (vocab,) to minus infinity for tokens that are not allowed. With `ignore_eos`, the end of
        text is never allowed."""
        mask = np.frombuffer(self.matcher.compute_bitmask(), np.uint8) if self.mask is None else self.mask
        allowed = np.unpackbits(mask, bitorder="little")[: len(scores)]
        scores[: len(allowed)][allowed == 0] = -np.inf
        scores[len(allowed) :] = -np.inf
        if self._ignores_eos:
            scores[self._ends] = -np.inf

    def take(self, token_id: int) -> None:
        """Advance by a token."""
        self.mask = None
        if not self.matcher.is_stopped():
            self.matcher.consume_token(token_id)

    def forced(self) -> list[int]:
        """Return the next tokens, if the grammar leaves no choice about them."""
        return [] if self.matcher.is_stopped() else self.matcher.compute_ff_tokens()


class Constraints:
    """Grammars for one vocabulary. `tokenizer_json` is of Hugging Face's tokenizers. The vocabulary is read in a thread
    of its own, because a large one takes a second."""

    def __init__(self, tokenizer_json: str, ends: Iterable[int], vocab_size: int) -> None:
        self._ends = sorted(ends)
        self._num_words = -(-vocab_size // 32)
        self._threads = ThreadPoolExecutor(1, "grammars")
        self._executor = LLExecutor()
        self._compiled: OrderedDict[Grammar, Future[LLMatcher]] = OrderedDict()
        self._tokenizer = self._threads.submit(self._read, tokenizer_json, vocab_size)

    @property
    def is_usable(self) -> bool:
        """Whether the tokenizer can be used. Waits until it is read."""
        return self._tokenizer.exception() is None

    def __call__(self, grammar: Grammar, *, ignore_eos: bool) -> Constraint:
        """Compile a grammar, in another thread. If this fails, `failure` says so."""
        if grammar in self._compiled:
            self._compiled.move_to_end(grammar)
        else:
            self._compiled[grammar] = self._threads.submit(self._compile, grammar)
            if len(self._compiled) > _MAX_CACHED:
                self._compiled.popitem(last=False)
        return Constraint(self._compiled[grammar], self._ends, ignore_eos=ignore_eos)

    def compute_masks(self, constraints: list[Constraint]) -> None:
        """Compute the next masks, in parallel. Other threads run meanwhile."""
        waiting = [one for one in constraints if one.mask is None and not one.matcher.is_stopped()]
        if not waiting:
            return
        masks = np.zeros((len(waiting), self._num_words), np.int32)
        pairs = [(one.matcher, index) for index, one in enumerate(waiting)]
        self._executor.unsafe_compute_mask_ptr(pairs, masks.ctypes.data, self._num_words * 4, len(waiting))
        for one, mask in zip(waiting, masks, strict=True):
            one.mask = mask.view(np.uint8)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _read(self, tokenizer_json: str, vocab_size: int) -> LLTokenizer:
        try:
            return LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=self._ends)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a Rust panic of the library is not an Exception
            logger.warning("Grammars are not supported for this tokenizer: %s.", in_one_line(error))
            raise ValueError("the tokenizer cannot be used") from error

    def _compile(self, grammar: Grammar) -> LLMatcher:
        limits = LLParserLimits(step_max_items=STEP_ITEMS)
        matcher = LLMatcher(self._tokenizer.result(), to_guidance(grammar), log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.deep_copy().compute_bitmask()  # the first mask compiles more
        return matcher
