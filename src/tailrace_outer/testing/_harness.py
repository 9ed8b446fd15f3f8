"""A law of engines, and the harness that it uses: one engine, its sequences and their deltas."""

from __future__ import annotations

import contextlib
import itertools
import random
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tailrace.engines.interface import Capabilities, Delta, Engine, Sequence
from tailrace.engines.schedule import FREE, Schedule
from tailrace.types import Sampling

__all__ = ["EngineHarness", "Law", "require", "under_law"]

_TIMEOUT_S = 30.0  # without any delta, while a sequence runs
_sequence_ids = itertools.count(1)  # never used twice, so that an engine may be shared between laws


def require(condition: bool, sequence_id: int | None, seen: object) -> None:
    """Raises: AssertionError with the sequence and the text `seen` if the condition is false."""
    if not condition:
        where = "the engine" if sequence_id is None else f"sequence {sequence_id}"
        raise AssertionError(f"{where}: {seen}")


class EngineHarness:
    """Drives an engine and keeps all its deltas, right or wrong. The laws judge them.

    Prompts are drawn from ids below `vocab_size`. The search for leaks runs `num_sequences`.
    """

    def __init__(self, engine: Engine, *, vocab_size: int, num_sequences: int) -> None:
        self.engine = engine
        self.vocab_size = vocab_size
        self.num_sequences = num_sequences
        self.deltas: dict[int, list[Delta]] = {}
        self.unknown: list[Delta] = []  # deltas of sequences that were never submitted
        self._running: set[int] = set()

    @property
    def width(self) -> int:
        """How many sequences a law runs at once: five, or as many as the engine takes if these are fewer."""
        return min(5, self.engine.capabilities.max_sequences)

    def prompts(self, count: int, salt: str = "") -> list[tuple[int, ...]]:
        """Return prompts of 5 to 20 tokens, always the same for a salt."""
        draw = random.Random(f"tailrace {salt}")
        return [tuple(draw.choices(range(self.vocab_size), k=draw.randint(5, 20))) for _ in range(count)]

    def sampling(self, max_tokens: int, seed: int | None = None, *, logprobs: bool = False) -> Sampling:
        """Return greedy sampling without a seed, temperature 1 with a seed. With ignore_eos if the engine has it."""
        return Sampling(
            temperature=1.0 if seed is not None else 0.0,
            seed=seed or 0,
            max_tokens=max_tokens,
            ignore_eos="ignore_eos" in self.engine.capabilities.parameters,
            logprobs=logprobs,
        )

    def submit(self, prompt_ids: Iterable[int], sampling: Sampling, schedule: Schedule = FREE) -> int:
        """Submit a sequence, and return its id. Raises: SequenceFailed if the engine does."""
        sequence_id = next(_sequence_ids)
        self.deltas[sequence_id] = []
        self.engine.submit(Sequence(sequence_id, (tuple(prompt_ids),), sampling, schedule))
        self._running.add(sequence_id)
        return sequence_id

    def step(self) -> list[Delta]:
        stepped = self.engine.step()
        for delta in stepped:
            if delta.sequence_id not in self.deltas:
                self.unknown.append(delta)
                continue
            self.deltas[delta.sequence_id].append(delta)
            if delta.finish_reason is not None:
                self._running.discard(delta.sequence_id)
        return stepped

    def finish(self, *sequence_ids: int) -> None:
        """Step until these sequences have ended; without arguments, until all have ended."""
        last_delta_s = time.monotonic()
        while waiting := self._running.intersection(sequence_ids or self._running):
            if self.step():
                last_delta_s = time.monotonic()
            silent_s = time.monotonic() - last_delta_s
            require(silent_s < _TIMEOUT_S, min(waiting), f"no delta of any sequence for {silent_s:.0f} s")

    def start(self, max_tokens: int) -> int:
        """Return a sequence that has a delta and still runs."""
        for prompt in self.prompts(8, "start"):
            sequence_id = self.submit(prompt, self.sampling(max_tokens))
            last_delta_s = time.monotonic()
            while not self.deltas[sequence_id] and time.monotonic() - last_delta_s < _TIMEOUT_S:
                self.step()
            require(bool(self.deltas[sequence_id]), sequence_id, f"no delta for {_TIMEOUT_S:.0f} s")
            if sequence_id in self._running:
                return sequence_id
        raise AssertionError(f"the engine: none of eight prompts ran on after its first delta, with {max_tokens=}")

    def alone(self, prompt_ids: Iterable[int], sampling: Sampling, *, like: int | None = None) -> tuple[int, ...]:
        """Return the answer of a sequence that runs alone, as a replay of sequence `like` if that is given."""
        sequence_id = self.submit(prompt_ids, sampling, FREE if like is None else self.schedule(like))
        self.finish(sequence_id)
        return self.ids(sequence_id)

    def schedule(self, sequence_id: int) -> Schedule:
        """Return what a replay of a sequence has to repeat."""
        return Schedule.of((len(delta.token_ids), delta.is_alone) for delta in self.deltas[sequence_id])

    def ids(self, sequence_id: int) -> tuple[int, ...]:
        return tuple(token for delta in self.deltas[sequence_id] for token in delta.token_ids)

    def end(self, sequence_id: int) -> Delta:
        return self.deltas[sequence_id][-1]

    def close(self) -> None:
        """Abort all sequences, and close the engine. The next law may get the same engine."""
        for sequence_id in self._running:
            self.engine.abort(sequence_id)
        for _ in range(8):
            if not self._running:
                break
            self.step()
        self.engine.close()


@dataclass(frozen=True, slots=True)
class Law:
    """One promise of the `Engine` protocol. Called with a way to make an engine, it passes or raises.

    Raises: AssertionError that names the law and the sequence, and says what was seen; whatever the engine raises.
    """

    name: str
    promise: str  # the law in words
    check: Callable[[EngineHarness], None]
    parameters: frozenset[str] = frozenset()  # of `Sampling`; the law applies only to engines with all of them
    exact: bool = False  # applies only to exact engines

    def applies_to(self, capabilities: Capabilities) -> bool:
        return self.parameters <= capabilities.parameters and (capabilities.exact or not self.exact)

    def __call__(self, make: Callable[[], Engine], *, vocab_size: int = 256, num_sequences: int = 1000) -> None:
        harness = EngineHarness(make(), vocab_size=vocab_size, num_sequences=num_sequences)
        try:
            if self.applies_to(harness.engine.capabilities):
                with under_law(self.name, self.promise):
                    self.check(harness)
        except BaseException:
            with contextlib.suppress(Exception):  # the first error is the one to report
                harness.close()
            raise
        harness.close()

    def __str__(self) -> str:
        return self.name


@contextmanager
def under_law(name: str, promise: str) -> Iterator[None]:
    """Add the name of the law to any exception."""
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"{name} ({promise}): {error}") from None
    except Exception as error:
        error.add_note(f"raised under the law {name} ({promise})")
        raise
