"""Records and events as the bytes of a row: msgpack, sealed where there is a key."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tailrace.errors import JournalDamaged
from tailrace.streams._cipher import RowCipher
from tailrace.streams.durable_records import DurableRecord
from tailrace.streams.record import Record
from tailrace.types import Event

__all__ = ["Rows"]

_encode = msgspec.msgpack.Encoder().encode
_decode_record = msgspec.msgpack.Decoder(Record).decode
_decode_events = msgspec.msgpack.Decoder(list[Event]).decode
_decode_note = msgspec.msgpack.Decoder(DurableRecord).decode


class Rows:
    """Both ways. What is read raises JournalDamaged where it is not what was written, and so does None: a row whose
    checksum is wrong."""

    def __init__(self, cipher: RowCipher) -> None:
        self._cipher = cipher

    def of_record(self, record: Record) -> bytes:
        return self._cipher.seal(_encode(record), record.stream_id)

    def of_events(self, stream_id: str, events: Sequence[Event]) -> bytes:
        return self._cipher.seal(_encode(events), stream_id)

    def of_note(self, key: bytes, record: DurableRecord) -> bytes:
        return self._cipher.seal(_encode(record), key.hex())

    def read_record(self, stream_id: str, row: bytes | None) -> Record:
        body = self._open(row, stream_id)
        try:
            return _decode_record(body)
        except msgspec.DecodeError as error:
            raise JournalDamaged("no record") from error

    def read_events(self, stream_id: str, row: bytes | None) -> list[Event]:
        body = self._open(row, stream_id)
        try:
            return _decode_events(body)
        except msgspec.DecodeError as error:
            raise JournalDamaged("no events") from error

    def read_note(self, key: bytes, row: bytes | None) -> DurableRecord:
        body = self._open(row, key.hex())
        try:
            note: DurableRecord = _decode_note(body)
        except msgspec.DecodeError as error:
            raise JournalDamaged("no note") from error
        return note

    def _open(self, row: bytes | None, whose: str) -> bytes:
        if row is None:
            raise JournalDamaged("a wrong checksum")
        return self._cipher.open(row, whose)
