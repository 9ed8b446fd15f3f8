"""Rows: the lines of a batch's file, and what is kept of their answers. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal, NamedTuple, TypeAlias

import msgspec

from tailrace_plugins.batches.stored_batches import LineError

__all__ = ["BatchRow", "Outcome", "RowError", "RowReader", "body_of", "model_of", "seconds_of"]

_CUSTOM_ID_CHARACTERS = 512
_WHOLE = {"stream", "stream_options", "background"}  # rows have whole answers
_WINDOW = re.compile(r"([1-9][0-9]{0,5})([smhd])", re.ASCII)
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}

# The outcomes of a row: an answer, an error of its request, or that it was not run.
Outcome: TypeAlias = Literal["succeeded", "errored", "expired", "canceled"]

_decode = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_text = msgspec.json.Decoder(str).decode


class _OfModel(msgspec.Struct):
    model: str | None = None


_decode_model = msgspec.json.Decoder(_OfModel).decode
_decode_body = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class BatchRow(NamedTuple):
    custom_id: str
    body: bytes  # JSON
    url: str = ""


class RowError(Exception):
    """A line that is no row."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.param = code, message, param

    def at(self, line: int | None) -> LineError:
        return LineError(self.code, self.message, line, self.param)


class RowReader:
    """Checks the lines of a file for an endpoint, one after the other."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._seen: set[int] = set()  # hashes of the custom ids: a file may have many

    def read(self, line: bytes | None) -> BatchRow:
        """Return the row of a line; None is a line that is too long. Raises: RowError."""
        if line is None:
            raise RowError("line_too_long", "This line is longer than --body-bytes.")
        try:
            line.decode()
        except UnicodeDecodeError:
            raise RowError("invalid_json_line", "This line is not UTF-8.") from None
        row = read_row(line)
        if row.url != self._endpoint:
            raise RowError("url_mismatch", "The url of this line is not the endpoint of the batch.", "url")
        hashed = hash(row.custom_id)
        if hashed in self._seen:
            raise RowError("duplicate_custom_id", "Another line has the same custom_id.", "custom_id")
        self._seen.add(hashed)
        return row


def read_row(line: bytes) -> BatchRow:
    """Raises: RowError."""
    try:
        fields = _decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise RowError("invalid_json_line", "This line is not a JSON object in UTF-8.") from None
    custom_id = _text(fields, "custom_id")
    if not 1 <= len(custom_id) <= _CUSTOM_ID_CHARACTERS:
        raise RowError(
            "invalid_custom_id", f"custom_id must have 1 to {_CUSTOM_ID_CHARACTERS} characters.", "custom_id"
        )
    if _text(fields, "method") != "POST":
        raise RowError("invalid_method", "method must be POST.", "method")
    url = _text(fields, "url")
    body = fields.get("body")
    if body is None:
        raise RowError("missing_required_parameter", "body is missing.", "body")
    if not bytes(body).lstrip().startswith(b"{"):
        raise RowError("invalid_type", "body must be an object.", "body")
    return BatchRow(custom_id, bytes(body), url)


def _text(fields: Mapping[str, msgspec.Raw], name: str) -> str:
    value = fields.get(name)
    if value is None:
        raise RowError("missing_required_parameter", f"{name} is missing.", name)
    try:
        return _decode_text(value)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise RowError("invalid_type", f"{name} must be text.", name) from None


def body_of(row: BatchRow) -> bytes:
    """Return the body of a row's request, without fields that ask for another answer than a whole one."""
    try:
        fields = _decode_body(row.body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return row.body  # its wire refuses it
    if not fields.keys() & _WHOLE:
        return row.body
    return msgspec.json.encode({name: value for name, value in fields.items() if name not in _WHOLE})


def model_of(row: BatchRow) -> str | None:
    """Return the model that a row asks for; None if it names none."""
    try:
        return _decode_model(row.body).model
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def seconds_of(window: str) -> int | None:
    """Return the seconds of a time such as 24h, or None if it is none."""
    found = _WINDOW.fullmatch(window)
    return int(found[1]) * _SECONDS[found[2]] if found else None
