"""Exceptions of libraries in messages for users."""

from __future__ import annotations

__all__ = ["in_one_line"]


def in_one_line(error: BaseException) -> str:
    """Return an exception's class and the first line of its message, shortened. If the first line ends with a colon,
    the second line is added."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if len(lines) > 1 and lines[0].endswith(":"):
        lines[0] += f" {lines[1]}"
    return f"{type(error).__name__}: {lines[0].rstrip('.')[:200]}" if lines else type(error).__name__
