"""Query strings, read strictly."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import parse_qsl

from tailrace.errors import RequestError

__all__ = ["read_count", "read_query"]


def read_query(query: bytes) -> dict[str, str]:
    """The fields of a query string: UTF-8, each once. Raises: RequestError."""
    if not query:
        return {}
    try:
        pairs = parse_qsl(query.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=16)
    except ValueError:
        raise RequestError("The query is not valid UTF-8, or has too many fields.") from None
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise RequestError("A field of the query is given twice.")
    return fields


def read_count(query: Mapping[str, str], name: str) -> int | None:
    """A whole number above 0, None where it is not given. Raises: RequestError."""
    digits = query.get(name)
    if digits is None:
        return None
    if not (digits.isascii() and digits.isdigit() and len(digits) < 10 and int(digits) > 0):
        raise RequestError(f"{name} must be a whole number above 0.", param=name)
    return int(digits)
