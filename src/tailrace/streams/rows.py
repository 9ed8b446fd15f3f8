"""Encode records and events as the bytes of a row: msgpack, encrypted if there is a journal key; and compute checksums.

The first byte of a row says whether the row is encrypted, so a key can be added to a journal later. Encryption is
AES-256-GCM (NIST SP 800-38D) with a random nonce. The stream's id is authenticated with it, so a row cannot be moved to
another stream.
"""

from __future__ import annotations

import hashlib
import os
import struct
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tailrace.errors import JournalDamaged, ModelError
from tailrace.types import End, Event, Payload, Prompt, Record, TextDelta

__all__ = ["Rows", "checksum", "elements", "intact", "read_journal_key"]

_PLAIN, _SEALED = b"\0", b"\1"
_NONCE_BYTES = 12
_TAG_BYTES = 16
_MIN_KEY_BYTES = 32
_ARRAY = struct.Struct(">BI")  # the header of an array in msgpack: its type and its length
_MOST_SHORT = 15  # elements of a short array, whose header is one byte
_HEADER_BYTES = {0xDC: 3, 0xDD: 5}  # by its first byte
_SPREAD = 2_654_435_761  # spreads the numbers of streams over 32 bits (Knuth, 6.4)

_encode = msgspec.msgpack.Encoder().encode
_decode_fields = msgspec.msgpack.Decoder(dict[str, Any]).decode  # Any: of each field's type
_decode_events = msgspec.msgpack.Decoder(list[Event[TextDelta]]).decode
_decode_app_events = msgspec.msgpack.Decoder(list[TextDelta | Payload | End]).decode


class Rows:
    """Encodes and decodes rows, with a journal key of 32 bytes or without one: of the streams of models, or `of_apps`.
    Reading raises JournalDamaged if a row is damaged or None, which stands for a row with a wrong checksum."""

    def __init__(self, journal_key: bytes | None, *, of_apps: bool = False) -> None:
        self._decode_events: Callable[[bytes], list[Any]] = _read_app_events if of_apps else _decode_events
        # Any: the library is imported only if needed, since the import takes longer than opening a journal.
        self._aead: Any = None
        if journal_key is not None:
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM

            self._aead = AESGCM(journal_key)

    @property
    def is_encrypting(self) -> bool:
        return self._aead is not None

    @staticmethod
    def is_encrypted(row: bytes) -> bool:
        return row[:1] == _SEALED

    def encrypt(self, body: bytes, row_key: str) -> bytes:
        if self._aead is None:
            return _PLAIN + body
        nonce = os.urandom(_NONCE_BYTES)
        sealed: bytes = self._aead.encrypt(nonce, body, row_key.encode())
        return _SEALED + nonce + sealed

    @staticmethod
    def num_added(row: bytes) -> int:
        """Return how many bytes `encrypt` has added to a body, by the beginning of the row."""
        return len(_SEALED) + _NONCE_BYTES + _TAG_BYTES if row[:1] == _SEALED else len(_PLAIN)

    def open(self, row: bytes | None, row_key: str) -> bytes:
        """Raises: JournalDamaged if the row was not encrypted with this journal key and for this stream."""
        if row is None:
            raise JournalDamaged("a wrong checksum")
        if row[:1] == _PLAIN:
            return row[1:]
        if self._aead is None:
            raise JournalDamaged("an encrypted row, and no key")
        from cryptography.exceptions import InvalidTag

        try:
            body: bytes = self._aead.decrypt(row[1 : 1 + _NONCE_BYTES], row[1 + _NONCE_BYTES :], row_key.encode())
        except (InvalidTag, ValueError) as error:
            raise JournalDamaged("a row that cannot be decrypted with this key") from error
        return body

    def encode_record(self, record: Record) -> bytes:
        prompts = [_stored(prompt) for prompt in record.prompts]
        return self.encrypt(_encode(msgspec.structs.replace(record, prompts=prompts)), record.stream_id)

    def encode_events(self, stream_id: str, events: Sequence[Event]) -> bytes:
        return self.encrypt(_encode(events), stream_id)

    def join_events(self, stream_id: str, num_events: int, encoded: bytes | bytearray) -> bytes:
        """Return the row of events that are encoded already (`elements`)."""
        header = _ARRAY.pack(0xDD, num_events) if num_events > _MOST_SHORT else bytes((0x90 | num_events,))
        return self.encrypt(header + encoded, stream_id)

    def read_record(self, stream_id: str, row: bytes | None) -> Record:
        try:
            fields = _decode_fields(self.open(row, stream_id))
            for prompt in fields.get("prompts", ()):
                if prompt[1] and isinstance(prompt[1][0], int):
                    prompt[1] = [prompt[1]]
            return msgspec.convert(fields, Record)
        except (msgspec.DecodeError, TypeError, LookupError) as error:
            raise JournalDamaged("not a record") from error

    def read_events(self, stream_id: str, row: bytes | None) -> list[Event]:
        try:
            return self._decode_events(self.open(row, stream_id))
        except (msgspec.DecodeError, UnicodeEncodeError) as error:
            raise JournalDamaged("not a list of events") from error


