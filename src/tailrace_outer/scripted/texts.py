"""The texts that the scripted engine recites. Each has broken a framing, a parser or a display somewhere.

A text is split into the longest pieces of the vocabulary, mostly single bytes: characters are split over tokens, and
line ends, sentinels and half a character are single tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["PIECES", "TEXTS", "cut"]

_LONG = "A long token, \u6f22\u5b57 and all. " * 2185  # 64 KiB
_HALF = b"\xf0\x9f"  # the first bytes of nearly every emoji: an emoji takes three tokens, other characters up to four

PIECES = (
    b"",
    _HALF,
    *(text.encode() for text in ("\n\n", "\r\n", "\u2028", "[DONE]", "data: [DONE]\n\n", _LONG)),
)
"""The tokens besides bytes and words."""

_TEXTS: dict[str, str | tuple[bytes, ...]] = {
    "newlines": "\n\nfirst, in\n\n\nthe middle \n and last\n\n",
    "carriage returns": "\rfirst\r\nthen\n\rand\r\rlast\r",
    "line ends of Unicode": "\u2028first\u2029 in \u0085\u2028\u2029 and last\u0085",
    "line ends of Python": "\x0bfirst\x0c in \x1c\x1d\x1e\x1f and last\x0c",
    "emoji": "\U0001f30a\U0001f415 \U0001f309\U0001f332 near the \u2602\ufe0f1\ufe0f\u20e3\U0001f41f",
    "joined emoji": "\U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f3f3\ufe0f\u200d\U0001f308 "
    "\U0001f44d\U0001f3fd \U0001f1f5\U0001f1f9",
    "combining marks": "\u0301first e\u0301 \u00e9 n\u0303 a\u0323\u0308 \u0e14\u0e49\u0e49\u0e49 Z\u0337\u035b",
    "an event stream": "data: x\n\nevent: end\nid: 1\nretry: 0\n\n: hb\n\ndata: [DONE]\n\n[DONE]",
    "nothing but the end": "[DONE]",
    "nothing but an end event": "data: [DONE]\n\n",
    "colons": ":\n:\n: \n:data\ndata\ndata:\n\n:",
    "control characters": "".join(map(chr, [*range(0x20), 0x7F, *range(0x80, 0xA0)])) + "\0",
    "a long token": f"a{_LONG}z",
    "right to left": "\u05e9\u05dc\u05d5\u05dd \u202eabc\u202c \u2066\u05e2\u05d5\u05dc\u05dd\u2069 \u200f\u061c",
    "byte order marks": "\ufefffirst, in\ufeffside and last\ufeff",
    "JSON": '{"choices":[{"delta":{"content":"no"}}],"error":{"message":"no"}}\n{"error_type":"generation"}',
    "quotes": '"\'\\ \\" \\n \\u0041 \\\\ \\ud83d / "\\',
    "markup": "</script><!-- --><b>&amp;&#10;]]> %0A %00 ${x} {{x}} <|end|> <0x0A>",
    "spaces": "   first \t in \u00a0 \u3000 side and last   ",
    "empty tokens": (b"", b"", b"a", b"", b" river", b"", b""),
    "no text": "",
    "rare characters": "\ufffd \ufffe\uffff \ud7ff\ue000 \U0001f4a9 \U0010ffff \ufdd0",
    "broken characters": (_HALF, b" ", b"o", b"k", b"\xff", b"\xc3", b"\xa9", b"\xe2", b"\x82", b"\n", _HALF, b"\x8c"),
}

TEXTS: dict[str, str] = {
    name: text if isinstance(text, str) else b"".join(text).decode("utf-8", "replace") for name, text in _TEXTS.items()
}
"""The texts by description. `scripted:text=3` recites the fourth."""


def cut(number: int, words: Sequence[bytes]) -> tuple[bytes, ...]:
    """Split a text into bytes, `words` and `PIECES`."""
    text = list(_TEXTS.values())[number]
    if not isinstance(text, str):
        return text
    rest, pieces = text.encode(), []
    longer = sorted((*words, *PIECES[1:]), key=len, reverse=True)
    while rest:
        piece = next((each for each in longer if rest.startswith(each)), rest[:1])
        pieces.append(piece)
        rest = rest[len(piece) :]
    return tuple(pieces)
