from __future__ import annotations

from tests.compat.checked import check_versions


def test_versions() -> None:
    check_versions("transformers", "5.19", "5.24", tests="tests/plugins/transformers")
