"""One sequence of a stream: takes ids from the engine, puts text into the log."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Ids
from dataclasses import replace
from typing import TYPE_CHECKING

from tailrace.engines.promise import Delta, Sequence
from tailrace.errors import EngineError
from tailrace.text import Detokenizer, StopMatcher, Tokenizer
from tailrace.types import TextDelta

if TYPE_CHECKING:
    from tailrace.generation.run import Run

__all__ = ["SEEDS", "Choice"]

logger = logging.getLogger("tailrace.generation")

SEEDS = 2**64  # engines take unsigned ones, clients also send negative ones
_CUTS = 3  # at one place, after which a sequence is not run again


class Choice:
    """The receiver of one sequence's deltas. This is the per-token path: no task, no lock, no JSON.

    A sequence that runs again, on another engine or in another process, begins with its prompt and has to say again
    what it has said; that is compared and not shown. If it says something else, a new sequence goes on behind what was
    shown (`go_on`).
    """

    __slots__ = (
        "_base",
        "_cut_at",
        "_cuts",
        "_detokenizer",
        "_heard",
        "_known",
        "_next",
        "_prior",
        "_run",
        "_stops",
        "_tokenizer",
        "in_engine",
        "index",
        "is_finished",
        "num_tokens",
        "sequence",
        "usage",
    )

    def __init__(self, run: Run, index: int, sequence: Sequence, tokenizer: Tokenizer) -> None:
        self._run = run
        self._tokenizer = tokenizer
        self.index = index
        self.sequence = sequence
        self.num_tokens = 0  # of the answer, so far
        self.is_finished = False  # as far as the log is concerned
        self.usage: tuple[int, int] | None = None  # tokens of prompt and answer, of an engine that counts otherwise
        self.in_engine = False
        self._base = 0  # ids of the answer that are part of the sequence's prompt
        self._prior = 0  # tokens of those, as in `usage`
        self._known: tuple[int, ...] = ()  # what the sequence has to say again, in comparable form
        self._heard = 0  # of those
        self._next = 0  # where the sequence's next delta starts
        self._cuts = 0  # losses in a row at the same place
        self._cut_at = -1
        self._set_text()

    def _set_text(self) -> None:
        sampling = self.sequence.sampling
        self._detokenizer = Detokenizer(self._tokenizer)
        self._stops = StopMatcher(sampling.stop, sampling.include_stop) if sampling.stop else None

    @property
    def num_heard(self) -> int:
        """How many tokens the engine has given of the sequence that it has now, or had last."""
        return self._next

    @property
    def num_answer_tokens(self) -> int:
        """Of the answer so far, as the model counts them."""
        return self.num_tokens if self.usage is None else self.usage[1]

    def push(self, delta: Delta) -> None:
        if delta.sequence_id != self.sequence.sequence_id:
            return  # of one that was given up
        if not self.is_finished:
            try:
                self._hear(delta)
            except Exception:  # a defect of ours must end this stream, not everybody's
                logger.exception("a delta could not be taken")
                self._run.fail("internal_error", "The server failed to read the engine's output.")
        if delta.finish_reason is not None and delta.sequence_id == self.sequence.sequence_id:
            self.in_engine = False
            self._run.left()

    def lost(self, error: EngineError) -> None:
        self._run.fell()
        self.in_engine = False
        if self.is_finished:
            self._run.left()
        else:
            self._run.strand()

    def may_try_again(self) -> bool:
        """It was lost by an engine that is still there. Often enough in one place, that is no accident."""
        self._cuts = self._cuts + 1 if self.num_tokens == self._cut_at else 1
        self._cut_at = self.num_tokens
        return self.num_tokens > 0 and self._cuts <= _CUTS

    def renew(self, sequence_id: int) -> None:
        """What the sequence was called is not used again."""
        self.sequence = replace(self.sequence, sequence_id=sequence_id)

    def again(self, token_ids: Ids[int]) -> str:
        """The sequence is to run again, with these tokens in the log; returns the text that they give."""
        self._set_text()
        if self._stops is None:
            text = self._detokenizer.push(token_ids)
        else:
            text = self._push_until_stop(self._stops, tuple(token_ids))[0]
        self.num_tokens = len(token_ids)
        self._known = self._tokenizer.comparable(token_ids[self._base :])
        self._heard = self._next = 0
        return text

    def go_on(self, sequence_id: int, token_ids: Ids[int]) -> None:
        """Another sequence is to go on behind these tokens, which are in the log."""
        sequence = self.sequence
        prompt_ids = sequence.prompt_ids[: len(sequence.prompt_ids) - self._base] + tuple(token_ids)
        assert sequence.sampling.max_tokens is not None
        num_before, self._prior = self._prior, len(token_ids) if self.usage is None else self.usage[1]
        sampling = replace(
            sequence.sampling,
            max_tokens=max(1, sequence.sampling.max_tokens + num_before - self._prior),
            # The same numbers drawn once more would be those of the beginning.
            seed=((sequence.sampling.seed or 0) + len(token_ids)) % SEEDS,
        )
        self.sequence = Sequence(sequence_id, prompt_ids, sampling)
        self._base = len(token_ids)
        self._known = ()
        self._next = 0

    def _hear(self, delta: Delta) -> None:
        run = self._run
        if delta.finish_reason == "error":
            reason = f"The engine ended this sequence: {delta.failure}."
            if delta.is_lost:
                run.cut(self, reason)
            elif delta.is_refused and not self.num_tokens:
                run.fail("request_refused", f"The engine refused this request: {delta.failure}.")
            else:
                run.fail("sequence_failed", reason)
            return
        if delta.start != self._next:
            run.fail("engine_error", "The engine's output has a gap.")
            return
        self._next += len(delta.token_ids)
        rest = self._compare(delta) if self._known else delta
        if rest is not None:
            self._take(rest)

    def _compare(self, delta: Delta) -> Delta | None:
        """What a delta adds to what is known; None if nothing."""
        if delta.finish_reason == "cancelled":
            return delta
        known, heard, ids = self._known, self._heard, self._tokenizer.comparable(delta.token_ids)
        self._heard = min(heard + len(ids), len(known))
        num_same = self._heard - heard
        ends_early = delta.finish_reason is not None and self._heard < len(known)
        if ends_early or ids[:num_same] != known[heard : self._heard]:
            self._run.diverged(self)
            return None
        if self._heard < len(known):
            return None
        self._known = ()
        if len(ids) == num_same and delta.finish_reason is None:
            return None
        return Delta(
            delta.sequence_id,
            delta.start,
            ids[num_same:],
            delta.logprobs[num_same:],
            delta.finish_reason,
            delta.failure,
            delta.top_logprobs[num_same:],
            delta.usage,
        )

    def _take(self, delta: Delta) -> None:
        run = self._run
        finish = delta.finish_reason
        if not self.num_tokens:
            run.begun()
        if delta.usage is not None:
            self.usage = (delta.usage[0] - self._prior, delta.usage[1] + self._prior)
        token_ids, logprobs, top = delta.token_ids, delta.logprobs, delta.top_logprobs
        stop = None
        if self._stops is None:
            text = self._detokenizer.push(token_ids)
        else:
            text, num_kept, stop = self._push_until_stop(self._stops, token_ids)
            token_ids, logprobs, top = token_ids[:num_kept], logprobs[:num_kept], top[:num_kept]
        self.num_tokens += len(token_ids)
        if run.is_watched:
            run.moved()
        if stop is not None:
            self._finish(TextDelta(text, token_ids, self.index, logprobs, "stop", stop, top))
            if finish is None:
                run.abort(self)
        elif finish is None:
            run.write(TextDelta(text, token_ids, self.index, logprobs, None, None, top))
        else:
            rest, stop = self._flush()
            finish = "stop" if stop else finish
            self._finish(TextDelta(text + rest, token_ids, self.index, logprobs, finish, stop, top))

    def _push_until_stop(self, stops: StopMatcher, token_ids: tuple[int, ...]) -> tuple[str, int, str | None]:
        """The text that may be shown, how many of the ids it took, and the stop string that one of them completed."""
        text = ""
        for position, token_id in enumerate(token_ids):
            shown, stop = stops.push(self._detokenizer.push((token_id,)))
            text += shown
            if stop is not None:
                return text, position + 1, stop
        return text, len(token_ids), None

    def _flush(self) -> tuple[str, str | None]:
        """What was held back; the rest of a character may still complete a stop string."""
        text = self._detokenizer.flush()
        if self._stops is None:
            return text, None
        shown, stop = self._stops.push(text)
        return (shown, stop) if stop is not None else (shown + self._stops.flush(), None)

    def _finish(self, last: TextDelta) -> None:
        self.is_finished = True
        self._run.write(last)
        self._run.finished()
