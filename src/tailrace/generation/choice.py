"""One answer of a stream: turns the deltas of one sequence into text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Ids
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import lru_cache
from itertools import accumulate
from typing import Literal

import msgspec
from msgspec.structs import replace

from tailrace.engines.interface import GRAMMAR_TOO_COMPLEX, Delta, Sequence
from tailrace.engines.schedule import FREE, Schedule
from tailrace.errors import Diverged, EngineError, EngineLost, RequestRefused, SequenceFailed, TailraceError
from tailrace.text import Detokenizer, ReasoningSplitter, StopMatcher, Tokenizer, ToolCallReader
from tailrace.text.calls import FORMATS, UNKNOWN
from tailrace.text.reasoning import end_of_reasoning
from tailrace.types import CallReading, FinishReason, ReasoningFormat, Segment, TextDelta, with_ids

__all__ = ["SEEDS", "Choice", "Problem", "State"]

SEEDS = 2**64  # engines take unsigned ones, clients also send negative ones
_MAX_RETRIES = 3  # at one position


class State(Enum):
    """The state of a choice. "On the engine": the engine has its sequence, and will report the sequence's end."""

    WAITING = auto()  # not on the engine, before its start or after its engine was lost
    REPLAYING = auto()  # on the engine; new tokens are compared with the log, and not shown
    RUNNING = auto()  # on the engine; new tokens go into the log
    ENDING = auto()  # on the engine, but the log is complete
    ENDED = auto()  # not on the engine, and the log is complete


# Bound once: CPython 3.11 takes 50 ns to look a member up in its enum, and this is the path of every token.
_WAITING, _REPLAYING, _RUNNING, _ENDING, _ENDED = State
_TRANSITIONS = {
    _WAITING: (_REPLAYING, _RUNNING, _ENDED),
    _REPLAYING: (_WAITING, _RUNNING, _ENDING),
    _RUNNING: (_WAITING, _ENDING),
    _ENDING: (_ENDED,),
    _ENDED: (_WAITING,),  # its last event could not be kept, and was dropped
}


_CHANGED = Diverged("A replay gave a different answer.")


@dataclass(frozen=True, slots=True)
class Problem:
    """A delta that cannot go into the log.

    `failed` ends the stream with `error`. `lost`: the engine lost this sequence, which may run again. `diverged`: a
    replay differs from the log.
    """

    kind: Literal["failed", "lost", "diverged"]
    error: TailraceError = _CHANGED


_DIVERGED = Problem("diverged")


