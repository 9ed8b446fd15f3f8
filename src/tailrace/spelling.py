"""Suggestions for misspelled names, lists in words, and paths in a form that is safe to print."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from urllib.parse import quote

__all__ = ["closest", "did_you_mean", "listed", "shown_path"]

_MAX_PATH = 200  # characters shown
_PATH_CHARACTERS = "/:@!$&'()*+,;=-._~"  # the others are shown percent-encoded


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ` Did you mean x?`, to append to a sentence; "" if no known name is similar."""
    close = closest(name.lower(), known)
    return f" Did you mean {close}?" if close else ""


def closest(name: str, known: Iterable[str]) -> str:
    """Return the known name that is most similar; "" if none is similar."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)), "")


def listed(names: Iterable[str]) -> str:
    """Return `a, b and c`. There must be at least one name."""
    *rest, last = names
    return f"{', '.join(rest)} and {last}" if rest else last


def shown_path(path: str) -> str:
    """Return a request's path for a log: one line, without control characters."""
    return quote(path, safe=_PATH_CHARACTERS, errors="replace")[:_MAX_PATH]
