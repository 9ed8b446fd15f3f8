"""One sequence of a stream: takes ids from the engine, puts text into the log."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from tailrace.engine import Delta
from tailrace.errors import EngineError
from tailrace.text import Detokenizer, StopMatcher
from tailrace.types import TextDelta

if TYPE_CHECKING:
    from tailrace.generation.run import Run

__all__ = ["Choice"]

logger = logging.getLogger("tailrace.generation")


class Choice:
    """The receiver of one sequence's deltas. This is the per-token path: no task, no lock, no JSON."""

    __slots__ = ("_detokenizer", "_run", "_stops", "index", "is_finished", "is_gone", "num_tokens", "sequence_id")

    def __init__(
        self, run: Run, index: int, sequence_id: int, detokenizer: Detokenizer, stops: StopMatcher | None
    ) -> None:
        self._run = run
        self._detokenizer = detokenizer
        self._stops = stops
        self.index = index
        self.sequence_id = sequence_id
        self.num_tokens = 0
        self.is_finished = False  # as far as the log is concerned
        self.is_gone = False  # from the engine too

    def push(self, delta: Delta) -> None:
        if not self.is_finished:
            try:
                self._take(delta)
            except Exception:  # a defect of ours must end this stream, not everybody's
                logger.exception("a delta could not be taken")
                self._run.fail("internal_error", "The server failed to read the engine's output.")
        if delta.finish_reason is not None:
            self.is_gone = True
            self._run.left()

    def lost(self, error: EngineError) -> None:
        self.is_gone = True
        self._run.fail(error.code, error.message)
        self._run.left()

    def _take(self, delta: Delta) -> None:
        finish = delta.finish_reason
        if finish == "error":
            self._run.fail("sequence_failed", f"The engine ended this sequence: {delta.failure}.")
            return
        if delta.start != self.num_tokens:
            self._run.fail("engine_error", "The engine's output has a gap.")
            return
        if not delta.start:
            self._run.begun()
        token_ids, logprobs, top = delta.token_ids, delta.logprobs, delta.top_logprobs
        stop = None
        if self._stops is None:
            text = self._detokenizer.push(token_ids)
        else:
            text, num_kept, stop = self._push_until_stop(self._stops, token_ids)
            token_ids, logprobs, top = token_ids[:num_kept], logprobs[:num_kept], top[:num_kept]
        self.num_tokens += len(token_ids)
        if stop is not None:
            self._finish(TextDelta(text, token_ids, self.index, logprobs, "stop", stop, top))
            if finish is None:
                self._run.abort(self)
        elif finish is None:
            self._run.log.append(TextDelta(text, token_ids, self.index, logprobs, None, None, top))
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
        self._run.log.append(last)
        self._run.finished()
