"""Which tokens of a sequence the engine computed in steps without another row.

An engine may use other kernels for a step with a single row, and these give other bits than those for a batch. So the
log keeps with each event whether its step had a single row, and a replay repeats this.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate, groupby

__all__ = ["FREE", "Schedule"]


@dataclass(frozen=True, slots=True)
class Schedule:
    """Run lengths in tokens, alternately in a batch and alone, from the start of the answer. Tokens after them are
    free: the engine may compute them in any step."""

    lengths: tuple[int, ...] = ()

    @classmethod
    def of(cls, deltas: Iterable[tuple[int, bool]]) -> Schedule:
        """`deltas`: numbers of tokens, and whether these were computed alone."""
        runs = [(alone, sum(count for count, _ in group)) for alone, group in groupby(deltas, key=lambda one: one[1])]
        lengths = tuple(count for _, count in runs)
        return cls((0, *lengths) if runs and runs[0][0] else lengths)

    @property
    def alone_end(self) -> int:
        """Index after the last token that must be computed alone; 0 if there is none."""
        return sum(self.lengths[: len(self.lengths) // 2 * 2])

    def is_alone(self, index: int) -> bool | None:
        """Return whether token `index` must be computed alone (True) or in a batch (False); None if it is free."""
        for run, end in enumerate(accumulate(self.lengths)):
            if index < end:
                return run % 2 == 1
        return None


FREE = Schedule()
