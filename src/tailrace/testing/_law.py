"""What a law is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tailrace.engines.promise import Capabilities, Engine
from tailrace.testing._trial import Trial, TrialSettings, on_trial

__all__ = ["Law"]


@dataclass(frozen=True, slots=True)
class Law:
    """One promise of the `Engine` protocol. Called with a way to make an engine, it passes or raises.

    Raises: AssertionError that names the law and the sequence, and says what was seen; whatever the engine raises.
    """

    name: str
    promise: str  # for people
    check: Callable[[Trial], None]
    parameters: frozenset[str] = frozenset()  # of `Sampling`, without which the law says nothing
    exact: bool = False  # says nothing of an engine that is not

    def applies_to(self, capabilities: Capabilities) -> bool:
        return self.parameters <= capabilities.parameters and (capabilities.exact or not self.exact)

    def __call__(self, make: Callable[[], Engine], *, vocab_size: int = 256, num_sequences: int = 1000) -> None:
        with on_trial(TrialSettings(make, vocab_size, num_sequences)) as trial:
            if not self.applies_to(trial.engine.capabilities):
                return
            try:
                self.check(trial)
            except AssertionError as error:
                raise AssertionError(f"{self.name} ({self.promise}): {error}") from None
            except Exception as error:
                error.add_note(f"raised under the law {self.name} ({self.promise})")
                raise

    def __str__(self) -> str:
        return self.name
