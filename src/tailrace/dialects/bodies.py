"""Reads and writes JSON bodies. Reading is strict; the written JSON is ASCII, which every client reads correctly."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from json.encoder import encode_basestring_ascii
from typing import Any

import msgspec

from tailrace.errors import RequestError, UnsupportedMediaType
from tailrace.text.templates import is_deeper

__all__ = [
    "JsonBody",
    "printable",
    "quote",
    "read_json",
    "read_value",
    "require_json",
    "require_json_or_curl",
    "require_plain_utf8",
    "time_of",
    "to_json",
]

_MAX_BRACKETS = 100_000  # of lists and objects, also inside strings; reading so many takes about 40 ms
_CHARSET = re.compile(r";\s*charset\s*=\s*\"?([^\s;\"]*)", re.IGNORECASE)

JsonBody = dict[str, Any]  # Any: JSON from the client, not yet checked

# All other characters are escaped: some clients split lines at U+2028, U+2029 and U+0085.
quote = encode_basestring_ascii
_encode_json = msgspec.json.Encoder().encode


def to_json(value: object) -> bytes:
    """Return compact JSON in ASCII."""
    text = _encode_json(value)
    if text.isascii():
        return text
    return _BEYOND_ASCII.sub(_escape, text.decode()).encode("ascii")


_BEYOND_ASCII = re.compile(r"[^\x00-\x7f]+")


def _escape(match: re.Match[str]) -> str:
    return quote(match[0])[1:-1]


def time_of(seconds: int) -> str:
    """Return seconds since the epoch in the format of RFC 3339."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def require_json(headers: Mapping[str, str]) -> None:
    """Require a JSON body. Forms on pages of other origins cannot send this type.

    Raises: UnsupportedMediaType.
    """
    kind = _kind(headers)
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise UnsupportedMediaType("Send the body as Content-Type: application/json.", param="content-type")


def require_json_or_curl(headers: Mapping[str, str]) -> None:
    """As `require_json`, but also accept a body without a type or with curl's default type. Commands in the
    documentation of some APIs, LiteLLM's requests to Ollama and Triton's client send no type. Requests of browsers have
    an Origin or Sec-Fetch-Site header, and need the type.

    Raises: UnsupportedMediaType.
    """
    is_untyped = _kind(headers) in ("", "application/x-www-form-urlencoded")
    if not is_untyped or "origin" in headers or "sec-fetch-site" in headers:
        require_json(headers)


def require_plain_utf8(headers: Mapping[str, str]) -> None:
    """Raises: UnsupportedMediaType for another charset than UTF-8, or for a compressed body."""
    charset = _CHARSET.search(headers.get("content-type", ""))
    if charset and charset[1].lower() not in ("utf-8", "utf8", "us-ascii", "ascii"):
        raise UnsupportedMediaType("Send the body in UTF-8.", param="content-type")
    if headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise UnsupportedMediaType("Send the body without a Content-Encoding.", param="content-encoding")


def _kind(headers: Mapping[str, str]) -> str:
    return headers.get("content-type", "").partition(";")[0].strip().lower()


def read_json(body: bytes) -> JsonBody:
    """As `read_value`, but require an object."""
    value = read_value(body)
    if not isinstance(value, dict):
        raise RequestError("The body must be a JSON object.")
    return value


def read_value(body: bytes) -> object:
    """Read JSON without NaN, lone surrogates or deep nesting.

    Raises: RequestError, which never repeats the input.
    """
    if body.count(b"[") + body.count(b"{") > _MAX_BRACKETS:
        raise RequestError("The body has too many lists and objects.")
    try:
        value = msgspec.json.decode(body)
    except RecursionError:
        raise RequestError("The body is nested too deeply.") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        position = re.search(r"\(byte (\d+)\)", str(error))
        where = f" at byte {position[1]}" if position else ""
        raise RequestError(f"The body is not valid JSON{where}.") from None
    if is_deeper(value):
        raise RequestError("The body is nested too deeply.")
    result: object = value
    return result


def printable(name: str) -> str:
    """Return a name of the client, safe for a header."""
    return re.sub(r"[^A-Za-z0-9_.-]", "?", name[:40])
