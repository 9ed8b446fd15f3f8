"""What may be written to a terminal of what others say."""

from __future__ import annotations

__all__ = ["printable_text"]

_PICTURES = 0x2400  # Unicode has a picture of each of the first 32 control characters from here on


def _table() -> dict[int, str | None]:
    table: dict[int, str | None] = {code: chr(_PICTURES + code) for code in range(0x20) if chr(code) not in "\n\t"}
    table |= {0x7F: "\u2421", **dict.fromkeys(range(0x80, 0xA0), "\ufffd")}
    return table | {ord("\r"): None}  # of a line end; alone, it would write over the line


_TABLE = _table()


def printable_text(text: str) -> str:
    """A text without control characters but line ends and tabs: a terminal takes them for commands, which set its
    title, its clipboard, or what is typed next. In their place stand their pictures."""
    return text.translate(_TABLE)
