"""Reads query strings, strictly."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import parse_qsl

from tailrace.dialects.bodies import printable, read_json
from tailrace.errors import RequestError, UnsupportedMediaType

__all__ = ["read_count", "read_fields_of_body", "read_query", "read_switch"]

_FORM = "application/x-www-form-urlencoded"


def read_query(query: bytes) -> dict[str, str]:
    """Return the fields of a query string. Raises: RequestError if it is not UTF-8 or has a field twice."""
    if not query:
        return {}
    try:
        pairs = parse_qsl(query.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=16)
    except ValueError:
        raise RequestError("The fields are not valid UTF-8, or there are too many of them.") from None
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise RequestError("A field is given twice.")
    return fields


def read_fields_of_body(content_type: str, body: bytes) -> dict[str, str]:
    """Return fields from a body, which may be a form, a JSON object of texts and numbers, or empty.

    Raises: RequestError; UnsupportedMediaType for another kind of body.
    """
    kind = content_type.partition(";")[0].strip().lower()
    if not body:
        return {}
    if kind == _FORM:
        return read_query(body)
    if kind != "application/json":
        raise UnsupportedMediaType(f"Send the fields as {_FORM} or application/json.", param="content-type")
    fields = {}
    for name, value in read_json(body).items():
        if value is None:  # means absent
            continue
        if not isinstance(value, str | int) or isinstance(value, bool):
            name = printable(name)
            raise RequestError(f"{name}: expected text or a whole number.", param=name)
        fields[name] = str(value)
    return fields


def read_count(query: Mapping[str, str], name: str) -> int | None:
    """Return a whole number above 0; None if the field is absent. Raises: RequestError."""
    digits = query.get(name)
    if digits is None:
        return None
    if not (digits.isascii() and digits.isdigit() and len(digits) < 10 and int(digits) > 0):
        raise RequestError(f"{name} must be a whole number from 1 to 999,999,999.", param=name)
    return int(digits)


def read_switch(query: Mapping[str, str], name: str) -> bool:
    """Return whether a field is `true`; false if it is absent. Raises: RequestError."""
    value = query.get(name, "false")
    if value not in ("true", "false"):
        raise RequestError(f"{name} must be true or false.", param=name)
    return value == "true"
