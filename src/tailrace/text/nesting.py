"""How deep JSON that came from elsewhere is nested: what walks through it is recursive."""

from __future__ import annotations

__all__ = ["MAX_DEPTH", "is_deeper"]

MAX_DEPTH = 64


def is_deeper(value: object, depth: int = MAX_DEPTH) -> bool:
    """Whether lists and objects are nested more than `depth` deep."""
    if not isinstance(value, dict | list):
        return False
    if not depth:
        return True
    items = value.values() if isinstance(value, dict) else value
    return any(is_deeper(item, depth - 1) for item in items if isinstance(item, dict | list))
