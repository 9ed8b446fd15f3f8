"""Reads uploads: forms with a file (multipart/form-data), of which only a piece is in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, TypeAlias

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from tailrace.errors import RequestError, UnsupportedMediaType

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

__all__ = ["FormFields", "read_form"]

_FIELD_BYTES = 1_000  # of a field that is no file, and of each header
_PARTS = 16

FormFields: TypeAlias = dict[str, str]


async def read_form(
    content_type: str,
    pieces: AsyncIterator[bytes],
    add: Callable[[bytes], object],
    keep: Callable[[], Awaitable[object]],
) -> tuple[FormFields, str]:
    """Return the fields of a form, and the name of its file, whose content goes to `add`. `keep` is awaited after each
    piece of the body.

    Raises: UnsupportedMediaType, RequestError, and what `pieces` and `keep` raise.
    """
    kind, options = parse_options_header(content_type)
    boundary = options.get(b"boundary")
    if kind != b"multipart/form-data" or not boundary:
        raise UnsupportedMediaType("Send the file as multipart/form-data.", param="content-type")
    form = _Form(add)
    try:
        parser = MultipartParser(boundary, form.callbacks())
        async for piece in pieces:
            parser.write(piece)
            await keep()
        parser.finalize()
    except FormParserError:
        raise RequestError("The body is not a valid form.") from None
    if not form.is_complete:
        raise RequestError("The form ends too early.")
    if form.filename is None:
        raise RequestError("file is missing.", param="file")
    return form.fields, form.filename


class _Form:
    """What the parser has found."""

    def __init__(self, add: Callable[[bytes], object]) -> None:
        self.fields: FormFields = {}
        self.filename: str | None = None
        self.is_complete = False
        self._add_to_file = add
        self._num_parts = 0
        self._header = bytearray()
        self._value = bytearray()
        self._disposition = b""
        self._name = ""
        self._is_file = False

    def callbacks(self) -> MultipartCallbacks:
        return {
            "on_part_begin": self._begin,
            "on_header_begin": self._begin_header,
            "on_header_field": self._add_to_header,
            "on_header_value": self._add_to_value,
            "on_header_end": self._end_header,
            "on_headers_finished": self._end_headers,
            "on_part_data": self._add_content,
            "on_part_end": self._end,
            "on_end": self._complete,
        }

    def _begin(self) -> None:
        self._num_parts += 1
        if self._num_parts > _PARTS:
            raise RequestError("The form has too many parts.")
        self._disposition = b""

    def _begin_header(self) -> None:
        self._header.clear()
        self._value.clear()

    def _add_to_header(self, data: bytes, start: int, end: int) -> None:
        _add(self._header, data[start:end])

    def _add_to_value(self, data: bytes, start: int, end: int) -> None:
        _add(self._value, data[start:end])

    def _end_header(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = bytes(self._value)

    def _end_headers(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        self._is_file = self._name == "file"
        self._value.clear()
        if not self._is_file:
            return
        if self.filename is not None:
            raise RequestError("The form has several files.", param="file")
        filename = options.get(b"filename", b"").decode("utf-8", "replace")
        self.filename = "".join(one for one in filename if one.isprintable())[:255] or "file"

    def _add_content(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self._add_to_file(data[start:end])
        else:
            _add(self._value, data[start:end])

    def _end(self) -> None:
        if not self._is_file:
            self.fields[self._name] = self._value.decode("utf-8", "replace")

    def _complete(self) -> None:
        self.is_complete = True


def _add(buffer: bytearray, data: bytes) -> None:
    if len(buffer) + len(data) > _FIELD_BYTES:
        raise RequestError(f"A field of the form is longer than {_FIELD_BYTES} bytes.")
    buffer += data
