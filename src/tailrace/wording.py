"""Parts of messages for users: suggestions for misspelled names, lists in words, exceptions of libraries, and paths and
foreign text in a form that is safe to print."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from urllib.parse import quote

__all__ = ["closest", "did_you_mean", "in_one_line", "listed", "printable_text", "shown_path"]

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


def in_one_line(error: BaseException) -> str:
    """Return an exception's class and the first line of its message, shortened. If the first line ends with a colon,
    the second line is added."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if len(lines) > 1 and lines[0].endswith(":"):
        lines[0] += f" {lines[1]}"
    return f"{type(error).__name__}: {lines[0].rstrip('.')[:200]}" if lines else type(error).__name__


def shown_path(path: str) -> str:
    """Return a request's path for a log: one line, without control characters."""
    return quote(path, safe=_PATH_CHARACTERS, errors="replace")[:_MAX_PATH]


_PICTURES = 0x2400  # Unicode's pictures of the first 32 control characters start here


def _table() -> dict[int, str | None]:
    table: dict[int, str | None] = {code: chr(_PICTURES + code) for code in range(0x20) if chr(code) not in "\n\t"}
    table |= {0x7F: "\u2421", **dict.fromkeys(range(0x80, 0xA0), "\ufffd")}
    return table | {ord("\r"): None}  # a lone carriage return would overwrite the line


_TABLE = _table()


def printable_text(text: str) -> str:
    """Replace control characters, except line ends and tabs, with their Unicode pictures. A terminal would run them as
    commands, which can set its title, its clipboard or its input."""
    return text.translate(_TABLE)
