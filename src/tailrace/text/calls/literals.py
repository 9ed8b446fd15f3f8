"""Rewrites a value that a model wrote, piece by piece, as JSON.

Models write JSON with small mistakes (a comma too many, a line end inside a string, `None`), or in the notation of
Python or of their own family. Everything that has a meaning is rewritten, so that the result always parses. Valid JSON
stays as it is, with its white space.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tailrace.text.calls.incoming import Incoming, Wait

__all__ = ["LiteralReader", "json_string", "json_text"]

_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_HEX = re.compile(r"[0-9a-fA-F]+")
_WORDS = {"true": "true", "false": "false", "null": "null", "none": "null", "undefined": "null", "nan": "null"}
_ESCAPES = {"\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r", '"': '\\"', "\\": "\\\\"}
_PYTHON_ESCAPES = {"'": "'", "0": "\\u0000", "a": "\\u0007", "v": "\\u000b", "\n": ""}
_NEEDS_ESCAPE = re.compile(r'[\x00-\x1f"\\]')
_MAX_WORD = 65_536  # characters of a word without quotes; such a word is held until it ends


def _known(word: str) -> str:
    """Return a word as JSON if it is a number or one of the words for true, false and nothing; otherwise ""."""
    return word if _NUMBER.fullmatch(word) else _WORDS.get(word.lower(), "")


def json_text(text: str) -> str:
    """Return a text as the contents of a JSON string, without its quotes."""
    return _NEEDS_ESCAPE.sub(lambda match: _ESCAPES.get(match[0], f"\\u{ord(match[0]):04x}"), text)


def json_string(text: str) -> str:
    """Return a text as a JSON string."""
    return f'"{json_text(text)}"'


@dataclass(slots=True)
class LiteralReader:
    """Takes one value from `source`, and writes it as JSON.

    `ends` are markers that end the whole call wherever they stand outside of a string: a model that forgets a bracket
    does not forget them. `quotes` open and close strings; quotes of several characters other than Python's know no
    escapes. With `arguments`, round brackets around the value hold the arguments of a call in Python, and arguments
    without a name get these names in turn.
    """

    source: Incoming
    write: Callable[[str], None]
    ends: tuple[str, ...] = ()
    quotes: tuple[str, ...] = ('"', "'")
    arguments: Sequence[str] | None = None
    _open: list[str] = field(default_factory=list)  # the closing brackets that are missing, in JSON
    _gap: str = ""  # white space and a comma since the last value
    _has_value: bool = False  # whether the innermost bracket has one
    _num_unnamed: int = 0

    def read(self) -> Wait[bool]:
        """Take the value. Returns whether it is whole. A value that the model ended too early is completed, unless the
        text was cut at a limit."""
        while True:
            self._gap += yield from self.source.space()
            char = yield from self.source.char()
            if not char or (yield from self.source.upcoming(*self.ends)):
                return self._finish(is_whole=bool(char))
            if self._open and char in "]})":
                self.source.take(1)
                self._close()
            elif self._open and char in ",;":
                self.source.take(1)
                self._gap += ","
                continue
            elif not (yield from self._element()):
                return self._finish(is_whole=False)
            if not self._open:
                return True

    def _element(self) -> Wait[bool]:
        """Take the next part of the innermost brackets: a key and its value, or a value. Returns whether it is
        whole."""
        space = self._gap.partition(",") if self._has_value and "," in self._gap else ("", "", self._gap)
        comma = "," if self._has_value else ""
        self.write(space[0] + comma + (space[2].replace(",", "") or (" " if comma and not space[1] else "")))
        self._gap = ""
        if self._open and self._open[-1] == "}":
            self._has_value = True
            return (yield from self._pair())
        return (yield from self._value())

    def _pair(self) -> Wait[bool]:
        held: list[str] = []
        is_whole, is_text = yield from self.scalar(held.append)
        key = "".join(held)
        if not is_whole:
            self.write(key if self.source.is_cut else f"{key}: null")
            return False
        space = yield from self.source.space()
        separator = yield from self.source.skip(":", "=")
        if separator or (is_text and (yield from self._is_value_next())):
            self.write((key if is_text else f'"{key}"') + (space + ":" if separator == ":" else ": "))
            self.write((yield from self.source.space()))
            return (yield from self._value())
        names = self.arguments if self.arguments is not None and len(self._open) == 1 else ()
        if self._num_unnamed < len(names):
            self.write(f"{json_string(names[self._num_unnamed])}: {key}")
            self._num_unnamed += 1
        else:
            self.write((key if is_text else f'"{key}"') + ": null")
        self._gap = space
        return True

    def _is_value_next(self) -> Wait[bool]:
        """Return whether a value follows a key whose colon the model forgot."""
        char = yield from self.source.char()
        return bool(char) and char not in ",;]})" and not (yield from self.source.upcoming(*self.ends))

    def _value(self) -> Wait[bool]:
        char = yield from self.source.char()
        if not char:
            if not self.source.is_cut:
                self.write("null")
            return False
        if char in "{[(":
            self.source.take(1)
            is_object = char == "{" or (char == "(" and not self._open and self.arguments is not None)
            self._open.append("}" if is_object else "]")
            self.write("{" if is_object else "[")
            self._has_value = False
            return True
        is_whole, _ = yield from self.scalar(self.write)
        self._has_value = True
        return is_whole

    def scalar(self, write: Callable[[str], None]) -> Wait[tuple[bool, bool]]:
        """Take a string or a word. Returns whether it is whole, and whether it became a JSON string."""
        quote = yield from self.source.skip(*self.quotes)
        if quote:
            write('"')
            is_whole = yield from self.string(quote, write)
            if is_whole or not self.source.is_cut:
                write('"')
            return is_whole, True
        word = yield from self._word()
        known = _known(word)
        write(known or json_string(word))
        return bool((yield from self.source.char())) or not self.source.is_cut, not known

    def _word(self) -> Wait[str]:
        """Take text without quotes, up to the next comma or bracket that is not inside of round ones."""
        word, depth = "", 0
        while len(word) < _MAX_WORD:
            char = yield from self.source.char()
            if not char or (yield from self.source.upcoming(*self.ends)):
                break
            if char in "(" and word:
                depth += 1
            elif char == ")" and depth:
                depth -= 1
            elif not depth and (
                (char in ",:=]})\n" and (word or char not in ":=")) or (char.isspace() and _known(word))
            ):
                break
            word += self.source.take(1)
        if not word:  # a bracket where a value should be
            return "null"
        return word.strip()

    def string(self, quote: str, write: Callable[[str], None]) -> Wait[bool]:
        """Take the rest of a string, with its closing quote, and write it without quotes. Returns whether it is
        whole."""
        knows_escapes = len(quote) == 1 or quote in ('"""', "'''")
        special = re.compile(rf'[\x00-\x1f"{re.escape(quote[0])}' + (r"\\]" if knows_escapes else "]"))
        while True:
            text, at = self.source.text, self.source.at
            match = special.search(text, at)
            stop = len(text) if match is None else match.start()
            if stop > at:
                chunk = self.source.take(stop - at)
                write(chunk if knows_escapes else chunk.replace("\\", "\\\\"))
            char = yield from self.source.char()
            if not char:
                return False
            if char == quote[0] and (yield from self.source.skip(quote)):
                return True
            if char == "\\" and knows_escapes:
                if not (yield from self._escape(write)):
                    return False
            elif special.match(char):
                write(json_text(self.source.take(1)))

    def _escape(self, write: Callable[[str], None]) -> Wait[bool]:
        r"""Take a \ and what belongs to it. Returns whether it is whole."""
        after = yield from self._ahead(2)
        if len(after) < 2:
            return False
        kind = after[1]
        if kind == "u":
            return (yield from self._unicode(write))
        if kind in "xU":
            size = 2 if kind == "x" else 8
            digits = (yield from self._ahead(2 + size))[2:]
            if len(digits) < size:
                return False
            if _HEX.fullmatch(digits) and int(digits, 16) <= sys.maxunicode:
                self.source.take(2 + size)
                write(json_text(chr(int(digits, 16))))
                return True
        if kind in '"\\/bfnrt':
            write(self.source.take(2))
        elif kind in _PYTHON_ESCAPES:
            self.source.take(2)
            write(_PYTHON_ESCAPES[kind])
        else:  # such as \d in a regular expression
            self.source.take(1)
            write("\\\\")
        return True

    def _unicode(self, write: Callable[[str], None]) -> Wait[bool]:
        r"""Take \uXXXX. Half a pair of surrogates becomes U+FFFD, since no parser takes it."""
        escape = yield from self._ahead(6)
        if len(escape) < 6:
            return False
        if not _HEX.fullmatch(escape[2:]):
            self.source.take(1)
            write("\\\\")
            return True
        code = int(escape[2:], 16)
        if 0xD800 <= code < 0xDC00:
            pair = yield from self._ahead(12)
            if re.fullmatch(r"\\u[dD][c-fC-F][0-9a-fA-F]{2}", pair[6:]):
                write(self.source.take(12))
                return True
            if len(pair) < 12 and self.source.is_cut:
                return False
        self.source.take(6)
        write("\\ufffd" if 0xD800 <= code < 0xE000 else escape)
        return True

    def _ahead(self, size: int) -> Wait[str]:
        """Return the next characters without taking them; fewer at the end of the text."""
        while len(self.source.text) - self.source.at < size and not self.source.is_complete:
            yield
        return self.source.text[self.source.at : self.source.at + size]

    def _close(self) -> None:
        """Close the innermost bracket, whichever the model wrote."""
        self.write(self._gap.replace(",", "") + self._open.pop())
        self._gap, self._has_value = "", True

    def _finish(self, *, is_whole: bool) -> bool:
        if not is_whole and self.source.is_cut:
            return False
        while self._open:
            self.write(self._open.pop())
        return True
