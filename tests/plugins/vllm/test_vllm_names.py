"""`tests/plugins/vllm` runs vLLM in an environment of its own: its law of bad words fails without them."""

from __future__ import annotations

from tests.compat.checked import check_versions


def test_versions() -> None:
    check_versions("vllm", "0.25.1", "0.32", tests="tests/plugins/vllm")
