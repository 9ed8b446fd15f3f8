"""The paths that are used, which wires of other packages cannot have."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import tailrace.api
from tailrace.dialects import WIRES
from tailrace.http.wires import OWN_PATHS, overlap, served_wires


def test_every_path_that_the_server_routes_is_known() -> None:
    sources = "\n".join(path.read_text() for path in Path(tailrace.api.__file__).parent.glob("*.py"))
    routed = set(re.findall(r"""[Rr]oute\(\s*(?:"[A-Z]+",\s*)?"(/[^"]*)\"""", sources)) - {"/{path:path}"}
    assert {"/metrics", "/page/{name:path}", "/v1/ws"} <= routed <= set(OWN_PATHS)


def test_ours_are_served_first() -> None:
    assert served_wires()[: len(WIRES)] == WIRES


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
        ("/a/{x}.json", "/a/b", True),  # more than there is: no harm is done by being strict
    ],
)
def test_paths_that_share_a_request(one: str, other: str, expected: bool) -> None:
    assert overlap(one, other) is expected
    assert overlap(other, one) is expected
