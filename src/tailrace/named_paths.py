"""Paths with names in one text: `poet=./poems,law=./law`."""

from __future__ import annotations

import re

__all__ = ["named_paths"]

# A name begins with a letter or a digit, so that ./a=b is a path.
_NAMED = re.compile(r"([A-Za-z0-9][A-Za-z0-9._:/-]{0,127})=(.+)", re.ASCII)


def named_paths(text: str) -> dict[str, str]:
    """Return paths by their names, "" for the one without a name. Raises: ValueError for two of the same name."""
    found: dict[str, str] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        match = _NAMED.fullmatch(part)
        name, path = (match[1], match[2]) if match else ("", part)
        if name in found:
            raise ValueError(f"has the name {name} twice." if name else "has two paths without a name.")
        found[name] = path
    return found
