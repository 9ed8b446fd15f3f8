"""OpenVINO with the real model."""

from __future__ import annotations

import pytest

from tailrace.engines import EngineSpec
from tailrace.models import ModelCard, models_path


@pytest.fixture(scope="module")
def openvino_spec(card: ModelCard) -> EngineSpec:
    """Small, so that a prompt at the limit is fast, with steps so small that it needs three."""
    return EngineSpec(
        engine="openvino",
        path=str(card.path),
        context_tokens=384,
        kv_tokens=8192,
        max_sequences=16,
        max_step_tokens=128,
        eos_token_ids=card.eos_token_ids,
        cache_path=str(models_path().parent / "prepared"),
    )
