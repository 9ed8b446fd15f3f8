"""`tests/apps/on_ray` runs Ray in an environment of its own: streams there outlive the request that began them."""

from __future__ import annotations

from tests.compat.checked import check_versions


def test_versions() -> None:
    check_versions("ray", "2.60", "2.60", tests="tests/apps/on_ray")
