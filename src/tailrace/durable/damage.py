"""What is said of a stream that is not there, while it may be one that was lost by damage."""

from __future__ import annotations

import math
import time

from tailrace.errors import JournalDamaged, TailraceError, UnknownStream

__all__ = ["damaged_until_s", "not_there"]


def damaged_until_s(damage_age_s: float | None, retention_s: float) -> float:
    """Until when, on the monotonic clock, a stream that is not there may be one that was lost. `damage_age_s` is None
    if none were."""
    return -math.inf if damage_age_s is None else time.monotonic() + retention_s - damage_age_s


def not_there(damaged_until_s: float) -> TailraceError:
    """The error for a stream that nobody knows."""
    if time.monotonic() < damaged_until_s:
        return JournalDamaged("There is no such stream, or it was lost: the journal of this server was damaged.")
    return UnknownStream("There is no such stream.")
