"""The error for a missing stream, which may have been lost by damage to the journal."""

from __future__ import annotations

import math
import time

from tailrace.errors import JournalDamaged, TailraceError, UnknownStream

__all__ = ["damaged_until_s", "missing_stream_error"]


def damaged_until_s(damage_age_s: float | None, retention_s: float) -> float:
    """Return until when (monotonic) a missing stream may be one that was lost. `damage_age_s` is None if none was
    lost."""
    return -math.inf if damage_age_s is None else time.monotonic() + retention_s - damage_age_s


def missing_stream_error(damaged_until_s: float) -> TailraceError:
    """Return the error for a missing stream."""
    if time.monotonic() < damaged_until_s:
        return JournalDamaged("There is no such stream, or it was lost when this server's journal was damaged.")
    return UnknownStream("There is no such stream.")
