"""Makes foreign text safe for a terminal."""

from __future__ import annotations

__all__ = ["printable_text"]

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
