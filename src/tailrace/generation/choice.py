"""One answer of a stream: what the engine says of one sequence becomes text."""

from __future__ import annotations

from collections.abc import Sequence as Ids
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Literal

from tailrace.engines.promise import Delta, Sequence
from tailrace.errors import Diverged, EngineError, EngineLost, RequestRefused, SequenceFailed, TailraceError
from tailrace.text import Detokenizer, StopMatcher, Tokenizer, ToolCallReader
from tailrace.types import TextDelta

__all__ = ["SEEDS", "Choice", "Problem", "State"]

SEEDS = 2**64  # engines take unsigned ones, clients also send negative ones
_MAX_RETRIES = 3  # at one position


class State(Enum):
    """Where a choice stands. "On the engine" means that the engine has its sequence, and will say when it is done."""

    WAITING = auto()  # not on the engine: not yet, or not at the moment
    REPLAYING = auto()  # on the engine, which says again what the log has; that is compared, and not shown
    RUNNING = auto()  # on the engine; what it says goes into the log
    ENDING = auto()  # on the engine, but the log has all that it will have
    ENDED = auto()  # not on the engine, and the log has all


# Bound once: CPython 3.11 takes 50 ns to look a member up in its enum, and this is the path of every token.
_WAITING, _REPLAYING, _RUNNING, _ENDING, _ENDED = State
_TRANSITIONS = {
    _WAITING: (_REPLAYING, _RUNNING, _ENDED),
    _REPLAYING: (_WAITING, _RUNNING, _ENDING),
    _RUNNING: (_WAITING, _ENDING),
    _ENDING: (_ENDED,),
    _ENDED: (_WAITING,),  # its last event could not be kept, and is given up
}


_CHANGED = Diverged("The answer came out differently after the engine was lost.")


@dataclass(frozen=True, slots=True)
class Problem:
    """A delta that cannot go into the log.

    `failed` ends the stream with `error`. `lost`: what the engine ran the sequence on went away, and the sequence may
    run again. `diverged`: a replay says something else than the log.
    """

    kind: Literal["failed", "lost", "diverged"]
    error: TailraceError = _CHANGED


_DIVERGED = Problem("diverged")


