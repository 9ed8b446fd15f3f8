"""Tickets: who accepts them, and until when."""

from __future__ import annotations

import base64

import msgspec
import pytest

from tailrace.access.keys import Key, new_key, rotated
from tailrace.access.tickets import LIFETIME_S, new_ticket, read_ticket

_NOW_S = 1_800_000_000.0


@pytest.fixture
def key() -> Key:
    return new_key("alice", now_s=_NOW_S).key


def _is_valid(ticket: str, key: Key, now_s: float = _NOW_S) -> bool:
    return read_ticket(ticket, {key.key_id: key}, now_s) is not None


def test_every_server_with_the_key_accepts_it(key: Key) -> None:
    ticket = new_ticket(key, "a-stream", _NOW_S)
    read = read_ticket(ticket, {key.key_id: msgspec.structs.replace(key)}, _NOW_S)
    assert read is not None
    assert (read.key_id, read.stream_id) == (key.key_id, "a-stream")
    assert _is_valid(ticket, key, _NOW_S + LIFETIME_S - 1)
    assert not _is_valid(ticket, key, _NOW_S + LIFETIME_S)


def test_it_ends_with_its_key(key: Key) -> None:
    ticket = new_ticket(key, "a-stream", _NOW_S)
    assert not _is_valid(ticket, msgspec.structs.replace(key, revoked_s=_NOW_S))
    assert not _is_valid(ticket, msgspec.structs.replace(key, expires_s=_NOW_S))
    assert not _is_valid(ticket, rotated(key, now_s=_NOW_S, grace_s=0).key)
    assert read_ticket(ticket, {}, _NOW_S) is None


def test_a_rotation_with_grace_breaks_no_ticket(key: Key) -> None:
    turned = rotated(key, now_s=_NOW_S, grace_s=LIFETIME_S + 60).key
    before, after = new_ticket(key, "a-stream", _NOW_S), new_ticket(turned, "a-stream", _NOW_S)
    assert _is_valid(before, turned)
    assert _is_valid(after, key), "a server that has not read the rotation yet"
    late_s = _NOW_S + 120  # the old secret ends before the ticket would
    late = new_ticket(turned, "a-stream", late_s)
    assert _is_valid(late, turned, late_s + LIFETIME_S - 1)


def test_what_is_no_ticket(key: Key) -> None:
    ticket = new_ticket(key, "a-stream", _NOW_S)
    signed = base64.urlsafe_b64decode(ticket + "=" * (-len(ticket) % 4))
    forged = signed.replace(b"a-stream", b"b-stream")
    unsigned = bytes(32) + signed[32:]
    for wrong in (forged, unsigned, signed[:32], signed[:10], b"", bytes(32) + b"[" * 10_000):
        assert not _is_valid(base64.urlsafe_b64encode(wrong).decode(), key)
    for text in ("", "é", "%", "a", ticket[:-1] + "!"):
        assert not _is_valid(text, key)


def test_a_key_without_an_old_secret_accepts_no_ticket_of_an_empty_one(key: Key) -> None:
    payload = new_ticket(key, "a-stream", _NOW_S)
    by_empty = new_ticket(msgspec.structs.replace(key, secret_hash=b""), "a-stream", _NOW_S)
    assert by_empty != payload
    assert not _is_valid(by_empty, key)
