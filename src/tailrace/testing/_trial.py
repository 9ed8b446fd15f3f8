"""What a law of engines is, and what it has to work with: one engine, what was asked of it, and all that it said."""

from __future__ import annotations

import contextlib
import itertools
import random
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tailrace.engines.promise import Capabilities, Delta, Engine, Sequence
from tailrace.types import Sampling

__all__ = ["EngineTrial", "Law", "hold", "under_law"]

_PATIENCE_S = 30.0  # without a single delta, while something should run
_sequence_ids = itertools.count(1)  # never used twice, so that an engine may be shared between laws


def hold(condition: bool, sequence_id: int | None, seen: object) -> None:
    """The one place where a law is found broken.

    Raises: AssertionError that names the sequence and what was seen.
    """
    if not condition:
        where = "the engine" if sequence_id is None else f"sequence {sequence_id}"
        raise AssertionError(f"{where}: {seen}")


class EngineTrial:
    """Drives an engine and keeps its deltas as they came, right or wrong: judging them is for the laws.

    `vocab_size` bounds the token ids that prompts are drawn from; `num_sequences` is how long to look for leaks.
    """

    def __init__(self, engine: Engine, *, vocab_size: int, num_sequences: int) -> None:
        self.engine = engine
        self.vocab_size = vocab_size
        self.num_sequences = num_sequences
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

    def close(self) -> None:
        """Leave the engine idle, as far as it lets itself, and close it: the next law may get the same one."""
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
    promise: str  # for people
    check: Callable[[EngineTrial], None]
    parameters: frozenset[str] = frozenset()  # of `Sampling`, without which the law says nothing
    exact: bool = False  # says nothing of an engine that is not

    def applies_to(self, capabilities: Capabilities) -> bool:
        return self.parameters <= capabilities.parameters and (capabilities.exact or not self.exact)

    def __call__(self, make: Callable[[], Engine], *, vocab_size: int = 256, num_sequences: int = 1000) -> None:
        trial = EngineTrial(make(), vocab_size=vocab_size, num_sequences=num_sequences)
        try:
            if self.applies_to(trial.engine.capabilities):
                with under_law(self.name, self.promise):
                    self.check(trial)
        except BaseException:
            with contextlib.suppress(Exception):  # what went wrong first is what is to be told
                trial.close()
            raise
        trial.close()

    def __str__(self) -> str:
        return self.name


@contextmanager
def under_law(name: str, promise: str) -> Iterator[None]:
    """Have whatever is raised name the law."""
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"{name} ({promise}): {error}") from None
    except Exception as error:
        error.add_note(f"raised under the law {name} ({promise})")
        raise
