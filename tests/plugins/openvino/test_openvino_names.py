from __future__ import annotations

from tests.compat.checked import check_versions

from tailrace_plugins.openvino.openvino_names import PagedAttention, to_paged_attention


def test_versions() -> None:
    check_versions("openvino", "2026.4", "2026.4.1", tests="tests/plugins/openvino")


def test_names() -> None:
    """The laws of `tests/plugins/openvino` run the operation and the transformation."""
    assert PagedAttention.__name__ == "_PagedAttentionExtension"
    assert callable(to_paged_attention)