def elements(events: Sequence[Event]) -> bytes:
    """Return events as msgpack, one after the other: a list of them without its header."""
    body = _encode(events)
    return body[_HEADER_BYTES.get(body[0], 1) :]


def _stored(prompt: Prompt) -> Any:  # Any: a named tuple's elements
    """Return a prompt in the form of its row: without the defaults at its end. Token ids alone are not in a list of
    segments, since earlier versions know only those."""
    shortened = _shortened(prompt)
    if len(prompt.segments) == 1 and isinstance(prompt.segments[0], tuple):
        return (shortened[0], prompt.segments[0], *shortened[2:])
    return shortened


def _read_app_events(body: bytes) -> list[Event[Payload]]:
    """Earlier versions kept the bytes of an app as text: a character for each byte."""
    events = _decode_app_events(body)
    return [Payload(event.text.encode("latin-1")) if isinstance(event, TextDelta) else event for event in events]


def _shortened(value: Any) -> Any:  # Any: a named tuple, or one of its elements
    """Return a named tuple without the defaults at its end, and its elements likewise. A server of an earlier version
    reads no tuple with elements that it does not know."""
    defaults = getattr(value, "_field_defaults", None)
    if defaults is None:
        return value
    num_given = len(value)
    while num_given and value[num_given - 1] == defaults.get(value._fields[num_given - 1], ...):
        num_given -= 1
    return tuple(_shortened(element) for element in value[:num_given])


def checksum(body: bytes, row_key: str | bytes | int, seq: int = 0) -> int:
    """Return the checksum of a row. It covers `row_key`, so that it does not fit any other row."""
    if isinstance(row_key, int):
        return zlib.crc32(body, row_key * _SPREAD + seq & 0xFFFFFFFF)
    return zlib.crc32(body, zlib.crc32(row_key.encode() if isinstance(row_key, str) else row_key))


def intact(body: bytes, crc: int, row_key: str | bytes | int, seq: int = 0) -> bytes | None:
    """Return the body, or None if it is damaged. A flipped bit may even change the type of a value."""
    try:
        return body if checksum(body, row_key, seq) == crc else None
    except (TypeError, UnicodeEncodeError):
        return None


def read_journal_key(path: Path) -> bytes:
    """Derive the journal key from the content of a file. Raises: ModelError if the file is missing or too short."""
    try:
        secret = path.read_bytes().strip()
    except OSError as error:
        raise ModelError(f"Cannot read the journal key from {path}: {error.strerror}.") from None
    if len(secret) < _MIN_KEY_BYTES:
        raise ModelError(
            f"The key in {path} is too short: it needs {_MIN_KEY_BYTES} characters. Make one: openssl rand -base64 32"
        )
    return hashlib.sha256(b"tailrace journal" + secret).digest()
