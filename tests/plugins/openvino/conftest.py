"""OpenVINO with the real model, and with a tiny one for what depends on no model."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.plugins.openvino.pairs import tiny_llama

from tailrace.engines import EngineSpec
from tailrace.models import ModelCard, models_path


def _spec(path: Path, eos_token_ids: tuple[int, ...], cache_path: Path) -> EngineSpec:
    """Small, so that a prompt at the limit is fast, with steps so small that it needs three."""
    return EngineSpec(
        engine="openvino",
        path=str(path),
        context_tokens=384,
        kv_tokens=8192,
        max_sequences=16,
        max_step_tokens=128,
        eos_token_ids=eos_token_ids,
        cache_path=str(cache_path),
    )


@pytest.fixture(scope="module")
def openvino_spec(card: ModelCard) -> EngineSpec:
    return _spec(card.path, card.eos_token_ids, models_path().parent / "prepared")


@pytest.fixture(scope="module")
def tiny_spec(tmp_path_factory: pytest.TempPathFactory) -> EngineSpec:
    """A random model with the ids below `pairs.PIECES`."""
    path = tmp_path_factory.mktemp("tiny")
    return _spec(tiny_llama(path / "model", 1), (0,), path / "prepared")
