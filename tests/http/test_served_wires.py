"""The served wires, and which paths could be the same request's."""

from __future__ import annotations

from importlib.metadata import entry_points

import pytest

from tailrace.dialects import WIRES, WIRES_GROUP
from tailrace.http.wires import ServedWires, overlap


def test_ours_are_served_first() -> None:
    assert ServedWires().all[: len(WIRES)] == WIRES


def test_the_plugins_of_this_package_are_served() -> None:
    points = entry_points(group=WIRES_GROUP)
    names = [point.name for point in points if point.dist is not None and point.dist.name == "tailrace"]
    assert names
    assert set(names) <= {wire.name for wire in ServedWires().all}


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ("/a", "/a", True),
        ("/a", "/a/", False),
        ("/a", "/a/b", False),
        ("/{x}", "/a", True),
        ("/{x}", "/a/b", False),
        ("/a/{x}/c", "/a/b/{y}", True),
        ("/a/{x}/c", "/a/b/d", False),
        ("/a/{x:path}", "/a/b/c", True),
        ("/a/{x:path}", "/b/{y:path}", False),
        ("/a/{x:path}", "/a", False),
        ("/a/{x:path}", "/a/", True),
        ("/a/{x}.json", "/a/b", True),  # more than there is: no harm is done by being strict
    ],
)
def test_paths_that_share_a_request(one: str, other: str, expected: bool) -> None:
    assert overlap(one, other) is expected
    assert overlap(other, one) is expected