@dataclass(slots=True, eq=False, repr=False)
class Choice:
    """Turns the deltas of a sequence into events. This is the path of every token: no task, no lock, no JSON.

    A sequence that runs again, on another engine or in another process, begins with its prompt and has to say again
    what the log has (`start_replay`). If it says something else, another sequence may continue behind that
    (`continue_from`).
    """

    index: int
    sequence: Sequence
    _tokenizer: Tokenizer
    state: State = _WAITING
    num_tokens: int = 0  # of the answer, so far
    usage: tuple[int, int] | None = None  # tokens of prompt and answer, of an engine that counts otherwise
    _num_prompted: int = 0  # ids of the answer that are part of the sequence's prompt
    _num_prompted_usage: int = 0  # tokens of those, as in `usage`
    _expected_ids: tuple[int, ...] = ()  # that a replay has to say, in comparable form
    _num_verified: int = 0  # of those
    _next_index: int = 0  # where the sequence's next delta starts
    _num_retries: int = 0  # in a row, at the same position
    _retried_at: int = -1
    _detokenizer: Detokenizer = field(init=False)
    _stops: StopMatcher | None = field(init=False)
    _tool_calls: ToolCallReader | None = field(init=False)

    def __post_init__(self) -> None:
        self._reset_text()

    @property
    def is_on_engine(self) -> bool:
        return self.state is not _WAITING and self.state is not _ENDED

    @property
    def is_complete(self) -> bool:
        """The log has all that it will have."""
        return self.state is _ENDING or self.state is _ENDED

    @property
    def num_generated(self) -> int:
        """Tokens that the engine has given of the sequence that it has now, or had last."""
        return self._next_index

    @property
    def num_answer_tokens(self) -> int:
        """Of the answer so far, as the model counts them."""
        return self.num_tokens if self.usage is None else self.usage[1]

    def take(self, delta: Delta) -> TextDelta | Problem | None:
        """What the engine said: the event that it makes, with a finish_reason if it is the last, or why it makes none.
        None is a replay that has shown nothing new yet, or more than the log will have."""
        state = self.state
        if state is _ENDING:
            return None
        finish = delta.finish_reason
        if finish == "error":
            return self._problem(delta)
        if delta.start != self._next_index:
            return Problem("failed", EngineError("The engine's output has a gap."))
        num_tokens = len(delta.token_ids)
        self._next_index += num_tokens
        if state is _REPLAYING:
            verified = self._verify(delta)
            if not isinstance(verified, Delta):
                return verified
            delta, num_tokens = verified, len(verified.token_ids)
        if delta.usage is not None:
            num_prompt, num_answer = delta.usage
            self.usage = (num_prompt - self._num_prompted_usage, num_answer + self._num_prompted_usage)
        token_ids, logprobs, top = delta.token_ids, delta.logprobs, delta.top_logprobs
        stop, is_cut = None, False
        if self._stops is None and self._tool_calls is None:
            text = self._detokenizer.push(token_ids)
        else:
            text, num_tokens, stop = self._push_each(token_ids)
            token_ids, logprobs, top = token_ids[:num_tokens], logprobs[:num_tokens], top[:num_tokens]
            is_cut = stop is not None or (self._tool_calls is not None and self._tool_calls.is_over)
        self.num_tokens += num_tokens
        if is_cut:
            finish = "stop" if stop is not None else "tool_calls"
        elif finish is not None:
            rest, stop = self._flush()
            text, finish = text + rest, "stop" if stop else finish
        return TextDelta(text, token_ids, self.index, logprobs, finish, stop, top)

    # Where it stands

    def on_submit(self) -> None:
        """The engine has the sequence."""
        self._set_state(_REPLAYING if self._expected_ids else _RUNNING)

    def on_complete(self) -> None:
        """The log has all that it will have."""
        if not self.is_complete:
            self._set_state(_ENDING if self.is_on_engine else _ENDED)

    def on_engine_done(self) -> None:
        """The engine does not have the sequence any more."""
        self._set_state(_ENDED if self.state is _ENDING else _WAITING)

    def reopen(self) -> None:
        """The log does not have all, after all."""
        if self.state is _ENDED:
            self._set_state(_WAITING)

    def _set_state(self, state: State) -> None:
        assert state in _TRANSITIONS[self.state], f"a choice cannot go from {self.state} to {state}"
        self.state = state

    # Running again

    def may_retry(self) -> bool:
        """Whether a sequence that was lost by an engine that is still there may run again. One that is lost again and
        again at the same position may not."""
        self._num_retries = self._num_retries + 1 if self.num_tokens == self._retried_at else 1
        self._retried_at = self.num_tokens
        return self.num_tokens > 0 and self._num_retries <= _MAX_RETRIES

    def rename(self, sequence_id: int) -> None:
        """Give the sequence another id, since one is used once only."""
        self.sequence = replace(self.sequence, sequence_id=sequence_id)

    def start_replay(self, token_ids: Ids[int]) -> str:
        """The sequence is to run again, with these tokens in the log; returns the text that they give."""
        self._reset_text()
        text = self._push_each(token_ids)[0]
        self.num_tokens = len(token_ids)
        self._expected_ids = self._tokenizer.comparable(token_ids[self._num_prompted :])
        self._num_verified = self._next_index = 0
        return text

    def continue_from(self, sequence_id: int, token_ids: Ids[int]) -> None:
        """Another sequence is to go on behind these tokens, which are in the log."""
        sequence = self.sequence
        prompt_ids = sequence.prompt_ids[: len(sequence.prompt_ids) - self._num_prompted] + tuple(token_ids)
        assert sequence.sampling.max_tokens is not None
        num_before = self._num_prompted_usage
        self._num_prompted_usage = len(token_ids) if self.usage is None else self.usage[1]
        sampling = replace(
            sequence.sampling,
            max_tokens=max(1, sequence.sampling.max_tokens + num_before - self._num_prompted_usage),
            # The same numbers drawn once more would be those of the beginning.
            seed=((sequence.sampling.seed or 0) + len(token_ids)) % SEEDS,
        )
        self.sequence = Sequence(sequence_id, prompt_ids, sampling)
        self._num_prompted = len(token_ids)
        self._expected_ids = ()
        self._next_index = 0

    # From a delta to an event

    def _problem(self, delta: Delta) -> Problem:
        reason = f"The engine ended this sequence: {delta.failure}."
        if delta.is_lost:
            return Problem("lost", EngineLost(reason))
        if delta.is_refused and not self.num_tokens:
            return Problem("failed", RequestRefused(f"The engine refused this request: {delta.failure}."))
        return Problem("failed", SequenceFailed(reason))

    def _verify(self, delta: Delta) -> Delta | Problem | None:
        """Compare a replay with what the log has; returns what goes beyond that."""
        if delta.finish_reason == "cancelled":
            return delta
        expected, before, ids = self._expected_ids, self._num_verified, self._tokenizer.comparable(delta.token_ids)
        self._num_verified = min(before + len(ids), len(expected))
        num_same = self._num_verified - before
        is_short = delta.finish_reason is not None and self._num_verified < len(expected)
        if is_short or ids[:num_same] != expected[before : self._num_verified]:
            return _DIVERGED
        if self._num_verified < len(expected):
            return None
        self._expected_ids = ()
        self._set_state(_RUNNING)
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

    def _reset_text(self) -> None:
        sampling = self.sequence.sampling
        self._detokenizer = Detokenizer(self._tokenizer)
        self._stops = StopMatcher(sampling.stop, sampling.include_stop) if sampling.stop else None
        self._tool_calls = ToolCallReader(single=True) if sampling.single_call else None

    def _push_each(self, token_ids: Ids[int]) -> tuple[str, int, str | None]:
        """The text that may be shown, how many of the ids it took, and the stop string that one of them completed. The
        ids that follow a stop string or the only call are not taken."""
        text = ""
        for num_taken, token_id in enumerate(token_ids, 1):
            shown, stop = self._detokenizer.push((token_id,)), None
            if self._stops is not None:
                shown, stop = self._stops.push(shown)
            text += shown
            is_called = False  # the only call, behind which nothing more is wanted
            if self._tool_calls is not None:
                self._tool_calls.push(shown)
                is_called = self._tool_calls.is_over
            if stop is not None or is_called:
                return text, num_taken, stop
        return text, len(token_ids), None

    def _flush(self) -> tuple[str, str | None]:
        """What was held back; the rest of a character may still complete a stop string."""
        text = self._detokenizer.flush()
        if self._stops is None:
            return text, None
        shown, stop = self._stops.push(text)
        return (shown, stop) if stop is not None else (shown + self._stops.flush(), None)
