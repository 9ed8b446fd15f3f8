"""Reads the text of a custom tool's call, which the model writes as `{"input": "…"}`.

A custom tool takes a text. Models call functions with JSON, so it is shown to them as a function of one text, and the
text is taken out of the arguments again.
"""

from __future__ import annotations

import re

import msgspec

__all__ = ["CUSTOM_INPUT", "CustomCallReader"]

CUSTOM_INPUT = "input"  # the name of the text among the arguments
_HEAD = re.compile(rf'\s*\{{\s*"{CUSTOM_INPUT}"\s*:\s*"')
_MAX_HEAD = 64  # characters within which the text has to begin
_HIGH, _LOW, _HEX = "[dD][89abAB]", "[dD][c-fC-F]", "[0-9a-fA-F]"
_PIECE = re.compile(
    rf'[^"\\]+|\\u{_HIGH}{_HEX}{{2}}\\u{_LOW}{_HEX}{{2}}|\\u{_HEX}{{4}}|\\.',  # an invalid \u stands for a u
    re.DOTALL,
)
# An escape that may go on in the next piece: of one character, or of a surrogate pair.
_UNFINISHED = re.compile(rf"\\(u{_HEX}{{0,3}})?|\\u{_HIGH}{_HEX}{{2}}(\\(u([dD]([c-fC-F]{_HEX}?)?)?)?)?")
_ESCAPES = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}


class CustomCallReader:
    """Reads the arguments of one call piece by piece. The combined result does not depend on how they are split."""

    def __init__(self) -> None:
        self._held = ""  # undecided characters
        self._state = "head"  # then text, then over; other if the arguments have another form

    def push(self, arguments: str) -> str:
        """Return the new part of the text."""
        if self._state == "over":
            return ""
        self._held += arguments
        if self._state == "head":
            match = _HEAD.match(self._held)
            if match is not None:
                self._state, self._held = "text", self._held[match.end() :]
            elif len(self._held) > _MAX_HEAD:
                self._state = "other"
        return self._take() if self._state == "text" else ""

    def flush(self) -> str:
        """Return the rest at the end of the call. Arguments in another form are the text, as they are."""
        held, self._held = self._held, ""
        if self._state in ("text", "over"):
            return ""  # nothing but an unfinished escape is held
        try:
            value = msgspec.json.decode(held)
        except (msgspec.DecodeError, RecursionError):
            return held
        found = value.get(CUSTOM_INPUT) if isinstance(value, dict) else None
        return found if isinstance(found, str) else held

    def _take(self) -> str:
        texts, position = [], 0
        while (match := _PIECE.match(self._held, position)) and not _UNFINISHED.fullmatch(self._held, position):
            texts.append(_decoded(match[0]))
            position = match.end()
        if self._held.startswith('"', position):
            self._state, position = "over", len(self._held)
        self._held = self._held[position:]
        return "".join(texts)


def _decoded(piece: str) -> str:
    if piece[0] != "\\":
        return piece
    if len(piece) > 2:
        units = bytes.fromhex(piece.replace("\\u", ""))
        return units.decode("utf-16-be", "replace")
    return _ESCAPES.get(piece[1], piece[1])
