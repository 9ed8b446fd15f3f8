"""The caller of a request is the address of its connection; headers do not change it."""

from __future__ import annotations

import pytest

from tailrace.access.principal import caller_of


@pytest.mark.parametrize(
    ("client", "caller"),
    [
        (("192.0.2.7", 50000), "192.0.2.7"),
        (("::ffff:192.0.2.7", 50000), "192.0.2.7"),
        (("2001:db8:1:2:3:4:5:6", 50000), "2001:db8:1:2::/64"),
        (("2001:db8:1:2:ffff::1", 50000), "2001:db8:1:2::/64"),
        (("fe80::1%eth0", 50000), "fe80::/64"),
        (("::1", 50000), "::/64"),
        (("", 0), ""),
        (None, ""),
    ],
)
def test_a_caller_is_an_address(client: tuple[str, int] | None, caller: str) -> None:
    headers = [(b"x-forwarded-for", b"198.51.100.1"), (b"forwarded", b"for=198.51.100.1")]
    assert caller_of({"type": "http", "client": client, "headers": headers}) == caller
