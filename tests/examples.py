"""How many examples hypothesis tries."""

from __future__ import annotations

from hypothesis import settings

__all__ = ["EXAMPLES", "examples"]

EXAMPLES = 100  # of a test that says no number


def examples(count: int) -> int:
    """Return `count`, or that part of it that the profile of this run tries. Each run tries others if CI is not set."""
    return max(1, count * settings().max_examples // EXAMPLES)
