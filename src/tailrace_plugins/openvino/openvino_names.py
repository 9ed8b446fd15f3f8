"""Paged attention, which OpenVINO offers to its own projects only."""

from __future__ import annotations

from typing import Any

from openvino._offline_transformations import paged_attention_transformation
from openvino.op import _PagedAttentionExtension as PagedAttention

__all__ = ["PagedAttention", "to_paged_attention"]


def to_paged_attention(model: Any) -> None:  # Any: the library's model
    """Replace a model's attention and its cache. Raises: RuntimeError if they are not those of a decoder."""
    paged_attention_transformation(model, False, False, False)
