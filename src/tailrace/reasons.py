"""What a library raised, for people."""

from __future__ import annotations

__all__ = ["in_one_line"]


def in_one_line(error: BaseException) -> str:
    """The kind of an error and the first line of what it says, or what that announces, cut to a length that fits into a
    sentence."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if len(lines) > 1 and lines[0].endswith(":"):
        lines[0] += f" {lines[1]}"
    return f"{type(error).__name__}: {lines[0].rstrip('.')[:200]}" if lines else type(error).__name__
