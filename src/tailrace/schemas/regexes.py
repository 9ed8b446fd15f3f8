"""Which regular expressions all engines support, and how large one is."""

from __future__ import annotations

import re

__all__ = ["MAX_REPEATS", "MAX_SIZE", "MAX_TEXT", "SET_SIZE", "TOO_LARGE", "UNSUPPORTED", "regex_fault", "regex_size"]

MAX_TEXT = 2_000  # characters of a regular expression
MAX_REPEATS = 64
MAX_SIZE = 4_096  # sum of all regular expressions, with their counts expanded
SET_SIZE = 64  # of a character set: .{128} took 2 s, (.{64}){64} 34 s, (a{64}){64} 0.1 s

_CLASS = re.compile(r"\[\^?\]?[^]]*\]")  # in a regular expression without escapes
_ESCAPES = set("dDwWsS.\\[](){}*+?|^$/-nrt\"'")
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")  # all but tab, newline and carriage return

LENGTH = f"a regular expression must have 1 to {MAX_TEXT} characters"
CONTROL = "a regular expression has no control characters but tab, newline and carriage return"
INVALID = "this is not a regular expression"
UNSUPPORTED = (
    "these parts of regular expressions are not supported: look-around, back-references, named "
    "groups, nested sets, escapes other than \\d, \\w, \\s, \\D, \\W, \\S and those of single characters, "
    f"empty groups and alternatives, braces that are not counts, and counts above {MAX_REPEATS}"
)
TOO_LARGE = (
    f"this regular expression is too large: with its counts expanded, it may have {MAX_SIZE} "
    f"characters; . and sets count as {SET_SIZE} each"
)


def regex_fault(text: object) -> str:
    """Return why not all engines support a regular expression for a whole text, or "": it is not one, has look-around,
    back-references or large counts."""
    if not isinstance(text, str) or not text or len(text) > MAX_TEXT:
        return LENGTH
    if _CONTROL.search(text):
        return CONTROL
    escapes = re.findall(r"\\(.)", text, re.DOTALL)
    classes = re.findall(_CLASS, _unescaped(text))
    structure = _structure(text)
    if (
        re.search(r"\(\?(?!:)|[*+?}][+]|\$(?!\Z)|(?<!^)\^|\{(?![0-9]+(,[0-9]*)?\})", structure)
        or re.search(r"(?:\A\^?|\((?:\?:)?|\|)\||\|(?:\)|\$?\Z)|\((?:\?:)?\)", structure)  # an empty part
        or any(re.search(r"\[\[|\[\^?\]|--|&&|~~|\|\|", one) for one in classes)
        or any(escape not in _ESCAPES for escape in escapes)
        or any(int(count) > MAX_REPEATS for count in re.findall("[0-9]+(?=[,0-9]*})", structure))
    ):
        return UNSUPPORTED
    try:
        if "[" in structure:  # Python may warn about an open set before it raises
            raise re.error("a set without its end")
        re.compile(text)
    except (re.error, RecursionError, OverflowError):
        return INVALID
    return TOO_LARGE if _size(structure) > MAX_SIZE else ""


def regex_size(text: str) -> int:
    """Return the size of a regular expression with its counts expanded."""
    return _size(_structure(text))


def _unescaped(text: str) -> str:
    """Replace escapes of sets by a ., and other escapes by an x."""
    return re.sub(r"\\.", lambda match: "." if match[0][1] in "dDwWsS" else "x", text, flags=re.DOTALL)


def _structure(text: str) -> str:
    """Return the structure of a regular expression: each set is replaced by a ."""
    return re.sub(_CLASS, ".", _unescaped(text))


def _size(structure: str) -> int:
    """Return the size of a `_structure` with its counts expanded."""
    sizes, last = [0], 0  # of the open groups, and of the part that a following count repeats
    for one in re.findall(r"\(\?:|\{[^}]*\}|.", structure, re.DOTALL):
        if one[0] == "(":
            sizes.append(0)
        elif one[0] == "{":
            most = max(1, *(int(count) for count in re.findall("[0-9]+", one)))
            sizes[-1] += last * (most - 1)
            last *= most
        else:
            last = sizes.pop() if one == ")" else SET_SIZE if one == "." else 1
            sizes[-1] += last
    return sizes[0]
