"""Regular expressions for whole numbers between two bounds."""

from __future__ import annotations

__all__ = ["pattern_between"]


def pattern_between(low: int, high: int) -> str:
    """Return a pattern that matches exactly the decimal forms of the integers from `low` to `high`, both included.

    Raises: ValueError if `low` is larger than `high`.
    """
    if low > high:
        raise ValueError("there is no number between the bounds")
    found = []
    if low < 0:
        found.append(f"-({'|'.join(_between(max(1, -high), -low))})")
    if high >= 0:
        found += _between(max(0, low), high)
    return "|".join(found)


def _between(low: int, high: int) -> list[str]:
    """Return patterns for non-negative numbers without leading zeros."""
    found = []
    while len(str(low)) < len(str(high)):
        most = 10 ** len(str(low)) - 1
        found += _same_length(str(low), str(most))
        low = most + 1
    return found + _same_length(str(low), str(high))


def _same_length(low: str, high: str) -> list[str]:
    if not low:
        return [""]
    if low[0] == high[0]:
        return [low[0] + rest for rest in _same_length(low[1:], high[1:])]
    num_rest = len(low) - 1
    first, last = int(low[0]), int(high[0])
    found = []
    if low[1:].strip("0"):
        found += [low[0] + rest for rest in _same_length(low[1:], "9" * num_rest)]
        first += 1
    top: list[str] = []
    if high[1:].strip("9"):
        top = [high[0] + rest for rest in _same_length("0" * num_rest, high[1:])]
        last -= 1
    if first <= last:
        found.append(
            (str(first) if first == last else f"[{first}-{last}]") + (f"[0-9]{{{num_rest}}}" if num_rest else "")
        )
    return found + top
