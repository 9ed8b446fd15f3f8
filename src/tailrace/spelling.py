"""Names that somebody else wrote: what may have been meant by one that is unknown, and how a path is shown."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from urllib.parse import quote

__all__ = ["did_you_mean", "shown_path"]

_MAX_PATH = 200  # characters shown
_PATH_CHARACTERS = "/:@!$&'()*+,;=-._~"  # the others are shown percent-encoded


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """` Did you mean x?`, to stand behind a sentence; nothing where no known name is close."""
    close = difflib.get_close_matches(name.lower(), list(known), n=1, cutoff=0.6)
    return f" Did you mean {close[0]}?" if close else ""


def shown_path(path: str) -> str:
    """A request's path for a log: in one line, and without characters that could change a terminal."""
    return quote(path, safe=_PATH_CHARACTERS, errors="replace")[:_MAX_PATH]
