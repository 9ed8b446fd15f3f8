"""The limits of a key or an owner."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import msgspec

__all__ = ["NO_LIMITS", "RATES", "Quota", "Rate"]

_Limit = Annotated[int, msgspec.Meta(ge=1, le=10**15)] | None


class Rate(msgspec.Struct, frozen=True):
    """A unit and a period, such as `requests_per_minute`."""

    unit: str  # requests or tokens
    period: str  # minute or month

    @property
    def field(self) -> str:
        """Return the name of the rate's field in a quota."""
        return f"{self.unit}_per_{self.period}"


RATES = tuple(Rate(unit, period) for period in ("minute", "month") for unit in ("requests", "tokens"))


class Quota(msgspec.Struct, frozen=True, omit_defaults=True):
    """Limits; None is no limit. Minutes and months are those of the clock, in UTC. Tokens are those of prompts and
    answers together. They count in the minute and month in which their request arrived."""

    requests_per_minute: _Limit = None
    tokens_per_minute: _Limit = None
    requests_per_month: _Limit = None
    tokens_per_month: _Limit = None
    streams_at_once: _Limit = None  # running and queued
    answer_tokens: _Limit = None  # of each answer

    def rates(self) -> Iterator[tuple[Rate, int]]:
        """Yield the limited rates with their limits."""
        for rate in RATES:
            limit = getattr(self, rate.field)
            if limit is not None:
                yield rate, limit


NO_LIMITS = Quota()
