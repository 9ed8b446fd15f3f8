"""What the journal's rows look like on disk: as they are, or sealed with a key that is not there.

The first byte says which, so that a journal that was begun without a key can go on with one. A sealed row is
AES-256-GCM (NIST SP 800-38D) with a random nonce, bound to its stream: it opens nowhere else.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Protocol

from tailrace.errors import JournalDamaged, ModelError

__all__ = ["Cipher", "PlainText", "RowCipher", "read_key"]

_PLAIN, _SEALED = b"\0", b"\1"
_NONCE_BYTES = 12
_LEAST_KEY_BYTES = 32


class RowCipher(Protocol):
    def seal(self, body: bytes, whose: str) -> bytes: ...

    def open(self, row: bytes, whose: str) -> bytes:
        """Raises: JournalDamaged if it is not what was sealed for this stream."""


class PlainText:
    """No key: rows as they are."""

    def seal(self, body: bytes, whose: str) -> bytes:
        return _PLAIN + body

    def open(self, row: bytes, whose: str) -> bytes:
        if row[:1] != _PLAIN:
            raise JournalDamaged("a sealed row, and no key")
        return row[1:]


class Cipher:
    """Rows sealed with a key of 32 bytes."""

    def __init__(self, key: bytes) -> None:
        # Needed by few: it takes longer to import than the journal takes to open.
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._aead = AESGCM(key)
        self._wrong = InvalidTag

    def seal(self, body: bytes, whose: str) -> bytes:
        nonce = os.urandom(_NONCE_BYTES)
        return _SEALED + nonce + self._aead.encrypt(nonce, body, whose.encode())

    def open(self, row: bytes, whose: str) -> bytes:
        if row[:1] == _PLAIN:
            return row[1:]
        try:
            return self._aead.decrypt(row[1 : 1 + _NONCE_BYTES], row[1 + _NONCE_BYTES :], whose.encode())
        except (self._wrong, ValueError) as error:
            raise JournalDamaged("a row that this key does not open") from error


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
