"""Links in memory: their signatures, and when they end."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import pytest
from msgspec.structs import replace

from tailrace.access.keyring import Keyring
from tailrace.access.keys import NewKey, new_key
from tailrace.access.shares import Share, Shares, new_share, token_of

NOW_S = time.time()


def share_of(made: NewKey, *, lifetime_s: float = 60.0) -> Share:
    key = made.key
    return new_share(key.owner, key.key_id, "stream", "a-stream", now_s=NOW_S, expires_s=NOW_S + lifetime_s)


@dataclass
class Server:
    keyring: Keyring = field(default_factory=Keyring)
    made: NewKey = field(default_factory=lambda: new_key("ann", now_s=NOW_S, scopes=("read", "generate")))

    def __post_init__(self) -> None:
        self.keyring.update([self.made.key])
        self.shares = Shares(self.keyring)
        self.share = share_of(self.made)
        self.shares.update([self.share], NOW_S)

    def found(self, token: str, now_s: float = NOW_S) -> Share | None:
        return self.shares.find(token, now_s)


def test_a_link_shows_its_share_until_it_expires() -> None:
    server = Server()
    token = token_of(server.share)
    assert server.found(token) == server.share
    assert server.found(token, NOW_S + 61) is None
    assert server.shares.ends_s(server.share) == server.share.expires_s


@pytest.mark.parametrize(
    "changed", [{"target": "b-stream"}, {"expires_s": NOW_S + 1e9}, {"kind": "conversation"}, {"owner": "bob"},
                {"secret": b"x" * 32}, {"share_id": "0" * 16}]
)  # fmt: skip
def test_the_signature_is_of_all_that_a_link_says(changed: dict[str, object]) -> None:
    server = Server()
    assert server.found(token_of(replace(server.share, **changed))) is None


def test_two_links_cannot_be_mixed() -> None:
    server = Server()
    other = share_of(server.made)
    server.shares.update([other], NOW_S)
    head, its_id, _ = token_of(other).split("_", 2)
    signature = token_of(server.share).split("_", 2)[2]
    assert server.found(f"{head}_{its_id}_{signature}") is None
    assert server.found(token_of(other)) == other


@pytest.mark.parametrize("how", ["revoked", "key", "missing"])
def test_readers_are_sent_away(how: str) -> None:
    server = Server()
    token = token_of(server.share)
    with server.shares.reading(server.share) as ended, server.shares.reading(server.share) as other:
        assert (server.shares.num_readers, server.shares.num_readers_of(server.share)) == (2, 2)
        match how:
            case "revoked":
                server.shares.update([replace(server.share, revoked_s=NOW_S)], NOW_S)
            case "key":
                server.keyring.update([replace(server.made.key, revoked_s=NOW_S)])
            case "missing":  # as after a restored copy of the database
                server.shares.update([], NOW_S, is_whole=True)
        assert ended.is_set()
        assert other.is_set()
    assert server.shares.num_readers == 0
    assert server.found(token) is None


def test_a_link_ends_with_the_time_of_its_key() -> None:
    server = Server(made=new_key("ann", now_s=NOW_S, scopes=("read",), expires_s=NOW_S + 5))
    assert server.shares.ends_s(server.share) == NOW_S + 5


def test_a_link_without_a_key_is_worth_nothing_once_there_are_keys() -> None:
    keyring = Keyring()
    shares = Shares(keyring)
    share = new_share("anonymous", "", "stream", "s", now_s=NOW_S, expires_s=NOW_S + 60)
    shares.update([share], NOW_S)
    assert shares.find(token_of(share), NOW_S) == share
    keyring.update([new_key("ann", now_s=NOW_S, scopes=("read",)).key])
    assert shares.find(token_of(share), NOW_S) is None


def test_readers_of_a_link_made_without_a_key_are_sent_away_by_the_first_key() -> None:
    keyring = Keyring()
    shares = Shares(keyring)
    share = new_share("anonymous", "", "stream", "a-stream", now_s=NOW_S, expires_s=NOW_S + 60)
    shares.update([share], NOW_S)
    assert shares.find(token_of(share), NOW_S) == share
    with shares.reading(share) as ended:
        shares.update([], NOW_S)
        assert not ended.is_set()
        keyring.update([new_key("ann", now_s=NOW_S, scopes=("read",)).key])
        shares.update([], NOW_S)
        assert ended.is_set()


def test_a_reader_who_comes_after_the_revocation_is_sent_away() -> None:
    server = Server()
    with server.shares.reading(server.share) as ended:
        assert not ended.is_set()
    server.shares.end(server.share.share_id)
    with server.shares.reading(server.share) as ended:
        assert ended.is_set()


def test_expired_links_leave_the_memory() -> None:
    server = Server()
    with server.shares.reading(server.share) as ended:
        server.shares.update([], NOW_S + 61)
        assert ended.is_set()
    assert not server.shares.is_valid(server.share, NOW_S)  # as if the clock went back
