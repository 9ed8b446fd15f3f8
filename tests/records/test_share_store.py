"""Links in the database, on each kind of database."""

from __future__ import annotations

import time

import pytest

from tailrace.access.shares import Share, new_share, token_of
from tailrace.errors import KeyRevoked, RequestError, UnknownShare
from tailrace.records import share_store
from tailrace.records.key_store import KeyStore
from tailrace.records.record_database import RecordDatabase
from tailrace.records.share_store import ShareStore


@pytest.fixture
def links(database: RecordDatabase) -> ShareStore:
    return ShareStore(database)


def _share(owner: str = "me", *, key_id: str = "", lifetime_s: float = 60.0) -> Share:
    now_s = time.time()
    return new_share(owner, key_id, "conversation", "conv_é", now_s=now_s, expires_s=now_s + lifetime_s)


def test_a_link_is_read_unchanged(database: RecordDatabase, links: ShareStore) -> None:
    share = _share()
    links.add(share)
    assert links.list("me") == [share]
    (known,) = KeyStore(database).changed_since(0).shares  # as each server reads it
    assert (known, token_of(known)) == (share, token_of(share))


def test_owners_are_separate(links: ShareStore) -> None:
    mine, yours = _share(), _share("you")
    links.add(mine)
    links.add(yours)
    assert links.list("me") == [mine]
    for share_id in (yours.share_id, "no", "", "\0", "x" * 1000):
        with pytest.raises(UnknownShare):
            links.revoke("me", share_id)
    assert links.forget("me") == 1
    assert (links.list("me"), links.list("you")) == ([], [yours])


def test_other_servers_learn_of_a_revocation(database: RecordDatabase, links: ShareStore) -> None:
    keys, share = KeyStore(database), _share()
    links.add(share)
    version = keys.changed_since(0).version
    assert keys.changed_since(version).shares == []
    links.revoke("me", share.share_id)
    (changed,) = keys.changed_since(version).shares
    assert changed.share_id == share.share_id
    assert changed.revoked_s is not None
    links.revoke("me", share.share_id)  # again: it was revoked when it was
    assert keys.changed_since(version).shares == [changed]
    assert links.list("me") == []


def test_ended_links_are_deleted_when_all_servers_know(
    database: RecordDatabase, links: ShareStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    expired, revoked, active = _share(lifetime_s=-1), _share(), _share()
    for share in (expired, revoked, active):
        links.add(share)
    links.revoke("me", revoked.share_id)
    links.delete_ended()
    assert len(KeyStore(database).changed_since(0).shares) == 3
    monkeypatch.setattr(share_store, "ENDED_S", -1.0)
    links.delete_ended()
    assert KeyStore(database).changed_since(0).shares == [active]


def test_an_owner_has_so_many(links: ShareStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(share_store, "MAX_SHARES", 2)
    first = _share()
    links.add(first)
    links.add(_share(lifetime_s=-1))  # one that has ended does not count
    links.add(_share())
    with pytest.raises(RequestError):
        links.add(_share())
    links.add(_share("you"))
    links.revoke("me", first.share_id)
    links.add(_share())


def test_nothing_is_added_for_a_deleted_owner(database: RecordDatabase, links: ShareStore) -> None:
    keys = KeyStore(database)
    made = keys.create("me")
    keys.forget("me")
    with pytest.raises(KeyRevoked):
        links.add(_share(key_id=made.key.key_id))
    assert links.list("me") == []
