"""One engine under trial: what was asked of it, and everything that it said."""

from __future__ import annotations

import contextlib
import itertools
import random
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tailrace.engines.promise import Delta, Engine, Sequence
from tailrace.types import Sampling

__all__ = ["Trial", "TrialSettings", "hold", "on_trial"]

_PATIENCE_S = 30.0  # without a single delta, while something should run
_sequence_ids = itertools.count(1)  # never used twice, so that an engine may be shared between laws


@dataclass(frozen=True, slots=True)
class TrialSettings:
    """How to get an engine, which token ids prompts may be drawn from, and how long to look for leaks."""

    make: Callable[[], Engine]
    vocab_size: int
    num_sequences: int


def hold(condition: bool, sequence_id: int | None, seen: object) -> None:
    """The one place where a law is found broken.

    Raises: AssertionError that names the sequence and what was seen.
    """
    if not condition:
        where = "the engine" if sequence_id is None else f"sequence {sequence_id}"
        raise AssertionError(f"{where}: {seen}")


class Trial:
    """Drives an engine and keeps its deltas as they came, right or wrong: judging them is for the laws."""

    def __init__(self, engine: Engine, settings: TrialSettings) -> None:
        self.engine = engine
        self.num_sequences = settings.num_sequences
        self.vocab_size = settings.vocab_size
        self.deltas: dict[int, list[Delta]] = {}
        self.strangers: list[Delta] = []  # deltas of sequences that nobody submitted
        self._running: set[int] = set()

    @property
    def width(self) -> int:
        """How many sequences a law runs side by side: five, or fewer where the engine takes fewer."""
        return min(5, self.engine.capabilities.max_sequences)

    def prompts(self, count: int, salt: str = "") -> list[tuple[int, ...]]:
        """Prompts of 5 to 20 tokens, the same ones each time."""
        draw = random.Random(f"tailrace {salt}")
        return [tuple(draw.choices(range(self.vocab_size), k=draw.randint(5, 20))) for _ in range(count)]

    def sampling(self, max_tokens: int, seed: int | None = None, *, logprobs: bool = False) -> Sampling:
        """Greedy without a seed, at temperature 1 with one. Goes on behind an end of text where the engine can."""
        return Sampling(
            temperature=1.0 if seed is not None else 0.0,
            seed=seed or 0,
            max_tokens=max_tokens,
            ignore_eos="ignore_eos" in self.engine.capabilities.parameters,
            logprobs=logprobs,
        )

    def submit(self, prompt_ids: Iterable[int], sampling: Sampling) -> int:
        """The id of a new sequence. Raises: SequenceFailed as the engine does."""
        sequence_id = next(_sequence_ids)
        self.deltas[sequence_id] = []
        self.engine.submit(Sequence(sequence_id, tuple(prompt_ids), sampling))
        self._running.add(sequence_id)
        return sequence_id

    def step(self) -> list[Delta]:
        stepped = self.engine.step()
        for delta in stepped:
            if delta.sequence_id not in self.deltas:
                self.strangers.append(delta)
                continue
            self.deltas[delta.sequence_id].append(delta)
            if delta.finish_reason is not None:
                self._running.discard(delta.sequence_id)
        return stepped

    def finish(self, *sequence_ids: int) -> None:
        """Step until these sequences have ended, or all of them where none is named."""
        heard_s = time.monotonic()
        while waiting := self._running.intersection(sequence_ids or self._running):
            if self.step():
                heard_s = time.monotonic()
            silent_s = time.monotonic() - heard_s
            hold(silent_s < _PATIENCE_S, min(waiting), f"no delta of any sequence for {silent_s:.0f} s")

    def start(self, max_tokens: int) -> int:
        """A sequence that has said something and still runs."""
        for prompt in self.prompts(8, "start"):
            sequence_id = self.submit(prompt, self.sampling(max_tokens))
            heard_s = time.monotonic()
            while not self.deltas[sequence_id] and time.monotonic() - heard_s < _PATIENCE_S:
                self.step()
            hold(bool(self.deltas[sequence_id]), sequence_id, f"no delta for {_PATIENCE_S:.0f} s")
            if sequence_id in self._running:
                return sequence_id
        raise AssertionError(f"the engine: none of eight prompts ran on after its first delta, with {max_tokens=}")

    def alone(self, prompt_ids: Iterable[int], sampling: Sampling) -> tuple[int, ...]:
        """The answer of a sequence that has the engine to itself."""
        sequence_id = self.submit(prompt_ids, sampling)
        self.finish(sequence_id)
        return self.ids(sequence_id)

    def ids(self, sequence_id: int) -> tuple[int, ...]:
        return tuple(token for delta in self.deltas[sequence_id] for token in delta.token_ids)

    def end(self, sequence_id: int) -> Delta:
        return self.deltas[sequence_id][-1]

    def clear_away(self) -> None:
        """Leave the engine idle, as far as it lets itself: the next law may get the same one."""
        for sequence_id in self._running:
            self.engine.abort(sequence_id)
        for _ in range(8):
            if not self._running:
                break
            self.step()


@contextmanager
def on_trial(settings: TrialSettings) -> Iterator[Trial]:
    """A trial of a new engine, which is closed at the end."""
    trial = Trial(settings.make(), settings)
    try:
        yield trial
    except BaseException:
        with contextlib.suppress(Exception):  # what went wrong first is what is to be told
            trial.clear_away()
            trial.engine.close()
        raise
    trial.clear_away()
    trial.engine.close()
