"""Records and events as the bytes of a row: msgpack, sealed where there is a key, and the checksum beside it.

The first byte of a row says whether it is sealed, so that a journal that was begun without a key can go on with one. A
sealed row is AES-256-GCM (NIST SP 800-38D) with a random nonce, bound to its stream: it opens nowhere else.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from tailrace.durable.records import DurableRecord
from tailrace.errors import JournalDamaged, ModelError
from tailrace.streams.log import Record
from tailrace.types import Event

__all__ = ["Rows", "checksum", "intact", "read_key"]

_PLAIN, _SEALED = b"\0", b"\1"
_NONCE_BYTES = 12
_LEAST_KEY_BYTES = 32
_SPREAD = 2_654_435_761  # numbers of streams over 32 bits (Knuth, 6.4)

_encode = msgspec.msgpack.Encoder().encode
_decode_record = msgspec.msgpack.Decoder(Record).decode
_decode_events = msgspec.msgpack.Decoder(list[Event]).decode
_decode_note = msgspec.msgpack.Decoder(DurableRecord).decode


class Rows:
    """Both ways, with a key of 32 bytes or none. What is read raises JournalDamaged where it is not what was written,
    and so does None: a row whose checksum is wrong."""

    def __init__(self, key: bytes | None) -> None:
        self._aead: Any = None  # Any: of a library that is imported late, since it takes longer than opening a journal
        if key is not None:
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM

            self._aead = AESGCM(key)

    def seal(self, body: bytes, whose: str) -> bytes:
        if self._aead is None:
            return _PLAIN + body
        nonce = os.urandom(_NONCE_BYTES)
        sealed: bytes = self._aead.encrypt(nonce, body, whose.encode())
        return _SEALED + nonce + sealed

    def open(self, row: bytes | None, whose: str) -> bytes:
        """Raises: JournalDamaged if it is not what was sealed for this stream."""
        if row is None:
            raise JournalDamaged("a wrong checksum")
        if row[:1] == _PLAIN:
            return row[1:]
        if self._aead is None:
            raise JournalDamaged("a sealed row, and no key")
        from cryptography.exceptions import InvalidTag

        try:
            body: bytes = self._aead.decrypt(row[1 : 1 + _NONCE_BYTES], row[1 + _NONCE_BYTES :], whose.encode())
        except (InvalidTag, ValueError) as error:
            raise JournalDamaged("a row that this key does not open") from error
        return body

    def of_record(self, record: Record) -> bytes:
        return self.seal(_encode(record), record.stream_id)

    def of_events(self, stream_id: str, events: Sequence[Event]) -> bytes:
        return self.seal(_encode(events), stream_id)

    def of_note(self, key: bytes, record: DurableRecord) -> bytes:
        return self.seal(_encode(record), key.hex())

    def read_record(self, stream_id: str, row: bytes | None) -> Record:
        try:
            return _decode_record(self.open(row, stream_id))
        except msgspec.DecodeError as error:
            raise JournalDamaged("no record") from error

    def read_events(self, stream_id: str, row: bytes | None) -> list[Event]:
        try:
            return _decode_events(self.open(row, stream_id))
        except msgspec.DecodeError as error:
            raise JournalDamaged("no events") from error

    def read_note(self, key: bytes, row: bytes | None) -> DurableRecord:
        try:
            note: DurableRecord = _decode_note(self.open(row, key.hex()))
        except msgspec.DecodeError as error:
            raise JournalDamaged("no note") from error
        return note


def checksum(body: bytes, whose: str | bytes | int, seq: int = 0) -> int:
    """The checksum of a row, which begins with whose it is: what is right for one is wrong for any other."""
    if isinstance(whose, int):
        return zlib.crc32(body, whose * _SPREAD + seq & 0xFFFFFFFF)
    return zlib.crc32(body, zlib.crc32(whose.encode() if isinstance(whose, str) else whose))


def intact(body: bytes, crc: int, whose: str | bytes | int, seq: int = 0) -> bytes | None:
    """The body, if all of it is what was written. A bit that flips may turn a value into one of any kind."""
    try:
        return body if checksum(body, whose, seq) == crc else None
    except (TypeError, UnicodeEncodeError):
        return None


def read_key(path: Path) -> bytes:
    """The key that stands for what is in a file. Raises: ModelError if that is too little, or not there."""
    try:
        secret = path.read_bytes().strip()
    except OSError as error:
        raise ModelError(f"The key of the journal cannot be read from {path}: {error.strerror}.") from None
    if len(secret) < _LEAST_KEY_BYTES:
        raise ModelError(
            f"The key in {path} is too short: it needs {_LEAST_KEY_BYTES} characters. Make one: openssl rand -base64 32"
        )
    return hashlib.sha256(b"tailrace journal" + secret).digest()