@dataclass(slots=True, eq=False, repr=False)
class Choice:
    """Turns the deltas of a sequence into events. This is the path of every token: no task, no lock, no JSON.

    A sequence that runs again, on another engine or in another process, starts from its prompt, and has to repeat the
    tokens in the log (`start_replay`). If it differs, another sequence may continue after these tokens
    (`continue_from`).
    """

    index: int
    sequence: Sequence
    _tokenizer: Tokenizer
    reasoning_format: ReasoningFormat | None = None
    calls: CallReading | None = None
    state: State = _WAITING
    num_tokens: int = 0  # of the answer, so far
    num_reasoning_tokens: int = 0  # tokens up to the end of the reasoning
    is_spent: bool = False  # the budget for reasoning is used up, and the reasoning has to end
    usage: tuple[int, int] | None = None  # tokens of prompt and answer, if the engine itself counts them
    num_cached_tokens: int | None = None  # of the prompt, found in a prefix cache; None: not known
    _num_prompted: int = 0  # ids of the answer that are part of the sequence's prompt
    _num_prompted_usage: int = 0  # their number as in `usage`
    _expected_ids: tuple[int, ...] = ()  # that a replay has to repeat, in comparable form
    _num_verified: int = 0  # expected ids that the replay has repeated
    _next_index: int = 0  # start of the sequence's next delta
    _num_retries: int = 0  # in a row, at the same position
    _retried_at: int = -1
    _prompt: tuple[Segment, ...] = field(init=False)
    _detokenizer: Detokenizer = field(init=False)
    _stops: StopMatcher | None = field(init=False)
    _tool_calls: ToolCallReader | None = field(init=False)
    _splitter: ReasoningSplitter | None = field(init=False)  # until the reasoning is over
    # The text of control tokens that belong to tool calls, by id. Other control tokens have no text.
    _spellings: Mapping[int, str] = field(init=False)
    _min_tokens: int = field(init=False)  # before which no stop string ends the answer
    _hidden: frozenset[int] = field(init=False)  # tokens that are not shown if they end the answer
    _is_plain: bool = field(init=False)  # none of the four has to see each token

    def __post_init__(self) -> None:
        self._prompt = self.sequence.segments
        self._min_tokens = self.sequence.sampling.min_tokens
        self._reset_text()

    @property
    def is_on_engine(self) -> bool:
        return self.state is not _WAITING and self.state is not _ENDED

    @property
    def is_complete(self) -> bool:
        """Whether the log has all events of this choice."""
        return self.state is _ENDING or self.state is _ENDED

    @property
    def num_generated(self) -> int:
        """Tokens of the current or last sequence that the engine has generated."""
        return self._next_index

    @property
    def num_answer_tokens(self) -> int:
        """Tokens of the answer so far, as the engine counts them."""
        return self.num_tokens if self.usage is None else self.usage[1]

    def take(self, delta: Delta) -> tuple[TextDelta, ...] | Problem:
        """Return the events of a delta, or the problem with it. The last event of the choice has a finish_reason.

        There are no events while a replay repeats the log, and after the log is complete. There are two if the delta
        has both reasoning and text.
        """
        state = self.state
        if state is _ENDING:
            return ()
        finish = delta.finish_reason
        if finish == "error":
            return self._problem(delta)
        if delta.start != self._next_index:
            return Problem("failed", EngineError("The engine's output has a gap."))
        self._next_index += len(delta.token_ids)
        if state is _REPLAYING:
            verified = self._verify(delta)
            if not isinstance(verified, Delta):
                return () if verified is None else verified
            delta = verified
        if delta.num_cached_tokens is not None and not self._num_prompted:  # else it counts a part of the answer
            self.num_cached_tokens = delta.num_cached_tokens
        if delta.usage is not None:
            num_prompt, num_answer = delta.usage
            self.usage = (num_prompt - self._num_prompted_usage, num_answer + self._num_prompted_usage)
        if not self._is_plain:
            return self._take_tokens(delta)
        text = self._detokenizer.push(delta.token_ids)
        self.num_tokens += len(delta.token_ids)
        if finish is not None:
            text += self._detokenizer.flush()
        return (
            TextDelta(
                text,
                delta.token_ids,
                self.index,
                delta.logprobs,
                finish,
                None,
                delta.top_logprobs,
                "",
                delta.is_alone,
                delta.prompt_logprobs,
            ),
        )

    # State

    def on_submit(self) -> None:
        """The engine has the sequence."""
        self._set_state(_REPLAYING if self._expected_ids else _RUNNING)

    def on_complete(self) -> None:
        """The log has all events of this choice."""
        if not self.is_complete:
            self._set_state(_ENDING if self.is_on_engine else _ENDED)

    def on_engine_done(self) -> None:
        """The engine no longer has the sequence."""
        self._set_state(_ENDED if self.state is _ENDING else _WAITING)

    def reopen(self) -> None:
        """The last event could not be kept: the choice is not complete."""
        if self.state is _ENDED:
            self._set_state(_WAITING)

    def _set_state(self, state: State) -> None:
        assert state in _TRANSITIONS[self.state], f"a choice cannot go from {self.state} to {state}"
        self.state = state

    # Reasoning

    def end_reasoning(self, sequence_id: int, token_ids: Ids[int]) -> TextDelta:
        """End the reasoning, whose budget is spent: return the event with the tokens that end it, and prepare another
        sequence that continues behind them. `token_ids` are those of the answer in the log."""
        ids = self._ids_of_end()
        self.is_spent = False
        shown = self._push_tokens(ids, is_forced=True)
        self.num_tokens += len(ids)
        self.continue_from(sequence_id, (*token_ids, *ids))
        return TextDelta(shown.text, ids, self.index, reasoning=shown.reasoning)

    def _ids_of_end(self) -> tuple[int, ...]:
        """Return the tokens that end the reasoning."""
        assert self.reasoning_format is not None
        return tuple(self._tokenizer.encode(end_of_reasoning(self.reasoning_format), special=True))

    def _push_log(self, token_ids: Ids[int]) -> tuple[_Shown, int]:
        """Read the ids of the log again. Also returns how many of them come before the position where the reasoning was
        ended, with the tokens that ended it; 0 if it was not."""
        shown = self._push_tokens(token_ids)
        if not self.is_spent or shown.num_taken == len(token_ids):
            return shown, 0
        self.is_spent, self.num_tokens = False, shown.num_taken
        ended = shown.num_taken + len(self._ids_of_end())
        for part, is_forced in ((token_ids[shown.num_taken : ended], True), (token_ids[ended:], False)):
            more = self._push_tokens(part, is_forced=is_forced)
            shown.reasoning, shown.text = shown.reasoning + more.reasoning, shown.text + more.text
            self.num_tokens += len(part)
        return shown, ended

    # Running again

    def may_retry(self) -> bool:
        """Return whether a sequence that a running engine lost may run again. It may not after `_MAX_RETRIES` losses at
        the same position."""
        self._num_retries = self._num_retries + 1 if self.num_tokens == self._retried_at else 1
        self._retried_at = self.num_tokens
        return self.num_tokens > 0 and self._num_retries <= _MAX_RETRIES

    def rename(self, sequence_id: int) -> None:
        """Give the sequence a new id. Ids are never used twice."""
        self.sequence = replace(self.sequence, sequence_id=sequence_id)

    def restore(self, token_ids: Ids[int]) -> None:
        """Count tokens that an earlier process has delivered."""
        self.num_tokens = 0
        if self._splitter is not None:
            self._push_log(token_ids)
        self.num_tokens = len(token_ids)

    def start_replay(self, deltas: Iterable[TextDelta]) -> bool:
        """Prepare to run the sequence again, with these events in the log. Returns whether their text is that of their
        tokens."""
        deltas = list(deltas)
        token_ids = [token_id for delta in deltas for token_id in delta.token_ids]
        self._reset_text()
        self.num_tokens = self.num_reasoning_tokens = 0
        shown, num_ended = self._push_log(token_ids)
        self.num_tokens = len(token_ids)
        if num_ended > self._num_prompted:  # an earlier process ended the reasoning
            self.continue_from(self.sequence.sequence_id, token_ids[:num_ended])
        self._expected_ids = self._tokenizer.comparable(token_ids[self._num_prompted :])
        self._num_verified = self._next_index = 0
        self.sequence = replace(self.sequence, schedule=self._schedule(deltas))
        return (shown.reasoning, shown.text) == (
            "".join(delta.reasoning for delta in deltas),
            "".join(delta.text for delta in deltas),
        )

    def _schedule(self, deltas: Ids[TextDelta]) -> Schedule:
        """Return the schedule of the tokens in these events that the sequence itself has generated."""
        ends = accumulate(len(delta.token_ids) for delta in deltas)
        own = (delta for delta, end in zip(deltas, ends, strict=True) if end > self._num_prompted)
        return Schedule.of((len(delta.token_ids), delta.is_alone) for delta in own)

    def continue_from(self, sequence_id: int, token_ids: Ids[int]) -> None:
        """Prepare another sequence that continues after these tokens, which are in the log."""
        sequence = self.sequence
        assert sequence.sampling.max_tokens is not None
        num_before = self._num_prompted_usage
        self._num_prompted_usage = len(token_ids) if self.usage is None else self.usage[1]
        sampling = replace(
            sequence.sampling,
            max_tokens=max(1, sequence.sampling.max_tokens + num_before - self._num_prompted_usage),
            prompt_logprobs=None if token_ids else sequence.sampling.prompt_logprobs,
            min_tokens=max(0, self._min_tokens - len(token_ids)),
            # With the same seed it would draw the random numbers of the answer's start again.
            seed=((sequence.sampling.seed or 0) + len(token_ids)) % SEEDS,
        )
        segments = with_ids(self._prompt, tuple(token_ids))
        self.sequence = replace(sequence, sequence_id=sequence_id, segments=segments, sampling=sampling, schedule=FREE)
        self._num_prompted = len(token_ids)
        self._expected_ids = ()
        self._next_index = 0

    # Events

    def _problem(self, delta: Delta) -> Problem:
        reason = f"The engine ended this sequence: {delta.failure}."
        if delta.is_lost:
            return Problem("lost", EngineLost(reason))
        if delta.is_refused and (not self.num_tokens or delta.failure == GRAMMAR_TOO_COMPLEX):
            return Problem("failed", RequestRefused(f"The engine refused this request: {delta.failure}."))
        return Problem("failed", SequenceFailed(reason))

    def _verify(self, delta: Delta) -> Delta | Problem | None:
        """Compare a replay with the log. Returns the part of the delta that is new; None if there is none."""
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
            is_alone=delta.is_alone,
            num_cached_tokens=delta.num_cached_tokens,
        )

    def _reset_text(self) -> None:
        sampling, reasoning = self.sequence.sampling, self.reasoning_format
        self._detokenizer = Detokenizer(self._tokenizer, include_special=sampling.include_special)
        self._splitter = ReasoningSplitter(reasoning, self._tokenizer.control_tokens) if reasoning is not None else None
        self._stops = StopMatcher(sampling.stop, sampling.include_stop) if sampling.stop else None
        self._spellings = _marker_texts(self._tokenizer, self.calls.format) if self.calls is not None else {}
        self._hidden = frozenset()
        if not sampling.include_stop:
            special = self._tokenizer.special_ids if sampling.include_special else frozenset()
            self._hidden = special.union(sampling.stop_token_ids)
        self._tool_calls = None
        if sampling.single_call:
            self._tool_calls = ToolCallReader(replace(self.calls or CallReading(), single=True))
        self._note_plain()

    def _note_plain(self) -> None:
        readers = (self._splitter, self._stops, self._tool_calls)
        self._is_plain = all(reader is None for reader in readers) and not self._spellings and not self._hidden

    def _take_tokens(self, delta: Delta) -> tuple[TextDelta, ...]:
        """Return the events of a delta, with its tokens read one at a time."""
        finish, ids = delta.finish_reason, delta.token_ids
        shown = self._push_tokens(ids, hides_last=finish == "stop" and bool(ids) and ids[-1] in self._hidden)
        if self.is_spent and (finish is None or shown.num_taken < len(ids)):
            finish = None
        elif self.is_spent:  # the model ended here itself
            self.is_spent = False
        if shown.stop is not None:
            finish = "stop"
        elif self._tool_calls is not None and self._tool_calls.is_over:
            finish = "tool_calls"
        elif finish is not None:
            self._flush(shown)
            finish = "stop" if shown.stop else finish
        self.num_tokens += shown.num_taken
        if not (shown.reasoning and shown.text):
            return (self._event(delta, shown, 0, shown.num_taken, finish),)
        reasoning_part = replace(shown, text="", stop=None)
        return (
            self._event(delta, reasoning_part, 0, shown.num_reasoning, None),
            self._event(delta, replace(shown, reasoning=""), shown.num_reasoning, shown.num_taken, finish),
        )

    def _event(self, delta: Delta, shown: _Shown, start: int, stop: int, finish: FinishReason | None) -> TextDelta:
        """Return the event for a delta's tokens from `start` to `stop`."""
        ids, logprobs, top = delta.token_ids[start:stop], delta.logprobs[start:stop], delta.top_logprobs[start:stop]
        prompt = () if start else delta.prompt_logprobs
        alone = delta.is_alone
        return TextDelta(shown.text, ids, self.index, logprobs, finish, shown.stop, top, shown.reasoning, alone, prompt)

    def _push_tokens(self, token_ids: Ids[int], *, is_forced: bool = False, hides_last: bool = False) -> _Shown:
        """Read ids, up to a stop string, the end of the only tool call or of the budget for reasoning. `is_forced`:
        they are those that end the reasoning. `hides_last`: the last one has no text."""
        shown, most = _Shown(), self.sequence.sampling.max_reasoning_tokens
        for token_id in token_ids:
            shown.num_taken += 1
            number = self.num_tokens + shown.num_taken
            is_hidden = hides_last and shown.num_taken == len(token_ids)
            reasoning, text = ("", "") if is_hidden else self._read(token_id, number)
            self._show(shown, reasoning, text, may_stop=number > self._min_tokens)
            if shown.stop is not None or (self._tool_calls is not None and self._tool_calls.is_over):
                break
            if most is not None and not is_forced and self._splitter is not None and self._splitter.is_reasoning:
                self.is_spent = self.num_reasoning_tokens >= most
                if self.is_spent:
                    break
        return shown

    def _read(self, token_id: int, num_tokens: int) -> tuple[str, str]:
        """Return the reasoning and the text of a token. `num_tokens` is its number in the answer, from 1."""
        splitter, spelling = self._splitter, self._spellings.get(token_id)
        if splitter is None:
            return "", self._detokenizer.push((token_id,)) if spelling is None else spelling
        was_reasoning = splitter.is_reasoning
        spelling = splitter.spellings.get(token_id, spelling)
        parts = splitter.push(self._detokenizer.push((token_id,)) if spelling is None else spelling)
        if was_reasoning or splitter.is_reasoning:
            self.num_reasoning_tokens = num_tokens
        if splitter.is_over:
            self._splitter = None
            self._note_plain()
        return parts

    def _show(self, shown: _Shown, reasoning: str, text: str, *, may_stop: bool = True) -> None:
        """Add reasoning and text. Stop strings and tool calls are found only in the text."""
        if reasoning:
            shown.reasoning += reasoning
            shown.num_reasoning = shown.num_taken
        if self._stops is not None and may_stop:
            text, shown.stop = self._stops.push(text)
        if self._tool_calls is not None:
            self._tool_calls.push(text)
        shown.text += text

    def _flush(self, shown: _Shown) -> None:
        """Add text that was held back. It may complete a stop string."""
        reasoning, text = "", self._detokenizer.flush()
        if self._splitter is not None:
            reasoning, text = map("".join, zip(self._splitter.push(text), self._splitter.flush(), strict=True))
        self._show(shown, reasoning, text)
        if self._stops is not None and shown.stop is None:
            shown.text += self._stops.flush()


class _Shown(msgspec.Struct):
    """The reasoning and the text of some tokens."""

    reasoning: str = ""
    text: str = ""
    stop: str | None = None  # the stop string that one of them completed
    num_taken: int = 0
    num_reasoning: int = 0  # tokens up to the last one with reasoning


@lru_cache(maxsize=64)  # a model may have a thousand control tokens
def _marker_texts(tokenizer: Tokenizer, call_format: str) -> Mapping[int, str]:
    """Return the text of each control token that belongs to a format of tool calls, by id."""
    markers = "".join(FORMATS.get(call_format, UNKNOWN).markers)
    return {token_id: text for text, token_id in tokenizer.control_tokens.items() if text in markers}
