"""What somebody may have meant by a name that nobody knows."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["did_you_mean"]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """` Did you mean x?`, to stand behind a sentence; nothing where no known name is close."""
    close = difflib.get_close_matches(name.lower(), list(known), n=1, cutoff=0.6)
    return f" Did you mean {close[0]}?" if close else ""
