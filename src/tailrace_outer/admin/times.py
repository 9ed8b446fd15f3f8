"""Option types for durations and points in time."""

from __future__ import annotations

import re
import time
from datetime import UTC, datetime
from typing import Any

import click

__all__ = ["Duration", "Moment", "date_of"]

_DAY_S = 86_400.0
_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": _DAY_S, "w": 7 * _DAY_S, "y": 365 * _DAY_S}
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)([smhdwy])", re.ASCII)


class Duration(click.ParamType[float]):
    """A number with a unit; converted to seconds."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:  # Any: click's
        if isinstance(value, float):
            return value
        seconds = _seconds(value)
        if seconds is None:
            self.fail(f"{value!r} is not a duration of at most 100 years, such as 90d, 12h or 30m.", param, ctx)
        return seconds


class Moment(click.ParamType[float]):
    """A date, a time, or a duration before now; converted to seconds since the epoch."""

    name = "date|duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:  # Any: click's
        if isinstance(value, float):
            return value
        ago_s = _seconds(value)
        if ago_s is not None:
            return time.time() - ago_s
        try:
            moment = datetime.fromisoformat(value)
        except ValueError:
            self.fail(f"{value!r} is not a date such as 2026-11-01, or a duration before now such as 7d.", param, ctx)
        return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).timestamp()


def date_of(seconds: float | None) -> str | None:
    """Format a point in time in UTC, as ISO 8601."""
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _seconds(text: str) -> float | None:
    found = _DURATION.fullmatch(text)
    if found is None or not 0 <= (seconds := float(found[1]) * _UNITS_S[found[2]]) <= 100 * _UNITS_S["y"]:
        return None
    return seconds
