"""What the guesses of a draft model cost and save: how long steps take, and how many guesses pay."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["Costs", "Gain", "Pace", "StepTimes"]

_FOLLOWS = 0.05  # of the difference to each new measurement
_PACE_FOLLOWS = 0.5
_LEAST_GAIN = 1.05  # of the speed without guesses, below which the measurements may be wrong


@dataclass(slots=True)
class Pace:
    """How many times as long as at first everything takes now, because of other load or longer texts. So a time that
    was measured long ago can be compared with one that was measured now."""

    value: float = 1.0

    def note(self, value: float) -> None:
        self.value += _PACE_FOLLOWS * (min(value, 2 * self.value) - self.value)


class StepTimes:
    """Seconds of a step by its number of rows. Numbers that were not measured lie on the line between those that
    were."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._took_s: dict[int, float] = {}  # at the first pace

    def note(self, num_rows: int, took_s: float) -> None:
        before_s = self._took_s.get(num_rows)
        if before_s is None:
            self._took_s[num_rows] = took_s / self._pace.value
            return
        self._pace.note(took_s / before_s)
        now_s = min(took_s / self._pace.value, 2 * before_s)
        self._took_s[num_rows] += _FOLLOWS * (now_s - before_s)

    def __call__(self, num_rows: int) -> float:
        """Returns 0 if nothing was measured."""
        return self._pace.value * self._first_s(num_rows)

    def _first_s(self, num_rows: int) -> float:
        if num_rows in self._took_s or not self._took_s:
            return self._took_s.get(num_rows, 0.0)
        rows = sorted(self._took_s)
        index = bisect_left(rows, num_rows)
        low, high = (rows[index - 1], rows[index]) if 0 < index < len(rows) else (rows[0], rows[-1])
        slope_s = (self._took_s[high] - self._took_s[low]) / max(high - low, 1)
        return max(self._took_s[low] + slope_s * (num_rows - low), 0.0)


class Gain(NamedTuple):
    """The number of guesses that makes a step fastest for its tokens; 0: none. `saved_s` is what one token saves."""

    num_guesses: int
    saved_s: float = 0.0


class Costs:
    """Measured times of the model, and of the draft model."""

    def __init__(self) -> None:
        pace = Pace()
        self.target = StepTimes(pace)
        self.alone = StepTimes(pace)  # of a single row that need not be computed as in a batch
        self.draft = StepTimes(pace)  # one token for each of so many rows
        self.prompt = StepTimes(pace)  # one token of a prompt, in a piece of many

    def plain_s(self, num_rows: int) -> float:
        """Return the seconds of a step without guesses."""
        return (self.alone(1) if num_rows == 1 else 0.0) or self.target(num_rows)

    def extra_s(self, num_rows: int, num_drafted: int, num_guesses: int) -> float:
        """Return how much longer a step takes if `num_drafted` of its rows have guesses."""
        checked_s = self.target(num_rows + num_drafted * num_guesses)
        return checked_s + num_guesses * self.draft(num_drafted) - self.plain_s(num_rows)

    def best(self, shares: Sequence[float], num_rows: int, most: int) -> Gain:
        """Return how many guesses pay for rows with these shares of right guesses, among `num_rows` rows."""
        plain_s = self.plain_s(num_rows)
        plain_token_s = plain_s / num_rows
        best, num_tokens = Gain(0), float(num_rows)
        likely = [1.0] * len(shares)  # that all guesses so far are right
        for count in range(1, most + 1):
            likely = [each * share for each, share in zip(likely, shares, strict=True)]
            num_tokens += sum(likely)
            token_s = (plain_s + self.extra_s(num_rows, len(shares), count)) / num_tokens
            if token_s * _LEAST_GAIN < plain_token_s and plain_token_s - token_s > best.saved_s:
                best = Gain(count, plain_token_s - token_s)
        return best

    def least_share(self, most: int) -> float | None:
        """Return the share of right guesses from which on they pay for a single row, in steps of 0.05; None if they
        never do."""
        shares = (percent / 100 for percent in range(5, 101, 5))
        return next((share for share in shares if self.best([share], 1, most).num_guesses), None)
